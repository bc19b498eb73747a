"""Brings a shard back to the present that a wrong clock took into the future.

The ticks that it issued by that clock are a range that it passes over when their time comes. The range is in
the catalog and on every node before the shard can issue an ID below it. Each step can be repeated: a command
that was interrupted leaves the shard fenced, and the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.shards import read_shard, require_no_issuer
from shardids.catalog.skipped import Skipped, bring, read_skipped, record_skipped, skipped_ranges
from shardids.errors import ClusterConflict, ShardidsError, StatementFailed, UnknownShard
from shardids.ids.layout import Layout
from shardids.mover.clocks.confirming import Comparison, compare_clocks
from shardids.mover.clocks.stored import StoredId, stored_outside
from shardids.mover.journal import alone
from shardids.pg.locks import holders_of_tables, named, open_transactions
from shardids.pg.queries import read

_CONNECT_TIMEOUT_S: Final = 5
_PATIENCE_S: Final = 60.0
"""How long to wait for transactions that may hold the old next_id() in a plan."""
_PAUSE_S: Final = 0.2
_LOCK_NOT_AVAILABLE: Final = "55P03"


class Work(StrEnum):
    """The kinds of work on a shard."""

    RESET = "reset"
    """The shard leads by more than ``max_ahead``."""
    ACTIVATE = "activate"
    """Its clock was reset, and it is still fenced: the command was interrupted."""
    RELEASE = "release"
    """The range has been passed: its next_id() needs no bound any more."""
    NOTHING = "nothing"
    """Its clock was reset; the range is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The work of a reset on a shard.

    Attributes:
        lead: how far its IDs lead the clock of its node.
        starts: the time at which it begins again: ``max_ahead`` past the present, as it may have led by that
            much before.
        first, last: the times of the range that it passes over.
        outage: from when to when it will refuse to draw, if the range is longer than ``max_ahead``.
        skipped: the range, as ticks.
    """

    lead: timedelta
    starts: datetime
    first: datetime
    last: datetime
    outage: tuple[datetime, datetime] | None
    skipped: Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """The outcome of a reset for a shard, or of its dry run.

    Attributes:
        plan: of a reset.
        unreachable: nodes that have not got the range, by name, with the reason.
    """

    shard: int
    node: str
    work: Work
    clocks: Comparison
    plan: Plan | None
    unreachable: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """A row of ``clocks/state.v1.sql``."""

    state: str
    lead_ms: int
    max_ahead_ms: int
    has_ticks_to_pass: bool
    is_bounded: bool

    def work(self, *, is_fenced: bool) -> Work:
        if self.lead_ms > self.max_ahead_ms:
            return Work.RESET
        if self.has_ticks_to_pass:
            return Work.ACTIVATE if is_fenced else Work.NOTHING
        # plan_reset() refuses what needs nothing.
        return Work.RELEASE if self.is_bounded else Work.RESET


def reset_clock(
    catalog: Catalog, shard: int, *, since: datetime | None = None, dry_run: bool = False
) -> Reset:
    """Bring a shard back to the present, continues that, or make draws quick again after the range.

    Args:
        catalog: of the cluster.
        shard: its number.
        since: the earliest time that the wrong clock can have shown, if the node has not recorded it.
        dry_run: return the plan, after all checks, and change nothing.

    Raises:
        BadArgument: the shard does not lead by more than ``max_ahead``, or ``since`` is not between the
            present and its last ID.
        ClusterConflict: the clocks do not agree; a stored ID is outside of the range; a move or adoption is
            not over; a function issues the shard's IDs; or a transaction does not end. Once the shard is
            fenced, repeating the call continues.
        UnknownShard, ConnectionFailed: as they say.
    """
    with alone(catalog, shard, "reset of the clock", dry_run=dry_run) as (node, connection):
        clocks = compare_clocks(catalog, node)
        clocks.require_agreement()
        work = _state(connection, node, shard).work(is_fenced=_is_fenced(connection, shard))
        if work is not Work.NOTHING:
            with connection.begin():
                require_no_issuer(connection, shard, node)
        plan = None
        unreachable: dict[str, str] = {}
        layout = catalog.describe().layout
        with Nodes(catalog.nodes(), catalog.url, connect_timeout_s=_CONNECT_TIMEOUT_S, durable=True) as nodes:
            if work is Work.RESET:
                plan = _plan(connection, layout, shard, since)
                unreachable = _require_covered(nodes, layout, plan)
            if not dry_run:
                match work:
                    case Work.RESET if plan is not None:
                        with _resumable(shard, node):
                            unreachable = _reset(catalog, nodes, connection, plan, node)
                    case Work.ACTIVATE:
                        _record(catalog, connection, shard)
                        unreachable = _spread(catalog, nodes, shard, leave_out=node)
                        with _resumable(shard, node):
                            _activate(catalog, connection, node, shard)
                    case Work.RELEASE:
                        with _resumable(shard, node):
                            _fence(connection, shard)
                            _activate(catalog, connection, node, shard)
                    case _:
                        _record(catalog, connection, shard)
                        unreachable = _spread(catalog, nodes, shard)
    return Reset(shard=shard, node=node, work=work, clocks=clocks, plan=plan, unreachable=unreachable)


def _state(connection: Connection, node: str, shard: int) -> _State:
    found = read(connection, "clocks/state.v1", _State, of_shard=shard)
    if not found:
        raise UnknownShard(
            f'the catalog places shard {shard} on node "{node}", which does not have it',
            hint="Restore its schema there from a backup, or see what else can be done: shardids doctor",
        )
    if found[0].state == "moved":
        raise ClusterConflict(
            f'shard {shard} is marked as moved on node "{node}", where the catalog places it',
            hint="For the remedy: shardids doctor",
        )
    return found[0]


def _is_fenced(connection: Connection, shard: int) -> bool:
    there = read_shard(connection, shard)
    return there is not None and there.state == "fenced"


def _plan(connection: Connection, layout: Layout, shard: int, since: datetime | None) -> Plan:
    with connection.begin():
        row = connection.execute(_PLAN, {"shard": shard, "since": since}).one()
    # A second before the range, a draw goes past it.
    refuses_from = row.first_at - timedelta(seconds=1)
    draws_from = row.last_at - row.max_ahead
    return Plan(
        lead=timedelta(milliseconds=row.lead_ms),
        starts=row.starts_at,
        first=row.first_at,
        last=row.last_at,
        outage=(refuses_from, draws_from) if draws_from > refuses_from else None,
        skipped=Skipped(
            shard=shard, first_tick=row.first_ms << layout.sequence_bits, last_tick=row.last_tick
        ),
    )


def _require_covered(nodes: Nodes, layout: Layout, plan: Plan) -> dict[str, str]:
    """Require that no stored ID would come twice; returns nodes that could not be asked."""
    starts_ms = round(plan.starts.timestamp() * 1000) - layout.epoch_ms
    starts_tick = (starts_ms - 1) << layout.sequence_bits

    def look(name: str, engine: Engine) -> StoredId | None:
        with engine.connect() as connection:
            return stored_outside(connection, name, layout, plan.skipped, starts_tick)

    asked = nodes.each(look)
    for stored in asked.results.values():
        if stored is not None:
            at = layout.decode(stored.id).time
            raise ClusterConflict(
                f'{stored.table} on node "{stored.node}" has ID {stored.id} of shard {plan.skipped.shard}, of'
                f" {at:%Y-%m-%d %H:%M:%S} UTC: it would come twice, as the range is from"
                f" {plan.first:%Y-%m-%d %H:%M:%S} to {plan.last:%Y-%m-%d %H:%M:%S} UTC",
                hint="If the wrong clock had shown that time already: --from TIME, no later than that. If the"
                " shard did not issue that ID: delete the row, or give it another key. Nothing was changed.",
            )
    return {name: error.message for name, error in asked.failures.items()}


def _reset(catalog: Catalog, nodes: Nodes, connection: Connection, plan: Plan, node: str) -> dict[str, str]:
    shard, layout = plan.skipped.shard, catalog.describe().layout
    _fence(connection, shard)
    # The fence ends the range: nobody draws any more.
    fenced = _plan(connection, layout, shard, plan.first)
    with catalog.engine.begin() as there:
        record_skipped(there, fenced.skipped)
    unreachable = _spread(catalog, nodes, shard, leave_out=node)
    try:
        with connection.begin():
            done = connection.execute(_RESET, {"shard": shard, "since": plan.first}).one()
            if done.first_tick < fenced.skipped.first_tick or done.last_tick > fenced.skipped.last_tick:
                raise ClusterConflict(f"shard {shard} was changed by another session", hint="")
    except StatementFailed as error:
        if error.sqlstate == _LOCK_NOT_AVAILABLE:
            raise ClusterConflict(
                f"transactions that drew from shard {shard} have not ended: {_holders(connection, shard)}",
                hint="End them, or wait.",
            ) from error
        raise
    _activate(catalog, connection, node, shard)
    return unreachable


def _record(catalog: Catalog, connection: Connection, shard: int) -> None:
    """Write the node's ranges to the catalog: shardids.reset_clock() can be called by hand."""
    with connection.begin():
        ranges = read_skipped(connection, "shardids", [shard])
    with catalog.engine.begin() as there:
        for skipped in ranges:
            record_skipped(there, skipped)


