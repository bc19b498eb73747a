"""Starts the servers that a comparison runs on, in temporary folders, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import psycopg

from shardids.compare.results import ServerKind
from shardids.compare.schemes import Scheme, Servers
from shardids.compare.testbed.mariadb_servers import MariaDbServer, temporary_mariadbs
from shardids.compare.testbed.redis_servers import (
    RedisPair,
    RedisServer,
    temporary_redis,
    temporary_redis_pair,
)
from shardids.dev.embedded import EmbeddedServer, temporary_servers
from shardids.dev.embedded.binaries import server_account
from shardids.dev.embedded.home import new_temporary_path
from shardids.errors import MissingLibrary, ServerStartFailed
from shardids.multimaster import mariadb_session

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
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def servers(self) -> Servers:
        """Returns where the servers listen."""
        return Servers(
            postgresql=tuple(server.url() for server in self.postgresql),
            mariadb=tuple(server.login for server in self.mariadb),
            redis=tuple(server.login for server in self.redis),
            redis_pair=tuple(login for pair in self.redis_pairs for login in pair.logins),
        )

    def kinds(self) -> list[ServerKind]:
        """Returns what a report says of the servers."""
        kinds = []
        if self.postgresql:
            with psycopg.connect(self.postgresql[0].url()) as connection:
                version = connection.info.parameter_status("server_version") or "?"
            kinds.append(_kind("PostgreSQL", version, len(self.postgresql), POSTGRESQL_SETTINGS))
        if self.mariadb:
            connection = mariadb_session.connect(self.mariadb[0].login)
            ((version,),) = mariadb_session.rows(connection, "select version()")
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
        return kinds


@contextlib.contextmanager
def stage_for(
    schemes: Sequence[Scheme], *, envs: Sequence[Mapping[str, str]] = (_NOTHING, _NOTHING)
) -> Iterator[Stage]:
    """Starts two PostgreSQL servers, each with one of ``envs``, and the others that the schemes need.

    MariaDB gets the first; Redis none, as its allocator is incompatible with libfaketime.

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
        yield stage


def check_disk(needed_mb: int) -> Path:
    """Returns the folder for the servers' folders; refuses one whose disk may lack room for them.

    Raises:
        ServerStartFailed: too little is free, or there is no folder that the servers' user can reach.
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
