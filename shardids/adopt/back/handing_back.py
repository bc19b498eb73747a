"""``shardids adopt back``: writes to all shards stop, the source confirms them all, and takes writes again.

As in a move, every table of the shards has a barrier that writers pass under a shared lock of their shard.
The session that holds the locks of all shards knows that no write is under way; when the source has confirmed
each node's log up to there, the shards are fenced. Until then a rollback leaves them as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.back.way_back import ANOTHER_SOURCE, NodeBack, back_name, states
from shardids.adopt.run.comparing import all_rows, node_reader
from shardids.adopt.run.following import Hop, Link, Nearing, is_noted_source, source_timeline
from shardids.adopt.run.sides import Sides, Taker
from shardids.errors import AdoptionFailed, StatementFailed
from shardids.pg.definitions import Definition
from shardids.pg.locks import AdvisoryLock
from shardids.replication.barrier import OnWait, PutOff, limit_pause, stop_in_a_quiet_moment, with_locks
from shardids.replication.sides import Side
from shardids.replication.subscriptions import LOCK_FAILURES

_FAILURES_TOLERATED: Final = 2
_GIVEN_BACK: Final = (
    "table %s was given back to the database that the cluster had adopted",
    "It takes writes there. To empty the shards: shardids adopt abort",
)
HOW_TO_MEND: Final = (
    'Its log names the row and the constraint: see "When a change can\'t go back" in docs/how-to/adopt.md.'
    " Or stay with the shards: shardids adopt finish"
)


def _opened_drain(sides: Sides, kept: ExitStack) -> Hop:
    """Open connections to wait until the source has the nodes' writes on disk."""
    links = [
        Link(publisher=taker.side, slot=back_name(taker), follower=sides.source) for taker in sides.takers
    ]
    names = {link.publisher: link.slot for link in links}

    def require(node: Side, _connection: Connection) -> None:
        raise AdoptionFailed(
            f'node "{node.name}" has no replication slot "{names[node]}" any more, or has given it up: the'
            " source lacks changes, and the way back is gone",
            hint="shardids adopt finish",
        )

    return Hop(links, kept, require)


def _require_source(drain: Hop, sides: Sides) -> None:
    """Require the source to be the server that has confirmed changes.

    Raises:
        AdoptionFailed: it was replaced by a standby, or restored.
    """
    timeline = source_timeline(drain.connections[sides.source])
    for taker in sides.takers:
        if not is_noted_source(drain.connections[taker.side], back_name(taker), timeline):
            raise AdoptionFailed(f"{ANOTHER_SOURCE}: the way back is gone", hint="shardids adopt finish")


def approach(sides: Sides, on_lag: Callable[[int], None], *, within_s: float) -> None:
    """Wait until the source is close enough to the nodes for a short pause.

    Raises:
        AdoptionFailed: it fails to take changes in, does not get closer for long, or is another server.
    """
    nearing, before = Nearing(on_lag), states(sides)
    with ExitStack() as kept:
        drain = _opened_drain(sides, kept)
        _require_source(drain, sides)
        while not drain.confirmed(drain.positions(), deadline=time.monotonic() + within_s, on_lag=nearing):
            _refuse_stopped(before, states(sides))
            nearing.require(
                "changes at the source",
                "the shards",
                "shardids adopt status; then shardids adopt back again.",
            )


def _refuse_stopped(before: Mapping[str, NodeBack], now: Mapping[str, NodeBack]) -> None:
    for node, state in now.items():
        if state.failures - before[node].failures > _FAILURES_TOLERATED:
            raise AdoptionFailed(
                f'the source can\'t take in a change that comes from node "{node}"', hint=HOW_TO_MEND
            )


def make_barriers(taker: Taker, on_wait: OnWait) -> None:
    """Create the write barrier on the tables of a node's shards, open. Idempotent."""
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
    """Stop writes to reference tables on all nodes, and require the same rows in all of them. Idempotent.

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
    approach: Callable[[], None],
) -> float:
    """Fence all shards once the source has all that was written to them; returns since when no writes pass.

    Retries until writers finish soon enough: each attempt to lock holds others up for 0.1 s at most.
    Idempotent: shards that a process which died has fenced stay fenced.

    Raises:
        AdoptionFailed: writes could not be stopped in time.
    """
    close_references(sides, there)

    def again() -> None:
        for taker in sides.takers:
            make_barriers(taker, on_wait)
        approach()

    return stop_in_a_quiet_moment(
        lambda: _try_close(sides, max_pause_s),
        on_wait=on_wait,
        too_late=lambda reason: AdoptionFailed(
            f"the shards could not be stopped {reason}",
            hint="shardids adopt back again, perhaps with a longer --max-pause.",
        ),
        between=again,
    )


def _try_close(sides: Sides, max_pause_s: float) -> float:
    with ExitStack() as kept:
        drain = _opened_drain(sides, kept)
        watching = {t.name: kept.enter_context(t.side.autocommit()) for t in sides.takers}
        nodes = [(taker, kept.enter_context(taker.side.begin())) for taker in sides.takers]
        for _, node in nodes:
            limit_pause(node, max_pause_s)
        since = time.monotonic()
        for taker, node in nodes:
            _lock(taker, node, watching[taker.name])
        for taker, node in nodes:
            _require_stopped(taker, node)
        remaining_s = max(max_pause_s / 2 - (time.monotonic() - since), 0.05)
        deadline = time.monotonic() + remaining_s
        if not drain.confirmed(drain.positions(), deadline=deadline):
            raise PutOff("the source did not catch up in time")
        _require_source(drain, sides)
        # A second look: a transaction that wrote past the barrier since the first one has left traces.
        for taker, node in nodes:
            _require_stopped(taker, node)
        for taker, node in nodes:
            node.execute(_FENCE, {"shards": list(taker.shards)})
    return since


def _lock(taker: Taker, node: Connection, watching: Connection) -> None:
    """Make writers wait until the transaction ends; those that had passed the barrier have ended."""
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
    """Make sure that the barriers stop all writers.

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
