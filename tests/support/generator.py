"""What the tests of the generator share: draws in bulk, refusals, threads, pauses."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psycopg
import pytest
from alembic import command
from sqlalchemy.engine import URL

from shardids import Layout
from shardids.migrate.install import trees
from tests.support.waiting import PATIENCE_S, wait_for

DEFAULT = Layout.preset("default")
CLUSTER = "00000000-0000-4000-8000-000000000001"
GATE = 4711
"""The advisory lock at which a paused function waits."""

Ids = npt.NDArray[np.int64]
Result = TypeVar("Result")


def connect(dsn: str) -> psycopg.Connection[Any]:
    """An autocommit connection."""
    return psycopg.connect(dsn, autocommit=True)


def row(connection: psycopg.Connection[Any], query: str, *parameters: object) -> tuple[Any, ...]:
    found = connection.execute(query, parameters or None).fetchone()
    assert found is not None
    return found


def scalar(connection: psycopg.Connection[Any], query: str, *parameters: object) -> Any:
    return row(connection, query, *parameters)[0]


def draw(
    connection: psycopg.Connection[Any], count: int = 1, expression: str = "shard_0005.next_id()"
) -> Ids:
    """What ``expression`` gives, ``count`` times in one statement, in the order of the evaluations."""
    query = f"""select string_agg(int8send(id), '')
                from (select {expression} as id from generate_series(1, {count:d})) drawn"""
    return _integers(connection, query)


def draw_block(connection: psycopg.Connection[Any], count: int, shard: int = 5) -> Ids:
    """The IDs of one call of the shard's ``next_ids``, in the order they come in."""
    query = f"select string_agg(int8send(id), '') from shard_{shard:04}.next_ids({count:d}) as ids (id)"
    return _integers(connection, query)


def reserve(connection: psycopg.Connection[Any], count: int | None, shard: int | None = 5) -> tuple[int, int]:
    """First and last tick of a reservation."""
    first, last = row(connection, "select first_tick, last_tick from shardids.reserve(%s, %s)", shard, count)
    return first, last


def run_ahead(connection: psycopg.Connection[Any], ms: int, shard: int = 5) -> int:
    """Takes ticks until the shard is at least so far ahead of the clock; the last of them."""
    while True:
        _, last = reserve(connection, 1_000_000, shard)
        clock_ms = scalar(connection, "select shardids.ms_of(clock_timestamp())")
        if (last >> DEFAULT.sequence_bits) - clock_ms >= ms:
            return last


def _integers(connection: psycopg.Connection[Any], query: str) -> Ids:
    cursor = connection.execute(query, binary=True)
    found = cursor.fetchone()
    assert found is not None
    return np.frombuffer(found[0] or b"", ">i8").astype(np.int64)


def ticks(ids: Ids | int, layout: Layout = DEFAULT) -> Any:
    """The ticks of IDs that don't use the sign bit."""
    ms = ids >> (layout.shard_bits + layout.sequence_bits)
    return (ms << layout.sequence_bits) | (ids & (layout.sequence_limit - 1))


def increases(ids: Ids) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def distinct(parts: Sequence[Ids]) -> bool:
    together = np.concatenate(list(parts))
    return len(np.unique(together)) == len(together)


@contextmanager
def refused(sqlstate: str, *words: str) -> Iterator[None]:
    """The block fails with this SQLSTATE and a message that has these words."""
    with pytest.raises(psycopg.Error) as caught:
        yield
    assert caught.value.sqlstate == sqlstate, caught.value
    message = caught.value.diag.message_primary or ""
    for word in words:
        assert word in message


def at_once(count: int, work: Callable[[int], Result]) -> list[Result]:
    """The results of ``work(0)`` … ``work(count - 1)``, each in a thread of its own."""
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(work, number) for number in range(count)]]


def advisory_locks(connection: psycopg.Connection[Any]) -> int:
    """How many advisory locks there are in this database."""
    return scalar(
        connection,
        """select count(*) from pg_locks where locktype = 'advisory'
           and database = (select oid from pg_database where datname = current_database())""",
    )


@contextmanager
def paused(
    owner: psycopg.Connection[Any],
    function: str,
    after: str,
    session: psycopg.Connection[Any],
    work: Callable[[psycopg.Connection[Any]], Result],
) -> Iterator[Callable[[], Result]]:
    """Runs ``work`` with a session until that waits behind what matches ``after`` in a function's source.

    That is a statement, or what comes before a condition. Other sessions do not wait there. The block runs
    meanwhile; what it is given lets ``work`` go on, and returns its result.
    """
    source = scalar(owner, "select pg_get_functiondef(%s::regproc)", function)
    condition = f"""
      case when current_setting('test.waits_at_gate', true) is not distinct from 'yes'
           then pg_catalog.pg_advisory_xact_lock_shared({GATE})::text is not null else true end and """
    statement = f"""
      if current_setting('test.waits_at_gate', true) = 'yes' then
        perform pg_catalog.pg_advisory_xact_lock_shared({GATE});
      end if;"""
    changed, places = re.subn(
        after, lambda found: found[0] + (condition if found[0].endswith("when") else statement), source
    )
    assert places, f"{function} has no statement like {after}"
    owner.execute(changed)
    owner.execute("select pg_advisory_lock(%s)", [GATE])
    session.execute("set test.waits_at_gate = 'yes'")
    open_gate = threading.Event()

    def open_the_gate() -> None:
        if not open_gate.is_set():
            open_gate.set()
            owner.execute("select pg_advisory_unlock(%s)", [GATE])
            owner.execute(source)

    def go_on() -> Result:
        open_the_gate()
        return working.result(PATIENCE_S)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, session)
        try:
            wait_for(lambda: working.done() or waiting_at_gate(owner), "the session waits at the gate")
            assert not working.done(), working.result()
            yield go_on
        finally:
            open_the_gate()


def waiting_at_gate(connection: psycopg.Connection[Any]) -> bool:
    return scalar(
        connection,
        """select exists (select from pg_locks where locktype = 'advisory' and not granted
           and classid = 0 and objid = %s)""",
        GATE,
    )


def install(url: URL, layout: Layout = DEFAULT, shards: Sequence[int] = (5,)) -> None:
    """Makes a database node a, with active shards."""
    with connect(url.set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.execute(node_sql(layout))
        for shard in shards:
            with connection.transaction():
                connection.execute("select shardids.enter_shard(%s)", [shard])
                connection.execute("select set_config('search_path', shardids.schema_of(%s), true)", [shard])
                connection.execute(trees.shard_sql())


@cache
def node_sql(layout: Layout) -> str:
    """The engine's migration as a script: much quicker to run again than the migration itself."""
    script = io.StringIO()
    config = trees.tree_config("node", output=script)
    settings = trees.layout_settings(layout, "shard_") | {"cluster": CLUSTER, "node": "a"}
    config.attributes.update(settings=settings)
    command.upgrade(config, "head", sql=True)
    return script.getvalue()
