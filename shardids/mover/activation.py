"""Activates a shard, or records where it is active, once all nodes show that it is active nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Engine, text

from shardids.catalog.moves import record_arrival
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, place_shard
from shardids.catalog.shards import Shard, read_shard, require_no_issuer
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.catalog.topology import Node, lost_shard
from shardids.errors import ClusterConflict, ConnectionFailed, StatementFailed, UnknownShard
from shardids.ids.layout import Layout
from shardids.mover.homes import LOCK_MS, Held, failover_nodes, held, in_use
from shardids.mover.journal import Journal, refuse_adoption
from shardids.pg.urls import parse_url, shown_url
from shardids.replication.subscriptions import LOCK_FAILURES

Before = Literal["active", "fenced", "moved", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A shard that was activated, or that would be.

    Attributes:
        node: its node.
        before: its state there. ``copy``: it was activated on another server, which must never issue IDs
            again.
    """

    shard: int
    node: str
    before: Before


def activate(
    catalog: Catalog,
    shard: int,
    *,
    above_tick: int | None = None,
    url: str | None = None,
    dry_run: bool = False,
) -> Activation:
    """Let a shard issue IDs and take writes on the node where the catalog places it. Idempotent.

    Args:
        catalog: of the cluster.
        shard: its number.
        above_tick: it issues ticks above this one, and above all that it knows of.
        url: the address of a database that is to take the place of the shard's node.
        dry_run: examine everything, and change nothing.

    Raises:
        UnknownShard: no node owns it, or its node does not have it.
        ClusterConflict: another node has it active, or newer, or does not answer; a move of it or an adoption
            is not over; or sessions keep its tables locked.
        ShardBusy: another command has the shard's lease.
        ShardLost: it was lost with its node, and the node has an old copy: ticks don't show its age, for a
            fence has raised them.
        TooFarAhead: ``above_tick`` is too far ahead of the clock.
        ClusterConflict: also, a function took the shard's place with ``shardids key function --back``.
    """
    with Journal.opened(catalog, shard, purpose="activation") as journal, ExitStack() as kept:
        journal.refuse_open()
        refuse_adoption(catalog)
        placement = catalog.placement()
        name = placement.owners().get(shard)
        if name is None:
            raise UnknownShard(
                f"no node owns shard {shard}", hint="List the shards with: shardids shard list"
            )
        there = None if url is None else Node(name=name, url=url)
        nodes = kept.enter_context(failover_nodes(placement, catalog, there))
        if there is not None:
            _require_successor(catalog, nodes[name], placement.nodes[name], shard, there)
        if not dry_run:
            kept.enter_context(journal.leases.held({name: nodes[name]}, shard))
        found = _examine(nodes, name, shard, catalog.describe().layout)
        if shard in placement.lost and found.before != "copy":
            raise lost_shard(shard, placement.lost[shard])
        is_to_activate = found.before != "active" or above_tick is not None
        if is_to_activate:
            with nodes[name].connect() as connection:
                require_no_issuer(connection, shard, name)
        if not dry_run:
            skipped = skipped_ranges(catalog, [shard]) if is_to_activate else ()
            asked = {"shard": shard, "epoch": journal.leases.epoch, "above": above_tick, "ms": str(LOCK_MS)}
            try:
                with nodes[name].begin() as connection:
                    connection.execute(_ALONE, asked)
                    # Of a move that was undone by hand: an active shard may have one, too.
                    connection.execute(text("select shardids.drop_barriers(:shard)"), asked)
                    if is_to_activate:
                        require_no_issuer(connection, shard, name)
                        bring(connection, skipped)
                        connection.execute(_ACTIVATE, asked)
            except StatementFailed as error:
                if error.sqlstate in LOCK_FAILURES:
                    raise in_use(nodes, shard, name) from error
                raise
    return found


