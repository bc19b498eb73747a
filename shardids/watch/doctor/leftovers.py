"""Checks for remains of moves, migrations and others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Final
from uuid import UUID

from shardids.pg.gids import Gid
from shardids.pg.locks import AdvisoryLock
from shardids.pg.notation import named_nodes, named_shards, shown_shards
from shardids.pg.queries import quoted
from shardids.pg.urls import parse_url, shown_url
from shardids.watch.doctor.findings import Found, Severity, check, grouped, in_shell, literal, on_node
from shardids.watch.facts.cluster import ClusterFacts, Leftover, LockHolder, Stray

_MIB: Final = 1 << 20
_PREPARED_S: Final = 5.0
_HELD_S: Final = 5.0
_TABLE_SLOT: Final = re.compile(r"pg_\d+_sync_\d+_\d+")
"""The slots of PostgreSQL's subscriptions for the copy of a table, one per table."""


@check(
    "move-interrupted",
    Severity.ERROR,
    remedy="`shardids shard move --resume` or `--abort`; of a key's: `shardids tenant move`.",
)
def move_interrupted(facts: ClusterFacts) -> Iterator[Found]:
    """An open move, of a shard or of a key, that no process is working on: it was interrupted."""
    for one in facts.key_moves:
        if not one.is_running:
            refused = "; statements over several shards are refused meanwhile" if one.is_unsettled else ""
            key = shlex.quote(one.key)
            yield Found(
                what=f"the move of key {one.key[:60]!r} from shard {one.source} to {one.target} was"
                f' interrupted in step "{one.step}"{refused}',
                to_do=f"Resume it, or undo it with shardids tenant move {key} --abort",
                commands=in_shell(f"shardids tenant move {key} --resume"),
                shards=(one.source, one.target),
                thing=one.key,
            )
    for move in facts.moves:
        if not move.is_running:
            yield Found(
                what=f'the move of shard {move.shard} from node "{move.source}" to node "{move.target}"'
                f' was interrupted in step "{move.step}"',
                to_do=f"Resume it, or undo it with shardids shard move {move.shard} --abort",
                commands=in_shell(f"shardids shard move {move.shard} --resume"),
                nodes=(move.source, move.target),
                shards=(move.shard,),
            )


def _left_behind(facts: ClusterFacts, kind: str) -> Iterator[tuple[str, Leftover]]:
    """Yield the leftovers that belong to no open move from or to the node."""
    busy = {name for move in facts.moves for name in (move.source, move.target)}
    for name, node in facts.nodes.items():
        for leftover in node.leftovers:
            if leftover.kind == kind and name not in busy:
                yield name, leftover


@check("leftover-slot", Severity.WARNING, remedy="Drop it: it keeps WAL until the disk is full.")
def leftover_slot(facts: ClusterFacts) -> Iterator[Found]:
    """A replication slot of a move that has ended."""
    for name, slot in _left_behind(facts, "slot"):
        kept = f"; it keeps {slot.kept_bytes / _MIB:,.1f} MiB of WAL" if slot.kept_bytes is not None else ""
        yield Found(
            what=f'replication slot {slot.name} of node "{name}" belongs to no open move{kept}',
            to_do="Drop it",
            commands=on_node(name, f"select pg_drop_replication_slot('{slot.name}');"),
            nodes=(name,),
            thing=slot.name,
        )


@check("leftover-publication", Severity.WARNING, remedy="Drop it.")
def leftover_publication(facts: ClusterFacts) -> Iterator[Found]:
    """A publication of a move that has ended."""
    for name, publication in _left_behind(facts, "publication"):
        yield Found(
            what=f'publication {publication.name} of node "{name}" belongs to no open move',
            to_do="Drop it",
            commands=on_node(name, f"drop publication {quoted(publication.name)};"),
            nodes=(name,),
            thing=publication.name,
        )


