"""``shardids compare`` on real servers: a short run of schemes that differ, and what stops it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardids.cli import app
from shardids.compare import run as running
from shardids.compare.measures.measuring import CLIENTS, QUICK, Measuring
from shardids.compare.results import CASES, Comparison, SchemeResult, to_json
from shardids.compare.schemes import SCHEMES, Servers
from shardids.compare.testbed import clients as client_module
from shardids.compare.testbed import stage
from shardids.compare.testbed.clients import Clients, client_processes
from shardids.errors import BadArgument, ShardidsError
from tests.support.standbys import public_folder
from tests.support.waiting import wait_for

COMPARED = (
    "shardids",
    "shardids-blocks",
    "sequence",
    "offsets",
    "offsets-mariadb",
    "tickets",
    "redis-blocks",
    "redis-wait",
    "published",
    "lamport",
    "hlc",
    "snowflake",
    "ulid",
)
PROGRAM = [sys.executable, "-c", "from shardids.cli import app; app()", "compare", "--quick"]

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "250")
    return lambda *words: CliRunner().invoke(app, ["compare", *words])


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    said: list[str] = []
    comparison = running.compare(COMPARED, quick=True, command="shardids compare --quick", say=said.append)
    assert {what.split(":")[0].split(",")[0] for what in said} >= {"draws", "storage", "order", "faults"}
    return comparison


@pytest.fixture(scope="module")
def results(comparison: Comparison) -> dict[str, SchemeResult]:
    return {result.about.name: result for result in comparison.schemes}


def test_every_measure_of_every_scheme(comparison: Comparison, results: dict[str, SchemeResult]) -> None:
    assert list(results) == [name for name in SCHEMES if name in COMPARED]
    assert comparison.left_out == {}
    for name, result in results.items():
        assert result.draws is not None
        assert 0 < result.draws.p50_us <= result.draws.p99_us, name
        assert result.inserts is not None
        assert set(result.inserts.per_s) == {1, CLIENTS}
        assert result.spread is not None
        assert set(result.spread.per_s) == {1, CLIENTS}
        if name == "offsets-mariadb":
            assert "in MariaDB" in result.left_out["storage"]
        else:
            assert result.storage is not None
            assert result.storage.growth[-1].rows == result.storage.rows
        assert result.order is not None
        assert [one.skew_ms for one in result.causality] == list(QUICK.skews_ms), name
        assert all(one.answers for one in result.causality), name
        assert set(result.duplicates) | set(result.left_out) >= set(CASES), name
        assert result.told is not None
    kinds = {kind.kind: kind for kind in comparison.conditions.servers}
    assert set(kinds) == {"PostgreSQL", "MariaDB", "Redis"}
    assert kinds["PostgreSQL"].settings["fsync"] == "on"
    assert kinds["MariaDB"].settings["auto-increment-increment"] == "2"
    assert kinds["Redis"].settings["appendonly"] == "yes"


@pytest.mark.parametrize("name", ["shardids", "shardids-blocks"])
def test_nothing_comes_twice_from_shardids(name: str, results: dict[str, SchemeResult]) -> None:
    found = results[name].duplicates
    assert {case: counted.twice for case, counted in found.items()} == dict.fromkeys(CASES, 0)
    assert all(counted.keys for counted in found.values())


def test_leads_are_lost_with_the_server(results: dict[str, SchemeResult]) -> None:
    """Keys that were set aside at once count as issued: the copy knows nothing of them."""
    aside = QUICK.losses * QUICK.lead_keys
    assert results["shardids-blocks"].duplicates["lost in bulk"].keys > aside
    assert results["redis-blocks"].duplicates["lost in bulk"].twice >= QUICK.drawn


def test_a_replica_has_what_wait_let_out(results: dict[str, SchemeResult]) -> None:
    assert results["redis-wait"].twice == 0
    lost = results["redis-wait"].duplicates["lost server"]
    assert lost.refused >= QUICK.losses
    assert "no replica of Redis has confirmed" in lost.refusal


def test_what_comes_twice_from_others(results: dict[str, SchemeResult]) -> None:
    assert results["published"].duplicates["clock back"].twice > 0
    for name in ("sequence", "tickets", "redis-blocks", "offsets", "offsets-mariadb"):
        # What was drawn after the copy was made is drawn again.
        assert results[name].duplicates["lost server"].twice > 0, name
        assert results[name].duplicates["lost in bulk"].twice > 0, name
        assert results[name].duplicates["crash"].twice == 0, name
        assert results[name].duplicates["restart"].twice == 0, name
    assert results["ulid"].twice == 0


def test_what_stops_when_a_server_is_down(results: dict[str, SchemeResult]) -> None:
    drawn = {name: result.outage and dict(result.outage.keys) for name, result in results.items()}
    all_ = results["sequence"].outage
    assert all_ is not None
    assert drawn["sequence"] == drawn["redis-wait"] == {0: 0, 1: 0}
    for name in ("shardids", "offsets", "offsets-mariadb", "published"):
        assert drawn[name] == {0: 0, 1: all_.tried}, name
    assert drawn["tickets"] == drawn["snowflake"] == {0: all_.tried, 1: all_.tried}
    assert drawn["ulid"] is None
    assert results["ulid"].left_out["outage"] == "no server is needed"
    assert "nothing to add" in results["sequence"].left_out["added server"]
    blocks = results["redis-blocks"].outage
    assert blocks is not None
    assert all(0 < count < blocks.tried for count in blocks.keys.values())


def test_order_and_size(results: dict[str, SchemeResult]) -> None:
    order = {name: result.order for name, result in results.items()}
    sequence, own, offsets = order["sequence"], order["shardids"], order["offsets"]
    assert sequence is not None
    assert own is not None
    assert offsets is not None
    assert sequence.out_of_order_percent == 0
    # Two shards that follow the clock in steps of 16 ms, in a run of some 100 ms.
    assert own.out_of_order_percent < 5 < offsets.out_of_order_percent
    assert {point.node for point in own.points} == {0, 1}
    sizes = {name: result.storage.index_bytes_per_row for name, result in results.items() if result.storage}
    assert sizes["shardids"] == pytest.approx(sizes["sequence"], rel=0.1)
    assert sizes["shardids"] < 0.8 * sizes["ulid"]


def test_answers_sort_after_what_they_answer_if_the_generator_is_told(
    results: dict[str, SchemeResult],
) -> None:
    under_skew = {name: result.causality[-1] for name, result in results.items()}
    for name in ("shardids", "hlc", "snowflake", "ulid", "published"):
        # Each answer of the node whose clock is behind.
        assert under_skew[name].first >= under_skew[name].answers // 2 - 1 > 0, name
    assert under_skew["sequence"].first == 0
    heard = {name for name, found in under_skew.items() if found.told is not None}
    assert heard == {"shardids", "lamport", "hlc"}
    for name in heard:
        assert all(found.told and found.told_first == 0 for found in results[name].causality), name


def test_what_an_id_tells(comparison: Comparison, results: dict[str, SchemeResult]) -> None:
    told = results["shardids"].told
    assert told is not None
    assert told.time is not None
    assert abs((told.time - comparison.conditions.made_at).total_seconds()) < 60
    assert told.origin == 0
    assert results["sequence"].told is not None
    assert results["sequence"].told.time is None


def test_json_and_reports_of_a_run(comparison: Comparison, run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    saved.write_text(to_json(comparison))
    page, tables = tmp_path / "report.html", tmp_path / "report.md"
    told = run("--load", str(saved), "--html", str(page), "--markdown", str(tables))
    assert told.exit_code == 0, told.output
    assert "shardids" in told.stdout
    assert "redis-blocks" in tables.read_text()
    assert "Key schemes, side by side" in page.read_text()
    again = run("--load", str(saved), "--json")
    assert json.loads(again.stdout) == json.loads(saved.read_text())


def test_a_scheme_that_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **rest: None if "maria" in name else which(name, **rest)
    )
    named = run("--quick", "--schemes", "tickets")
    assert named.exit_code == 1
    assert "mariadb-install-db is not installed" in named.stderr
    assert "apt-get install" in named.stderr
    monkeypatch.setattr(running, "SCHEMES", {name: SCHEMES[name] for name in ("tickets", "ulid")})
    found = running.compare(quick=True, say=lambda _what: None)
    assert [result.about.name for result in found.schemes] == ["ulid"]
    assert "mariadb-install-db is not installed" in found.left_out["tickets"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--schemes", "shardids,uuid9"), 2, "scheme 'uuid9' does not exist"),
        (("--schemes", ""), 2, "scheme '' does not exist"),
        (("--html", "/no/such/folder/report.html"), 2, "can't be written"),
        (("--load", "/no/such/file.json"), 2, "can't be read"),
    ],
)
def test_bad_arguments(run: Run, words: tuple[str, ...], code: int, message: str) -> None:
    told = run(*words) if "--load" in words else run("--quick", *words)
    assert told.exit_code == code
    assert message in told.stderr


def test_too_little_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage._replace(free=5_000_000))
    told = run("--quick")
    assert told.exit_code == 1
    assert "has 5 MB free" in told.stderr
    assert "TMPDIR" in told.stderr


def test_libraries_are_asked_for_before_anything_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    told = run("--quick", "--html", str(tmp_path / "report.html"))
    assert told.exit_code == 1
    assert "altair is not installed" in told.stderr
    assert not list(tmp_path.iterdir())


def test_without_libfaketime_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_PLACES", ())
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _name: "nowhere")
    found = running.compare(["uuid1"], quick=True, say=lambda _what: None)
    (result,) = found.schemes
    assert "apt-get install libfaketime" in result.left_out["clock back"]
    assert "every 7 minutes" in result.left_out["order"]
    assert set(result.duplicates) == set(CASES) - {"clock back"}


@contextlib.contextmanager
def _failing(how: str) -> Iterator[Callable[[], int]]:
    if how == "when getting ready":
        raise BadArgument(how)

    def go() -> int:
        if how == "ends":
            os._exit(7)
        if how == "hangs":
            threading.Event().wait()
        if how == "at work":
            raise BadArgument(how)
        return 1

    yield go


def test_a_client_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with client_processes(1) as clients:
        assert clients.run(_failing, [("",)]) == [1]
        monkeypatch.setattr(client_module, "_PATIENCE_S", 1.0)
        with pytest.raises(ShardidsError, match="does not answer for 1 s"):
            clients.run(_failing, [("hangs",)])
        with pytest.raises(ShardidsError, match="ended with exit code -9"):
            clients.run(_failing, [("",)])


def test_clients_that_fail() -> None:
    with client_processes(3) as clients:
        for how in ("when getting ready", "at work"):
            with pytest.raises(BadArgument, match=how):
                clients.run(_failing, [("",), (how,), ("",)])
            assert clients.run(_failing, [("",)] * 3) == [1, 1, 1]
        with pytest.raises(ShardidsError, match="ended with exit code 7"):
            clients.run(_failing, [("",), ("ends",), ("",)])


def test_a_measure_that_fails_is_left_out() -> None:
    said: list[str] = []
    run = Measuring(
        schemes={name: SCHEMES[name] for name in ("ulid", "uuid4")},
        servers=Servers(),
        clients=Clients([]),
        sizes=QUICK,
        say=said.append,
    )

    def measure(name: str) -> int:
        if name == "ulid":
            raise OSError(28, "No space left on device")
        return 7

    assert run.rounds("storage", 3, measure) == {"uuid4": [7, 7, 7]}
    assert run.left_out == {"ulid": {"storage": "[Errno 28] No space left on device"}}
    assert sum("round 3 of 3" in what for what in said) == 1


@pytest.fixture
def home() -> Iterator[Path]:
    with public_folder() as folder:
        folder.chmod(0o777)
        yield folder


@pytest.mark.parametrize(
    ("signum", "servers"),
    [(signal.SIGINT, 1), (signal.SIGINT, 22), (signal.SIGKILL, 12), (signal.SIGKILL, 22)],
)
def test_nothing_is_left_of_a_run_that_was_ended(home: Path, signum: signal.Signals, servers: int) -> None:
    environment = {**os.environ, "TMPDIR": str(home)}
    # Its own group: Ctrl-C reaches the clients, too.
    process = subprocess.Popen(
        [*PROGRAM, "--schemes", "shardids,redis"],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    with process:
        wait_for(
            lambda: len(processes(str(home))) >= servers, "servers run" if servers < 20 else "clients draw"
        )
        (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
        _, told = process.communicate(timeout=60)
    assert process.returncode == (130 if signum == signal.SIGINT else -signum)
    # A client that is just starting when its parent is killed reads the end of a pipe in multiprocessing.
    assert b"Traceback" not in told or (signum == signal.SIGKILL and b"forkserver.py" in told)
    wait_for(lambda: not processes(str(home)), "servers are gone")
    wait_for(lambda: not list(home.iterdir()), "their folders are gone")
    wait_for(lambda: not group(process.pid), "clients are gone")


def processes(mark: str) -> list[str]:
    """Commands of processes that run in a folder, or name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace")
            folder = str((path / "cwd").readlink())
        except OSError:
            continue
        if mark in command or folder.startswith(mark):
            found.append(command)
    return found


def group(pgid: int) -> list[str]:
    """What is left of a group of processes."""
    listed = subprocess.run(
        ["ps", "-o", "args=", "-g", str(pgid)], capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if "defunct" not in line]
