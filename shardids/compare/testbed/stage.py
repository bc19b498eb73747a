"""The servers that a comparison runs on, their conditions, and a clock that can be stepped."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import psycopg

import shardids
from shardids.compare.multimaster import mariadb
from shardids.compare.results import ServerKind
from shardids.compare.schemes import Scheme, Servers
from shardids.compare.schemes.shards import Shardids
from shardids.compare.testbed.servers import (
    IdServiceServer,
    MariaDbServer,
    RedisPair,
    RedisServer,
    temporary_id_service,
    temporary_mariadbs,
    temporary_redis,
    temporary_redis_pair,
)
from shardids.errors import MissingLibrary, ServerStartFailed
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.embedded.binaries import server_account
from shardids.pg.embedded.data import make_folder, new_temporary_path
from shardids.pg.embedded.watchdog import Watchdog

_LIBRARIES: Final = ("psycopg", "PyMySQL", "redis", "uuid-utils", "python-ulid", "fastapi", "uvicorn")
_FLUSHES: Final = 30


def machine(folder: Path) -> str:
    """Return processor, memory, system, load, and how long the folder's disk takes to flush a page."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    facts = (
        f"{os.cpu_count()} cores{_model()}, {memory_gb:.0f} GB of memory",
        f"{platform.system()} {platform.machine()}",
        f"a flush of 8 kB to the servers' disk takes {flush_us(folder):,.0f} µs",
        f"load at the start {os.getloadavg()[0]:.1f}",
    )
    return "; ".join(facts)


def flush_us(folder: Path) -> float:
    """Return the median time of a write and fsync of 8 kB, in µs; a few µs mean a disk in memory."""
    times_ns = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_FLUSHES):
            before = time.perf_counter_ns()
            os.write(file.fileno(), bytes(8192))
            os.fsync(file.fileno())
            times_ns.append(time.perf_counter_ns() - before)
    return statistics.median(times_ns) / 1000


