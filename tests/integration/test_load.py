"""``shardids load``: files into shards, each row once, whatever happens to the process."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars
import psycopg
import pytest
from sqlalchemy import Column, ForeignKey, Integer, MetaData, Table, Text, text
from sqlalchemy.engine import URL

from shardids import Cluster, primary_key
from shardids.cli import app
from shardids.client.copying.lanes import of_driver
from shardids.errors import ClusterConflict
from shardids.tables.load.sending import Mark, Step, advance, make_tables, read_marks
from shardids.watch import doctor
from tests.conftest import dsn
from tests.support.clusters import catalog_at, environment
from tests.support.waiting import wait_for

metadata = MetaData()
owners = Table("owners", metadata, primary_key("id"), Column("name", Text))
things = Table(
    "things",
    metadata,
    primary_key("id"),
    Column("owner", Text),
    Column("number", Integer, unique=True),
    Column("note", Text, server_default="none"),
)
parts = Table("parts", metadata, primary_key("id"), Column("owner_id", ForeignKey("owners.id")))
KEY = ("--table", "things", "--key", "owner")


@pytest.fixture
def there(cluster: Cluster, cluster_url: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, with the tables in every shard; commands find it."""
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).engine.begin() as connection:
            metadata.create_all(connection, checkfirst=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(cluster_url))
    monkeypatch.chdir(tmp_path)
    return cluster