@check("leftover-subscription", Severity.WARNING, remedy="Drop it: it may overwrite rows of the shard.")
def leftover_subscription(facts: ClusterFacts) -> Iterator[Found]:
    """A subscription of a move that has ended."""
    for name, subscription in _left_behind(facts, "subscription"):
        this = quoted(subscription.name)
        yield Found(
            what=f'subscription {subscription.name} of node "{name}" belongs to no open move',
            to_do="Drop it, and its slot on the other node",
            commands=on_node(
                name,
                f"alter subscription {this} disable;",
                f"alter subscription {this} set (slot_name = none);",
                f"drop subscription {this};",
            ),
            nodes=(name,),
            thing=subscription.name,
        )


@check("writes-rejected", Severity.ERROR, remedy="Drop the write barrier: `shardids shard activate`.")
def writes_rejected(facts: ClusterFacts) -> Iterator[Found]:
    """A table of an active shard has a move's write barrier: it refuses writes, or (a warning) slows them."""
    for name, node in facts.nodes.items():
        for kind, severity, does in (
            ("closed barrier", Severity.ERROR, "refuse writes, though the shard is active here"),
            (
                "barrier",
                Severity.WARNING,
                "still have a move's write barrier, which costs a lock at every write",
            ),
        ):
            barriers = [
                barrier.shard
                for barrier in node.leftovers
                if barrier.kind == kind
                and barrier.shard is not None
                and facts.is_settled(barrier.shard, name)
            ]
            if barriers:
                shards = tuple(sorted(set(barriers)))
                yield Found(
                    what=f'{len(barriers)} tables in {named_shards(shards)} of node "{name}" {does}',
                    to_do="Activate it: that drops the barriers once it is found to be active nowhere else",
                    commands=in_shell(f"shardids shard activate {shown_shards(shards)}"),
                    nodes=(name,),
                    shards=shards,
                    severity=severity,
                )


@check("shard-lost", Severity.ERROR, remedy="Accept the loss, or restore the shard and activate it.")
def shard_lost(facts: ClusterFacts) -> Iterator[Found]:
    """The server that took over a shard's node does not have the shard, and no client is sent to it."""
    lost = ((placed.node, shard) for shard, placed in facts.placed.items() if placed.state == "lost")
    for node, shards in grouped(lost).items():
        url = shown_url(parse_url(facts.nodes[node].node.url))
        yield Found(
            what=f'{named_shards(shards)}: lost with node "{node}", whose new server does not have the rows',
            to_do="See the dry run, then repeat the command with --yes in place of --dry-run; or restore"
            f' it on node "{node}" from a backup, activate it there, and repeat it without --accept-loss',
            commands=in_shell(
                f"shardids node replace {node} --url {shlex.quote(url)} --accept-loss {shown_shards(shards)}"
                " --dry-run"
            ),
            nodes=(node,),
            shards=shards,
        )
    for loss in facts.losses:
        if not loss.is_running:
            url = shown_url(parse_url(facts.nodes[loss.node].node.url))
            yield Found(
                what=f'shard {loss.shard}: lost with node "{loss.node}" and placed on node "{loss.home}";'
                " the command was interrupted before it was completed there",
                to_do="Complete it",
                commands=in_shell(f"shardids node replace {loss.node} --url {shlex.quote(url)}"),
                nodes=(loss.home,),
                shards=(loss.shard,),
            )


def _strays(facts: ClusterFacts, kind: str) -> Iterator[tuple[str, Stray]]:
    for name, node in facts.nodes.items():
        for stray in node.strays:
            if stray.kind == kind:
                yield name, stray


