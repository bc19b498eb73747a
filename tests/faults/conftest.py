"""Servers, clocks and recorders of the fault tests; at the end, how many IDs they saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from psycopg import sql

from shardids.catalog.rows import Catalog
from shardids.migrate.install import provision
from shardids.pg.embedded import EmbeddedServer, temporary_server
from tests.support.faults import LAYOUT, connect
from tests.support.recorder import Recorder
from tests.support.server_clock import Clock
from tests.support.standbys import public_folder

DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
COLUMNS = {"next_id()": ("one", "many", "default"), "next_ids(n)": ("block",), "reserve(n)": ("reserve",)}

_received = pytest.StashKey[dict[str, Counter[str]]]()
_reported = pytest.StashKey[list[str]]()
_numbers = count()

Report = Callable[[str], None]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_received] = {}
    config.stash[_reported] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash[_reported]:
        terminalreporter.section("Shards moved under faults, every write there once")
        for line in lines:
            terminalreporter.write_line(line)
    received = config.stash[_received]
    if not received:
        return
    terminalreporter.section("IDs received under faults, each one once")
    terminalreporter.write_line("".join(f"{heading:>14}" for heading in (*COLUMNS, "in all")))
    for name, counts in [*received.items(), ("in all", sum(received.values(), Counter()))]:
        figures = [sum(counts[kind] for kind in kinds) for kinds in COLUMNS.values()]
        line = "".join(f"{figure:>14,}" for figure in (*figures, sum(figures)))
        terminalreporter.write_line(f"{line}  {name}")


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
    """The clock of ``faked_server``."""
    yield _clock
    _clock.set(0)


@pytest.fixture(scope="session")
def _faked_server(_clock: Clock) -> Iterator[EmbeddedServer]:
    with temporary_server(env=_clock.env) as server:
        yield server


@pytest.fixture
def faked_server(clock: Clock, _faked_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server whose clock is ``clock``; after the test it runs again, and is empty."""
    yield _faked_server
    _faked_server.start(attached=True)
    drop_databases(_faked_server)


@pytest.fixture
def faked_node(faked_server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a database with shard 0 on ``faked_server``."""
    return make_node(faked_server, request.node.name)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """A server that nothing befalls."""
    with temporary_server() as server:
        yield server


@pytest.fixture
def node(server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a database with shard 0 on ``server``."""
    return make_node(server, request.node.name)


@pytest.fixture(scope="session")
def _durable_server() -> Iterator[EmbeddedServer]:
    with temporary_server(settings=DURABLE) as server:
        yield server


@pytest.fixture
def durable_server(_durable_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server that loses nothing it acknowledged; after the test it runs again, and is empty."""
    yield _durable_server
    _durable_server.start(attached=True)
    drop_databases(_durable_server)


@pytest.fixture
def durable_node(durable_server: EmbeddedServer, request: pytest.FixtureRequest) -> str:
    """The URL of a database with shard 0 on ``durable_server``."""
    return make_node(durable_server, request.node.name)


def make_database(server: EmbeddedServer, purpose: str, template: str = "template0") -> str:
    """An empty database, or a copy of one; its URL."""
    name = f"{next(_numbers)} {purpose}"[:60]
    with connect(server.url()) as admin:
        admin.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )
    return server.url(name)


def make_node(server: EmbeddedServer, purpose: str, shard: int = 0) -> str:
    """A database with the generator and one shard; its URL."""
    url = make_database(server, purpose)
    catalog = Catalog(url)
    try:
        provision.init(catalog, LAYOUT, shard + 1)
        provision.add_node(catalog, "a", url)
        provision.create_shards(catalog, [shard])
    finally:
        catalog.close()
    return url


def drop_databases(server: EmbeddedServer) -> None:
    """Makes copies of the server's files, and its recovery, quick again."""
    with connect(server.url()) as admin:
        names = admin.execute(
            "select datname from pg_database where not datistemplate and datname <> 'postgres'"
        )
        for (name,) in names.fetchall():
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


Finish = Callable[[Recorder], None]
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
    """Checks a recorder and enters its counts in the summary."""

    def check(recorder: Recorder) -> None:
        request.config.stash[_received][request.node.name] = recorder.check()

    return check
