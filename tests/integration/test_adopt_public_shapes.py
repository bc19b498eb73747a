"""Plans for the shapes of public schemas: what each finding is, and that its remedy does no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.adopt.plan.document import Plan, Severity, parse_plan, plan_text
from shardids.adopt.plan.planning import Planned, make_plan
from shardids.errors import BadArgument
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


def test_a_key_that_a_delete_sets_null_is_never_to_be_not_null(mastodon: Planned) -> None:
    said = findings(mastodon.plan, "public.media_attachments.account_id")
    (reason,) = [reason for severity, reason in said if severity is Severity.BLOCKS]
    assert "90 of 900 rows have none" in reason
    assert '"media_attachments_account_id_fkey" sets it NULL' in reason
    assert not any(
        "SET NOT NULL;" in one.remedy for one in mastodon.plan.findings if "media_attachments" in one.subject
    )


@pytest.mark.parametrize("where", ["source", "5"])
def test_a_rule_for_rows_without_an_owner_ends_the_obstacle(shaped: Callable[[str], URL], where: str) -> None:
    planned = make_plan(
        shaped(public_shapes.MASTODON), root="accounts", unowned=[f"media_attachments={where}"]
    )
    (table,) = [one for one in planned.plan.tables if one.name == "public.media_attachments"]
    assert table.unowned == ("source" if where == "source" else "shard 5")
    assert not [
        one
        for one in findings(planned.plan, "public.media_attachments.account_id")
        if one[0] is Severity.BLOCKS
    ]
    # Their statuses are in the shards of their authors.
    ((severity, reason),) = findings(planned.plan, "public.media_attachments.status_id")
    assert (severity is Severity.NOT_KEPT) is (where == "5")
    assert ("90 of 900 rows refer" in reason) is (where == "5")


def test_a_table_that_grows_with_the_root_is_no_small_reference_table(mastodon: Planned) -> None:
    ((severity, reason),) = findings(mastodon.plan, "public.conversations")
    assert severity is Severity.NOTE
    assert "every node gets all its about 200 rows" in reason
    assert "200 rows" in reason.partition("each write goes to every node")[2]
    assert not any("every node" in reason for _, reason in findings(mastodon.plan, "public.custom_emojis"))


def test_large_reference_tables_are_told_with_their_size_and_writes(shaped: Callable[[str], URL]) -> None:
    plan = make_plan(shaped(public_shapes.LEMMY), root="person").plan
    kinds = {table.name: str(table.kind) for table in plan.tables}
    assert kinds == {
        "public.person": "root",
        "public.post": "direct",
        "public.comment": "direct",
        "public.community_follower": "direct",
        "public.community": "reference",
        "public.site": "reference",
        "public.language": "loose",
    }
    about = [one for one in plan.findings if one.subject == "public.community"]
    (found,) = [one for one in about if "every node gets all" in one.reason]
    assert "400 rows" in found.reason
    assert "kB" in found.reason
    assert "--loose public.community" in found.remedy
    assert not findings(plan, "public.site")
    said = findings(plan, "public.comment.post_id")
    assert any(severity is Severity.NOT_KEPT and "cross shards" in reason for severity, reason in said)


def test_foreign_keys_of_all_partitions_count_as_the_tables(shaped: Callable[[str], URL]) -> None:
    plan = make_plan(shaped(public_shapes.PAGILA), root="customer").plan
    (payment,) = [table for table in plan.tables if table.name == "public.payment"]
    assert (str(payment.kind), payment.key, payment.rows) == ("direct", "customer_id", 300)
    said = findings(plan, "public.payment.customer_id")
    assert any("belongs to partitions: the tables of the shards have none" in reason for _, reason in said)
    assert any(
        "all 300 rows have the same key" in reason for _, reason in findings(plan, "public.payment.rental_id")
    )


def test_a_partition_without_the_foreign_key_is_doubted(shaped: Callable[[str], URL]) -> None:
    one = public_shapes.PAGILA.replace(
        "alter table payment_p02 add foreign key (customer_id) references customer;", ""
    )
    plan = make_plan(shaped(one), root="customer").plan
    (payment,) = [table for table in plan.tables if table.name == "public.payment"]
    assert (str(payment.kind), payment.key) == ("direct", "customer_id")
    assert any(
        "is NOT VALID, or not of all partitions" in reason
        for _, reason in findings(plan, "public.payment.customer_id")
    )


@pytest.fixture(scope="module")
def gitlab(shaped: Callable[[str], URL]) -> URL:
    return shaped(public_shapes.GITLAB)


def test_roots_are_proposed(gitlab: URL) -> None:
    with pytest.raises(BadArgument, match="which table is all else to be split by") as asked:
        make_plan(gitlab)
    assert "--root public.projects (4 of 10 tables refer to it); --root public.issues (1 of 10" in (
        asked.value.hint or ""
    )


def test_columns_that_are_called_like_keys_are_told(gitlab: URL) -> None:
    plan = make_plan(gitlab, root="projects").plan
    assert {str(table.kind) for table in plan.tables} == {"root", "loose"}
    for column in ("issues.project_id", "notes.project_id", "labels.project_id", "stray.project_id"):
        ((severity, reason),) = findings(plan, f"public.{column}")
        assert severity is Severity.NOTE
        assert "the column seems to hold the key" in reason


def test_guesses_are_checked_by_rows_and_confirmed_in_the_file(gitlab: URL) -> None:
    planned = make_plan(gitlab, root="projects", guess=True)
    plan = planned.plan
    tables = {table.name.removeprefix("public."): table for table in plan.tables}
    kinds = {name: str(table.kind) for name, table in tables.items()}
    assert kinds == {
        "projects": "root",
        "issues": "direct",
        "notes": "direct",
        "labels": "direct",
        "label_links": "derived",
        # No such projects; another type; another name; referred to by none.
        "stray": "loose",
        "odd": "loose",
        "merge_requests": "loose",
        "namespaces": "loose",
        "users": "loose",
    }
    assert [name for name, table in tables.items() if table.is_guess] == [
        name for name in tables if kinds[name] in ("direct", "derived")
    ]
    assert tables["label_links"].path[0].table in ("public.issues", "public.labels")
    assert (
        Severity.TO_CONFIRM,
        "it finds its key by a guess from names; all 800 values are those of a row there",
    ) in findings(plan, "public.issues")
    ((_, strays),) = findings(plan, "public.stray.project_id")
    assert strays.endswith("the table stays at the source; 0 of 100 values are those of a row there")
    assert planned.comments["public.issues"][0].startswith(
        "A guess by names. Direct: public.issues.project_id holds the key."
    )
    guessed = [one for one in plan.findings if one.severity is Severity.TO_CONFIRM]
    assert all(plan.is_blocked_by(one) for one in guessed)
    confirmed = replace(plan, tables=tuple(replace(table, is_guess=False) for table in plan.tables))
    assert not any(confirmed.is_blocked_by(one) for one in guessed)
    assert parse_plan(plan_text(plan), "plan.toml") == plan