def rows_of(
    cluster: Cluster, columns: str = "owner, number, note", table: str = "things"
) -> Iterator[tuple[Any, ...]]:
    """All rows, each after its shard."""
    for shard in range(cluster.shard_count):
        with cluster.engine(cluster.node_of(shard)).connect() as connection:
            for row in connection.execute(
                text(f"select {columns} from shard_{shard:04d}.{table} order by id")
            ):
                yield (shard, *row)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command ended with."""

    returncode: int
    stdout: str
    stderr: str


def loading(*words: str, stdin: str = "") -> Ran:
    """``shardids load …`` on the cluster, in this process."""
    said, told = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as stopped:
            app(["load", *words], prog_name="shardids")
    return Ran(returncode=int(stopped.value.code or 0), stdout=said.getvalue(), stderr=told.getvalue())


def write(name: str, content: str) -> str:
    Path(name).write_text(content, encoding="utf-8", newline="")
    return name


def rejected(name: str = "things.csv.rejects.csv") -> list[tuple[int, str]]:
    with Path(name).open(encoding="utf-8", newline="") as file:
        return [(int(row["line"]), row["reason"]) for row in csv.DictReader(file)]


def test_a_file_is_read_as_postgresql_reads_it(there: Cluster) -> None:
    content = (
        "\ufeffnumber,owner,note\r\n"
        '1,ann,\r\n2,bob,""\r\n3,"c, ""the"" d","two\nlines, and a \\N"\r\n'
        '4,"ef,g",\\.\r\n\r\n5,   ,NULL\r\n'
    )
    ran = loading(write("things.csv", content), *KEY)
    assert (ran.returncode, ran.stdout[:19]) == (0, "Loaded 5 rows into ")
    found = sorted(rows_of(there), key=lambda row: row[2])
    assert [row[1:] for row in found] == [
        ("ann", 1, None),
        ("bob", 2, ""),
        ('c, "the" d', 3, "two\nlines, and a \\N"),
        ("ef,g", 4, "\\."),
        ("   ", 5, "NULL"),
    ]
    assert all(there.shard_for(owner) == shard for shard, owner, *_ in found)


def test_a_load_is_done_once(there: Cluster, cluster_url: URL) -> None:
    name = write("things.csv", "owner,number\n" + "".join(f"owner {n % 30},{n}\n" for n in range(3_000)))
    assert json.loads(loading(name, *KEY, "--dry-run", "--json").stdout)["rows"] == 3_000
    assert list(rows_of(there)) == []
    first = json.loads(loading(name, *KEY, "--json").stdout)
    assert (first["rows"], first["already"], sum(first["by_shard"].values())) == (3_000, 0, 3_000)
    again = json.loads(loading(name, *KEY, "--json").stdout)
    assert (again["rows"], again["already"], again["by_shard"]) == (0, 3_000, {})
    assert sorted(row[2] for row in rows_of(there)) == list(range(3_000))
    assert {row[3] for row in rows_of(there)} == {"none"}
    write("things.csv", "owner,number\nann,5000\n")
    other = loading(name, *KEY)
    assert (other.returncode, "is of another file" in other.stderr) == (1, True)
    assert loading(name, *KEY, "--name", "another").returncode == 0
    # The table in which the shards remember it is no finding, and no drift.
    with catalog_at(dsn_of(there)) as catalog:
        assert [
            finding.what for finding in doctor.examine(catalog).findings if "shardids_load" in finding.what
        ] == []


def dsn_of(cluster: Cluster) -> URL:
    return cluster._catalog.url


def test_records_that_can_not_be_loaded_are_kept_with_their_reason(there: Cluster) -> None:
    bad = {
        3: ",3",
        5: "ann,five",
        8: 'bob,8,"too",many',
        9: "ann,1",
        11: "cyd",
        12: 'e"f",12',
        14: 'dan,"1\n4"',
    }
    lines = [bad.get(n, f"ann,{n}") for n in range(2, 16)]
    ran = loading(
        write("things.csv", "\n".join(["owner,number", "ann,1", *lines[1:]]) + "\n"), *KEY, "--json"
    )
    assert ran.returncode == 1, ran.stderr
    told = json.loads(ran.stdout)
    assert told["rejected"] == len(bad)
    found = dict(rejected())
    assert {line: reason.split("(")[0].strip() for line, reason in found.items()} == {
        3: "owner, which determines its shard, is NULL",
        5: 'invalid input syntax for type integer: "five"',
        8: "extra data after last expected column",
        9: 'duplicate key value violates unique constraint "things_number_key"',
        11: 'missing data for column "number"',
        12: "a quote stands within a field that does not begin with one",
        14: 'invalid input syntax for type integer: "1\n4"',
    }
    assert sorted(row[2] for row in rows_of(there)) == [1, 4, 6, 7, 10, 13, 15]
    again = json.loads(loading("things.csv", *KEY, "--json").stdout)
    assert (again["rows"], again["rejected"], dict(rejected())) == (0, len(bad), found)
    # Rows that were rejected are not there.
    assert again["already"] == 7


def test_too_many_rejects_end_the_load_and_are_no_loss(there: Cluster) -> None:
    write("things.csv", "owner,number\n" + "".join(f"ann,{n if n % 3 else 'x'}\n" for n in range(30)))
    ran = loading("things.csv", *KEY, "--max-rejects", "5")
    assert (ran.returncode, "10 records were rejected, more than the limit of 5" in ran.stderr) == (1, True)
    assert list(rows_of(there)) == []
    ran = loading("things.csv", *KEY)
    assert (ran.returncode, len(rejected())) == (1, 10)
    assert sorted(row[2] for row in rows_of(there)) == [n for n in range(30) if n % 3]


def test_rows_follow_those_that_they_refer_to(there: Cluster) -> None:
    there.copy(owners, ((f"owner {n}",) for n in range(20)), columns=("name",), key="name")
    ids = [id_ for _, id_ in rows_of(there, "id", "owners")]
    strange = there.at(shard=0).reserve(1)[0]
    write("parts.csv", "owner_id\n" + "".join(f"{id_}\n" for id_ in (*ids, strange, 7)))
    ran = loading("parts.csv", "--table", "parts", "--json")
    assert (ran.returncode, json.loads(ran.stdout)["rows"]) == (1, 20)
    reasons = dict(rejected("parts.csv.rejects.csv"))
    assert "violates foreign key constraint" in reasons[22]
    assert len(reasons) == 2
    assert [there.shard_of(owner) == shard for shard, owner in rows_of(there, "owner_id", "parts")] == [
        True
    ] * 20


def test_parquet_and_stdin_and_a_file_without_a_header(there: Cluster) -> None:
    rows = [("ann", 1, "x"), ("bob", 2, None), (None, 3, "y")]
    polars.DataFrame(rows, schema=["owner", "number", "note"], orient="row").write_parquet("things.parquet")
    ran = loading("things.parquet", *KEY)
    assert ran.returncode == 1, ran.stderr
    assert rejected("things.parquet.rejects.csv") == [(3, "owner, which determines its shard, is NULL")]
    piped = ("--format", "csv", "--columns", "number,owner", "--delimiter", ";", "--name", "piped")
    assert loading("-", *KEY, *piped, stdin="10;ann\n11;bob\n").returncode == 0
    assert sorted(row[1:] for row in rows_of(there)) == [
        ("ann", 1, "x"),
        ("ann", 10, "none"),
        ("bob", 2, None),
        ("bob", 11, "none"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("things.csv", "--table", "nothing"), "has no table nothing"),
        (("things.csv", "--table", "things"), "cannot determine the shards"),
        (("things.csv", "--table", "things", "--key", "colour"), "no column colour"),
        (("absent.csv", *KEY), "can't be read"),
        (("things.txt", *KEY), "the format is not known"),
        (("-", *KEY, "--format", "csv"), "needs a name"),
        (("things.csv", *KEY, "--delimiter", ";;"), "can't separate"),
        (("things.csv", *KEY, "--rejects", "things.csv"), "is not a file of rejected records"),
    ],
)
def test_what_can_not_be_loaded_is_refused(there: Cluster, words: tuple[str, ...], message: str) -> None:
    write("things.csv", "owner,number\nann,1\n")
    ran = loading(*words)
    assert (ran.returncode, message in ran.stderr) == (2, True), ran.stderr
    assert list(rows_of(there)) == []
    assert Path("things.csv").read_text(encoding="utf-8").endswith("ann,1\n")


def test_a_killed_load_goes_on_where_it_ended(
    there: Cluster, cluster_url: URL, admin: psycopg.Connection
) -> None:
    count = 4_000
    write(
        "things.csv", "owner,number\n" + "".join(f"owner {n},{n if n % 500 else 'x'}\n" for n in range(count))
    )
    held = there.shard_for("owner 7")
    with there.engine(there.node_of(held)).begin() as connection:
        connection.execute(
            text(
                f"""create function shard_{held:04d}.hold() returns trigger language plpgsql as
                    $$ begin perform pg_advisory_xact_lock(7); return new; end $$;
                    create trigger hold before insert on shard_{held:04d}.things
                    for each row when (new.number = 7) execute function shard_{held:04d}.hold()"""
            )
        )
    program = [sys.executable, "-c", "from shardids.cli import app; app()", "load", "things.csv", *KEY]
    holding = there.engine(there.node_of(held)).connect()
    holding.execute(text("select pg_advisory_lock(7)"))
    with subprocess.Popen(program, env=environment(**os.environ), stderr=subprocess.DEVNULL) as process:
        wait_for(
            lambda: (
                admin.execute(
                    "select count(*) from pg_locks where locktype = 'advisory' and objid = 7 and not granted"
                ).fetchone()
                == (1,)
            ),
            "the load to wait",
        )
        wait_for(lambda: any(shard != held for shard, *_ in rows_of(there)), "another shard to be loaded")
        process.send_signal(signal.SIGKILL)
    holding.execute(text("select pg_advisory_unlock(7)"))
    holding.close()
    wait_for(lambda: not in_transactions(admin, there), "the killed load's sessions to end")
    loaded = {row[2] for row in rows_of(there)}
    assert 0 < len(loaded) < count
    ran = loading("things.csv", *KEY, "--json")
    told = json.loads(ran.stdout)
    assert ran.returncode == 1
    # What it had loaded is not loaded again, and its rejects are there once.
    good = [n for n in range(count) if n % 500]
    assert told["rows"] == len(good) - len(loaded)
    assert sorted(row[2] for row in rows_of(there)) == good
    assert sorted(line for line, _ in rejected()) == [n + 2 for n in range(count) if n % 500 == 0]


def test_rows_are_committed_while_the_file_is_read(there: Cluster, admin: psycopg.Connection) -> None:
    lines = ["owner,number\n", *(f"owner {n},{n}\n" for n in range(60_000))]
    words = ["load", "-", "--format", "csv", "--name", "piped", *KEY, "--json"]
    program = [sys.executable, "-c", "from shardids.cli import app; app()", *words]
    with subprocess.Popen(program, env=environment(**os.environ), stdin=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write("".join(lines[:50_000]).encode())
        process.stdin.flush()
        wait_for(lambda: any(rows_of(there)), "rows to be committed")
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not in_transactions(admin, there), "the killed load's sessions to end")
    committed = len(list(rows_of(there)))
    ran = subprocess.run(
        program,
        env=environment(**os.environ),
        input="".join(lines).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    told = json.loads(ran.stdout)
    assert (told["rows"], told["already"]) == (60_000 - committed, committed)
    assert sorted(row[2] for row in rows_of(there)) == list(range(60_000))


def test_a_load_that_is_killed_at_random_moments_has_each_row_once(
    there: Cluster, admin: psycopg.Connection
) -> None:
    count, every = 120_000, 997
    write(
        "things.csv",
        "owner,number\n" + "".join(f"owner {n % 5000},{n if n % every else 'x'}\n" for n in range(count)),
    )
    good = [n for n in range(count) if n % every]
    program = [sys.executable, "-c", "from shardids.cli import app; app()", "load", "things.csv", *KEY]
    there_before = 0
    for _ in range(4):
        goal = there_before + random.randrange(1, 20_000)
        with subprocess.Popen(program, env=environment(**os.environ), stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and marked(there) < goal:
                time.sleep(0.01)
            time.sleep(random.random() / 10)
            process.send_signal(signal.SIGKILL)
        wait_for(lambda: not in_transactions(admin, there), "the killed load's sessions to end")
        there_now = marked(there)
        assert there_now >= there_before
        there_before = there_now
    told = json.loads(loading("things.csv", *KEY, "--json").stdout)
    assert told["rows"] + told["already"] == len(good)
    assert sorted(row[2] for row in rows_of(there)) == good
    assert sorted(line for line, _ in rejected()) == [n + 2 for n in range(count) if n % every == 0]


def marked(cluster: Cluster) -> int:
    """How many records of the load are done with."""
    total = 0
    for shard in range(cluster.shard_count):
        with cluster.engine(cluster.node_of(shard)).connect() as connection:
            if connection.scalar(text(f"select to_regclass('shard_{shard:04d}.shardids_load')")) is not None:
                total += connection.scalar(text(f"select rows from shard_{shard:04d}.shardids_load")) or 0
    return total


def in_transactions(admin: psycopg.Connection, cluster: Cluster) -> bool:
    names = [cluster.engine(node).url.database for node in cluster.placement.nodes.values()]
    row = admin.execute(
        "select count(*) from pg_stat_activity where datname = any(%s) and xact_start is not null", [names]
    ).fetchone()
    return row != (0,)


def test_two_processes_do_not_run_one_load(there: Cluster) -> None:
    schema = there.schema_of(5)
    with there.engine(there.node_of(5)).begin() as connection:
        make_tables(connection, [schema])
        driver = of_driver(connection)

        def go_on(before: int, after: int) -> None:
            step = Step(schema=schema, before=before, after=Mark(rows=after, rejected=0))
            advance(driver, "things", "a file", [step])

        go_on(0, 5)
        go_on(5, 7)
        for before in (0, 5, 9):
            with pytest.raises(ClusterConflict, match='another process is running the load "things"'):
                go_on(before, 12)
    assert read_marks(there, "things", "a file") == {5: Mark(rows=7, rejected=0)}
    assert read_marks(there, "other things", "a file") == {}