@check(
    "schema-orphaned",
    Severity.WARNING,
    remedy="Drop it, if nobody needs its tables: `shardids shard purge --node`.",
)
def schema_orphaned(facts: ClusterFacts) -> Iterator[Found]:
    """A schema with the name of a shard that its node does not know, and without a generator."""
    for name, schema in _strays(facts, "schema"):
        placed = facts.placed.get(schema.shard) if schema.shard is not None else None
        if schema.shard in facts.moving or (placed is not None and placed.state == "creating"):
            continue
        yield Found(
            what=f'schema {schema.name} of node "{name}" has {schema.detail} tables and no generator, and is'
            " not a shard of the node",
            to_do="See whose tables these are; if nobody needs them, drop it",
            commands=in_shell(f"shardids shard purge {schema.shard} --node {shlex.quote(name)}"),
            nodes=(name,),
            shards=() if schema.shard is None else (schema.shard,),
            thing=schema.name,
        )


@check("extension-in-shard", Severity.ERROR, remedy="Move it to a schema that no shard has.")
def extension_in_shard(facts: ClusterFacts) -> Iterator[Found]:
    """An extension in a shard's schema: all shards of the node need it, and it goes where that shard goes."""
    for name, extension in _strays(facts, "extension"):
        schema = facts.nodes[name].shards[extension.shard].schema if extension.shard is not None else ""
        yield Found(
            what=f'extension {extension.name} of node "{name}" is in schema {schema}: dropping the schema'
            " drops it, and its dependent objects in other shards",
            to_do="Move it to a schema that no shard has"
            if extension.detail
            else "It cannot be moved: create it again in another schema, with its dependent objects",
            commands=on_node(name, f"alter extension {quoted(extension.name)} set schema public;")
            if extension.detail
            else (),
            nodes=(name,),
            shards=() if extension.shard is None else (extension.shard,),
            thing=extension.name,
        )


def _gid_of(facts: ClusterFacts, transaction: Stray) -> Gid | None:
    """Return the parts of a prepared transaction's name, if it is of this cluster's sessions."""
    gid = Gid.parse(transaction.name)
    return gid if gid is not None and gid.cluster == facts.description.cluster else None


@check("in-doubt", Severity.WARNING, remedy="`shardids transactions --resolve`.")
def in_doubt(facts: ClusterFacts) -> Iterator[Found]:
    """A transaction on several nodes that its client has not ended within five seconds of preparing it."""
    parts: dict[UUID, list[tuple[str, Gid, float]]] = {}
    for name, transaction in _strays(facts, "prepared transaction"):
        gid, age_s = _gid_of(facts, transaction), transaction.age_s or 0.0
        if gid is not None and age_s >= _PREPARED_S:
            parts.setdefault(gid.transaction, []).append((name, gid, age_s))
    for one, found in parts.items():
        names = tuple(dict.fromkeys(name for name, _, _ in found))
        age_s = max(age_s for _, _, age_s in found)
        yield Found(
            what=f"transaction {one} was prepared on {named_nodes(names)} {age_s:,.0f} s ago,"
            f' and has not ended; node "{found[0][1].decider}" decides. Until it ends, its rows are locked,'
            " VACUUM removes no newer rows, and moves and migrations wait",
            to_do="End it as decided; if nothing was decided, roll it back",
            commands=in_shell("shardids transactions --resolve"),
            nodes=names,
            thing=str(one),
        )


@check("prepared-transaction", Severity.WARNING, remedy="Commit it or roll it back.")
def prepared_transaction(facts: ClusterFacts) -> Iterator[Found]:
    """One that others prepared over five seconds ago, and that was neither committed nor rolled back."""
    for name, transaction in _strays(facts, "prepared transaction"):
        age_s = transaction.age_s or 0.0
        if age_s >= _PREPARED_S and _gid_of(facts, transaction) is None:
            locks = f"locks {transaction.detail}" if transaction.detail else "locks no table"
            yield Found(
                what=f'transaction {transaction.name!r} of node "{name}" was prepared {age_s:,.0f} s ago and'
                f" {locks}; until it ends, VACUUM removes no newer rows, and moves and migrations wait",
                to_do="Ask its coordinator whether to commit it; if nobody knows of it, roll it back",
                commands=on_node(name, f"rollback prepared {literal(transaction.name)};"),
                nodes=(name,),
                thing=transaction.name,
            )


