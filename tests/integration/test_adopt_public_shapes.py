"""Plans for the shapes of public schemas: what each finding is, and that its remedy does no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.adopt.plan.document import Plan, Severity
from shardids.adopt.plan.planning import Planned, make_plan
from tests.conftest import BlankDatabases, dsn
from tests.support import public_shapes


@pytest.fixture(scope="module")
def shaped(databases: BlankDatabases) -> Iterator[Callable[[str], URL]]:
    """Makes a database of a shape, once for all tests."""
    made: dict[str, URL] = {}

    def make(shape: str) -> URL:
        if shape not in made:
            made[shape] = databases.take()
            with psycopg.connect(dsn(made[shape]), autocommit=True) as db:
                db.execute(shape.encode())
        return made[shape]

    yield make
    for url in made.values():
        databases.give_back(url)


def findings(plan: Plan, subject: str) -> list[tuple[Severity, str]]:
    """The findings about a subject."""
    return [(one.severity, one.reason) for one in plan.findings if one.subject == subject]


@pytest.fixture(scope="module")
def mastodon(shaped: Callable[[str], URL]) -> Planned:
    return make_plan(shaped(public_shapes.MASTODON), root="accounts")


def test_keys_by_a_function_draw_from_the_shards(mastodon: Planned) -> None:
    for table in ("accounts", "statuses", "media_attachments"):
        assert (
            Severity.NOTE,
            f"it draws from public.timestamp_id('{table}'::text); in the shards new rows draw from next_id()",
        ) in findings(mastodon.plan, f"public.{table}.id")
    assert mastodon.comments["public.statuses"] == [
        "Direct: public.statuses.account_id holds the key, by foreign key statuses_account_id_fkey."
        " New rows draw id from next_id()."
    ]
