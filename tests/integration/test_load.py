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
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars
import psycopg
import pytest
from sqlalchemy import Column, Connection, ForeignKey, Integer, MetaData, Table, Text, text
from sqlalchemy.engine import URL

from shardids import Cluster, primary_key
from shardids.catalog.keys.homes import put_home
from shardids.cli import app
from shardids.client.copying.lanes import of_driver
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.pg.locks import AdvisoryLock
from shardids.tables.load import LoadSettings, load
from shardids.tables.load.run import _source
from shardids.tables.load.sending import Mark, Reject, Rejects, Step, advance, make_tables, read_marks
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


def test_a_value_that_is_too_long_for_an_index_is_rejected(there: Cluster) -> None:
    for shard in range(there.shard_count):
        with there.at(shard=shard).engine.begin() as connection:
            connection.execute(text(f"create index on shard_{shard:04d}.things (note)"))
    long = "".join(random.Random(5).choices("0123456789abcdef", k=20_000))
    write("things.csv", f"owner,number,note\nann,1,a\nann,2,{long}\nbob,3,c\n")
    ran = loading("things.csv", *KEY)
    assert (ran.returncode, sorted(row[2] for row in rows_of(there))) == (1, [1, 3]), ran.stderr
    ((line, reason),) = rejected()
    assert (line, "index row" in reason) == (3, True), reason


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
        (
            ("things.csv", "--table", "things"),
            "with --key, a column that holds IDs with --id, or one shard with --shard.",
        ),
        (("things.csv", *KEY, "--shard", "1"), "at most one of --key, --id and --shard can name the shards"),
        (
            ("things.csv", "--table", "things", "--region", "eu"),
            "--region names the region of keys, and requires --key",
        ),
        (("things.csv", "--table", "things", "--key", "colour"), "no column colour"),
        (("absent.csv", *KEY), "can't be read"),
        (("things.txt", *KEY), "the format is not known"),
        (("-", *KEY, "--format", "csv"), "needs a name"),
        (("things.csv", *KEY, "--delimiter", ";;"), "can't separate"),
        (("things.csv", "--table", "things", "--shard", "99"), "Error: shard 99 does not exist"),
        (("things.csv", "--table", "things", "--shard", "99", "--dry-run"), "Error: shard 99 does not exist"),
        (("things.csv", "--table", "things", "--shard=-1"), "Shards are numbered 0 to 7."),
        (("things.csv", *KEY, "--rejects", "things.csv"), "is not a file of rejected records"),
    ],
)
def test_what_can_not_be_loaded_is_refused(there: Cluster, words: tuple[str, ...], message: str) -> None:
    write("things.csv", "owner,number\nann,1\n")
    ran = loading(*words)
    assert (ran.returncode, message in ran.stderr) == (2, True), ran.stderr
    assert list(rows_of(there)) == []
    assert Path("things.csv").read_text(encoding="utf-8").endswith("ann,1\n")


def test_an_empty_file_is_refused_by_name(there: Cluster) -> None:
    ran = loading(write("e.csv", ""), *KEY)
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (2, "Error: e.csv is empty")
    assert loading("e.csv", *KEY, "--columns", "owner,number").stdout == "Loaded 0 rows into 0 shards.\n"


@contextmanager
def stopping_at_seven(cluster: Cluster) -> Iterator[Connection]:
    """Has every load wait before its row with number 7, which is of owner 7, until ``let_go`` or the end."""
    held = cluster.shard_for("owner 7")
    engine = cluster.engine(cluster.node_of(held))
    with engine.begin() as connection:
        connection.execute(
            text(
                f"""create function shard_{held:04d}.hold() returns trigger language plpgsql as
                    $$ begin perform pg_advisory_xact_lock(7); return new; end $$;
                    create trigger hold before insert on shard_{held:04d}.things
                    for each row when (new.number = 7) execute function shard_{held:04d}.hold()"""
            )
        )
    with engine.connect() as holding:
        holding.execute(text("select pg_advisory_lock(7)"))
        try:
            yield holding
        finally:
            let_go(holding)


