"""A shop whose tables had serial keys and were adopted: as shards, and as one database with the same rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Engine, ForeignKey, insert, select, text
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, primary_key
from shardids.catalog.old_ids import OldIdRule, fill_directory, write_old_ids
from shardids.catalog.topology import shard_for_key
from shardids.pg.connections import open_engine
from tests.conftest import BlankDatabases, found_cluster

SHARDS = 8
USERS, ORDERS, EVENTS, ITEMS = 60, 120, 80, 200


class Base(DeclarativeBase):
    pass


class User(Base):
    """The root: an old ID is hashed."""

    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str]
    orders: Mapped[list[Order]] = relationship(back_populates="user", order_by="Order.id")


class Order(Base):
    """Old IDs are in a directory."""

    __tablename__ = "Orders, 100% old"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey(User.id))
    total: Mapped[int]
    user: Mapped[User] = relationship(back_populates="orders")
    items: Mapped[list[Item]] = relationship(back_populates="order", order_by="Item.id")


class Item(Base):
    """Old IDs are looked for in all shards; its shard is told by its order."""

    __tablename__ = "items"

    id: Mapped[int] = primary_key()
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    amount: Mapped[int]
    order: Mapped[Order] = relationship(back_populates="items")


class Event(Base):
    """Old IDs are looked for in all shards."""

    __tablename__ = "100% events"

    id: Mapped[int] = primary_key(name="The ID", key="id")
    user_id: Mapped[int] = mapped_column(ForeignKey(User.id))
    kind: Mapped[str | None]


class Like(Base):
    """A table that came after the adoption."""

    __tablename__ = "likes"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey(User.id))


RULES = [
    OldIdRule(table="users", column="id", rule="key"),
    OldIdRule(table=Order.__tablename__, column="id", rule="directory"),
    OldIdRule(table="items", column="id", rule="fan-out"),
    OldIdRule(table=Event.__tablename__, column="The ID", rule="fan-out"),
]
MODELS: list[type[Any]] = [User, Order, Item, Event, Like]


@dataclass(frozen=True)
class Shop:
    """A cluster, and one database with the same rows.

    ``shard_of`` has the shard of each row of the old database, by model and ID.
    """

    cluster: Cluster
    plain: Engine
    urls: list[URL]
    shard_of: dict[tuple[type[Any], int], int] = field(default_factory=dict)


@contextmanager
def adopted_shop(databases: BlankDatabases) -> Iterator[Shop]:
    """Eight shards on two nodes, with old rows and new ones."""
    urls = [databases.take() for _ in range(3)]
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    plain = open_engine(urls[2], what="the plain database")
    with Cluster.connect(urls[0], listen=False) as cluster:
        shop = Shop(cluster, plain, urls)
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
        _old_rows(shop)
        with cluster._catalog.engine.begin() as connection:
            write_old_ids(connection, rules=RULES)
            orders = ((id_, shard) for (model, id_), shard in shop.shard_of.items() if model is Order)
            fill_directory(connection, Order.__tablename__, orders)
        cluster.refresh()
        _new_rows(shop)
        _copy(shop)
        yield shop
    plain.dispose()
    for url in urls:
        databases.give_back(url)


def _old_rows(shop: Shop) -> None:
    draw = random.Random(17)
    rows: dict[type[Any], list[dict[str, Any]]] = {
        User: [{"id": n, "name": f"user {n}"} for n in range(1, USERS + 1)],
        Order: [
            {"id": n, "user_id": draw.randint(1, USERS), "total": n % 7}
            for n in draw.sample(range(1, 9000), ORDERS)
        ],
        Event: [
            {"id": n, "user_id": draw.randint(1, USERS), "kind": draw.choice([None, "a", "b"])}
            for n in range(1, EVENTS + 1)
        ],
    }
    orders = [row["id"] for row in rows[Order]]
    rows[Item] = [{"id": n, "order_id": draw.choice(orders), "amount": n % 5} for n in range(1, ITEMS + 1)]
    there = shop.shard_of
    for row in rows[User]:
        there[User, row["id"]] = shard_for_key(row["id"], SHARDS)
    for model in (Order, Event):
        for row in rows[model]:
            there[model, row["id"]] = there[User, row["user_id"]]
    for row in rows[Item]:
        there[Item, row["id"]] = there[Order, row["order_id"]]
    for model in (User, Order, Event, Item):
        for shard in range(SHARDS):
            some = [row for row in rows[model] if there[model, row["id"]] == shard]
            with shop.cluster.at(shard=shard).connection() as connection, connection.begin():
                connection.execute(insert(model), some) if some else None


def _new_rows(shop: Shop) -> None:
    for shard in range(SHARDS):
        with shop.cluster.session(shard=shard) as session, session.begin():
            user = User(name=f"new {shard}", orders=[Order(total=shard, items=[Item(amount=1)])])
            session.add(user)
            session.flush()
            session.add_all([Event(user_id=user.id, kind="new"), Like(user_id=user.id)])
            old = next(n for (model, n), s in shop.shard_of.items() if model is User and s == shard)
            session.add_all([Order(user_id=old, total=100 + shard), Like(user_id=old)])


def _copy(shop: Shop) -> None:
    with shop.plain.begin() as there:
        there.execute(text("create function next_id() returns bigint language sql as 'select 0::bigint'"))
        Base.metadata.create_all(there, checkfirst=False)
        there.execute(text("set session_replication_role = replica"))
        for table in Base.metadata.sorted_tables:
            for shard in range(SHARDS):
                with shop.cluster.at(shard=shard).connection() as here:
                    rows = [
                        {column.key: value for column, value in zip(table.columns, row, strict=True)}
                        for row in here.execute(select(table))
                    ]
                if rows:
                    there.execute(insert(table), rows)
