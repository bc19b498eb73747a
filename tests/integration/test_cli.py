"""The command ``shardids``: what it prints where, its exit codes, and its messages."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer.main
from psycopg import sql
from sqlalchemy.engine import URL

import shardids
from shardids import Layout
from shardids.catalog.topology import Node
from shardids.cli import app
from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT
from shardids.ids.text import to_text
from shardids.migrate.install import provision
from shardids.pg.notation import parse_shards
from shardids.pg.sqlfiles import data_folder
from shardids.pg.urls import parse_url
from tests.conftest import BlankDatabases, MakeRole, dsn, found_cluster
from tests.support.clusters import COMMAND, catalog_at, command, connected, environment, everything

Blank = Callable[[], URL]

BORN = datetime(2026, 11, 21, 13, 57, 29, 713000, tzinfo=UTC)
ID = DEFAULT.encode(at=BORN, shard=37, sequence=2)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> object:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, without a catalog in the environment."""
    monkeypatch.delenv("SHARDIDS_CATALOG", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str, stdin: str = "") -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app([*words], prog_name="shardids")
        said = capsys.readouterr()
        return Ran(code=int(stopped.value.code or 0), out=said.out, err=said.err)

    return run


@pytest.fixture(scope="module")
def made(databases: BlankDatabases) -> Iterator[tuple[URL, URL]]:
    """A cluster of 8 shards on two databases that the tests leave as it is."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    yield urls
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def home(made: tuple[URL, URL]) -> str:
    """The catalog of ``made``, as a command takes it."""
    return dsn(made[0])


def refused(ran: Ran, code: int, *words: str) -> None:
    """A message on stderr, nothing on stdout, and no traceback."""
    assert (ran.code, ran.out) == (code, ""), ran
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


# IDs.


@pytest.mark.parametrize(
    "written", [str(ID), f"+{ID}", hex(ID), to_text(ID), to_text(ID).lower(), f"  {ID}"], ids=repr
)
def test_an_id_in_each_of_its_forms(run: Run, written: str) -> None:
    ran = run("id", "decode", written)
    assert (ran.code, ran.err) == (0, "")
    head, bits, time, shard, sequence = ran.out.splitlines()
    assert head.split() == [str(ID), to_text(ID)]
    assert bits.split() == ["0", f"{ID:064b}"[1:42], f"{37:012b}", f"{2:010b}"]
    assert "2026-11-21 13:57:29.713 UTC" in time
    assert shard.split()[-1] == "37"
    assert sequence.split()[-1] == "2"


def test_negative_ids(run: Run) -> None:
    instagram = Layout.preset("instagram")
    late = instagram.encode(ms=(1 << 40) + 5, shard=3, sequence=9)
    assert late < 0
    for words in ([str(late), "--layout", "instagram"], ["--layout", "instagram", "--", str(late)]):
        ran = run("id", "decode", "--json", *words)
        assert (ran.code, ran.err) == (0, "")
        assert ran.json == [
            {
                "id": str(late),
                "text": to_text(late),
                "time": instagram.decode(late).time.isoformat(timespec="milliseconds"),
                "ms": (1 << 40) + 5,
                "shard": 3,
                "sequence": 9,
            }
        ]
    refused(run("id", "decode", str(late)), 2, str(late), "negative")


def test_several_ids_and_ids_from_stdin(run: Run) -> None:
    for words, stdin in (
        ([str(ID), hex(ID + 1)], ""),
        ([], f"{ID}\n{hex(ID + 1)}\n"),
        (["-"], f" {ID} {hex(ID + 1)}"),
    ):
        ran = run("id", "decode", *words, "--json", stdin=stdin)
        assert [one["id"] for one in ran.json] == [str(ID), str(ID + 1)]
        plain = run("id", "decode", *words, stdin=stdin)
        assert plain.out.count("UTC") == 2
    refused(run("id", "decode", stdin=" \n"), 2, "no ID given")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("x", ["'x'"]),
        ("", ["empty"]),
        ("99999999999999999999", ["18446744073709551615"]),
        ("9" * 5000, ["64 bits"]),
        (str(1 << 63), ["negative"]),
        ("0x", ["'0x'"]),
        ("12.5", ["'12.5'"]),
        ("--nonesuch", ["--nonesuch"]),
        ("ZZZZZZZZZZZZZ", ["64 bits"]),
        ("[bold]x[/]", ["[bold]x[/]"]),
    ],
)
def test_what_is_no_id(run: Run, written: str, words: list[str]) -> None:
    refused(run("id", "decode", written), 2, "Error:", *words)
    # All or nothing: what can be read is not printed either.
    refused(run("id", "decode", str(ID), written, "--json"), 2, *words)


def test_ids_where_their_shards_live(run: Run, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home = DEFAULT.encode(at=BORN, shard=5)
    ran = run("id", "decode", str(at_home), str(ID), "--catalog", home, "--json")
    assert [one["node"] for one in ran.json] == ["b", None]
    monkeypatch.setenv("SHARDIDS_CATALOG", home)
    assert 'on node "b" now' in run("id", "decode", str(at_home)).out
    assert "node" not in run("id", "decode", str(ID)).out


@pytest.mark.parametrize(
    ("written", "at"), [("2026-11-21T13:57:29.713", BORN), ("2026-11-21T14:57:29.713+01:00", BORN)]
)
def test_an_id_is_put_together(run: Run, written: str, at: datetime) -> None:
    ran = run("id", "encode", "--shard", "37", "--time", written, "--sequence", "2")
    assert (ran.code, ran.out, ran.err) == (0, f"{DEFAULT.encode(at=at, shard=37, sequence=2)}\n", "")
    other = run("id", "encode", "--shard", "37", "--time", written, "--layout", "twitter")
    assert other.out == f"{Layout.preset('twitter').encode(at=at, shard=37)}\n"
    now = run("id", "encode", "--shard", "1", "--time", "now")
    assert abs(DEFAULT.decode(int(now.out)).time - datetime.now(UTC)).total_seconds() < 60


def test_ids_that_cannot_be_put_together(run: Run) -> None:
    for shard, time, sequence, words in (
        ("4096", "now", "0", "4095"),
        ("-1", "now", "0", "4095"),
        ("0", "tomorrow", "0", "'tomorrow'"),
        ("0", "2023-12-31", "0", "epoch"),
        ("0", "2099-01-01", "0", "2093"),
        ("0", "now", "1024", "1023"),
    ):
        ran = run("id", "encode", f"--shard={shard}", "--time", time, "--sequence", sequence)
        assert ran.code in {1, 2}
        refused(ran, ran.code, words)
    refused(
        run("id", "encode", "--shard", "1", "--time", "now", "--layout", "41-12"),
        2,
        "'41-12' is not a layout",
    )


def test_the_ids_of_a_time(run: Run, home: str) -> None:
    span = ("--from", "2026-11-21", "--to", "2026-11-22")
    start, end = datetime(2026, 11, 21, tzinfo=UTC), datetime(2026, 11, 22, tzinfo=UTC)
    bounds = DEFAULT.id_range(start, end)
    assert run("id", "range", *span).out == f"{bounds.first} {bounds.last}\n"
    assert run("id", "range", *span, "--json").json == {"first": str(bounds.first), "last": str(bounds.last)}
    of_shard = DEFAULT.id_range(start, end, 5)
    assert (
        run("id", "range", *span, "--shard", "5", "--catalog", home).out
        == f"{of_shard.first} {of_shard.last}\n"
    )
    refused(run("id", "range", "--from", "2026-11-22", "--to", "2026-11-21"), 2, "reversed")
    refused(run("id", "range", *span, "--shard", "4096"), 2, "4095")


def test_ids_are_drawn(run: Run, home: str) -> None:
    ran = run("id", "next", "--shard", "6", "-n", "3000", "--catalog", home)
    assert (ran.code, ran.err) == (0, "")
    drawn = [int(line) for line in ran.out.splitlines()]
    assert len(drawn) == len(set(drawn)) == 3000
    assert drawn == sorted(drawn)
    assert {DEFAULT.decode(one).shard for one in drawn} == {6}
    (one,) = run("id", "next", "--shard", "6", "--catalog", home).out.splitlines()
    assert int(one) > drawn[-1]
    for count in ("0", "-1", "4194305", "5000000000", "9" * 30):
        refused(run("id", "next", "--shard", "6", "-n", count, "--catalog", home), 2, count)
    refused(run("id", "next", "--shard", "8", "--catalog", home), 2, "shard 8 does not exist", "0 to 7")


# Clusters.


def test_a_cluster_step_by_step(run: Run, blank_database: Blank, make_role: MakeRole) -> None:
    urls = blank_database(), blank_database()
    role = str(make_role("App").username)
    at = ("--catalog", dsn(urls[0]))
    before = everything(*urls)

    def step(*words: str, verbs: tuple[str, str], what: str) -> None:
        """A dry run says what would be done and does nothing; then it is done."""
        nonlocal before
        dry = run(*words, *at, "--dry-run")
        assert (dry.code, dry.err) == (0, "")
        assert f"Would {verbs[0]} {what}" in dry.out
        assert everything(*urls) == before
        done = run(*words, *at)
        assert (done.code, done.err) == (0, "")
        assert f"{verbs[1]} {what}" in done.out
        after = everything(*urls)
        assert after != before
        before = after

    make, add, grant = ("make", "Made"), ("add", "Added"), ("grant", "Granted")
    step("init", "--shards", "6", verbs=make, what="cluster")
    assert run("init", "--shards", "6", *at).code == 0
    empty = run("node", "list", *at)
    assert (empty.code, empty.out) == (0, "")
    assert "shardids node add" in empty.err
    assert run("node", "list", "--json", *at).json == []
    add_first = ("node", "add", "a", "--url", dsn(urls[0]), "--store-password")
    step(*add_first, verbs=add, what='node "a"')
    assert run("query-node", "status", "--json", *at).json == [
        {"node": "a", "url": None, "tables": 0, "faults": []}
    ]
    step("node", "add", "B-2.x", "--url", dsn(urls[1]), verbs=add, what='node "B-2.x"')
    assert run("node", "add", "a", "--url", dsn(urls[0]), *at).code == 0
    nothing = run("shard", "list", *at)
    assert (nothing.code, nothing.out) == (0, "")
    assert run("shard", "list", "--json", *at).json == []
    step("shard", "create", "0-1,5", verbs=make, what="2 shards on node")
    step("shard", "create", verbs=make, what="2 shards on node")
    again = run("shard", "create", "all", *at)
    assert (again.code, again.out) == (0, "Nothing to do: the shards exist\n")

    step("grant", role, verbs=grant, what=f'use of 6 shards to "{role}"')
    assert run("grant", role, "--shards", "1,3-4", *at).out == f'Granted use of 3 shards to "{role}"\n'

    third = blank_database()
    assert run("node", "add", "c", "--url", dsn(third), *at).err == ""
    assert run("node", "remove", "c", "--dry-run", *at).out == 'Would remove node "c"\n'
    assert run("node", "remove", "c", *at).out == 'Removed node "c"\n'
    assert "c" not in {one["node"] for one in run("node", "list", "--json", *at).json}
    with connected(urls[0]) as there:
        left = there.execute("select srvname from pg_foreign_server order by 1").fetchall()
    assert left == [("shardids_B-2.x",), ("shardids_a",)]


def test_what_there_is(run: Run, home: str) -> None:
    at = ("--catalog", home)
    nodes = run("node", "list", "--json", *at).json
    assert [(one["node"], one["shards"]) for one in nodes] == [("a", 4), ("b", 4)]
    plain = run("node", "list", *at)
    assert plain.out.splitlines()[0].split() == ["node", "region", "shards", "url"]
    assert "postgresql://" in plain.out
    shards = run("shard", "list", "--json", *at).json
    assert [one["shard"] for one in shards] == list(range(8))
    assert {one["schema"] for one in shards} == {f"shard_000{n}" for n in range(8)}
    of_node = run("shard", "list", "--node", "a", "--json", *at).json
    assert of_node == [one for one in shards if one["node"] == "a"]
    assert len(of_node) == 4
    heads = run("shard", "list", *at).out.splitlines()[0].split()
    assert heads == ["shard", "node", "region", "schema", "state", "lease", "pin"]
    (facts,) = run("shard", "list", "5", "--json", *at).json
    assert (facts["shard"], facts["schema"], facts["state"]) == (5, "shard_0005", "active")
    shown = run("shard", "list", "5", *at).out
    assert re.search(r"^\s*schema  shard_0005$", shown, re.M)


def test_a_layout_that_turns_negative_is_warned_of(run: Run, blank_database: Blank) -> None:
    ran = run("init", "--shards", "4", "--layout", "instagram", "--catalog", dsn(blank_database()))
    assert ran.code == 0
    assert "Made cluster" in ran.out
    assert "Warning" in ran.err
    assert "negative" in ran.err


def test_init_says_how_long_the_layout_lasts_and_what_it_holds(run: Run, blank_database: Blank) -> None:
    ran = run("init", "--shards", "8", "--catalog", dsn(blank_database()))
    assert (ran.code, ran.err) == (0, "")
    _, time, ids, shards = ran.out.splitlines()
    left = Layout.preset("default").years_left(datetime.now(UTC))
    said = re.fullmatch(r"  time     until 2093-09-06, (\d+\.\d) years left", time)
    assert said is not None
    assert float(said[1]) == pytest.approx(left, abs=0.1)
    assert ids == "  IDs      1,024,000 a second in each shard, 8,192,000 in all"
    assert shards == "  shards   8 of 4,096 that the layout has room for"


@pytest.mark.parametrize("years", [9.9, 10.1])
def test_init_warns_of_a_layout_that_ends_within_ten_years(
    years: float, run: Run, blank_database: Blank
) -> None:
    end = datetime.now(UTC) + timedelta(days=years * 365.2425)
    layout = f"39-12-10@{int(end.timestamp() * 1000) - (1 << 39)}"
    until = f"{Layout.parse(layout).last_time:%Y-%m-%d}"
    at = ("--catalog", dsn(blank_database()))
    for more in (("--dry-run",), ()):
        ran = run("init", "--shards", "8", "--layout", layout, *at, *more)
        assert ran.code == 0
        assert f"until {until}, {years} years left" in ran.out
        assert "Warning" not in ran.out
        if years < 10:
            assert ran.err == (
                f"Warning: layout {layout} ends on {until}: from then on no shard issues IDs. A layout"
                " is fixed for good.\n"
            )
        else:
            assert ran.err == ""


def test_refusals_of_the_cluster(run: Run, home: str, made: tuple[URL, URL], blank_database: Blank) -> None:
    before = everything(*made)
    at = ("--catalog", home)
    for words, code, said in (
        (["init", "--shards", "9"], 1, ["number of shards is 8, not 9"]),
        (["init", "--shards", "8", "--layout", "twitter"], 1, ["layout is 41-12-10"]),
        (["init", "--shards", "5000"], 2, ["1 to 4096"]),
        (["init", "--shards", "x"], 2, ["--shards"]),
        (["init", "--layout", "nonesuch"], 2, ["nonesuch"]),
        (["init", "--schema-prefix", "It's"], 2, ["It's"]),
        (["node", "add", "a b", "--url", dsn(made[1])], 2, ["'a b'"]),
        (["node", "add", "c", "--url", dsn(made[1])], 1, ['already node "b"']),
        (["node", "add", "c"], 2, ["--url"]),
        (["node", "add", "c", "--url", "mysql://ann:hidden-word@h/d"], 2, ["mysql"]),
        (
            ["node", "add", "c", "--url", "postgresql://ann:hidden-word@127.0.0.1:1/d"],
            1,
            ["refused", 'node "c"'],
        ),
        (["node", "remove", "a"], 1, ['node "a"', "4 shards", "shardids rebalance --drain a"]),
        (["node", "remove", "a", "--dry-run"], 1, ['node "a"', "4 shards"]),
        (["node", "remove", "nonesuch"], 1, ['"nonesuch"', '"a", "b"']),
        (["shard", "create", "7-9"], 2, ["'7-9'", "0 to 7"]),
        (["shard", "create", "--node", "nonesuch"], 1, ['"nonesuch"']),
        (["shard", "create", "0", "--node", "b"], 1, ['shard 0 is on node "a"']),
        (["shard", "list", "--node", "nonesuch"], 1, ['"nonesuch"', '"a", "b"']),
        (["shard", "list", "8"], 2, ["Shards are numbered 0 to 7."]),
        (["shard", "move", "3-1", "--to", "b"], 2, ["3-1 runs backwards: 1-3"]),
        (["rebalance", "--margin", "10", "--dry-run"], 2, ["'10'", "write 0.1 or 10%"]),
        (["rebalance", "--margin", "-1", "--dry-run"], 2, ["'-1'"]),
        (["rebalance", "--watch", "--min-gain", "1", "--dry-run"], 2, ["'1'", "write 0.1 or 10%"]),
        (["tenant", "top", "400", "--key", "users.name"], 1, ["shard 400 does not exist", "0 to 7"]),
        (
            ["shard", "reset-clock", "5", "--dry-run"],
            2,
            ["ms behind the clock: there is nothing to reset", "shardids shard activate 5"],
        ),
        (["grant", "no body"], 1, ['no role "no body"']),
        (["grant", "[bold]x[/]"], 1, ['no role "[bold]x[/]"']),
        (["grant", "anybody", "--shards", "8"], 2, ["'8'", "0 to 7"]),
    ):
        ran = run(*words, *at)
        refused(ran, code, *said)
        assert "hidden-word" not in ran.err
    assert everything(*made) == before


def test_parts_of_the_mean(run: Run, home: str) -> None:
    found = [
        run("rebalance", "--margin", margin, "--dry-run", "--json", "--catalog", home).json
        for margin in ("0.1", "10%")
    ]
    assert found[0] == found[1]


def test_a_role_without_rights_is_told_who_has_them(
    run: Run, made: tuple[URL, URL], make_role: MakeRole
) -> None:
    catalog = dsn(make_role().set(database=made[0].database))
    for words in (["node", "list"], ["id", "next", "--shard", "0"], ["node", "remove", "b"]):
        refused(run(*words, "--catalog", catalog), 1, "permission denied", "shardids grant ROLE")


def test_without_a_catalog(run: Run, blank_database: Blank, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = (
        ["init"],
        ["node", "list"],
        ["node", "add", "a", "--url", "postgresql://h/d"],
        ["node", "remove", "a"],
        ["shard", "create"],
        ["shard", "list"],
        ["shard", "list", "1"],
        ["grant", "anybody"],
        ["id", "next", "--shard", "1"],
    )
    for words in commands:
        refused(run(*words), 2, "--catalog", "SHARDIDS_CATALOG")
    monkeypatch.setenv("SHARDIDS_CATALOG", "postgresql://ann:hidden-word@127.0.0.1:1/app")
    for words in (*commands, ["id", "decode", "1"]):
        ran = run(*words)
        refused(ran, 1, "the catalog can't be reached", "postgresql://ann@127.0.0.1:1/app", "refused")
        assert "hidden-word" not in ran.err
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(blank_database()))
    for words in (*commands[1:], ["id", "decode", "1"]):
        refused(run(*words), 1, "holds no shardids catalog", "shardids init")


def test_tables_are_whole_in_a_narrow_terminal(
    run: Run, blank_database: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = blank_database()
    six = "postgresql://dba@[fe80::1]:5432/app"
    long = f"postgresql://dba@{'database-7.' * 12}example.com:5432/photos"
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 4)
        catalog.add_node(Node(name="six", url=six))
        catalog.add_node(Node(name="long", url=long))
    monkeypatch.setenv("COLUMNS", "60")
    shown = run("node", "list", "--catalog", dsn(url)).out
    assert six in shown
    assert long in shown
    assert [one["url"] for one in run("node", "list", "--json", "--catalog", dsn(url)).json] == [long, six]


def test_a_database_that_refuses_is_told_in_a_line(run: Run, blank_database: Blank) -> None:
    url = blank_database()
    at = ("--catalog", dsn(url))
    assert run("init", "--shards", "4", *at).code == 0
    assert run("node", "add", "a", "--url", dsn(url), *at).code == 0
    with connected(url) as connection:
        connection.execute("create schema shard_0002; create table shard_0002.id_counter ()")
    refused(run("shard", "create", *at), 1, "id_counter", 'node "a"')
    with connected(url) as connection:
        connection.execute("update shardids.shardids_version set version_num = 'node_9999'")
    refused(run("node", "add", "a", "--url", dsn(url), *at), 1, "node_9999")


# The doctor.


def test_the_doctor_says_what_is_wrong_and_exits_with_3(run: Run, cluster_url: URL) -> None:
    catalog = dsn(cluster_url)
    well = run("doctor", "--catalog", catalog)
    assert (well.code, well.err) == (0, "")
    assert re.fullmatch(
        r"Nothing wrong: \d+ checks of 2 nodes and 8 shards in \d\.\d s; the layout lasts until 2093-09-06\n",
        well.out,
    )
    with connected(cluster_url) as connection:
        connection.execute("select shardids.fence(1), shardids.fence(2)")
    ill = run("doctor", "--catalog", catalog, "--checks", "shard-stopped, years-left")
    assert (ill.code, ill.err) == (3, "")
    head, what, to_do, place, command, summary = ill.out.splitlines()
    assert head == 'error shard-stopped  node "a", shards 1-2'
    assert what.startswith("  shards 1-2: fenced on the owner, node")
    assert place == "  in a shell:"
    assert command == "    shardids shard activate 1-2"
    assert summary.startswith("1 wrong: 2 checks of 2 nodes")
    ran = run("doctor", "--catalog", catalog, "--checks", "shard-stopped", "--json")
    assert ran.code == 3
    report = ran.json
    assert isinstance(report, dict)
    (finding,) = report.pop("findings")
    assert {key: report[key] for key in ("well", "nodes", "shards", "checks")} == {
        "well": False,
        "nodes": ["a", "b"],
        "shards": 8,
        "checks": ["shard-stopped"],
    }
    assert finding == {
        "check": "shard-stopped",
        "severity": "error",
        "what": what.strip(),
        "to_do": to_do.removeprefix("  → "),
        "commands": [{"where": "shell", "text": command.strip(), "node": "", "step": ""}],
        "nodes": ["a"],
        "shards": [1, 2],
        "thing": "",
    }


def test_the_first_node_brings_the_query_node(
    run: Run, blank_database: Blank, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, other, own = (dsn(blank_database()) for _ in range(3))
    monkeypatch.setenv("SHARDIDS_CATALOG", catalog)
    assert run("init", "--shards", "2").code == 0
    tried = run("node", "add", "a", "--url", catalog, "--query-node", own, "--dry-run")
    assert (tried.code, tried.out) == (0, 'Would add node "a"\n')
    nowhere = own.rpartition("/")[0] + "/none"
    added = run("node", "add", "a", "--url", catalog, "--query-node", nowhere, "--store-password")
    assert added.code == 0
    assert added.err.startswith(
        "Warning: the query node does not show today's shards and tables, and may refuse"
    )
    # It is recorded, so that others tell what is missing.
    status = run("query-node", "status", "--json")
    (row,) = status.json
    assert (status.code, row["node"], row["tables"]) == (3, None, None)
    assert "none" in row["faults"][0]
    assert run("query-node", "create", "--url", own, "--store-password").code == 0
    refused(
        run("node", "add", "b", "--url", other, "--query-node", other),
        2,
        "--query-node goes with the first node",
        "shardids query-node create --url URL",
    )
    assert run("node", "add", "b", "--url", other).err == ""
    assert run("query-node", "create", "--on", "b").err == ""
    why = 'node "b" is the query node'
    refused(run("node", "remove", "b"), 1, why, "shardids query-node create --on NODE")
    assert run("query-node", "create", "--on", "a", "--store-password").err == ""
    assert run("node", "remove", "b").err == ""
    with connected(parse_url(catalog)) as there:
        left = there.execute("select srvname from pg_foreign_server order by 1").fetchall()
    assert left == [("shardids_a",)]


def test_the_query_node_by_commands(run: Run, cluster_url: URL) -> None:
    catalog = dsn(cluster_url)
    with catalog_at(catalog) as there:
        nodes = there.nodes()
    for name, shards in (("a", range(4)), ("b", range(4, 8))):
        with connected(parse_url(nodes[name].url)) as connection:
            for shard in shards:
                schema = f"shard_{shard:04}"
                connection.execute(
                    f"create table {schema}.logs (id bigint primary key default {schema}.next_id());"
                    f" create table {schema}.words (word text)".encode()
                )
    at = ("--catalog", catalog)
    words = ("create", *at, "--on", "a", "--store-password")
    before = everything(cluster_url)
    assert run("query-node", "status", *at).err.startswith("No query node. To make one: ")
    dry = run("query-node", *words, "--dry-run")
    assert dry.code == 0
    assert dry.err.startswith('Warning: table "words" is left out: it is unknown whether each shard has')
    assert 'create view "shardids_query"."logs"' in dry.out
    assert str(cluster_url.password) not in dry.out
    assert everything(cluster_url) == before
    made = run("query-node", *words, "--sharded", "words")
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith("Query node made: ")
    assert run("query-node", "refresh", *at).out == "The query node is up to date\n"
    shown = run("query-node", "status", *at, "--json")
    assert shown.json == [{"node": "a", "url": None, "tables": 2, "faults": []}]
    for wrong, code, why in (
        (("create",), 2, "a query node needs a node or another database"),
        (("create", "--on", "c"), 1, 'there is no node "c"'),
    ):
        refused(run("query-node", *wrong, *at), code, why, "")
    mistyped = run("query-node", "create", *at, "--on", "a", "--sharded", "zzz")
    refused(mistyped, 2, 'no shard has a table "zzz"', "logs")
    assert "shardids_version" not in mistyped.err
    assert run("query-node", "drop", *at).out.startswith("Query node dropped: ")
    refused(run("query-node", "refresh", *at), 1, "the cluster has no query node", "query-node create")


def test_a_node_that_is_down_is_one_finding(run: Run, cluster_url: URL) -> None:
    at = ("--catalog", dsn(cluster_url))
    assert run("query-node", "create", *at, "--on", "a", "--store-password").code == 0
    with catalog_at(dsn(cluster_url)) as there:
        b = str(parse_url(there.nodes()["b"].url).database)
    with connected(cluster_url) as connection:
        connection.execute(sql.SQL("alter database {} allow_connections false").format(sql.Identifier(b)))
        connection.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [b])
    report = run("doctor", *at, "--json")
    assert isinstance(report.json, dict)
    assert [one["check"] for one in report.json["findings"]] == ["node-unreachable"]
    status = run("query-node", "status", *at)
    assert status.code == 3
    (line,) = status.err.splitlines()
    assert line.startswith('node "b" can\'t be reached at ')
    assert "not currently accepting connections" in line
    assert "faults" not in status.out
    assert "--store-password" not in status.err
    tried = run("query-node", "refresh", *at)
    assert tried.code == 1
    assert "--store-password" not in tried.err
    asked = run("transactions", *at)
    assert asked.code == 1
    assert asked.err.startswith('Nothing is prepared on node "a".\nNot asked: node "b".\nError: ')


def test_the_doctor_needs_a_catalog_and_names_of_checks(run: Run, home: str) -> None:
    listed = run("doctor", "--list")
    assert listed.code == 0
    assert {"shard-stopped", "clocks-apart"} <= {line.split()[0] for line in listed.out.splitlines()}
    refused(run("doctor", "--catalog", home, "--checks", "nonesuch"), 2, "'nonesuch'", "shard-stopped")
    refused(run("doctor", "--catalog", "postgresql://127.0.0.1:1/none"), 1, "the catalog can't be reached")


# SQL.


def test_the_sql_files(run: Run) -> None:
    folder = data_folder("sql")
    files = sorted(folder.glob("*/*.sql"))
    listed = run("sql")
    assert (listed.code, listed.err) == (0, "")
    assert listed.out.splitlines() == [file.relative_to(folder).as_posix() for file in files]
    assert len(files) > 10
    for file in files:
        whole = file.relative_to(folder).as_posix()
        for name in (whole, whole.removesuffix(".sql")):
            shown = run("sql", name)
            assert (shown.code, shown.out, shown.err) == (0, file.read_text("utf-8"), "")
    for name in ("nonesuch", "../pyproject.toml", "", "engine/engine.v2"):
        refused(run("sql", name), 2, repr(name), "engine/engine.v1.sql")


# Help.


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name in getattr(command, "commands", {}):
        yield from commands(command.get_command(typer.Context(command), name), (*path, name))


ALL = dict(commands(typer.main.get_command(app)))


def test_the_commands_that_there_are() -> None:
    leaves = {" ".join(path) for path, command in ALL.items() if not hasattr(command, "commands")}
    assert leaves >= {
        *(
            "init",
            "grant",
            "doctor",
            "demo",
            "node add",
            "node list",
            "node remove",
            "shard create",
            "shard list",
        ),
        *("id decode", "id encode", "id range", "id next", "sql", "transactions"),
        *("dev up", "dev status", "dev down", "query-node create", "query-node status"),
        *("query-node refresh", "query-node drop"),
    }


READING = {
    *("compare", "console", "counter show", "demo", "doctor", "metrics", "migrate check"),
    *("id decode", "id encode", "id next", "id range", "id stats", "plan", "sql"),
    *("tenant show", "tenant top"),
}
LISTING = {"list", "status", "transactions"}
WRITING_FILES = {"migrate init", "migrate revision", "adopt plan", "routes"}


def test_what_changes_can_be_tried_and_what_lists_can_be_read_by_programs() -> None:
    for path, found in ALL.items():
        name, options = " ".join(path), {option for one in found.params for option in one.opts}
        if hasattr(found, "commands"):
            continue
        if path[-1] in LISTING:
            assert "--json" in options, name
        elif name not in READING | WRITING_FILES:
            assert "--dry-run" in options, name


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_has_help(run: Run, path: tuple[str, ...]) -> None:
    for flag in ("--help", "-h"):
        ran = run(*path, flag)
        assert (ran.code, ran.err) == (0, "")
        assert f"Usage: shardids{''.join(f' {word}' for word in path)}" in ran.out
    for parameter in ALL[path].params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert option in ran.out
        assert getattr(parameter, "help", None) or parameter.param_type_name == "argument"
    for name, child in getattr(ALL[path], "commands", {}).items():
        assert name in ran.out
        assert child.help


def test_what_is_no_command(run: Run) -> None:
    refused(run("nonesuch"), 2, "nonesuch")
    refused(run("node", "nonesuch"), 2, "nonesuch")
    refused(run("node", "list", "--nonesuch"), 2, "--nonesuch")
    ran = run()
    assert ran.code == 2
    assert "Usage: shardids" in ran.out + ran.err


def test_the_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"shardids {shardids.__version__}\n", "")


def test_a_folder_without_a_cluster_is_named_in_the_next_step(run: Run) -> None:
    ran = run("dev", "status", "--dir", "no folder")
    said = "No cluster in no folder. To make one: shardids dev up --dir 'no folder'\n"
    assert (ran.code, ran.err) == (3, said)


def test_numbers_that_no_command_takes(run: Run, home: str) -> None:
    refused(run("rebalance", "--margin", "-5", "--catalog", home), 2, "--margin")
    refused(run("shard", "list", "9999", "--catalog", home), 2, "Shards are numbered 0 to 7.")


def test_a_picture_is_whole_in_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "91202249713    2026-11-21 13:57:29.713 UTC" in run("id", "decode", str(ID)).out


# Processes of their own.


def test_in_a_pipe_a_row_is_a_line(home: str) -> None:
    shown = command("node", "list", SHARDIDS_CATALOG=home, COLUMNS="")
    assert len(shown.stdout.splitlines()) == 3


def test_a_full_disk_and_a_folder_that_is_a_file_are_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ran = command("dev", "up", "--dir", str(tmp_path / "file" / "cluster"))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Error: ")
    assert "Not a directory" in ran.stderr
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", COMMAND, "sql"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert ended.returncode == 1
    assert b"Traceback" not in ended.stderr


def test_the_shell_completes_commands() -> None:
    asked = environment(COMP_WORDS="shardids mig", COMP_CWORD="1", _SHARDIDS_COMPLETE="complete_bash")
    program = [sys.executable, "-c", f"import sys; sys.argv[0] = 'shardids'; {COMMAND}"]
    completed = subprocess.run(program, env=asked, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["migrate"]


def test_results_go_to_stdout_and_messages_to_stderr(home: str) -> None:
    drawn = command("id", "next", "--shard", "2", "-n", "2", SHARDIDS_CATALOG=home)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    first, second = map(int, drawn.stdout.split())
    assert DEFAULT.decode(first).shard == DEFAULT.decode(second).shard == 2
    # Bytes that are no text, and a message that has them.
    wrong = command("id", "decode", stdin="\udcff\n")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("Error: '\\udcff' is not the text form of an ID")
    assert "Traceback" not in wrong.stderr


# Numbers of shards.


@pytest.mark.parametrize(
    ("written", "shards"),
    [
        ("all", list(range(8))),
        ("0", [0]),
        ("7", [7]),
        ("0-3,7", [0, 1, 2, 3, 7]),
        ("5-5", [5]),
        ("3,1,2,1-3", [1, 2, 3]),
        ("0-7", list(range(8))),
        (" 1 , 2-3 ", [1, 2, 3]),
        ("007", [7]),
    ],
)
def test_numbers_and_ranges(written: str, shards: list[int]) -> None:
    assert parse_shards(written, 8) == shards


@pytest.mark.parametrize(
    "written",
    [
        "3-1",
        "x",
        "99",
        "8",
        "0-8",
        "",
        ",",
        "1,",
        "-",
        "-1",
        "1-",
        "1-2-3",
        "1..3",
        "٣",
        "1.0",
        "ALL",
        "9" * 5000,
    ],
)
def test_what_is_no_number_of_a_shard(written: str) -> None:
    with pytest.raises(BadArgument) as caught:
        parse_shards(written, 8)
    assert caught.value.hint


def test_the_ids_that_a_query_answers(run: Run, made: tuple[URL, URL]) -> None:
    def asked(query: str) -> Ran:
        return run("id", "stats", "--url", dsn(made[0]), "--query", query, "--json")

    ran = asked("select shardids.min_id(now()) + n * 1024 from generate_series(0, 99) n;")
    told: Any = ran.json
    assert (ran.code, told["ids"], told["shard_count"], told["duplicates"]) == (0, 100, 100, 0)
    refused(asked("values (1, 2)"), 2, "the query has 2 columns")
    refused(asked("select"), 2, "the query has 0 columns")
    refused(asked(" ; "), 2, "the query is empty")
    refused(asked("values (null), (1)"), 2, "row 1: NULL is no ID")
    refused(asked("select 1.5"), 2, "row 1: '1.5' is not")
    refused(asked("select x from nonesuch"), 1, "the database refuses the query: relation", "nonesuch")
    refused(asked("select shard_0000.next_id()"), 1, "read-only")
    refused(asked("select 1) to stdout; drop schema shardids cascade; copy (select 1"), 1)
    ran = asked("select 1::bigint where false")
    assert (ran.code, ran.json["ids"]) == (0, 0)