def _spread(catalog: Catalog, nodes: Nodes, shard: int, *, leave_out: str | None = None) -> dict[str, str]:
    """Bring the shard's ranges to all nodes; return those that did not answer."""
    ranges = skipped_ranges(catalog, [shard])

    def write(_name: str, engine: Engine) -> None:
        with engine.begin() as connection:
            bring(connection, ranges)

    failures = nodes.each(write, [name for name in nodes if name != leave_out]).failures
    return {name: error.message for name, error in failures.items()}


def _fence(connection: Connection, shard: int) -> None:
    with connection.begin():
        connection.execute(text("select shardids.fence(:shard)"), {"shard": shard})


def _activate(catalog: Catalog, connection: Connection, node: str, shard: int) -> None:
    """Activate the shard when nobody can draw by a plan of its old next_id() any more."""
    with connection.begin():
        bring(connection, skipped_ranges(catalog, [shard]))
    _await_transactions(connection, shard)
    with connection.begin():
        require_no_issuer(connection, shard, node)
        connection.execute(text("select shardids.activate(:shard)"), {"shard": shard})


def _await_transactions(connection: Connection, shard: int) -> None:
    """Wait until all transactions have ended that are open in the database now."""
    deadline = time.monotonic() + _PATIENCE_S
    waited_for = _transactions(connection)
    while waited_for:
        still = _transactions(connection)
        waited_for = {key: who for key, who in waited_for.items() if key in still}
        if waited_for and time.monotonic() > deadline:
            raise ClusterConflict(
                f"transactions that may hold the old next_id() of shard {shard} have not ended within"
                f" {_PATIENCE_S:.0f} s: {', '.join(sorted(waited_for.values())[:5])}",
                hint="End them with pg_terminate_backend(pid), or wait.",
            )
        if waited_for:
            time.sleep(_PAUSE_S)


