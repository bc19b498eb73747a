"""What is logged beside statements: how transactions end, COPY, and programs; and what never is of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from shardids import AsyncCluster, Cluster, mover
from shardids.errors import ConnectionFailed, CopyFailed, ShardidsError, StatementFailed
from shardids.pg.embedded import temporary_servers
from shardids.replication.programs import find_programs
from shardids.watch.stats.reading import answer
from tests.conftest import dsn
from tests.support import moves_by_hand
from tests.support.logged import of, run, told, with_times_as
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.moves_by_hand import SHARD, Note
from tests.support.referring import database, nodes_at

Blank = Callable[[], URL]
SECRET = "classified"


@pytest.fixture(autouse=True)
def hears(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Hears what is sent and run, also while fixtures make engines."""
    # A command that another test has run in this process has set the level of each.
    with caplog.at_level(logging.DEBUG, "shardids.sql"), caplog.at_level(logging.DEBUG, "shardids.mover"):
        yield


@pytest.fixture
def notes(hears: None, blank_database: Blank) -> Iterator[Cluster]:
    """A cluster whose shards have notes, each with other words."""
    nodes = moves_by_hand.two_nodes(blank_database)
    with Cluster.connect(nodes["catalog"], listen=False) as cluster:
        cluster.engine(cluster.node_of(SHARD)).connect().close()
        yield cluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        yield nodes
        nodes.catalog.close()


