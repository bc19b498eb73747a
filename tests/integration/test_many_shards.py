"""A shard costs a node the same to make, grant and reserve from, however many others it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL

from shardids.migrate.install.provision import create_shard, make_shard
from shardids.pg.connections import open_engine
from tests.conftest import BlankDatabases, found_cluster

SHARDS = 48
"""A list of the functions of one name, one per shard, has so many rows of pg_proc."""
SLACK = SHARDS // 2


@dataclass(frozen=True, slots=True)
class Costs:
    """Rows of pg_proc that the session reads to make a shard: the third, and the last of SHARDS."""

    few: int
    many: int


@contextmanager
def connected_to(node: URL) -> Iterator[Connection]:
    engine = open_engine(node, what='node "a"', administrative=True)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture(scope="module")
def node(databases: BlankDatabases) -> Iterator[URL]:
    url = databases.take()
    found_cluster(url, {"a": url}, 2)
    yield url
    databases.give_back(url)


@pytest.fixture(scope="module")
def costs(node: URL) -> Costs:
    with connected_to(node) as connection:
        few = cost_of_a_shard(connection, 2)
        for shard in range(3, SHARDS - 1):
            create_shard(connection, shard)
        return Costs(few=few, many=cost_of_a_shard(connection, SHARDS - 1))


@pytest.fixture
def connection(node: URL, costs: Costs) -> Iterator[Connection]:
    """A session on a node with SHARDS shards."""
    with connected_to(node) as connection:
        yield connection


def functions_read(connection: Connection, work: Callable[[], object]) -> int:
    """Returns how many rows of pg_proc a session reads for some work in its open transaction."""
    read = text("""select coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
                   from pg_stat_xact_sys_tables where relname = 'pg_proc'""")
    before: int = connection.scalar(read) or 0
    work()
    after: int = connection.scalar(read) or 0
    return after - before


def cost_of_a_shard(connection: Connection, shard: int) -> int:
    with connection.begin() as transaction:
        cost = functions_read(connection, lambda: make_shard(connection, shard))
        transaction.rollback()
    # A session reads more for its first shard than for others.
    with connection.begin():
        return min(cost, functions_read(connection, lambda: make_shard(connection, shard)))


def test_what_a_shard_costs_does_not_grow_with_their_number(costs: Costs) -> None:
    assert costs.many < costs.few + SLACK


def test_a_new_shard_locks_no_sequences_of_the_others(connection: Connection) -> None:
    with connection.begin() as transaction:
        make_shard(connection, SHARDS)
        locked = connection.scalar(
            text("""select count(distinct l.relation) from pg_locks l join pg_class c on c.oid = l.relation
                    where l.pid = pg_backend_pid() and c.relkind = 'S'
                      and c.relnamespace <> 'shardids'::regnamespace""")
        )
        transaction.rollback()
    # Its own two, and those of the first shard, by which the clock is believed: a server has room for some
    # thousand locks.
    assert locked == 4


def test_a_reservation_looks_up_no_name_that_shards_share(connection: Connection) -> None:
    with connection.begin() as transaction:
        # Plans, and functions of the engine.
        connection.execute(text("select shardids.reserve(0, 1)"))
        reserve = text("select shardids.reserve(1, 1)")
        assert functions_read(connection, lambda: connection.execute(reserve)) < SLACK
        transaction.rollback()


def test_what_a_grant_costs_grows_with_its_own_shards(connection: Connection) -> None:
    def cost(shards: range) -> int:
        numbers = {"shards": list(shards)}
        grant = text("select shardids.grant_usage(:shards, 'pg_monitor')")
        revoke = text("select shardids.revoke_usage(:shards, 'pg_monitor')")
        with connection.begin() as transaction:
            done = functions_read(connection, lambda: connection.execute(grant, numbers))
            done += functions_read(connection, lambda: connection.execute(revoke, numbers))
            transaction.rollback()
        return done

    cost(range(1))
    assert (cost(range(SHARDS)) - cost(range(SHARDS // 2))) / (SHARDS // 2) < SLACK
