"""Replaces a lost node: points its catalog entry at the server that took over, a promoted standby.

Shards that the new server does not have as they were count as lost: the placement names no node for them,
so that no client reads or writes the rows there. ``homes`` finds their copies, and gives them a home once
the loss is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from shlex import quote

from sqlalchemy import text

from shardids.catalog.keys.copies import bring_to
from shardids.catalog.leases import lives
from shardids.catalog.losses import complete_loss, read_arrivals
from shardids.catalog.moves import MovingKey, read_moves, read_moving_keys
from shardids.catalog.nodes import Nodes
from shardids.catalog.references import references_of, require_none
from shardids.catalog.rows import Catalog, point_node, read_placement
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.catalog.topology import Node, Placement
from shardids.errors import ClusterConflict, ConnectionFailed, StatementFailed, UnsupportedServer
from shardids.logs import logger
from shardids.mover import homes
from shardids.mover.homes import (
    LOCK_MS,
    Held,
    Homes,
    LostShard,
    examine,
    held,
    in_use,
    last_arrivals,
    why_lost,
)
from shardids.mover.journal import Journal
from shardids.pg.notation import named_shards, shown_shards
from shardids.pg.urls import parse_url, shown_url
from shardids.replication.journals import Entry, being_moved, take_over
from shardids.replication.subscriptions import LOCK_FAILURES
from shardids.tables.views import follow

_PATIENCE_S = 3
"""How long to wait for the old server to show that it is not lost."""
_MOVER_PATIENCE_S = 30.0
"""How long movers may take to notice that the node is gone; the catalog frees their locks before."""


log = logger("mover")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """The contents of a node's new server.

    Attributes:
        node: the node's name.
        url: the node's new address, without the password.
        shards: how many shards live on it.
        fenced: shards that were active on it although they live elsewhere or count as lost, because the
            standby was promoted before it had received their move. They were fenced there.
        stopped: shards that live on it and are fenced, so that they issue no IDs.
        lost: shards that the server does not have as they were, and that have no home.
        accepted: the same, but given a home in this call.
        set_aside: schemas to which incomplete copies were renamed, each with its node.
        open_key_moves: moves of keys from or to its shards that are not over, one line for each, with the
            next step. They go on by their own command.
        stale_views: views over shards that could not be refreshed, one line for each, with the remedy.
    """

    node: str
    url: str
    shards: int
    fenced: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    lost: tuple[LostShard, ...] = ()
    accepted: tuple[LostShard, ...] = ()
    set_aside: tuple[str, ...] = ()
    open_key_moves: tuple[str, ...] = ()
    stale_views: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """The shards of the node, and of others, on the new server."""

    placement: Placement
    rows: Mapping[int, Held]
    lost: tuple[LostShard, ...]
    sound: frozenset[int]
    active_here: Mapping[int, str]


def replace_node(
    catalog: Catalog,
    name: str,
    url: str,
    *,
    accept_loss: Collection[int] = (),
    with_references: bool = False,
    dry_run: bool = False,
) -> Replacement:
    """Point a node at the server that took over from it; routers follow as they do after a move.

    No ID is issued twice: a promoted standby is on a later timeline than the activation of its shards,
    so each shard's first draw jumps one to two ``safety_margin`` past the clock and past all
    that the standby knows of.

    A shard that the server does not have as it was counts as lost from then on: no client is sent to it. If
    it is in ``accept_loss``, the newest copy that a node has becomes its home, or an empty shard without
    one. Later writes to it are given up. Calling it again finds the shards that are still lost, and completes
    an interrupted call.

    With ``dry_run`` it checks everything and changes nothing. ``with_references``: the caller lets the nodes
    follow the writer of reference tables again, as ``references.replace_node`` does. While that
    writer is being moved, or its move was interrupted, shards of ``accept_loss`` get no home, and are among
    those that are lost.

    Raises:
        ClusterConflict: the node is unknown; the cluster has reference tables, and not ``with_references``;
            the old server still takes writes; a shard of it is being moved; the new server is another
            database, still a standby, a copy rather than a standby, or has none of the node's shards; or a
            shard of ``accept_loss`` is active on another node, or was not lost with this one.
        ConnectionFailed: the new server does not answer.
    """
    if not with_references:
        require_none(catalog, "replace_node")
    # The repair of reference tables that comes then may need this node.
    homes_wait = not dry_run and references_of(catalog).successor is not None
    old = catalog.existing_node(name)
    new = Node(name=name, url=url)
    if shown_url(parse_url(old.url)) != shown_url(parse_url(url)):
        _require_gone(catalog, old)
    with homes.failover_nodes(catalog.placement(), catalog, new) as nodes:
        _require_node(catalog, nodes, new)
        with Homes.opened(catalog, nodes) as giving:
            keys = _take_moves(giving, name, dry_run=dry_run)
            unfinished = [loss for loss in giving.open() if loss.node == name]
            for loss in unfinished if not dry_run else ():
                giving.give(loss.shard, lost_with=name, home=loss.home)
            found = _find(catalog, nodes, new, leave_out=[loss.shard for loss in unfinished if dry_run])
            _refuse(found, new, accept_loss)
            _require_lost(catalog, found, new, set(accept_loss) - {loss.shard for loss in unfinished})
            if not dry_run:
                # A standby may lack ranges of its primary, and serves clients from here on.
                with nodes[name].begin() as connection:
                    bring(connection, skipped_ranges(catalog))
                    with catalog.engine.connect() as source:
                        bring_to(source, connection)
                lost = {shard.shard for shard in found.lost}
                _fence(nodes, new, found, found.active_here.keys() - lost)
                _close_references(nodes, new, references_of(catalog).writer)
                with catalog.engine.begin() as connection:
                    point_node(connection, old, url, lost=lost, found=found.sound)
                    for shard in lost:
                        complete_loss(connection, shard)
                # A fence makes an old copy look newer, and like one that a move has left: not before the
                # placement says that the shard is lost.
                _fence(nodes, new, found, found.active_here.keys() & lost)
            accepted = tuple(s for s in found.lost if s.shard in accept_loss and not homes_wait)
            renamed = [
                giving.give(one.shard, lost_with=name, home=one.home) for one in accepted if not dry_run
            ]
    replacement = Replacement(
        node=name,
        url=shown_url(parse_url(url)),
        shards=len(found.sound) + sum(shard.home == name for shard in accepted),
        fenced=tuple(sorted(found.active_here)),
        stopped=tuple(sorted(s for s in found.sound if found.rows[s].state == "fenced")),
        lost=tuple(shard for shard in found.lost if shard not in accepted),
        accepted=accepted,
        set_aside=tuple(chain.from_iterable(renamed)),
        open_key_moves=tuple(
            f"the move of key {one.key!r} from shard {one.source} to {one.target} is not over:"
            f" shardids tenant move {quote(one.key)} --resume, or --abort"
            for one in keys
        ),
        stale_views=() if dry_run else follow(catalog),
    )
    if not dry_run:
        log_replacement(replacement)
    return replacement


def _require_gone(catalog: Catalog, old: Node) -> None:
    """Refuse while the old primary takes writes: its shards would take writes on two servers."""
    try:
        with (
            Nodes({old.name: old}, catalog.url, connect_timeout_s=_PATIENCE_S) as nodes,
            nodes[old.name].connect() as connection,
        ):
            is_standby = connection.execute(text("select pg_is_in_recovery()")).scalar_one()
    except (ConnectionFailed, UnsupportedServer):
        return
    if not is_standby:
        raise ClusterConflict(
            f'the server of node "{old.name}" at {old.url} still takes writes',
            hint="Stop it for good first, or its shards would be written to on two servers.",
        )


def _require_node(catalog: Catalog, nodes: Nodes, new: Node) -> None:
    """Require that the new server is this node's database, and takes writes."""
    url = shown_url(parse_url(new.url))
    with nodes[new.name].connect() as connection:
        if connection.execute(text("select pg_is_in_recovery()")).scalar_one():
            raise ClusterConflict(f"{url} is a standby still", hint="Promote it first: select pg_promote()")
        there = text("select to_regclass('shardids.node') is not null")
        row = None
        if connection.execute(there).scalar_one():
            row = connection.execute(text("select name, cluster from shardids.node")).one()
    if row is None or (row.name, row.cluster) != (new.name, catalog.describe().cluster):
        found = "no node" if row is None else f'node "{row.name}" of cluster {row.cluster}'
        raise ClusterConflict(
            f'the database at {url} is {found}, not node "{new.name}" of this cluster',
            hint="Name the promoted standby's database, the one that was the node's.",
        )


