"""``shardids adopt back``: writes to all shards stop, the source confirms them all, and takes writes again.

As in a move, every table of the shards has a barrier that writers pass under a shared lock of their shard.
Whoever holds the locks of all shards knows that no write is under way; when the source has confirmed each
node's log up to there, the shards are fenced. Until then a rollback leaves them as they were.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.comparing import all_rows, node_reader
from shardids.adopt.definitions import Definition
from shardids.adopt.sides import Sides, Taker
from shardids.adopt.timelines import is_noted_source, source_timeline
from shardids.adopt.way_back import ANOTHER_SOURCE, NodeBack, back_name, states
from shardids.catalog.locks import AdvisoryLock
from shardids.errors import AdoptionFailed, StatementFailed
from shardids.mover.barrier import LOCK_MS, PAUSE_BETWEEN_S, OnWait, PutOff, with_locks
from shardids.mover.cutover import flush
from shardids.mover.replication import LOCK_FAILURES, PATIENCE_S

_POLL_S: Final = 0.003
_FAILURES_TOLERATED: Final = 2
_GIVEN_BACK: Final = (
    "table %s was given back to the database that the cluster had adopted",
    "It takes writes there. To empty the shards: shardids adopt abort",
)
HOW_TO_MEND: Final = (
    'Its log names the row and the constraint: see "When a change can\'t go back" in docs/how-to/adopt.md.'
    " Or stay with the shards: shardids adopt finish"
)


class BackDrain:
    """Waits until the source has on disk what the nodes have written. Connections are opened beforehand."""

    def __init__(self, sides: Sides, kept: ExitStack) -> None:
        self._nodes = [(taker, kept.enter_context(taker.side.autocommit())) for taker in sides.takers]
        self._source = kept.enter_context(sides.source.autocommit())

    def positions(self) -> dict[str, str]:
        """Returns positions in the nodes' logs past everything written so far, by the slots' names."""
        return {back_name(taker): flush(node) for taker, node in self._nodes}

    def confirmed(self, wanted: Mapping[str, str], *, seconds: float, on_lag: Callable[[int], None]) -> bool:
        """Waits until the source has confirmed the positions; false if time runs out.

        Raises:
            AdoptionFailed: a slot is gone.
        """
        deadline = time.monotonic() + seconds
        while True:
            # The source confirms only what it has flushed.
            flush(self._source)
            lag_bytes = max(self._lag(taker, node, wanted[back_name(taker)]) for taker, node in self._nodes)
            if lag_bytes == 0:
                return True
            on_lag(lag_bytes)
            if time.monotonic() > deadline:
                return False
            # New log wakes the senders, which ask the source for its position.
            for _, node in self._nodes:
                flush(node)
            time.sleep(_POLL_S)

    def require_source(self) -> None:
        """Requires the source to be the server that has confirmed changes.

        Raises:
            AdoptionFailed: it was replaced by a standby, or restored.
        """
        timeline = source_timeline(self._source)
        for taker, node in self._nodes:
            if not is_noted_source(node, back_name(taker), timeline):
                raise AdoptionFailed(f"{ANOTHER_SOURCE}: there is no way back", hint="shardids adopt finish")

    @staticmethod
    def _lag(taker: Taker, node: Connection, wanted: str) -> int:
        row = node.execute(_LAG, {"name": back_name(taker), "wanted": wanted}).one_or_none()
        if row is None or row.is_lost:
            raise lost(taker)
        return int(row.lag_bytes)


def lost(taker: Taker) -> AdoptionFailed:
    """Returns the error for a node that no longer keeps its log for the source."""
    return AdoptionFailed(
        f'node "{taker.side.name}" has no replication slot "{back_name(taker)}" any more, or has given it up:'
        " the source lacks changes, and there is no way back",
        hint="shardids adopt finish",
    )


_LAG = text("""
    select greatest(cast(:wanted as pg_lsn) - confirmed_flush_lsn, 0)::bigint as lag_bytes,
           coalesce(wal_status = 'lost', false) as is_lost
    from pg_replication_slots where slot_name = :name""")


def approach(sides: Sides, on_lag: Callable[[int], None], *, within_s: float) -> None:
    """Waits until the source is close enough to the nodes for a short pause.

    Raises:
        AdoptionFailed: it fails to take changes in, does not get closer for long, or is another server.
    """
    least, changed = sys.maxsize, time.monotonic()

    def watch(lag_bytes: int) -> None:
        nonlocal least, changed
        on_lag(lag_bytes)
        if lag_bytes < least:
            least, changed = lag_bytes, time.monotonic()

    before = states(sides)
    with ExitStack() as kept:
        drain = BackDrain(sides, kept)
        drain.require_source()
        while not drain.confirmed(drain.positions(), seconds=within_s, on_lag=watch):
            _refuse_stopped(before, states(sides))
            if time.monotonic() - changed > PATIENCE_S:
                raise AdoptionFailed(
                    f"the source stays {least} bytes behind the shards; its log may say why",
                    hint="shardids adopt status; then shardids adopt back again.",
                )


def _refuse_stopped(before: Mapping[str, NodeBack], now: Mapping[str, NodeBack]) -> None:
    for node, state in now.items():
        if state.failures - before[node].failures > _FAILURES_TOLERATED:
            raise AdoptionFailed(
                f'the source can\'t take in a change that comes from node "{node}"', hint=HOW_TO_MEND
            )


def make_barriers(taker: Taker, on_wait: OnWait) -> None:
    """Creates the write barrier on the tables of a node's shards, open. Idempotent."""
    with taker.side.autocommit() as connection:
        for shard in taker.shards:
            names = {"shard": shard}
            connection.execute(text("select shardids.release(:shard)"), names)
            missing = text("select oid::bigint from shardids.without_barrier(:shard, true) oid")
            for table in connection.scalars(missing, names).all():
                with_locks(
                    taker.side,
                    "select shardids.add_barrier(:shard, cast(:table as oid), true)",
                    names | {"table": table},
                    on_wait=lambda attempt, shard=shard: on_wait(attempt, _who(connection, [shard])),  # type: ignore[misc]  # mypy can't type a default of a lambda
                )


