"""Whether a shard can be moved. Everything is looked at first; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text

from shardids.errors import MoveRefused
from shardids.mover import requirements
from shardids.mover.dumping import Scripts, find_programs
from shardids.mover.requirements import Refusal
from shardids.mover.sides import Sides, server_major


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a move that nothing speaks against would move, and how.

    ``size_bytes`` is that of tables and indexes, ``rows`` an estimate. ``notes`` are what could not be
    checked.
    """

    shard: int
    source: str
    target: str
    offline: bool
    tables: int
    rows: int
    size_bytes: int
    sequences: tuple[str, ...]
    pg_dump: str
    notes: tuple[str, ...]
    scripts: Scripts


def examine(sides: Sides, *, offline: bool, replace_copy: bool, parallel: int = 1) -> Plan:
    """Looks for everything that speaks against moving a shard; the plan if nothing does.

    The schema is made on the target, whole, and taken back: what the target lacks comes out now.

    ``replace_copy``: the target may have an old copy of the shard, which goes. ``parallel`` is how many
    moves will run at once.

    Raises:
        MoveRefused: all reasons, with what to do.
        ConnectionFailed: a node does not answer.
    """
    notes: list[str] = []
    with sides.source.autocommit() as source, sides.target.autocommit() as target:
        refusals = [
            *requirements.shard_is_there(source, sides),
            *requirements.target_is_free(target, sides, replace_copy),
        ]
        refusals += requirements.engines_agree(source, target, sides)
        refusals += requirements.roles_exist(source, target, sides)
        if not offline:
            refusals += requirements.tables_can_be_followed(source, sides)
            refusals += requirements.replication_fits(source, target, sides, parallel)
        facts = source.execute(_FACTS, {"shard": sides.shard}).one()
        refusals += requirements.room_is_enough(sides, facts.size_bytes, notes)
        sequences = tuple(
            source.scalars(text("select name from shardids.sequences_of(:shard)"), {"shard": sides.shard})
        )
        programs = find_programs(server_major(source))
    _raise(sides, refusals)
    scripts = schema_of_source(sides)
    _raise(sides, requirements.target_takes_schema(sides, scripts, subscribing=not offline))
    return Plan(
        shard=sides.shard,
        source=sides.source.node.name,
        target=sides.target.node.name,
        offline=offline,
        tables=facts.tables,
        rows=facts.rows,
        size_bytes=facts.size_bytes,
        sequences=sequences,
        pg_dump=str(programs.folder / "pg_dump"),
        notes=tuple(notes),
        scripts=scripts,
    )


def schema_of_source(sides: Sides) -> Scripts:
    """The shard's schema as it is now."""
    with sides.source.autocommit() as source:
        identities = list(source.scalars(_IDENTITY_INDEXES, {"shard": sides.shard}))
        programs = find_programs(server_major(source))
    return programs.dump_schema(sides.source.parameters(), sides.schema, identities)


def _raise(sides: Sides, refusals: Sequence[Refusal]) -> None:
    if not refusals:
        return
    source, target = sides.source.node.name, sides.target.node.name
    where = f'shard {sides.shard} can\'t be moved from node "{source}" to "{target}"'
    if len(refusals) == 1:
        raise MoveRefused(f"{where}: {refusals[0].reason}", hint=refusals[0].remedy)
    raise MoveRefused(
        f"{where}:\n" + "\n".join(f"- {refusal.reason}" for refusal in refusals),
        hint="\n".join(f"- {remedy}" for remedy in dict.fromkeys(refusal.remedy for refusal in refusals)),
    )


_FACTS = text("""
    select count(*) filter (where c.relkind = 'r') as tables,
           coalesce(sum(c.reltuples) filter (where c.reltuples > 0 and c.relkind = 'r'), 0)::bigint as rows,
           coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as size_bytes
    from pg_class c where c.oid = any (shardids.tables_of(:shard))""")

_IDENTITY_INDEXES = text("""
    select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid
    where i.indrelid = any (shardids.tables_of(:shard)) and i.indisreplident""")
