"""Servers, clocks and recorders of the fault tests; at the end, how many IDs they saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from shardids import provision
from shardids.catalog import Catalog
from shardids.devcluster import found
from shardids.embedded import EmbeddedServer, temporary_server
from tests.faults.support import LAYOUT, Clock, Recorder, connect
from tests.integration.standbys import public_folder

DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}

_received = pytest.StashKey[dict[str, int]]()
_reported = pytest.StashKey[list[str]]()

Report = Callable[[str], None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_received] = {}
    config.stash[_reported] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[_received]
    if counts:
        terminalreporter.section("IDs received under faults, each one once")
        for name, count in counts.items():
            terminalreporter.write_line(f"{count:>13,}  {name}")
        terminalreporter.write_line(f"{sum(counts.values()):>13,}  in all")
    if lines := config.stash[_reported]:
        terminalreporter.section("Shards moved under faults, every write there once")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Keeps a line for the end of the run."""
    return request.config.stash[_reported].append


@pytest.fixture(scope="session")
def _clock() -> Iterator[Clock]:
    with public_folder() as folder:
        yield Clock(folder)


@pytest.fixture
def clock(_clock: Clock) -> Iterator[Clock]:
    """The clock of the servers whose name has ``faked`` in it."""
    yield _clock
    _clock.set(0)


@pytest.fixture(scope="session")
def _server() -> Iterator[EmbeddedServer]:
    with temporary_server() as server:
        yield server


@pytest.fixture(scope="session")
def _faked_server(_clock: Clock) -> Iterator[EmbeddedServer]:
    with temporary_server(env=_clock.env) as server:
        yield server


@pytest.fixture
def node(_server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a database with shard 0."""
    return make_node(_server, request.node.name)


@pytest.fixture
def faked_node(clock: Clock, _faked_server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The same on a server whose clock is ``clock``."""
    return make_node(_faked_server, request.node.name)


@pytest.fixture
def duplicate(_server: EmbeddedServer) -> Callable[[str], str]:
    """Copies a database of ``node``'s server that nobody is connected to; the URL of the copy."""

    def copy(url: str) -> str:
        name = str(conninfo_to_dict(url)["dbname"])
        with connect(_server.url()) as admin:
            admin.execute(
                sql.SQL("create database {} template {}").format(
                    sql.Identifier(f"copy of {name}"[:60]), sql.Identifier(name)
                )
            )
        return _server.url(f"copy of {name}"[:60])

    return copy


@pytest.fixture(scope="session")
def _durable_server() -> Iterator[EmbeddedServer]:
    with temporary_server(settings=DURABLE) as server:
        yield server


@pytest.fixture
def durable_server(_durable_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server that loses nothing it acknowledged; it runs again after the test."""
    yield _durable_server
    _durable_server.start(attached=True)


@pytest.fixture
def durable_node(durable_server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a database with shard 0 on ``durable_server``."""
    return make_node(durable_server, request.node.name)


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server of the test's own, with shard 0."""
    with temporary_server() as server:
        found([server], 1)
        yield server


@pytest.fixture
def own_faked_server(clock: Clock) -> Iterator[EmbeddedServer]:
    """The same with the clock ``clock``."""
    with temporary_server(env=clock.env) as server:
        found([server], 1)
        yield server


@pytest.fixture
def subscriber() -> Iterator[EmbeddedServer]:
    """An empty server."""
    with temporary_server() as server:
        yield server


def make_node(server: EmbeddedServer, name: str) -> str:
    """A database with the generator and shard 0; its URL."""
    name = name[:60]
    with connect(server.url()) as admin:
        admin.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
    catalog = Catalog(server.url(name))
    try:
        catalog.init(LAYOUT, 1)
        provision.add_node(catalog, "a", server.url(name))
        provision.create_shards(catalog, range(1))
    finally:
        catalog.close()
    return server.url(name)


Finish = Callable[[Recorder], int]
Record = Callable[..., Recorder]


@pytest.fixture
def record() -> Iterator[Record]:
    """Makes recorders; their sessions end with the test."""
    made: list[Recorder] = []

    def make(url: str, *, expected: tuple[str, ...] = ()) -> Recorder:
        made.append(Recorder(url, expected=expected))
        return made[-1]

    yield make
    for recorder in made:
        recorder.stop()


@pytest.fixture
def finish(request: pytest.FixtureRequest) -> Finish:
    """Checks a recorder and enters its count in the summary."""

    def check(recorder: Recorder) -> int:
        count = recorder.check()
        counts = request.config.stash[_received]
        counts[request.node.name] = counts.get(request.node.name, 0) + count
        return count

    return check