def let_go(holding: Connection) -> None:
    holding.execute(text("select pg_advisory_unlock_all()"))


def waits_at_seven(admin: psycopg.Connection) -> bool:
    row = admin.execute(
        "select count(*) from pg_locks where locktype = 'advisory' and objid = 7 and not granted"
    ).fetchone()
    return row == (1,)


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """``shardids load …`` as a process of its own, which is killed if the block fails."""
    program = [sys.executable, "-c", "from shardids.cli import app; app()", "load", *words]
    with subprocess.Popen(program, env=environment(**os.environ), stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def test_a_killed_load_goes_on_where_it_ended(
    there: Cluster, cluster_url: URL, admin: psycopg.Connection
) -> None:
    count = 4_000
    write(
        "things.csv", "owner,number\n" + "".join(f"owner {n},{n if n % 500 else 'x'}\n" for n in range(count))
    )
    held = there.shard_for("owner 7")
    with stopping_at_seven(there), started("things.csv", *KEY) as process:
        wait_for(lambda: waits_at_seven(admin), "the load to wait")
        wait_for(lambda: any(shard != held for shard, *_ in rows_of(there)), "another shard to be loaded")
        process.send_signal(signal.SIGKILL)
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


def test_a_load_does_not_go_on_after_a_key_has_moved(there: Cluster, cluster_url: URL) -> None:
    """The first rows of a shard are others then: some would be left out, and some come twice."""
    rows = [f"owner {n % 4},{n if n != 250 else 'x'}\n" for n in range(400)]
    file = Path(write("things.csv", "owner,number\n" + "".join(rows)))

    def stopped(**how: Any) -> ShardidsError:
        name = "-".join(how)
        settings = LoadSettings(
            table="things",
            name=name,
            rejects=Path(name),
            most_rejects=0,
            rows_a_transaction=20,
            **how,
        )
        with file.open("rb") as opened, pytest.raises(ShardidsError) as refused:
            load(there, opened, settings)
        return refused.value

    assert "records were rejected" in stopped(key="owner").message
    before = list(rows_of(there))
    assert before
    with catalog_at(cluster_url) as catalog:
        put_home(catalog, "text", "owner 1", (there.shard_for("owner 1") + 1) % 8)
        there.refresh()
        again = stopped(key="owner")
        assert 'keys were moved to other shards since load "key" began' in again.message
        assert "under another name: --name" in again.hint
        assert list(rows_of(there)) == before
        # Rows that are all of one shard are the same, whatever moves.
        with there.at(shard=5).engine.begin() as connection:
            connection.execute(text("alter table shard_0005.things drop constraint things_number_key"))
        assert "records were rejected" in stopped(shard=5).message
        put_home(catalog, "text", "owner 2", (there.shard_for("owner 2") + 1) % 8)
        there.refresh()
        assert "records were rejected" in stopped(shard=5).message


def test_rows_are_committed_while_the_file_is_read(there: Cluster, admin: psycopg.Connection) -> None:
    lines = ["owner,number\n", *(f"owner {n},{n}\n" for n in range(90_000))]
    words = ["load", "-", "--format", "csv", "--name", "piped", *KEY, "--json"]
    program = [sys.executable, "-c", "from shardids.cli import app; app()", *words]
    with subprocess.Popen(program, env=environment(**os.environ), stdin=subprocess.PIPE) as process:
        assert process.stdin
        process.stdin.write("".join(lines[:80_000]).encode())
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
    assert (told["rows"], told["already"]) == (90_000 - committed, committed)
    assert sorted(row[2] for row in rows_of(there)) == list(range(90_000))


@pytest.mark.long
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
        "select count(*) from pg_stat_activity where datname = any(%s) and xact_start is not null"
        " or pid in (select pid from pg_locks where locktype = 'advisory' and classid = %s)",
        [names, AdvisoryLock.LOAD],
    ).fetchone()
    return row != (0,)


