"""The comparison of an adoption, while rows are changed that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from shardids.adopt import adoption
from shardids.adopt.run import comparing, following
from shardids.pg.embedded import temporary_servers
from shardids.pg.reader import Reader
from tests.support.adoptions import Shop, new_shop


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        with closing(shop.catalog):
            if not shop.has_row_filters:
                pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
            adoption.run(shop.catalog, shop.plan)
            yield shop


def test_rows_that_change_are_read_again_by_their_primary_keys(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes lag, and the source has other rows each time it is read."""
    asked: list[tuple[bool, str]] = []
    all_rows, await_confirmed = comparing.all_rows, following.await_confirmed

    def ask(reader: Reader, query: str) -> list[dict[str, Any]]:
        asked.append((reader._what == "the source", query))
        return all_rows(reader, query)

    with shop.connected("source") as source:
        follow = 'alter subscription "{}" {}'
        names = {
            name: [row for (row,) in node.execute("select subname from pg_subscription").fetchall()]
            for name, node in _nodes(shop)
        }

        def set_following(action: str) -> None:
            for name, subscriptions in names.items():
                with shop.connected(name) as node:
                    for subscription in subscriptions:
                        node.execute(follow.format(subscription, action).encode())

        def write() -> None:
            source.execute("update users set name = name || '+' where id <= 20")
            source.execute("update lines set what = what || '+' where user_id <= 20")

        rounds: list[int] = []

        def change(*given: Any, **options: Any) -> None:
            rounds.append(1)
            if len(rounds) % 4:
                write()
            else:
                set_following("enable")
                await_confirmed(*given, **options)

        monkeypatch.setattr(comparing, "all_rows", ask)
        monkeypatch.setattr(comparing, "await_confirmed", change)
        set_following("disable")
        write()
        try:
            adoption.compare(shop.catalog)
        finally:
            set_following("enable")
        assert len(rounds) > 4
        by_key = [query for is_source, query in asked if is_source and "pg_catalog" in query]
        whole = [query for is_source, query in asked if is_source and "pg_catalog" not in query]
        # Once for the digests, and once more for those that differ.
        assert max(sum(f"from {name} t" in query for query in whole) for name in ("users", "lines")) <= 2
        assert len(by_key) > 2
        source.execute("set enable_seqscan = off")
        for query in by_key:
            plan = "\n".join(row for (row,) in source.execute(f"explain {query}".encode()).fetchall())
            assert "Seq Scan" not in plan, plan


def test_any_two_rows_of_a_wide_table_have_other_texts(shop: Shop) -> None:
    names = [f"c{number}" for number in range(250)]
    rows: list[list[str | None]] = [["a"] * 250 for _ in range(5)]
    rows[1][249], rows[2][249], rows[3][0], rows[4][89] = "", None, "a','a", "b"
    with shop.connected("source") as source:
        values = ", ".join(f"({', '.join(['%s'] * 250)})" for _ in rows)
        found = psycopg.ClientCursor(source).execute(
            f"select distinct {comparing._text(names)} from (values {values}) t ({', '.join(names)})",
            [value for row in rows for value in row],
        )
        assert len(found.fetchall()) == len(rows)


def _nodes(shop: Shop) -> Iterator[tuple[str, psycopg.Connection]]:
    for name in "ab":
        with shop.connected(name) as node:
            yield name, node