def close_references(sides: Sides, there: Mapping[str, Definition]) -> None:
    """Stops writes to reference tables on all nodes, and requires the same rows in all of them. Idempotent.

    Raises:
        AdoptionFailed: the nodes have different rows: only those of the first would be at the source.
    """
    message, hint = _GIVEN_BACK
    for taker in sides.takers:
        for table in sides.reference:
            with_locks(
                taker.side,
                "select shardids.close_back(cast(:name as regclass), :message, :hint)",
                {"name": table.name, "message": message, "hint": hint},
            )
    for table in sides.reference:
        digests = {taker.side.name: _digest(taker, there[table.name]) for taker in sides.takers}
        first = sides.takers[0].side.name
        other = [node for node, digest in digests.items() if digest != digests[first]]
        if other:
            raise AdoptionFailed(
                f'table {table.name} has other rows on node "{other[0]}" than on "{first}",'
                " which sends them to the source",
                hint="Make the tables the same on all nodes; then shardids adopt back.",
            )


def open_references(sides: Sides) -> None:
    """Lets reference tables take writes again. Idempotent."""
    for taker in sides.takers:
        for table in sides.reference:
            with_locks(
                taker.side, "select shardids.open_table(cast(:name as regclass))", {"name": table.name}
            )


def _digest(taker: Taker, definition: Definition) -> tuple[int, int]:
    quoted = taker.side.engine.dialect.identifier_preparer.quote_identifier
    columns = ", ".join(quoted(column.name) for column in definition.stored)
    query = (
        f"select count(*) as n, coalesce(sum(hashtextextended(row({columns})::text, 0)::numeric), 0)::text"  # noqa: S608 -- quoted
        f" as digest from only {definition.name}"
    )
    with node_reader(taker) as reader:
        (found,) = all_rows(reader, query)
    return found["n"], int(found["digest"])