def test_a_second_process_changes_nothing(
    there: Cluster, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A record of every shard is rejected before the first row waits.
    lines = [f"owner {n},{n if n > 40 or n == 7 else 'x'}\n" for n in (*range(7), *range(8, 400), 7)]
    write("things.csv", "owner,number\n" + "".join(lines) + ",5\n")
    with stopping_at_seven(there) as holding, started("things.csv", *KEY) as process:
        wait_for(lambda: waits_at_seven(admin), "the load to wait")
        wait_for(lambda: len(rejected()) > 1, "records to be rejected")
        wait_for(lambda: any(rows_of(there)), "rows to be loaded")
        before = Path("things.csv.rejects.csv").read_bytes()
        # If it is not refused, it fails.
        monkeypatch.setenv("PGOPTIONS", "-c lock_timeout=10s")
        second = loading("things.csv", *KEY)
        assert 'another process is running the load "things.csv"' in second.stderr
        assert "Wait until it has ended, and start the load again" in " ".join(second.stderr.split())
        assert (second.returncode, Path("things.csv.rejects.csv").read_bytes()) == (1, before)
        # It only reads.
        assert loading("things.csv", *KEY, "--dry-run").returncode == 1
        assert Path("things.csv.rejects.csv").read_bytes() == before
        let_go(holding)
    assert process.returncode == 1
    assert sorted(line for line, _ in rejected()) == [*range(2, 42), 402]
    assert sorted(row[2] for row in rows_of(there)) == [7, *range(41, 400)]


def test_rejects_are_not_replaced_by_a_process_that_has_lost_its_lock(
    there: Cluster, admin: psycopg.Connection
) -> None:
    write(
        "things.csv",
        "owner,number\n" + "".join(f"owner {n},{n}\n" for n in range(7)) + "owner 7,7\nowner 7,x\n",
    )
    with stopping_at_seven(there) as holding, started("things.csv", *KEY) as process:
        wait_for(lambda: waits_at_seven(admin), "the load to wait")
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'shardids load things.csv by %'"
        )
        let_go(holding)
    assert process.returncode == 1
    assert (Path("things.csv.rejects.csv").exists(), 7 in {row[2] for row in rows_of(there)}) == (
        False,
        False,
    )
    assert loading("things.csv", *KEY).returncode == 1
    assert [line for line, _ in rejected()] == [10]
    assert sorted(row[2] for row in rows_of(there)) == [*range(8)]


def test_a_file_for_rejects_that_is_none_is_refused(there: Cluster) -> None:
    write("things.csv", "owner,number\nann,1\n")
    ran = loading("things.csv", *KEY, "--rejects", os.devnull)
    assert "is not a file of rejected records" in ran.stderr
    assert Path(os.devnull).is_char_device()
    for content in (b"", b"\xff\x00", b"load,line\r\n"):
        Path("other").write_bytes(content)
        for words in ((), ("--dry-run",)):
            ran = loading("things.csv", *KEY, "--rejects", "other", *words)
            assert (ran.returncode, "is not a file of rejected records" in ran.stderr) == (2, True), content
        assert Path("other").read_bytes() == content
    assert "can't be read" in loading("things.csv", *KEY, "--rejects", "things.csv/other").stderr
    assert list(rows_of(there)) == []


def test_two_loads_do_not_share_a_file_for_rejects(there: Cluster) -> None:
    write("a.csv", "owner,number\nann,x\nann,1\n")
    write("b.csv", "owner,number\nann,y\nann,2\n")
    both = (*KEY, "--rejects", "both.csv")
    assert loading("a.csv", *both).returncode == 1
    before = Path("both.csv").read_bytes()
    for words in ((), ("--dry-run",)):
        ran = loading("b.csv", *both, *words)
        assert (ran.returncode, 'both.csv has rejected records of the load "a.csv"' in ran.stderr) == (
            2,
            True,
        )
    assert (Path("both.csv").read_bytes(), [row[2] for row in rows_of(there)]) == (before, [1])
    # Nor do two that run at once.
    Path("both.csv").unlink()
    rejects = [
        Rejects(Path("both.csv"), name, {}, require=lambda: None, dry_run=False)
        for name in ("a.csv", "b.csv")
    ]
    one = Reject(line=2, shard=None, row=0, reason="bad", record="ann,x")
    rejects[0].add([one])
    with pytest.raises(BadArgument, match="was made meanwhile, by another load"):
        rejects[1].add([one])
    rejects[0].close()
    assert rejected("both.csv") == [(2, "bad")]