@check("lock-held", Severity.ERROR, remedy="See whose session it is; end it: `pg_terminate_backend(pid)`.")
def lock_held(facts: ClusterFacts) -> Iterator[Found]:
    """A session that holds the lock of a shard's generator or schema for over five seconds."""
    for name, node in facts.nodes.items():
        held = grouped(
            ((holder.pid, holder.lock), holder.shard)
            for holder in node.lock_holders
            if (holder.age_s or 0.0) >= _HELD_S
            and (holder.lock == AdvisoryLock.GENERATOR or _is_forgotten(facts, holder))
        )
        holders = {(holder.pid, holder.lock): holder for holder in node.lock_holders}
        for (pid, lock), shards in held.items():
            holder = holders[pid, lock]
            session = f'process {pid} of role "{holder.role}"'
            if holder.application_name:
                session += f", application {holder.application_name!r},"
            whose, stopped = (
                ("generator", "draws that must raise the shard's clock fail")
                if lock == AdvisoryLock.GENERATOR
                else ("schema", "migrations and moves fail")
            )
            yield Found(
                what=f'{session} holds the lock of the {whose} of {named_shards(shards)} on node "{name}",'
                f" {_since(holder)}: {stopped} after 10 s of waiting",
                to_do="Look at the session in pg_stat_activity; if nobody needs it, end it",
                commands=on_node(name, f"select pg_terminate_backend({pid});"),
                nodes=(name,),
                shards=shards,
                thing=str(pid),
            )


def _since(holder: LockHolder) -> str:
    age_s = holder.age_s or 0.0
    if holder.state == "active":
        return f"in a transaction that began {age_s:,.0f} s ago"
    return f"{holder.state} for {age_s:,.0f} s"


def _is_forgotten(facts: ClusterFacts, holder: LockHolder) -> bool:
    """Return whether no migration or move can need the lock of the schema: they hold it until they commit."""
    return holder.state != "active" and not facts.is_migrating and holder.shard not in facts.moving


@check("slot-inactive", Severity.WARNING, remedy="Drop it, if nobody will read it: it keeps WAL.")
def slot_inactive(facts: ClusterFacts) -> Iterator[Found]:
    """A replication slot that is not of shardids, and that nobody reads."""
    sources = {move.source for move in facts.moves}
    for name, slot in _strays(facts, "slot"):
        if name in sources and _TABLE_SLOT.fullmatch(slot.name):
            continue
        kept = f"; it keeps {slot.kept_bytes / _MIB:,.1f} MiB of WAL" if slot.kept_bytes is not None else ""
        yield Found(
            what=f'{slot.detail} replication slot {slot.name} of the server of node "{name}" is'
            f" inactive{kept}",
            to_do="Start its reader; if the reader no longer exists, drop the slot",
            commands=on_node(name, f"select pg_drop_replication_slot({literal(slot.name)});"),
            nodes=(name,),
            thing=slot.name,
        )


@check("revision-unfinished", Severity.ERROR, remedy="`shardids migrate up` or `down`, for these shards.")
def revision_unfinished(facts: ClusterFacts) -> Iterator[Found]:
    """A revision with parts outside a transaction that was interrupted in a shard."""
    unfinished = (
        ((name, *stray.name.split(" ")[:2]), stray.shard)
        for name, stray in _strays(facts, "revision")
        if stray.shard is not None and not stray.detail and not facts.is_migrating
    )
    for (name, direction, *revision), shards in grouped(unfinished).items():
        yield Found(
            what=f'{named_shards(shards)} of node "{name}": revision {"".join(revision)} was interrupted on'
            f" the way {direction}",
            to_do="Finish it",
            commands=in_shell(f"shardids migrate {direction} --shards {shown_shards(shards)}"),
            nodes=(name,),
            shards=shards,
            thing="".join(revision),
        )
