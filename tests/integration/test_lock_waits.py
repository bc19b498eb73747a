"""Whoever holds an advisory lock of shardids keeps nobody waiting for ever, and is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids.errors import StatementFailed
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.locks import AdvisoryLock
from tests.conftest import dsn, found_cluster
from tests.support.clusters import catalog_at, connected

SHARD = 2
TRIES = {
    "grant on a shard": (AdvisoryLock.INSTALL, f"select shardids.grant_usage(array[{SHARD}], 'pg_monitor')"),
    "revoke on a shard": (
        AdvisoryLock.INSTALL,
        f"select shardids.revoke_usage(array[{SHARD}], 'pg_monitor')",
    ),
    "grant in the catalog": (
        AdvisoryLock.CATALOG_GRANTS,
        "select shardids_catalog.grant_usage('pg_monitor')",
    ),
    "write": (AdvisoryLock.WRITE_BARRIER, f"insert into shard_{SHARD:04}.users values (1)"),
}


@pytest.fixture
def home(blank_database: Callable[[], URL]) -> URL:
    """A node with the catalog, and a shard whose table has a write barrier."""
    url = blank_database()
    found_cluster(url, {"a": url}, 4)
    with connected(url) as connection:
        connection.execute(f"create table shard_{SHARD:04}.users (id bigint primary key)")
        connection.execute(f"select shard_{SHARD:04}.next_id(), shardids.add_barriers({SHARD})")
    return url


@contextmanager
def held(url: URL, lock: AdvisoryLock) -> Iterator[str]:
    """Somebody holds a lock; how they are named."""
    part = f", {SHARD}" if lock == AdvisoryLock.WRITE_BARRIER else ""
    with connected(url) as holder:
        holder.execute(f"select pg_advisory_lock({int(lock)}{part})".encode())
        row = holder.execute(
            "select format('process %s of role \"%s\"', pg_backend_pid(), current_user)"
        ).fetchone()
        assert row is not None
        yield str(row[0])


@pytest.mark.parametrize("name", TRIES)
def test_who_holds_a_lock_is_named(home: URL, name: str) -> None:
    lock, statement = TRIES[name]
    with connected(home) as connection:
        connection.execute("set lock_timeout = '200ms'")
        with held(home, lock) as holder:
            with pytest.raises(
                psycopg.errors.LockNotAvailable, match=f"{int(lock)}.* is held by {holder}"
            ) as waited:
                connection.execute(statement.encode())
            assert waited.value.diag.message_hint == (
                "Try again. A session that holds it for long can be ended with pg_terminate_backend(pid)."
            )
        connection.execute(statement.encode())
        assert connection.execute("show lock_timeout").fetchone() == ("200ms",)


def test_an_installation_names_who_holds_its_lock(home: URL) -> None:
    with held(home, AdvisoryLock.INSTALL) as holder:
        short = home.update_query_dict({"options": "-c lock_timeout=200ms"})
        with catalog_at(short) as catalog, pytest.raises(StatementFailed, match=f"is held by {holder}"):
            provision.init(catalog, DEFAULT, 4)
        with catalog_at(short) as catalog, pytest.raises(StatementFailed, match=f"is held by {holder}"):
            provision.add_node(catalog, "z", dsn(short))
    with catalog_at(home) as catalog:
        provision.init(catalog, DEFAULT, 4)
        provision.add_node(catalog, "a", dsn(home))