def test_a_file_for_rejects_whose_end_is_cut_off_is_read_to_there(there: Cluster) -> None:
    write("things.csv", "owner,number\n,1\n,\u00fc\nann,3\n")
    assert loading("things.csv", *KEY).returncode == 1
    path = Path("things.csv.rejects.csv")
    whole = path.read_bytes()
    for cut in (2, 3, 4, 20):
        path.write_bytes(whole[:-cut])
        told = json.loads(loading("things.csv", *KEY, "--json").stdout)
        assert (told["rows"], told["rejected"], sorted(rejected())[1][0], path.read_bytes() == whole) == (
            0,
            2,
            3,
            True,
        ), cut


def test_a_shard_whose_rows_are_not_those_it_has_taken_gets_no_other(there: Cluster) -> None:
    """Also if the rows behind the last mark are read at once with those before it."""
    shard = there.shard_for("ann")
    other = next(key for key in map(str, range(100)) if there.shard_for(key) != shard)
    write("things.csv", f"owner,number\nann,1\n{other},2\n" + "".join(f"ann,{n}\n" for n in range(3, 50)))
    settings = LoadSettings(
        table="things", key="owner", name="things", rejects=Path("rejects.csv"), rows_a_transaction=1
    )
    with Path("things.csv").open("rb") as file:
        source = _source(file, settings)
        for at, rows, line in ((shard, 2, 2), (there.shard_for(other), 1, 3)):
            with there.at(shard=at).engine.begin() as connection:
                make_tables(connection, [there.schema_of(at)])
                after = Mark(rows=rows, rejected=0, line=line)
                step = Step(schema=there.schema_of(at), before=0, after=after)
                advance(of_driver(connection), "things", source, [step], homes_version=0)
        with pytest.raises(ClusterConflict, match="which it has taken is not known any more"):
            load(there, file, settings)
    assert list(rows_of(there)) == []


LONG = (1, 14, 49)
"""Rows whose owner is too long at first."""


def resumed_after_the_column_grew(cluster: Cluster) -> None:
    """Loads a part of a file some of whose keys are too long, and makes them fit."""
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).engine.begin() as connection:
            connection.execute(text(f"alter table shard_{shard:04d}.things alter owner type varchar(5)"))
    owners = dict.fromkeys(LONG, "longer") | dict.fromkeys((47, 48), "")
    lines = [f"{owners.get(n, f't{n}')},{n}\n" for n in range(1, 51)]
    write("things.csv", "owner,number\n" + "".join(lines))
    settings = LoadSettings(
        table="things",
        key="owner",
        name="things.csv",
        rejects=Path("things.csv.rejects.csv"),
        most_rejects=3,
        rows_a_transaction=1,
    )
    # Ten rows are sent at a time, each in a transaction.
    with pytest.MonkeyPatch.context() as patch, Path("things.csv").open("rb") as file:
        patch.setattr("shardids.tables.load.files._READ", 1)
        with pytest.raises(ShardidsError, match="4 records were rejected"):
            load(cluster, file, settings)
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).engine.begin() as connection:
            connection.execute(text(f"alter table shard_{shard:04d}.things alter owner type varchar(50)"))


def test_records_that_have_a_shard_only_later_are_neither_lost_nor_mistaken_for_others(
    there: Cluster,
) -> None:
    resumed_after_the_column_grew(there)
    before = len(list(rows_of(there)))
    assert 20 <= before < 46
    told = json.loads(loading("things.csv", *KEY, "--json").stdout)
    # What an earlier run has passed stays rejected; what comes behind is read anew.
    assert sorted(row[2] for row in rows_of(there)) == [n for n in range(1, 51) if n not in {1, 14, 47, 48}]
    assert sorted(line - 1 for line, _ in rejected()) == [1, 14, 47, 48]
    assert (told["rows"], told["already"], told["rejected"], told["unlisted"]) == (46 - before, before, 4, 0)