def versions() -> dict[str, str]:
    """Return the versions of shardids, Python, and the installed drivers and libraries."""
    found = {"shardids": shardids.__version__, "Python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f" ({value.strip()})"
    return ""


_PLACES = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/local/lib/faketime", "/opt/*/lib/faketime")


class FakedClock:
    """The machine's clock plus all steps so far, for the processes that are started with :attr:`env`.

    The monotonic clock does not step.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        self._library, self._file = library, folder / "clock"
        self._ahead_s = 0.0
        self.step(0)

    @property
    def env(self) -> Mapping[str, str]:
        """Returns the environment that lets a process follow this clock."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: float) -> None:
        """Step the clock of all its processes at once."""
        self._ahead_s += seconds
        # Replaced as a whole: a process may read it at any time.
        new = self._file.with_suffix(".new")
        new.write_text(f"{self._ahead_s:+.3f}s\n")
        new.chmod(0o644)
        new.replace(self._file)


def faketime_library() -> Path:
    """Return the path of libfaketime; Debian's package is ``libfaketime``.

    Raises:
        MissingLibrary: libfaketime is not installed.
    """
    # If it is installed for several architectures, this one's.
    own = sysconfig.get_config_var("MULTIARCH") or "*"
    for place in (f"/usr/lib/{own}/faketime", *_PLACES):
        for path in sorted(Path("/").glob(f"{place[1:]}/libfaketimeMT*")):
            return path
    raise MissingLibrary("libfaketime is not installed", hint="On Debian: apt-get install libfaketime")


@contextlib.contextmanager
def faked_clock() -> Iterator[FakedClock]:
    """Make a clock in a temporary folder, which is removed when the block or this process ends.

    Raises:
        MissingLibrary: libfaketime is not installed.
    """
    library = faketime_library()
    account = server_account()
    folder = new_temporary_path(account)
    watchdog = Watchdog(remove=folder)
    try:
        make_folder(folder, account)
        yield FakedClock(library, folder)
    finally:
        watchdog.close()
        shutil.rmtree(folder, ignore_errors=True)


POSTGRESQL_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "wal_level": "replica",
        "shared_buffers": "128MB",
        "max_connections": "200",
    }
)
"""The settings: durable, as PostgreSQL's defaults are; more connections, for there are many schemes."""

_BARE_MB: Final = 500

_MARIADB_SETTINGS: Final[Mapping[str, str]] = MappingProxyType({"innodb-flush-log-at-trx-commit": "1"})
_NOTHING: Mapping[str, str] = MappingProxyType({})

Server = TypeVar("Server")


@dataclass(slots=True, kw_only=True)
class Stage:
    """The running servers; ``missing`` says, by the kind, why there are none of a kind."""

    postgresql: list[EmbeddedServer] = field(default_factory=list)
    mariadb: list[MariaDbServer] = field(default_factory=list)
    redis: list[RedisServer] = field(default_factory=list)
    redis_pairs: list[RedisPair] = field(default_factory=list)
    id_service: list[IdServiceServer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def servers(self) -> Servers:
        """Returns where the servers listen."""
        return Servers(
            postgresql=tuple(server.url() for server in self.postgresql),
            mariadb=tuple(server.login for server in self.mariadb),
            redis=tuple(server.login for server in self.redis),
            redis_pair=tuple(login for pair in self.redis_pairs for login in pair.logins),
            id_service=tuple(server.login for server in self.id_service),
        )

    def kinds(self) -> list[ServerKind]:
        """Return the report's description of the servers."""
        kinds = []
        if self.postgresql:
            with psycopg.connect(self.postgresql[0].url()) as connection:
                version = connection.info.parameter_status("server_version") or "?"
            kinds.append(_kind("PostgreSQL", version, len(self.postgresql), POSTGRESQL_SETTINGS))
        if self.mariadb:
            connection = mariadb.connect(self.mariadb[0].login)
            ((version,),) = mariadb.rows(connection, "select version()")
            connection.close()
            kinds.append(_kind("MariaDB", version, len(self.mariadb), self.mariadb[0].settings))
        redis = [
            *self.redis,
            *(server for pair in self.redis_pairs for server in (pair.primary, pair.replica)),
        ]
        if redis:
            with redis[0].client() as client:
                version = client.info("server")["redis_version"]
            kinds.append(_kind("Redis", version, len(redis), redis[0].settings))
        if self.id_service:
            version = importlib.metadata.version("fastapi")
            kinds.append(_kind("FastAPI", version, len(self.id_service), {"processes": "1"}))
        return kinds


@contextlib.contextmanager
def stage_for(
    schemes: Sequence[Scheme], *, envs: Sequence[Mapping[str, str]] = (_NOTHING, _NOTHING)
) -> Iterator[Stage]:
    """Start two PostgreSQL servers, each with one of ``envs``, and the others that the schemes need.

    MariaDB gets the first; Redis none, as its allocator is incompatible with libfaketime; nor the ID service,
    whose IDs have the time of PostgreSQL. The shards that it draws from are made first.

    Raises:
        ServerStartFailed: PostgreSQL can't be started. Failures of other kinds are in ``missing``.
    """
    needs = [scheme.about.needs for scheme in schemes]
    mariadb = max((need.mariadb for need in needs), key=len, default=())
    redis = max((need.redis for need in needs), key=len, default=())
    pair = next((need.redis_pair for need in needs if need.redis_pair), None)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        stage = Stage()

        def enter(manager: AbstractContextManager[list[Server]]) -> Future[list[Server]]:
            # Started concurrently; whatever happens then, every started server is ended.
            started = pool.submit(manager.__enter__)
            stack.push(lambda *error: manager.__exit__(*error) if started.exception() is None else None)
            return started

        postgresql = [enter(temporary_servers(1, settings=POSTGRESQL_SETTINGS, env=env)) for env in envs]
        settings = [{**_MARIADB_SETTINGS, **each} for each in mariadb]
        mariadbs = enter(temporary_mariadbs(settings, env=envs[0])) if mariadb else None
        redises = enter(_one(temporary_redis(redis[0]))) if redis else None
        pairs = enter(_one(temporary_redis_pair(pair))) if pair else None
        stage.postgresql = [server for started in postgresql for server in started.result()]
        stage.mariadb = _started("MariaDB", mariadbs, stage.missing)
        stage.redis = _started("Redis", redises, stage.missing)
        stage.redis_pairs = _started("Redis", pairs, stage.missing)
        if any(need.id_service for need in needs):
            Shardids().install(stage.servers)
            service = enter(_one(temporary_id_service(stage.postgresql[0].url())))
            stage.id_service = _started("The ID service", service, stage.missing)
        yield stage


def check_disk(needed_mb: int) -> Path:
    """Return the folder for the servers' folders; refuse one whose disk may lack room for them.

    Raises:
        ServerStartFailed: too little is free, or the servers' user can reach no folder.
    """
    folder = new_temporary_path(server_account()).parent
    needed_mb += _BARE_MB
    free_mb = shutil.disk_usage(folder).free // 1_000_000
    if free_mb < needed_mb:
        raise ServerStartFailed(
            f"{folder} has {free_mb:,} MB free; the servers may take {needed_mb:,} MB",
            hint="Free some, set TMPDIR to a folder with more room, or compare less: --quick, --schemes.",
        )
    return folder


@contextlib.contextmanager
def _one(manager: AbstractContextManager[Server]) -> Iterator[list[Server]]:
    with manager as server:
        yield [server]


def _started(kind: str, servers: Future[list[Server]] | None, missing: dict[str, str]) -> list[Server]:
    try:
        return servers.result() if servers else []
    except (ServerStartFailed, MissingLibrary) as error:
        missing[kind] = error.in_a_line()
        return []


def _kind(kind: str, version: str, count: int, settings: Mapping[str, str]) -> ServerKind:
    return ServerKind(kind=kind, version=version, count=count, settings=dict(settings))
