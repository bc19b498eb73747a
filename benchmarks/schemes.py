"""The ways to make a key that are measured side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import psycopg

from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.pg.sqlfiles import read_sql
from shardids.testing.devcluster import create_cluster

SHARD = 5
NEXT_ID = "next_id()"
NEXT_IDS = "IDs from next_ids(n)"
PUBLISHED = "the published function"
TIDIED = "the same, clock read tidied"
NEXTVAL = "nextval()"
UUID4 = "gen_random_uuid()"
UUID7 = "uuidv7()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """An SQL expression that makes one key, and the type of the key."""

    name: str
    expression: str
    type: str = "bigint"

    def draw_many(self, count: int) -> bytes:
        """Return a query that draws ``count`` keys, each by its own expression, and gives their number."""
        # Built from this module's constants only.
        return f"select count({self.expression}) from generate_series(1, {count})".encode()


def schemes(server_version: int) -> list[Scheme]:
    """Return the schemes that a server of this version can run; ``psycopg``'s number, such as 180001."""
    all_ = [
        Scheme(name=NEXTVAL, expression="nextval('plain')"),
        Scheme(name=NEXT_ID, expression="shard_0005.next_id()"),
        Scheme(name=PUBLISHED, expression="published.next_id()"),
        Scheme(name=TIDIED, expression="published.next_id_tidied()"),
        Scheme(name=UUID4, expression="gen_random_uuid()", type="uuid"),
    ]
    if server_version >= 180000:
        all_.append(Scheme(name=UUID7, expression="uuidv7()", type="uuid"))
    return all_


@contextmanager
def server_with_all(shards: int = 8) -> Iterator[tuple[EmbeddedServer, psycopg.Connection]]:
    """Start a server with the shards and the other schemes' objects; yield it and a connection to it."""
    with temporary_server() as server:
        create_cluster([server], shards)
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(read_sql("compare/published.v1").encode())
            connection.execute("create sequence plain")
            yield server, connection


@contextmanager
def together(url: str, count: int) -> Iterator[Callable[[bytes], None]]:
    """Open so many sessions; yield what runs a query in all of them at once and waits for all."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(psycopg.connect(url, autocommit=True)) for _ in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))

        def run(query: bytes) -> None:
            for done in [pool.submit(session.execute, query) for session in sessions]:
                done.result()

        yield run


def version_of(connection: psycopg.Connection) -> str:
    """Return the server's version, in words."""
    return connection.info.parameter_status("server_version") or "?"
