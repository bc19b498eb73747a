"""``shard purge`` whose sessions end before any of its statements: it fails by name, and is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event

from shardids import mover
from shardids.errors import ShardidsError
from shardids.pg.embedded import temporary_servers
from shardids.tables import views
from tests.support.clusters import catalog_at
from tests.support.faults import scaled
from tests.support.moves import TwoNodes, assert_one_owner, two_nodes

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.notes (id bigint primary key, body text)"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 4)
        views.create_query_node(nodes.catalog, node="a", store_password=True)
        yield nodes
        nodes.catalog.close()


class Ender:
    """Ends the session that is about to run a statement, or a COMMIT: the one of a number, with a text."""

    def __init__(self, place: int, words: str = "") -> None:
        self._place, self._words = place, words
        self.statements = 0

    def __call__(self, connection: Connection, _cursor: Any = None, statement: str = "", *_: Any) -> None:
        self.statements += self._words in statement
        if self._words in statement and self.statements == self._place:
            info = connection.connection.driver_connection.info  # type: ignore[union-attr] # psycopg's
            with psycopg.connect(info.dsn, password=info.password, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [info.backend_pid])

    @contextmanager
    def listening(self) -> Iterator[None]:
        for name in ("before_cursor_execute", "commit"):
            event.listen(Engine, name, self)
        try:
            yield
        finally:
            for name in ("before_cursor_execute", "commit"):
                event.remove(Engine, name, self)


def purged(url: str, shard: int) -> bool:
    """What the command does; whether it dropped the copy."""
    with catalog_at(url) as catalog:
        mover.purge(catalog, [shard], dry_run=True)
        views.follow(catalog)
        return bool(mover.purge(catalog, [shard]))


def test_a_purge_whose_session_ends_fails_by_name_and_is_repeated(nodes: TwoNodes) -> None:
    shard, failures = nodes.new_shard(TABLES), 0
    views.follow(nodes.catalog)
    mover.move(nodes.catalog, shard, "b")
    for place in count(1, scaled(5, 1)):
        ender, is_purged = Ender(place), False
        with ender.listening():
            try:
                is_purged = purged(nodes.catalog_url, shard)
            except ShardidsError:
                failures += 1
        if ender.statements < place:
            break
        if is_purged or not mover.old_copies(nodes.catalog, [shard]):
            other = "a" if nodes.catalog.node_of(shard).name == "b" else "b"
            mover.move(nodes.catalog, shard, other)
    assert failures > scaled(5, 30)
    assert mover.old_copies(nodes.catalog, [shard]) == []
    assert_one_owner(nodes, shard)


def test_a_query_node_whose_own_session_ends_says_so(nodes: TwoNodes) -> None:
    """While it tries whether it can read from a node: that node is not the reason."""
    with Ender(1, '"@shardids_').listening():
        (said,) = views.follow(nodes.catalog)
    assert "can't be reached" in said
    assert "can't read from" not in said
    assert views.follow(nodes.catalog) == ()
