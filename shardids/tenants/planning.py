"""The plan of a key's move: the rows that it takes along, if nothing stands in its way. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from shlex import quote
from uuid import UUID

from psycopg import sql
from sqlalchemy import Connection, Engine

from shardids.adopt.plan.paths import parse_name
from shardids.catalog.keys.homes import refused_keys, shard_of_key
from shardids.catalog.keys.known import region_of
from shardids.catalog.regions import existing_region
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import schema_name
from shardids.errors import BadArgument, ClusterConflict, MoveRefused
from shardids.mover.journal import refuse_adoption
from shardids.replication.sides import Directory, Side, guard, move_nodes
from shardids.replication.subscriptions import Refusal, refused
from shardids.tenants.entries import refuse_unfit
from shardids.tenants.examining import examine, require_trusted, tables
from shardids.tenants.family import Choices, Family, Part, read_family, run
from shardids.tenants.journal import KeyJournal, KeyMove, all_key_moves
from shardids.tenants.making import NewShard, planned
from shardids.tenants.unclear import unclear_counters, unclear_ids


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
    catalog: Catalog,
    key: str,
    target: int | None,
    choices: Choices | None,
    *,
    new: NewShard | None = None,
    back: bool = False,
    trusted: Sequence[str] = (),
) -> KeyPlan:
    """Find out whether a key can be moved to a shard; change nothing. Takes the arguments of :func:`move`.

    ``trusted`` are roles whose code may run as the session's.

    Raises:
        BadArgument: a name is not found, or ``key`` is not a key of the root's type.
        ClusterConflict: the key lives in that shard, or a move of it or an adoption is not over.
        MoveRefused: any other reason.
    """
    with KeyJournal.opened(catalog, key) as journal:
        journal.refuse_open()
        target, choices = chosen(catalog, key, target, choices, new=new, back=back)
        if new is None:
            return examined(catalog, key, target, choices, trusted)[0]
        found, _ = examined(catalog, key, None, choices, trusted)
        number, node = planned(catalog, new, found.source)
        return replace(found, target=number, target_node=node)


def chosen(
    catalog: Catalog,
    key: str,
    target: int | None,
    choices: Choices | None,
    *,
    new: NewShard | None,
    back: bool,
) -> tuple[int | None, Choices]:
    """Return where a key goes, and how its rows are found: as the last time if the caller does not say.

    A shard that is ``new`` has no number yet.
    """
    if back or choices is None or not choices.root:
        last = _last_move(catalog, key, choices)
        if back:
            if last is None:
                raise ClusterConflict(f"key {key!r} was never moved", hint="Name a shard: --to-shard N")
            target = last.source
        if last is not None and (choices is None or not choices.root):
            choices = Choices.of(last.choices)
    if target is None and new is None:
        raise BadArgument("where to is missing", hint="Name the shard: --to-shard N, or --new-shard")
    if choices is None or not choices.root:
        raise BadArgument("the root is missing", hint="Name the table with the key's row: --root users.email")
    return target, choices


def _last_move(catalog: Catalog, key: str, choices: Choices | None) -> KeyMove | None:
    """Return the last move of a key that the caller describes; ``None`` if it was never moved.

    Raises:
        BadArgument: keys of several kinds with that text were moved, and the description fits more than one.
    """
    moves = [one for one in all_key_moves(catalog) if one.is_of(key) and one.outcome == "moved"]
    if choices is not None and choices.root:
        moves = [one for one in moves if region_of(one.kind) == (choices.region or None)]
        if len({one.kind for one in moves}) > 1:
            moves = [one for one in moves if one.choices["root"] == choices.root] or moves
    kinds = sorted({one.kind for one in moves})
    if len(kinds) > 1:
        raise BadArgument(
            f"keys {key!r} of several kinds were moved: {', '.join(kinds)}",
            hint="Name the table and the column with the key, as when it was moved: --root TABLE.COLUMN, and"
            f" --region if it is of one. The moves: shardids tenant move {quote(key)} --list",
        )
    return moves[-1] if moves else None


def examined(
    catalog: Catalog, key: str, target: int | None, choices: Choices, trusted: Sequence[str]
) -> tuple[KeyPlan, Family]:
    """Return the plan of a move and the key's tables. Raises as :func:`plan` does.

    Without ``target``, of a move to a shard that is not made yet; the plan names the source in its place.
    """
    refuse_adoption(catalog)
    directory = Directory.read(catalog)
    any_shard = min(directory.placement.node_of) if target is None else target
    node = directory.placement.locate(any_shard).name
    schema = schema_name(directory.schema_prefix, any_shard)
    with (
        move_nodes(directory.placement, directory.login, name="shardids_key_check") as nodes,
        nodes[node].begin() as connection,
    ):
        require_trusted(connection, any_shard, trusted)
        # All shards have the same tables; the kind of the key follows from the type of its column.
        kind = read_family(connection, schema, key, choices).kind
    with catalog.engine.connect() as connection:
        source = shard_of_key(connection, kind, key)
    if source == target:
        raise ClusterConflict(f"key {key!r} lives in shard {target} already")
    if choices.region and target is None:
        raise ClusterConflict(
            f'keys of region "{choices.region}" live in its shards, and a new one would be of none',
            hint=f"Name a shard of the region that is empty: --to-shard N; its shards:"
            f" {existing_region(choices.region, directory.placement.regions)}",
        )
    if choices.region and target not in existing_region(choices.region, directory.placement.regions).shards:
        raise ClusterConflict(f'shard {target} is not of region "{choices.region}"')
    with (
        ends_of(directory, source, source if target is None else target, name="shardids_key_check") as ends,
        ends.source.begin() as there,
        ends.target.begin() as here,
    ):
        require_trusted(there, source, trusted)
        if target is not None:
            require_trusted(here, target, trusted)
        family = read_family(there, ends.source_schema, key, choices)
        refusals = examine(family, there, None if target is None else (here, ends.target_schema))
        refusals += unclear_ids(family, there, catalog.describe().layout)
        refusals += unclear_counters(family, there, ends.source_schema, choices)
        if target is not None:
            refusals += unclear_counters(family, here, ends.target_schema, choices)
            refusals += _left(catalog, family, here, target)
        shards = [source] if target is None else [source, target]
        refusals += refuse_unfit(catalog, directory.placement, family, shards)
        _refuse(family, source, target, refusals)
        rows = {part.name: _count(there, family, part) for part in family.parts}
    found = KeyPlan(
        kind=family.kind,
        key=family.key,
        source=source,
        target=source if target is None else target,
        source_node=ends.source.name,
        target_node=ends.target.name,
        rows=rows,
        loose=choices.loose,
    )
    return found, family


def refuse_new_tables(catalog: Catalog, move: KeyMove, family: Family, source: Connection) -> None:
    """Refuse tables that were made or changed while a move was interrupted, for the reasons of a plan.

    Raises:
        MoveRefused: there are some.
    """
    refusals = list(tables(family, source)) or list(unclear_ids(family, source, catalog.describe().layout))
    _refuse(family, move.source, move.target, refusals)


def _left(catalog: Catalog, family: Family, there: Connection, target: int) -> Iterator[Refusal]:
    """Require that the target refuses no key that has left it with the primary key of this one's root.

    Refusals compare it, where each shard numbers the root's rows by itself.
    """
    moves = {one.id: one for one in all_key_moves(catalog)}
    for one in refused_keys(there):
        past = moves.get(one.move)
        if past is None or one.shard != target or (past.kind, past.key) == (family.kind, family.key):
            continue
        if past.choices["anchor"] == family.anchor and parse_name(past.choices["root"])[0] == family.root:
            yield Refusal(
                reason=f"shard {target} refuses rows of table {family.root} with primary key {family.anchor}:"
                f" it is that of key {past.key!r}, which has left it",
                remedy="Move the key to another shard, or give its row another primary key, with all rows"
                " that have it.",
            )


def _count(connection: Connection, family: Family, part: Part) -> int:
    query = sql.SQL("select count(*) from {} a where {}").format(
        sql.Identifier(family.schema, part.name), family.owns(part, "a", family.schema)
    )
    return int(run(connection, query).scalar_one())


def _refuse(family: Family, source: int, target: int | None, refusals: Sequence[Refusal]) -> None:
    if not refusals:
        return
    to = "a new one" if target is None else target
    raise refused(f"key {family.key!r} can't be moved from shard {source} to {to}", refusals, MoveRefused)
