"""Writes revisions as files for psql, one per node, for a DBA who runs them by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardids.errors import BadArgument, ClusterConflict
from shardids.migrate.compiled import Compiled, Compiler, Stage
from shardids.migrate.environment import Direction
from shardids.migrate.migration import Migration
from shardids.migrate.plan import Heads, Position, shown_heads
from shardids.migrate.player import Limits, enter, enter_session, is_concurrent, mark, named_drops
from shardids.pg.notation import named_shards, shown_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """The text for each node, and the shards left out because they are at another revision."""

    of_node: Mapping[str, str]
    elsewhere: tuple[Position, ...]


def write_scripts(
    migration: Migration, direction: Direction, start: str, target: str, shards: list[int], *, limits: Limits
) -> Scripts:
    """Return SQL that takes the shards at ``start`` to ``target``, and records that it did.

    Raises:
        BadArgument: the revision is unknown, it is in the other direction, or no shard is at ``start``.
        ClusterConflict: a revision on the way needs a connection, or a shard is half way through one.
        ConnectionFailed, UnknownShard: a shard can't be asked for its revision.
    """
    environment = migration.environment
    heads: Heads = (
        () if start == "base" else (environment.revision(environment.target(start, "up")).revision,)
    )
    end = environment.target(target, "up")
    leads: Direction = "up"
    if end == "base" or (heads and end != heads[0] and end in environment.ancestors(heads)):
        leads = "down"
    if leads != direction:
        raise BadArgument(
            f"from {shown_heads(heads)} to {end} is {leads}",
            hint=f"shardids migrate {leads} {start}:{target} --sql",
        )
    state = migration.state(shards)
    state.check()
    there = [p for p in state.positions.values() if (p.heads or ()) == heads]
    if not there:
        raise BadArgument(f"no shard is at {shown_heads(heads)}", hint="See: shardids migrate status")
    unfinished = [p.shard for p in there if p.unfinished]
    if unfinished:
        raise ClusterConflict(
            f"{named_shards(unfinished)} stopped half way through a revision",
            hint=f"Finish it first: shardids migrate {direction} {end} --shards {shown_shards(unfinished)}",
        )
    compiler = Compiler(environment, direction)
    texts: dict[str, list[str]] = {}
    for position in sorted(there, key=lambda p: p.shard):
        compiled = compiler.compile(environment.route(position.heads, end, direction))
        if compiled.reason:
            raise ClusterConflict(
                f"there is no SQL from {shown_heads(heads)} to {end}: {compiled.reason}",
                hint=f"Run it with: shardids migrate {direction} {end}",
            )
        lines = texts.setdefault(position.node, [_heading(position.node, heads, compiled)])
        lines.extend(_shard_lines(position, compiled, environment.version_table, limits))
    return Scripts(
        of_node={node: "\n".join(lines) for node, lines in texts.items()},
        elsewhere=tuple(p for p in state.positions.values() if (p.heads or ()) != heads),
    )


def _heading(node: str, heads: Heads, compiled: Compiled) -> str:
    drops = "".join(f"-- It drops {one}, with all rows.\n" for one in named_drops(compiled))
    return (
        f'-- Node "{node}", from {shown_heads(heads)} to {shown_heads(compiled.route.end)}, for psql.\n'
        "-- Each shard refuses unless it is at that revision. After an error, write the file again: it then\n"
        "-- holds the shards that are left.\n"
        f"{drops}"
        "\\set ON_ERROR_STOP on\n"
    )


def _shard_lines(position: Position, compiled: Compiled, table: str, limits: Limits) -> Iterator[str]:
    heads, shard = position.heads, position.shard
    yield f"-- shard {shard}"
    if compiled.preface:
        opening = enter(shard, table, heads, limits) + " \\g /dev/null"
        yield from ("begin;", opening, compiled.preface, "commit;\n")
        heads = ()
    for stage in compiled.stages:
        for number, part in enumerate(stage.parts):
            opening = enter(shard, table, heads, limits) + " \\g /dev/null"
            if part.in_transaction:
                after = _marks(table, compiled.direction, stage, number + 1)
                yield from ("begin;", opening, part.sql, *after, "commit;\n")
            else:
                if number == 0:
                    begun = _marks(table, compiled.direction, stage, 0)
                    yield from ("begin;", opening, *begun, "commit;\n")
                waits = is_concurrent(part.sql)
                yield enter_session(shard, limits, waits=waits) + " \\g /dev/null"
                yield part.sql + "\n"
                done = _marks(table, compiled.direction, stage, number + 1)
                yield from ("begin;", opening, *done, "commit;\n")
        heads = stage.end


def _marks(table: str, direction: Direction, stage: Stage, count: int) -> list[str]:
    return [f"{statement} \\g /dev/null" for statement in mark(table, direction, stage, count)]