def _transactions(connection: Connection) -> dict[str, str]:
    with connection.begin():
        return {one.id: str(one) for one in open_transactions(connection)}


def _holders(connection: Connection, shard: int) -> str:
    with connection.begin():
        offset = connection.scalar(_OFFSET, {"shard": shard})
        return named(holders_of_tables(connection, [offset] if offset else []), "short ones")


@contextmanager
def _resumable(shard: int, node: str) -> Iterator[None]:
    """Add to an error that the shard may be fenced by now, and how to continue."""
    try:
        yield
    except ShardidsError as error:
        raise ClusterConflict(
            f'shard {shard} on node "{node}" is not reset yet, and may be fenced: {error.message}',
            hint=f"{error.hint} Then run it again: it continues.".strip(),
        ) from error


_PLAN: Final = text("""
    select p.lead_ms, p.first_ms, n.max_ahead,
           greatest(s.high_water_tick, ((p.last_ms + 1) << shardids.sequence_bits()) - 1) as last_tick,
           to_timestamp((p.starts_ms + shardids.epoch_ms()) / 1000.0) as starts_at,
           to_timestamp((p.first_ms + shardids.epoch_ms()) / 1000.0) as first_at,
           to_timestamp((p.last_ms + shardids.epoch_ms()) / 1000.0) as last_at
    from shardids.plan_reset(:shard, shardids.ms_of(cast(:since as timestamptz))) p,
         shardids.shard s, shardids.node n
    where s.id = :shard""")
_RESET: Final = text(
    "select * from shardids.reset_clock(:shard, shardids.ms_of(cast(:since as timestamptz)))"
)
_OFFSET: Final = text("select id_offset::text from shardids.shard where id = :shard")