def _take_moves(giving: Homes, node: str, *, dry_run: bool) -> list[MovingKey]:
    """Take over the open moves from and to a node, once their movers have noticed that it is gone.

    Returns those of keys, which their own command ends.

    Raises:
        ClusterConflict: a mover still lives.
    """
    deadline = time.monotonic() + _MOVER_PATIENCE_S
    epoch = giving.leases.epoch
    while True:
        with giving.held.transaction() as connection:
            there = {shard for shard, at in read_placement(connection).owners().items() if at == node}
            moves = [one for one in read_moves(connection) if node in (one.source, one.target)]
            keys = [one for one in read_moving_keys(connection) if there & {one.source, one.target}]
            opened: list[tuple[Entry, str, str, str]] = [
                *((one, Journal.TABLE, f"shard {one.shard}", Journal.COMMAND) for one in moves),
                *((one, "key_move", f"key {one.key!r}", "shardids tenant move") for one in keys),
            ]
            busy = [
                being_moved(subject, command)
                for open_, table, subject, command in opened
                if open_.epoch != epoch
                and (
                    lives(connection, open_.epoch)
                    or not (dry_run or take_over(connection, table, open_, epoch))
                )
            ]
        if not busy:
            return keys
        if time.monotonic() > deadline:
            raise busy[0]
        time.sleep(0.5)


