"""The plan of a key's move: the rows that it takes along, if nothing stands in its way. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from uuid import UUID

from psycopg import sql
from sqlalchemy import Connection, Engine

from shardids.catalog.keys.homes import shard_of_key
from shardids.catalog.regions import existing_region
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.errors import BadArgument, ClusterConflict, MoveRefused
from shardids.mover.journal import refuse_adoption
from shardids.replication.sides import Directory, Side, guard, move_nodes
from shardids.replication.subscriptions import Refusal
from shardids.tenants.examining import examine
from shardids.tenants.family import Choices, Family, Part, read_family, run
from shardids.tenants.journal import KeyJournal, all_key_moves


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPlan:
    """The rows that a move takes along, if nothing stands in its way: their number, by table."""

    kind: str
    key: str
    source: int
    target: int
    source_node: str
    target_node: str
    rows: Mapping[str, int]
    loose: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Both shards of a move, each with an engine, also where both are on one node."""

    source: Side
    target: Side
    source_schema: str
    target_schema: str

    def engines(self, source: int, target: int) -> dict[int, tuple[str, Engine]]:
        """Return the node and the engine of each shard."""
        return {
            source: (self.source.name, self.source.engine),
            target: (self.target.name, self.target.engine),
        }


@contextmanager
def ends_of(
    directory: Directory, source: int, target: int, *, name: str, epoch: UUID | None = None
) -> Iterator[Ends]:
    """Yield both shards; with ``epoch`` their sessions work under the leases."""
    with ExitStack() as kept:
        sides = []
        for shard in (source, target):
            node = directory.placement.locate(shard).name
            engine = kept.enter_context(move_nodes(directory.placement, directory.login, name=name))[node]
            if epoch is not None:
                guard(engine, shard, epoch)
            sides.append(Side(name=node, engine=engine))
        prefix = directory.schema_prefix
        yield Ends(
            source=sides[0],
            target=sides[1],
            source_schema=schema_name(prefix, source),
            target_schema=schema_name(prefix, target),
        )


def plan(
    catalog: Catalog, key: str, target: int | None, choices: Choices | None, *, back: bool = False
) -> KeyPlan:
    """Find out whether a key can be moved to a shard; change nothing. Takes the arguments of :func:`move`.

    Raises:
        BadArgument: a name is not found, or ``key`` is not a key of the root's type.
        ClusterConflict: the key lives in that shard, or a move of it or an adoption is not over.
        MoveRefused: any other reason.
    """
    with KeyJournal.opened(catalog, key) as journal:
        journal.refuse_open()
        target, choices = chosen(catalog, key, target, choices, back=back)
        return examined(catalog, key, target, choices)[0]


def chosen(
    catalog: Catalog, key: str, target: int | None, choices: Choices | None, *, back: bool
) -> tuple[int, Choices]:
    """Return where a key goes, and how its rows are found: as the last time if the caller does not say."""
    last = next(
        (one for one in reversed(all_key_moves(catalog)) if one.key == key and one.outcome == "moved"), None
    )
    if back:
        if last is None:
            raise ClusterConflict(f"key {key!r} was never moved", hint="Name a shard: --to-shard N")
        target = last.source
    if choices is None or not choices.root:
        choices = Choices.of(last.choices) if last is not None else choices
    if target is None:
        raise BadArgument("where to is missing", hint="Name the shard: --to-shard N")
    if choices is None or not choices.root:
        raise BadArgument("the root is missing", hint="Name the table with the key's row: --root users.email")
    return target, choices


def examined(catalog: Catalog, key: str, target: int, choices: Choices) -> tuple[KeyPlan, Family]:
    """Return the plan of a move and the key's tables. Raises as :func:`plan` does."""
    refuse_adoption(catalog)
    directory = Directory.read(catalog)
    node = directory.placement.locate(target).name
    schema = schema_name(directory.schema_prefix, target)
    with (
        move_nodes(directory.placement, directory.login, name="shardids_key_check") as nodes,
        nodes[node].begin() as connection,
    ):
        # All shards have the same tables; the kind of the key follows from the type of its column.
        kind = read_family(connection, schema, key, choices).kind
    with catalog.engine.connect() as connection:
        source = shard_of_key(connection, kind, key)
    if source == target:
        raise ClusterConflict(f"key {key!r} lives in shard {target} already")
    if choices.region and target not in existing_region(choices.region, directory.placement.regions).shards:
        raise ClusterConflict(f'shard {target} is not of region "{choices.region}"')
    with (
        ends_of(directory, source, target, name="shardids_key_check") as ends,
        ends.source.begin() as there,
        ends.target.begin() as here,
    ):
        family = read_family(there, ends.source_schema, key, choices)
        _refuse(
            family,
            source,
            target,
            examine(family, there, here, ends.target_schema, directory.placement.old_ids),
        )
        rows = {part.name: _count(there, family, part) for part in family.parts}
    found = KeyPlan(
        kind=family.kind,
        key=family.key,
        source=source,
        target=target,
        source_node=ends.source.name,
        target_node=ends.target.name,
        rows=rows,
        loose=choices.loose,
    )
    return found, family


def _count(connection: Connection, family: Family, part: Part) -> int:
    query = sql.SQL("select count(*) from {} a where {}").format(
        sql.Identifier(family.schema, part.name), family.owns(part, "a", family.schema)
    )
    return int(run(connection, query).scalar_one())


def _refuse(family: Family, source: int, target: int, refusals: Sequence[Refusal]) -> None:
    if not refusals:
        return
    where = f"key {family.key!r} can't be moved from shard {source} to {target}"
    if len(refusals) == 1:
        raise MoveRefused(f"{where}: {refusals[0].reason}", hint=refusals[0].remedy)
    raise MoveRefused(
        f"{where}:\n" + "\n".join(f"- {refusal.reason}" for refusal in refusals),
        hint="\n".join(f"- {remedy}" for remedy in dict.fromkeys(refusal.remedy for refusal in refusals)),
    )
