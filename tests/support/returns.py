"""Clients of the shards of an adopted shop, and what has to be true of it after the way back."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import psycopg

from tests.support.adoptions import Clients, Shop, schema


@dataclass
class InShards:
    """What one client of the shards knows to be committed: names of users, amounts of orders."""

    users: dict[int, str] = field(default_factory=dict)
    orders: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    refused: bool = False


class ShardClients:
    """Threads, each in one shard, that insert, update and delete there until they are refused."""

    def __init__(self, shop: Shop, number: int = 8, every_s: float = 0.004) -> None:
        self._shop, self._every_s = shop, every_s
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.written = [InShards() for _ in range(number)]
        placement = shop.catalog.placement()
        shards = sorted(placement.node_of)
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(shards[n % len(shards)], placement.node_of[shards[n % len(shards)]], one, n),
                daemon=True,
            )
            for n, one in enumerate(self.written)
        ]

    def __enter__(self) -> ShardClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failures:
            raise self._failures[0]

    @property
    def count(self) -> int:
        return sum(len(one.users) + len(one.orders) + len(one.deleted) for one in self.written)

    def _run(self, shard: int, node: str, written: InShards, index: int) -> None:
        turn = 0
        try:
            with self._shop.connected(node) as connection:
                while not self._stop.wait(self._every_s):
                    turn += 1
                    try:
                        self._change(connection, schema(shard), turn, written, f"{index}/{turn}")
                    except psycopg.Error as error:
                        if error.sqlstate != "SI002":
                            raise
                        written.refused = True
                        return
        except BaseException as failure:  # noqa: BLE001 -- raised again at the end
            self._failures.append(failure)

    @staticmethod
    def _change(connection: psycopg.Connection, s: str, turn: int, written: InShards, name: str) -> None:
        users, orders = list(written.users), list(written.orders)
        if turn % 7 == 5 and orders:
            order = orders[turn % len(orders)]
            connection.execute(f'delete from {s}."Orders" where id = %s', [order])
            written.deleted.add(order)
            del written.orders[order]
        elif turn % 5 == 3 and orders:
            order, user = orders[turn % len(orders)], users[turn % len(users)]
            connection.execute(
                f'update {s}."Orders" set amount = %s, user_id = %s where id = %s', [turn, user, order]
            )
            written.orders[order] = turn
        elif turn % 4 == 2 and users:
            user = users[turn % len(users)]
            connection.execute(f"update {s}.users set name = %s where id = %s", [name, user])
            written.users[user] = name
        elif turn % 4 == 1 or not users:
            (user,) = connection.execute(
                f"insert into {s}.users (name, mood, country) values (%s, 'low', 'at') returning id", [name]
            ).fetchone()
            written.users[user] = name
        else:
            (order,) = connection.execute(
                f'insert into {s}."Orders" (user_id, amount) values (%s, 0) returning id',
                [users[turn % len(users)]],
            ).fetchone()
            connection.execute(
                f"insert into {s}.lines values (%s, 1, %s, 'new')", [order, users[turn % len(users)]]
            )
            written.orders[order] = 0


def assert_at_source(
    shop: Shop, clients: Clients | None = None, in_shards: ShardClients | None = None
) -> None:
    """Every acknowledged write is at the source once, and what was deleted is not."""
    with shop.connected("source") as source:
        names = dict(source.execute("select id, name from users").fetchall())
        amounts = dict(source.execute('select id, amount from "The Shop"."Orders"').fetchall())
        (users, orders) = source.execute(
            'select (select count(*) from users), (select count(*) from "The Shop"."Orders")'
        ).fetchone()
    assert (len(names), len(amounts)) == (users, orders)
    for written in clients.written if clients else ():
        assert written.users.items() <= names.items()
        assert written.orders.keys() <= amounts.keys()
        assert not written.deleted & amounts.keys()
    for one in in_shards.written if in_shards else ():
        assert one.users.items() <= names.items()
        assert one.orders.items() <= amounts.items()
        assert not one.deleted & amounts.keys()


def same_everywhere(shop: Shop) -> None:
    """The source has the rows of all shards, and no others."""
    for at_source, table in (("users", "users"), ('"The Shop"."Orders"', '"Orders"'), ("lines", "lines")):
        columns = {"users": 'id, name, mood, country, "od:d %s", initial'}.get(table, "*")
        with shop.connected("source") as source:
            there = sorted(map(str, source.execute(f"select {columns} from {at_source}").fetchall()))
        here = sorted(str(row) for rows in shop.rows(table).values() for row in rows)
        assert there == here, table