def _find(catalog: Catalog, nodes: Nodes, new: Node, *, leave_out: Collection[int]) -> _Findings:
    """Compare the new server with the placement, which no mover of the node's shards can change now."""
    placement = catalog.placement()
    with catalog.engine.connect() as connection:
        moves, arrivals = read_moves(connection), read_arrivals(connection)
    leaving = {m.shard: m.target for m in moves if m.source == new.name}
    arriving = {m.shard for m in moves if m.target == new.name}
    owners = placement.owners()
    with nodes[new.name].connect() as connection:
        rows = held(connection, owners)
    reasons = why_lost(rows, placement, new.name, last_arrivals(arrivals, new.name), leaving)
    unsettled = {shard: reason for shard, reason in reasons.items() if shard not in leave_out}
    lost = tuple(examine(nodes, new.name, unsettled, arrivals))
    homes_of = {shard.shard: shard.home for shard in lost}
    # What such shards had moved away from comes to light when they are active here.
    elsewhere = {s: n for s, n in owners.items() if n != new.name and s not in arriving} | homes_of
    return _Findings(
        placement=placement,
        rows=rows,
        lost=lost,
        sound=frozenset(s for s, n in owners.items() if n == new.name and s in rows and s not in reasons),
        active_here={s: n for s, n in elsewhere.items() if s in rows and rows[s].is_active},
    )


def _refuse(found: _Findings, new: Node, accept_loss: Collection[int]) -> None:
    url = shown_url(parse_url(new.url))
    active = (found.rows[shard] for shard in found.sound if found.rows[shard].state == "active")
    if copied := sorted(row.shard for row in active if not row.is_own):
        raise ClusterConflict(
            f'{url} is a copy of node "{new.name}", not its standby, and {named_shards(copied)} not'
            " activated there",
            hint="If the original is gone for good, activate them: shardids shard activate"
            f" {shown_shards(copied)} --url {url}. Then repeat the command.",
        )
    undecided = [s.shard for s in found.lost if s.shard not in found.placement.lost.keys() | accept_loss]
    if undecided and not found.sound:
        raise ClusterConflict(
            f'{url} has no shard of node "{new.name}" as it was; {named_shards(undecided)}:'
            f" {found.lost[0].reason}",
            hint="It may be an old copy. If nothing newer is left, see the rows that would be given up:"
            f" --accept-loss {shown_shards(undecided)} --dry-run",
        )
    for shard in found.lost:
        if shard.shard in accept_loss and shard.active_on is not None:
            raise ClusterConflict(
                f'shard {shard.shard} is active on node "{shard.active_on}", although the catalog places it'
                f' on "{new.name}"',
                hint="See: shardids doctor",
            )


def _require_lost(catalog: Catalog, found: _Findings, new: Node, shards: Collection[int]) -> None:
    """Refuse shards that were never lost with the node; those of an earlier call pass."""
    with catalog.engine.connect() as connection:
        before = {
            one.shard for one in read_arrivals(connection) if not one.is_moved and one.source == new.name
        }
    if unlost := sorted(set(shards) - before - {shard.shard for shard in found.lost}):
        are = "is" if len(unlost) == 1 else "are"
        raise ClusterConflict(
            f"{named_shards(unlost)} {are} not lost: nothing to accept",
            hint=f"See which are: shardids node replace {new.name} --url {shown_url(parse_url(new.url))}"
            " --dry-run",
        )


def _fence(nodes: Nodes, new: Node, found: _Findings, shards: Collection[int]) -> None:
    """Fence shards that do not live here. A fence survives a rollback of its transaction."""
    with nodes[new.name].begin() as connection:
        connection.execute(text("select set_config('lock_timeout', :ms, true)"), {"ms": str(LOCK_MS)})
        for shard in sorted(shards):
            try:
                connection.execute(
                    text("select shardids.fence(:shard, :home), shardids.add_barriers(:shard)"),
                    {"shard": shard, "home": found.active_here[shard]},
                )
            except StatementFailed as error:
                if error.sqlstate in LOCK_FAILURES:
                    raise in_use(nodes, shard, new.name) from error
                raise


def _close_references(nodes: Nodes, new: Node, writer: str | None) -> None:
    """Let nobody write to reference tables here, unless this node is the writer: it may have been that."""
    if writer in (None, new.name):
        return
    with nodes[new.name].begin() as connection:
        connection.execute(
            text("""
                select set_config('lock_timeout', :ms, true),
                       shardids.guard_reference_table(c.oid, :writer, false)
                from pg_class c join pg_trigger t on t.tgrelid = c.oid and t.tgname = 'shardids_reference'
                where c.relnamespace = to_regnamespace('shardids_ref')"""),
            {"ms": str(LOCK_MS), "writer": writer},
        )


def log_replacement(done: Replacement) -> None:
    """Log that a node was replaced, with the numbers of shards that were ``fenced`` or ``lost``."""
    numbers = {name: [one.shard for one in getattr(done, name)] for name in ("lost", "accepted")}
    log.warning(
        'node "%s" is at %s now: %s shards, %s lost',
        done.node,
        done.url,
        done.shards,
        len(done.lost),
        extra={"node": done.node, "fenced": list(done.fenced), **numbers},
    )