_ALONE = text("select set_config('lock_timeout', :ms, true), shardids.require_lease(:shard, :epoch)")
_ACTIVATE = text("select shardids.activate(:shard, coalesce(cast(:above as bigint), -1))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """A shard that was placed, or that would be, on the node where it is active."""

    shard: int
    before: str
    node: str


def place(catalog: Catalog, shard: int, node: str, *, dry_run: bool = False) -> Placing:
    """Correct the catalog, which names another node than the one where a shard is active. Idempotent.

    No copy is activated or changed. With ``dry_run`` it examines everything, and changes nothing.

    Raises:
        UnknownShard: the catalog has no such shard.
        ClusterConflict: the shard is not active on the node; another node has it active, or newer, or does
            not answer; a move of it or an adoption is not over.
        ShardBusy: another command has the shard's lease.
        ShardLost: it was lost with its node.
    """
    with Journal.opened(catalog, shard, purpose="placement") as journal, ExitStack() as kept:
        journal.refuse_open()
        refuse_adoption(catalog)
        placement = catalog.placement()
        before = placement.locate(shard).name
        nodes = kept.enter_context(failover_nodes(placement, catalog))
        both = {name: nodes[name] for name in sorted({before, node})}
        if not dry_run:
            kept.enter_context(journal.leases.held(both, shard))
        found = _examine(nodes, node, shard, catalog.describe().layout)
        if found.before != "active":
            raise ClusterConflict(
                f'shard {shard} is not active on node "{node}"',
                hint=f"Look at its copies: shardids doctor; shardids shard list {shard}",
            )
        if before != node and not dry_run:
            with nodes[node].connect() as there:
                tick = held(there, [shard])[shard].high_water_tick
            with catalog.engine.begin() as connection:
                place_shard(connection, shard, source=before, target=node)
                # A later failover judges copies by the arrivals.
                record_arrival(connection, shard, source=before, target=node, high_water_tick=tick)
    return Placing(shard=shard, before=before, node=node)


def _require_successor(catalog: Catalog, engine: Engine, old: Node, shard: int, new: Node) -> None:
    """Require that a database is a copy of the node, and the shard not active at the node's other address."""
    with engine.connect() as connection:
        row = connection.execute(text("select name, cluster from shardids.node")).one()
    if (row.name, row.cluster) != (old.name, catalog.describe().cluster):
        raise ClusterConflict(
            f'the database is node "{row.name}" of cluster {row.cluster}, not node "{old.name}" of this one',
            hint=f"Name the address of a copy of node {old.name}.",
        )
    if shown_url(parse_url(new.url)) == shown_url(parse_url(old.url)):
        return
    try:
        with Nodes({old.name: old}, catalog.url) as nodes, nodes[old.name].connect() as connection:
            row_there = held(connection, [shard]).get(shard)
    except ConnectionFailed:
        return
    if row_there is not None and row_there.is_active and row_there.is_own:
        raise ClusterConflict(
            f'shard {shard} is active on node "{old.name}", at the address in the catalog',
            hint="Stop that server for good first. Two copies would issue the same IDs.",
        )


def _examine(nodes: Nodes, name: str, shard: int, layout: Layout) -> Activation:
    """Return how the shard is on its node, when no other node has it active or newer."""

    def ask(_name: str, engine: Engine) -> Held | None:
        with engine.connect() as connection:
            return held(connection, [shard]).get(shard)

    answers = nodes.each(ask)
    for other, error in answers.failures.items():
        raise ClusterConflict(
            f'shard {shard} is not activated: node "{other}" may have it active, and was not examined:'
            f" {error.message}",
            hint=f"When node {other} answers, repeat the command. If it is lost for good, replace it first:"
            f" shardids node replace {other} --url …",
        )
    with nodes[name].connect() as connection:
        row = read_shard(connection, shard)
        found = _before(connection, row, name, shard)
    own = answers.results[name]
    known = -1 if own is None else own.high_water_tick
    known = known if row is None else max(known, row.stored_tick(layout))
    _refuse_others(
        {n: there for n, there in answers.results.items() if there and n != name}, known, name, shard
    )
    return found


def _before(connection: Connection, row: Shard | None, name: str, shard: int) -> Activation:
    has_generator = connection.scalar(
        text("select to_regclass(format('%I.id_offset', shardids.schema_of(:shard))) is not null"),
        {"shard": shard},
    )
    if not has_generator:
        raise UnknownShard(
            f'node "{name}" does not have shard {shard}',
            hint="Restore its schema there from a backup, or see what else can be done: shardids doctor",
        )
    if row is not None and row.state == "arriving":
        raise ClusterConflict(
            f'shard {shard} on node "{name}" is an incomplete copy, which a move has begun',
            hint="See: shardids doctor",
        )
    if row is None or row.state not in ("active", "fenced", "moved"):
        # The schema was copied or restored: the generator knows it from another server.
        return Activation(shard=shard, node=name, before="copy")
    return Activation(shard=shard, node=name, before=row.state)


def _refuse_others(others: Mapping[str, Held], known: int, name: str, shard: int) -> None:
    for other, row in others.items():
        if row.is_active:
            raise ClusterConflict(
                f'shard {shard} is active on node "{other}": node "{name}" must not have it active',
                hint="Two active copies would take different writes. Which node is right: shardids doctor",
            )
        if row.is_whole and row.high_water_tick > known:
            raise ClusterConflict(
                f'node "{other}" has a newer copy of shard {shard} than node "{name}": its high-water tick is'
                f" {row.high_water_tick}, not {known}",
                hint="Compare the rows of both. See: shardids doctor",
            )