def test_a_load_is_refused_if_which_records_a_shard_has_taken_is_not_known(there: Cluster) -> None:
    resumed_after_the_column_grew(there)
    Path("things.csv.rejects.csv").rename("elsewhere.csv")
    refused = " ".join(loading("things.csv", *KEY).stderr.split())
    assert "belong to it now: which it has taken is not known any more" in refused
    assert "things.csv.rejects.csv does not list them: name the file that does (--rejects)" in refused
    assert not {1, 14} & {row[2] for row in rows_of(there)}
    assert loading("things.csv", *KEY, "--rejects", "elsewhere.csv").returncode == 1
    assert sorted(row[2] for row in rows_of(there)) == [n for n in range(1, 51) if n not in {1, 14, 47, 48}]
    # A shard may have taken records that have no shard any more.
    for shard in range(there.shard_count):
        with there.at(shard=shard).engine.begin() as connection:
            column = f"alter table shard_{shard:04d}.things alter owner type varchar(2) using left(owner, 2)"
            connection.execute(text(column))
    listed = Path("elsewhere.csv").read_bytes()
    refused = loading("things.csv", *KEY, "--rejects", "elsewhere.csv").stderr
    assert "a type of a column that determines the shard" in " ".join(refused.split())
    assert Path("elsewhere.csv").read_bytes() == listed


def test_a_load_is_refused_if_the_file_is_read_in_another_way(there: Cluster) -> None:
    write("things.csv", "number,owner\n1,ann\n")
    assert loading("things.csv", *KEY).returncode == 0
    ran = loading("things.csv", *KEY, "--columns", "owner,number")
    assert "is of another file, or had other options" in ran.stderr


def test_a_load_that_an_older_version_began_is_refused(there: Cluster) -> None:
    write("things.csv", "owner,number\nann,1\n")
    shard = there.shard_for("ann")
    with there.at(shard=shard).engine.begin() as connection:
        make_tables(connection, [there.schema_of(shard)])
        connection.execute(text(f"alter table shard_{shard:04d}.shardids_load drop column line"))
        connection.execute(
            text(f"insert into shard_{shard:04d}.shardids_load values ('things.csv', 'a file', 1, 0, 0)")
        )
    ran = loading("things.csv", *KEY)
    assert 'load "things.csv" was begun by an older version' in ran.stderr
    assert list(rows_of(there)) == []
    # Other loads go on: the table gets its column.
    assert loading("things.csv", *KEY, "--name", "another").returncode == 0
    assert loading("things.csv", *KEY, "--name", "another").returncode == 0
    assert [row[2] for row in rows_of(there)] == [1]


def test_rejects_that_an_earlier_run_wrote_to_another_file_are_not_forgotten(there: Cluster) -> None:
    write("things.csv", "owner,number\nann,1\nann,x\nbob,y\n,4\n")
    assert loading("things.csv", *KEY).returncode == 1
    ran = loading("things.csv", *KEY, "--rejects", "other.csv")
    assert (ran.returncode, "3 records rejected: see other.csv" in ran.stderr) == (1, True)
    assert "other.csv lacks 2 of them, which an earlier run wrote to another file" in ran.stderr
    told = json.loads(loading("things.csv", *KEY, "--rejects", "other.csv", "--json").stdout)
    assert (told["rejected"], told["unlisted"], len(rejected("other.csv"))) == (3, 2, 1)


def test_two_processes_do_not_run_one_load(there: Cluster) -> None:
    schema = there.schema_of(5)
    with there.engine(there.node_of(5)).begin() as connection:
        make_tables(connection, [schema])
        driver = of_driver(connection)

        def go_on(before: int, after: int) -> None:
            step = Step(schema=schema, before=before, after=Mark(rows=after, rejected=0, line=after))
            advance(driver, "things", "a file", [step], homes_version=0)

        go_on(0, 5)
        go_on(5, 7)
        for before in (0, 5, 9):
            with pytest.raises(ClusterConflict, match='another process is running the load "things"'):
                go_on(before, 12)
    assert read_marks(there, "things", "a file") == {5: Mark(rows=7, rejected=0, line=7)}
    assert read_marks(there, "other things", "a file") == {}
