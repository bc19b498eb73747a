"""IDs of the past, for rows whose UUIDs are kept beside them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from shardids.adopt.past_ids import fill_past_ids, room_for_past_ids
from shardids.catalog.old_ids import OldIdRule, write_old_ids
from shardids.client.cluster import Cluster
from shardids.errors import BadArgument, UnknownShard
from shardids.ids.layout import DEFAULT
from tests.conftest import found_cluster

EPOCH = DEFAULT.first_time
SHARD = 3


TABLE = "the %s rows"


@pytest.fixture
def cluster(blank_database: Any) -> Iterator[Cluster]:
    """Four shards, each with an empty table of rows that have UUIDs."""
    url: URL = blank_database()
    found_cluster(url, {"a": url}, 4)
    with Cluster.connect(url, listen=False) as cluster:
        run(
            cluster,
            """create table {t} (uuid uuid primary key default gen_random_uuid(), "The ID" bigint unique,
                                 made timestamptz)""",
        )
        yield cluster


def run(cluster: Cluster, statement: str) -> list[Any]:
    """Executes a statement in the shard; ``{t}`` is the table."""
    with cluster.at(shard=SHARD).connection() as connection, connection.begin():
        plain = connection.execution_options(no_parameters=True)
        done = plain.exec_driver_sql(statement.replace("{t}", f'{cluster.schema_of(SHARD)}."{TABLE}"'))
        return list(done) if done.returns_rows else []


def insert(cluster: Cluster, times: str) -> None:
    run(cluster, f"insert into {{t}} (made) {times}")


def rows(cluster: Cluster) -> list[Any]:
    return run(cluster, 'select "The ID" as id, made from {t} order by made, uuid')


def fill_in(cluster: Cluster, connection: Connection) -> int:
    return fill_past_ids(
        cluster._catalog,
        connection,
        SHARD,
        table=TABLE,
        id_column="The ID",
        time_column="made",
        order_column="uuid",
    )


def fill(cluster: Cluster) -> int:
    with cluster.engine(cluster.node_of(SHARD)).begin() as connection:
        return fill_in(cluster, connection)


def test_rows_get_distinct_ids_in_the_order_of_their_times(cluster: Cluster) -> None:
    insert(cluster, f"select '{EPOCH}'::timestamptz + n * interval '7 hours' from generate_series(1, 2000) n")
    # More than a millisecond holds, and those that follow at once.
    insert(cluster, "select '2024-06-01 12:00:00.5Z'::timestamptz from generate_series(1, 2500)")
    insert(cluster, "select '2024-06-01 12:00:00.501Z'::timestamptz from generate_series(1, 10)")
    assert fill(cluster) == 4510
    found = rows(cluster)
    ids = [row.id for row in found]
    assert ids == sorted(set(ids))
    assert {DEFAULT.shard_of(id_) for id_ in ids} == {SHARD}
    times = [row.made.replace(microsecond=row.made.microsecond // 1000 * 1000) for row in found]
    late = [DEFAULT.decode(id_).time - time for id_, time in zip(ids, times, strict=True)]
    assert min(late) == timedelta(0)
    assert max(late) == timedelta(milliseconds=2)
    assert sum(one == timedelta(0) for one in late) == 2000 + 1024
    assert fill(cluster) == 0
    assert rows(cluster) == found
    assert cluster.at(shard=SHARD).reserve(1)[0] > max(ids)


def test_what_a_shard_may_have_issued_is_refused_and_nothing_is_changed(cluster: Cluster) -> None:
    _, end = room_for_past_ids(cluster._catalog)
    assert timedelta(hours=23) < datetime.now(UTC) - end < timedelta(hours=25)
    insert(cluster, "select '2024-06-01 12:00Z'::timestamptz")
    for time, said in (
        (f"'{end}'::timestamptz", "of 1 rows without an ID, made is not from"),
        ("now()", "is not from"),
        ("'infinity'::timestamptz", "for example infinity"),
        ("'-infinity'::timestamptz", "for example -infinity"),
        (f"'{EPOCH}'::timestamptz - interval '1 second'", "for example 2023-12-31 23:59:59"),
        ("null::timestamptz", "1 rows without an ID have no made"),
        (
            f"'{end}'::timestamptz - interval '1 ms' from generate_series(1, 1025)",
            "the IDs of 1026 rows do not fit before",
        ),
    ):
        insert(cluster, f"select {time}")
        with pytest.raises(BadArgument, match=said):
            fill(cluster)
        assert run(cluster, 'select count("The ID") from {t}') == [(0,)]
        run(cluster, "delete from {t} where made <> '2024-06-01 12:00Z' or made is null")
    assert fill(cluster) == 1
    insert(cluster, "select '2024-06-02 12:00Z'::timestamptz")
    with pytest.raises(BadArgument, match="1 rows have IDs of the past, and 1 have none"):
        fill(cluster)
    with cluster.engine(cluster.node_of(0)).begin() as connection, pytest.raises(UnknownShard):
        fill_past_ids(cluster._catalog, connection, 77, table="users", order_column="uuid")


def test_old_ids_leave_room_for_those_of_the_past_or_there_is_none(cluster: Cluster) -> None:
    rule = OldIdRule(table="orders", column="id", rule="key")
    with cluster._catalog.engine.begin() as connection:
        write_old_ids(connection, rules=[rule], below=1 << 40)
    first, _ = room_for_past_ids(cluster._catalog)
    assert first - EPOCH == timedelta(milliseconds=1 << 18)
    insert(cluster, f"select '{first}'::timestamptz")
    assert fill(cluster) == 1
    cluster.refresh()
    ((id_, made),) = rows(cluster)
    assert cluster.shard_of(id_) == SHARD
    assert cluster.decode(id_).time == made == first


def test_there_is_no_room_below_the_highest_number(cluster: Cluster) -> None:
    rule = OldIdRule(table="orders", column="id", rule="key")
    with cluster._catalog.engine.begin() as connection:
        write_old_ids(connection, rules=[rule])
    with pytest.raises(BadArgument, match="no room for IDs of the past"):
        fill(cluster)


def test_writers_wait_until_the_ids_are_committed(cluster: Cluster) -> None:
    insert(cluster, "select '2024-06-01 12:00Z'::timestamptz")
    with cluster.engine(cluster.node_of(SHARD)).begin() as connection:
        fill_in(cluster, connection)
        # Executed together: a transaction of their own.
        write = "set local lock_timeout = '50ms'; insert into {t} default values"
        with pytest.raises(DBAPIError, match="lock timeout"):
            run(cluster, write)
    assert rows(cluster)[0].id is not None


def test_rows_of_all_partitions_get_distinct_ids(cluster: Cluster) -> None:
    """Rows of two partitions may be at the same place, each in its own."""
    run(cluster, "drop table {t}")
    run(
        cluster,
        """create table {t} (uuid uuid default gen_random_uuid(), "The ID" bigint, made timestamptz)
           partition by list ((date_part('day', made at time zone 'UTC')))""",
    )
    for part, days in (("early", "1"), ("late", "2, 3")):
        schema = cluster.schema_of(SHARD)
        run(cluster, f"create table {schema}.{part} partition of {{t}} for values in ({days})")
    first = EPOCH.replace(day=1) + timedelta(days=366)
    insert(
        cluster,
        f"select t from generate_series('{first}', '{first + timedelta(days=2)}', interval '1 hour') t",
    )
    assert fill(cluster) == 49
    found = rows(cluster)
    assert len({row.id for row in found}) == 49
    assert [row.id for row in found] == sorted(row.id for row in found)