def close_shards(
    sides: Sides,
    there: Mapping[str, Definition],
    *,
    max_pause_s: float,
    on_wait: OnWait,
    on_lag: Callable[[int], None],
) -> float:
    """Fences all shards once the source has all that was written to them; returns since when no writes pass.

    Retries until writers finish soon enough: each attempt to lock holds others up for 0.1 s at most.
    Idempotent: shards that a process which died has fenced stay fenced.

    Raises:
        AdoptionFailed: writes could not be stopped in time.
    """
    close_references(sides, there)
    deadline, attempt = time.monotonic() + PATIENCE_S, 0
    while True:
        attempt += 1
        try:
            return _try_close(sides, max_pause_s)
        except PutOff as reason:
            on_wait(attempt, str(reason))
            if time.monotonic() > deadline:
                raise AdoptionFailed(
                    f"the shards could not be stopped in {attempt} attempts: {reason}",
                    hint="shardids adopt back again, perhaps with a longer --max-pause.",
                ) from reason
        time.sleep(PAUSE_BETWEEN_S)
        for taker in sides.takers:
            make_barriers(taker, on_wait)
        approach(sides, on_lag, within_s=max(max_pause_s / 10, 0.05))


def _try_close(sides: Sides, max_pause_s: float) -> float:
    with ExitStack() as kept:
        drain = BackDrain(sides, kept)
        watching = {t.name: kept.enter_context(t.side.autocommit()) for t in sides.takers}
        nodes = [(taker, kept.enter_context(taker.side.begin())) for taker in sides.takers]
        for _, node in nodes:
            node.execute(
                # If this process hangs, the server ends the transaction, and the writers wait no longer.
                text("""
                    select set_config('idle_in_transaction_session_timeout', :pause_ms, true),
                           set_config('lock_timeout', :lock_ms, true)"""),
                {"pause_ms": str(round(max_pause_s * 1000)), "lock_ms": str(LOCK_MS)},
            )
        since = time.monotonic()
        for taker, node in nodes:
            _lock(taker, node, watching[taker.name])
        for taker, node in nodes:
            _require_stopped(taker, node)
        remaining_s = max(max_pause_s / 2 - (time.monotonic() - since), 0.05)
        if not drain.confirmed(drain.positions(), seconds=remaining_s, on_lag=lambda _bytes: None):
            raise PutOff("the source did not catch up in time")
        drain.require_source()
        # A second look: a transaction that wrote past the barrier since the first one has left traces.
        for taker, node in nodes:
            _require_stopped(taker, node)
        for taker, node in nodes:
            node.execute(_FENCE, {"shards": list(taker.shards)})
    return since


def _lock(taker: Taker, node: Connection, watching: Connection) -> None:
    """Makes writers wait until the transaction ends; those that had passed the barrier have ended."""
    try:
        node.execute(
            text("""
                select pg_advisory_xact_lock(:class, shard)
                from unnest(cast(:shards as integer[])) shard"""),
            {"class": AdvisoryLock.WRITE_BARRIER, "shards": list(taker.shards)},
        )
    except StatementFailed as error:
        if error.sqlstate in LOCK_FAILURES:
            raise PutOff(_who(watching, taker.shards)) from error
        raise


def _require_stopped(taker: Taker, node: Connection) -> None:
    """Makes sure that the barriers stop all writers.

    Raises:
        PutOff: a session can get past them.
    """
    found = node.execute(_WAYS_PAST, {"shards": list(taker.shards)}).one()
    if found.open_table is not None:
        raise PutOff(f"table {found.open_table} has no write barrier, or a disabled one")
    if found.holder is not None:
        raise PutOff(f"{found.holder} changes a shard without passing its write barrier")


def _who(watching: Connection, shards: Sequence[int]) -> str:
    found = watching.execute(_OLDEST, {"shards": list(shards)}).first()
    if found is None:
        return "somebody else was writing"
    return f"{found.holder} has been in a writing transaction for {found.seconds} s"


_FENCE = text("select shardids.fence(shard) from unnest(cast(:shards as integer[])) shard order by shard")
_WAYS_PAST = text("""
    select (select min(name::text) from unnest(cast(:shards as integer[])) shard,
                   shardids.without_barrier(shard, true) name) as open_table,
           (select h.holder from unnest(cast(:shards as integer[])) shard,
                   shardids.barrier_holders(shard, false) h limit 1) as holder""")
_OLDEST = text("""
    select h.holder, h.seconds from unnest(cast(:shards as integer[])) shard,
           shardids.barrier_holders(shard, true) h
    order by h.seconds desc nulls last limit 1""")