def sent(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of statements, and no value in it."""
    assert SECRET not in json.dumps([vars(one) for one in caplog.records], default=str)
    found = [line.removeprefix("DEBUG ") for line in with_times_as(told(caplog.records, "sql"))]
    caplog.clear()
    return found


def test_a_transaction_ends_with_a_record_if_one_was_open(
    notes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with notes.at(shard=SHARD).connection() as connection:
        caplog.clear()
        connection.commit()
        connection.exec_driver_sql("select 1")
        connection.commit()
        connection.rollback()
        (_, record) = caplog.records
        assert vars(record).keys() >= {"server", "node", "statement", "seconds"}
        assert sent(caplog) == ['node "a": took N ms: select 1', 'node "a": took N ms: COMMIT']
        with connection.begin():
            pass
    assert sent(caplog) == []
    with notes.at(shard=SHARD).connection() as connection:
        connection.exec_driver_sql("select 1")
    assert sent(caplog) == ['node "a": took N ms: select 1', 'node "a": took N ms: ROLLBACK']
    with notes.engine(notes.node_of(SHARD)).connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql("select 1")
        connection.commit()
    assert sent(caplog) == ['node "a": took N ms: select 1']


def test_a_commit_that_fails_is_told_by_its_code(notes: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    with notes.at(shard=SHARD).connection() as connection:
        connection.exec_driver_sql("create temporary table t (x text unique deferrable initially deferred)")
        connection.exec_driver_sql("insert into t values (%s), (%s)", (SECRET, SECRET))
        sent(caplog)
        with pytest.raises(IntegrityError):
            connection.commit()
        assert sent(caplog) == ['node "a": UniqueViolation 23505 after N ms: COMMIT']
    with notes.at(shard=SHARD).connection() as connection:
        pid = connection.exec_driver_sql("select pg_backend_pid()").scalar_one()
        with notes.at(shard=SHARD).connection() as other:
            other.execute(text("select pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        sent(caplog)
        with pytest.raises(ConnectionFailed):
            connection.commit()
        assert sent(caplog)[0] == 'node "a": AdminShutdown 57P01 after N ms: COMMIT'


def test_two_phase_commits_are_logged(notes: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    engine = notes.engine(notes.node_of(SHARD))
    insert = text(f"insert into {schema(SHARD)}.notes (words) values (:words)")
    for ending in ("commit", "rollback"):
        with engine.connect() as connection:
            transaction = connection.begin_twophase(SECRET)
            connection.execute(insert, {"words": ending})
            caplog.clear()
            transaction.prepare()
            getattr(transaction, ending)()
        assert sent(caplog) == [
            'node "a": took N ms: PREPARE TRANSACTION …',
            f'node "a": took N ms: {ending.upper()} PREPARED …',
        ]
    with engine.connect() as connection:
        transaction = connection.begin_twophase(SECRET)
        connection.execute(insert, {"words": "third"})
        sent(caplog)
        transaction.commit()
    assert sent(caplog) == ['node "a": took N ms: COMMIT']


def test_transactions_under_asyncio(cluster_url: URL, caplog: pytest.LogCaptureFixture) -> None:
    async def use() -> None:
        async with (
            await AsyncCluster.connect(dsn(cluster_url), listen=False) as cluster,
            cluster.session(shard=1) as session,
        ):
            await session.execute(text("select 1"))
            await session.commit()

    asyncio.run(use())
    assert sent(caplog)[-2:] == ['node "a": took N ms: select 1', 'node "a": took N ms: COMMIT']


def copies(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in sent(caplog) if "copy" in line.lower()]


def test_rows_that_the_client_copies(notes: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    notes.copy(Note, [{"words": SECRET}, {"words": "other"}], shard=SHARD)
    (record,) = [vars(one) for one in caplog.records if "rows" in vars(one)]
    assert (record["server"], record["node"], record["rows"]) == ('node "a"', "a", 2)
    assert record["seconds"] > 0
    assert record["statement"].lower().startswith("copy ")
    (line,) = copies(caplog)
    assert line == f'node "a": took N ms, 2 rows: {record["statement"]}'
    with pytest.raises(CopyFailed):
        notes.copy(Note, [{"words": SECRET}], shard=SHARD)
    assert [line.split(":")[1] for line in copies(caplog)] == [" UniqueViolation 23505 after N ms"]
    with pytest.raises(CopyFailed):
        notes.copy(Note, [{"words": f"{SECRET}\0"}], shard=SHARD)
    assert [line.split(":")[1] for line in copies(caplog)] == [" RowRefused after N ms"]


def test_nothing_is_logged_of_an_engine_that_was_made_before(
    blank_database: Blank, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shardids.sql"):
        urls = moves_by_hand.two_nodes(blank_database)
        with Cluster.connect(urls["catalog"], listen=False) as cluster:
            notes = [{"words": SECRET}]
            cluster.copy(Note, notes, shard=SHARD)
            with caplog.at_level(logging.DEBUG, "shardids.sql"), pytest.raises(CopyFailed):
                cluster.copy(Note, notes, shard=SHARD)
    assert sent(caplog) == []


def test_records_that_are_loaded_and_rejected(cluster_url: URL, tmp_path: Path) -> None:
    things = "create table {s}.things (id bigint primary key default {s}.next_id(), n integer)"
    with Cluster.connect(cluster_url, listen=False) as cluster:
        for shard in range(cluster.shard_count):
            with cluster.at(shard=shard).engine.begin() as connection:
                connection.exec_driver_sql(things.replace("{s}", schema(shard)))
    file = tmp_path / "things.csv"
    file.write_text(f"n\n1\n{SECRET}\n2\n")
    words = ("load", str(file), "--table", "things", "--shard", "1", "--rejects", str(tmp_path / "rejects"))
    result, stderr = run(cluster_url, "-vv", "--log-format", "json", *words, "--json", code=1)
    assert (result["rows"], result["rejected"]) == (2, 1)
    records = [one for one in of(stderr, "sql") if one["statement"].lower().startswith("copy ")]
    assert [one.get("rows") for one in records] == [None, 1, None, 1]
    assert {one["node"] for one in records} == {"a"}
    assert any("InvalidTextRepresentation 22P02 after" in one["message"] for one in records)
    assert SECRET not in "".join(line for line in stderr.splitlines() if line.startswith("{"))


def test_rows_of_reference_tables(nodes: TwoNodes, caplog: pytest.LogCaptureFixture) -> None:
    with nodes_at({name: database(nodes.servers["a"], f"node_{name}") for name in "ab"}):
        found = copies(caplog)
    assert any(line.startswith('node "a": took N ms, 0 rows: copy (select ') for line in found)
    assert any(line.startswith('node "b": took N ms, 0 rows: copy "pg_temp".') for line in found)


def test_ids_that_a_database_answers(blank_database: Blank, caplog: pytest.LogCaptureFixture) -> None:
    url = dsn(blank_database())
    with answer(url, f"select 5 as id where '{SECRET}' <> '';") as file:
        assert file.read() == b"5\n"
    assert copies(caplog) == [
        "the database: took N ms, 1 rows: copy (select 5 as id where … <> … ) to stdout"
    ]
    with pytest.raises(ShardidsError), answer(url, f"select '{SECRET}'::integer"):
        pass
    (line,) = copies(caplog)
    assert line.startswith("the database: InvalidTextRepresentation 22P02 after N ms: copy (")


def parameters(nodes: TwoNodes, node: str) -> dict[str, str]:
    """libpq's parameters, with the password."""
    with nodes.connected(node) as connection:
        info = connection.info
        assert info.password
        names = {"host": info.host, "port": str(info.port), "user": info.user, "dbname": info.dbname}
        return names | {"password": info.password}


def programs(caplog: pytest.LogCaptureFixture, nodes: TwoNodes) -> list[dict[str, Any]]:
    """What was logged of programs, and no password in it."""
    everything = json.dumps([vars(one) for one in caplog.records], default=str)
    for node in nodes.servers:
        assert parameters(nodes, node)["password"] not in everything
    assert "password=" not in everything
    records = [one for one in caplog.records if hasattr(one, "program")]
    assert {one.levelname for one in records} == {"DEBUG"}
    found = [vars(one) for one in records if one.name == "shardids.mover"]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (mover.Options(), {"pg_dump", "pg_restore"}),
        (mover.Options(offline=True), {"pg_dump", "pg_restore", "psql"}),
    ],
)
def test_programs_of_a_move(
    nodes: TwoNodes, caplog: pytest.LogCaptureFixture, options: mover.Options, expected: set[str]
) -> None:
    shard = nodes.new_shard()
    mover.move(nodes.catalog, shard, "b", options=options)
    found = programs(caplog, nodes)
    assert {one["program"] for one in found} == expected
    assert {one["exit_code"] for one in found} == {0}
    assert all(one["seconds"] > 0 for one in found)
    for one in found:
        assert one["message"].startswith(f"{one['program']} ended with exit code 0 after ")
    assert any(f"--schema={schema(shard)}" in one["arguments"] for one in found)
    assert any("--dbname=" in one["arguments"] and "port=" in one["arguments"] for one in found)


def test_a_program_that_fails(nodes: TwoNodes, caplog: pytest.LogCaptureFixture) -> None:
    with nodes.connected("a") as connection:
        found = find_programs(connection.info.server_version // 10000)
    with pytest.raises(StatementFailed, match="no matching tables"):
        found.dump_table(parameters(nodes, "a") | {"options": f"-c a.b={SECRET}"}, "public", "missing")
    (record,) = [one for one in programs(caplog, nodes) if one["arguments"] != "--version"]
    assert (record["program"], record["exit_code"]) == ("pg_dump", 1)
    assert "no matching tables" not in record["message"]
    assert SECRET not in str(record)
