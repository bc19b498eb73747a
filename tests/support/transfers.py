"""Money that goes from account to account, over two nodes: the sum is known, and so are the halves."""

from __future__ import annotations

from collections.abc import Iterable

from psycopg import sql
from sqlalchemy import ForeignKey, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from shardids import Cluster, primary_key, sharding_key
from tests.support.clusters import connected

TABLES = """
    create table {s}.accounts (
      id bigint primary key default {s}.next_id(), name text not null unique, balance integer not null);
    create table {s}.entries (
      id bigint primary key default {s}.next_id(), account_id bigint not null references {s}.accounts,
      transfer text not null, amount integer not null,
      unique (account_id, transfer) deferrable initially deferred);"""
OPENING = 1000


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)
    balance: Mapped[int]


class Entry(Base):
    __tablename__ = "entries"

    id: Mapped[int] = primary_key()
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    transfer: Mapped[str]
    amount: Mapped[int]


def open_bank(cluster: Cluster) -> dict[str, list[str]]:
    """Makes the tables and an account in each shard; the accounts' names by node, in the shards' order."""
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).connection() as connection, connection.begin():
            connection.exec_driver_sql(TABLES.format(s=cluster.schema_of(shard)))
    names: dict[int, str] = {}
    number = 0
    while len(names) < cluster.shard_count:
        names.setdefault(cluster.shard_for(f"account {number}"), f"account {number}")
        number += 1
    with cluster.sharded_session() as session:
        session.add_all(Account(name=name, balance=OPENING) for name in names.values())
        session.commit()
    by_node: dict[str, list[str]] = {}
    for shard, name in sorted(names.items()):
        by_node.setdefault(cluster.node_of(shard).name, []).append(name)
    return by_node


def transfer(session: Session, source: str, target: str, token: str, amount: int = 1) -> None:
    """Takes an amount from one account to another, in the session's transaction."""
    # In one order, whichever way the money goes: two transfers never wait for each other on two nodes.
    for name in sorted((source, target)):
        account = session.execute(select(Account).where(Account.name == name).with_for_update()).scalar_one()
        change = -amount if name == source else amount
        account.balance += change
        session.add(Entry(account_id=account.id, transfer=token, amount=change))
        session.flush()


def balances(cluster: Cluster) -> dict[str, int]:
    """What is in each account."""
    with cluster.sharded_session() as session:
        return {account.name: account.balance for account in session.scalars(select(Account))}


def require_whole(cluster: Cluster) -> int:
    """Fails unless each transfer is on both sides, and the sum is what it was; returns how many there are."""
    with cluster.sharded_session() as session:
        entries = list(session.scalars(select(Entry)))
    sides: dict[str, list[int]] = {}
    for entry in entries:
        sides.setdefault(entry.transfer, []).append(entry.amount)
    halves = {token: amounts for token, amounts in sides.items() if len(amounts) != 2 or sum(amounts)}
    assert not halves
    found = balances(cluster)
    assert sum(found.values()) == OPENING * len(found)
    return len(sides)


def prepared_on(urls: Iterable[URL]) -> list[str]:
    """The names of what is prepared in some databases."""
    found = []
    for url in urls:
        with connected(url) as connection:
            found += [
                gid
                for (gid,) in connection.execute(
                    "select gid from pg_prepared_xacts where database = current_database()"
                )
            ]
    return found


def roll_back_prepared(urls: Iterable[URL]) -> None:
    """Ends what is prepared in some databases."""
    for url in urls:
        for name in prepared_on([url]):
            with connected(url) as connection:
                connection.execute(sql.SQL("rollback prepared {}").format(sql.Literal(name)))
