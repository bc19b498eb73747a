"""Prepares the shards for an adoption: writes revisions that make their tables like those of the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.definitions import AS_IS
from shardids.adopt.facts import column_name
from shardids.adopt.key_findings import is_crossing
from shardids.adopt.making import Making, Statements, make_table, make_type, widened
from shardids.adopt.plan import Kind, Plan, TablePlan
from shardids.adopt.requirements import refuse
from shardids.adopt.sides import Sides, Taker, opened_sides, source_url
from shardids.adopt.structure import Constraint, Structure, Type, read_structures, read_types
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, ShardidsError
from shardids.migrate.environment import Environment
from shardids.migrate.scaffold import write_environment, write_revision
from shardids.mover.requirements import Refusal

_SPLIT: Final = (Kind.ROOT, Kind.DIRECT, Kind.DERIVED)
_MESSAGE: Final = "tables of the adopted database"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Statements that make the tables.

    Attributes:
        node: to run once on each node; none if all is there.
        shard: to run in each shard.
        node_undo, shard_undo: what takes them back.
        differs: what is otherwise than at the source, with the reason.
    """

    node: tuple[str, ...]
    shard: tuple[str, ...]
    node_undo: tuple[str, ...]
    shard_undo: tuple[str, ...]
    differs: tuple[str, ...]


def prepare(catalog: Catalog, plan: Plan, *, source: str | None = None, with_grants: bool = True) -> Prepared:
    """Returns statements that make the plan's tables, having tried them on each node; changes nothing.

    Args:
        catalog: the cluster that adopts.
        plan: the plan.
        source: the source's URL, if it differs from the plan's, or to give a password.
        with_grants: roles get the privileges that they have on the source's tables.

    Raises:
        AdoptionRefused: a table can't be made; the message has the reason, of a node its own.
    """
    url = source_url(catalog, plan.source, source)
    with opened_sides(catalog, plan, url, name="shardids_adopt_prepare") as sides:
        wanted = {table.name: table for table in plan.tables if table.kind is not Kind.LOOSE}
        with sides.source.engine.connect() as connection:
            structures = read_structures(connection, wanted)
            types = read_types(connection, wanted)
        missing = [name for name in wanted if name not in structures]
        again = "Write the plan again: shardids adopt plan"
        refuse(plan, [Refusal(reason=f"the source has no table {name}", remedy=again) for name in missing])
        writer = _Writer(plan, structures, with_grants=with_grants)
        for one in types:
            writer.add_type(one, is_there=_is_there(sides, "to_regtype", one.name))
        for table in wanted.values():
            in_place = table.kind is Kind.REFERENCE and _is_there(sides, "to_regclass", table.name)
            if not in_place:
                writer.add_table(table)
        refuse(plan, list(_missing_roles(sides, writer.roles)))
        prepared = writer.prepared()
        for taker in sides.takers:
            _try(taker, prepared)
        return prepared


def write(prepared: Prepared, folder: Path) -> list[Path]:
    """Writes the statements as revisions of the application, after the newest; returns their files.

    Makes an environment without models if the folder does not exist.

    Raises:
        BadArgument: the folder holds no environment, or there are several heads.
    """
    if not folder.exists():
        write_environment(folder)
    paths = []
    if prepared.node:
        paths.append(_revision(folder, prepared.node, prepared.node_undo, for_nodes=True))
    if prepared.shard:
        paths.append(_revision(folder, prepared.shard, prepared.shard_undo, for_nodes=False))
    return paths


def _revision(folder: Path, up: Iterable[str], down: Iterable[str], *, for_nodes: bool) -> Path:
    message = f"{_MESSAGE}, on nodes" if for_nodes else _MESSAGE
    return write_revision(Environment.at(folder), message, up, down, for_nodes=for_nodes)


class _Writer:
    """Collects statements for the nodes and for their shards."""

    def __init__(self, plan: Plan, structures: Mapping[str, Structure], *, with_grants: bool) -> None:
        self._plans = {table.name: table for table in plan.tables}
        self._structures = structures
        self._names = {one.qualified: one.name for one in structures.values()}
        self._with_grants = with_grants
        self._crossing = {one.subject for one in plan.findings if is_crossing(one)}
        self._wide = widened(
            structures, {name: _keys(self._plans[name]) for name in structures if self._is_split(name)}
        )
        self._node, self._shard = Statements(), Statements()
        self._schemas: dict[str, None] = {}
        self.roles: set[str] = set()

    def add_type(self, type_: Type, *, is_there: bool) -> None:
        if not is_there:
            self._schemas[type_.schema] = None
            make_type(type_, self._node)

    def add_table(self, table: TablePlan) -> None:
        structure, is_split = self._structures[table.name], self._is_split(table.name)
        column = structure.columns.get(table.id or "") if is_split else None
        to = self._shard if is_split else self._node
        making = Making(
            structure=structure,
            name=structure.table if is_split else structure.qualified,
            key=column.name if column is not None and column.sequences else None,
            wide=self._wide[table.name],
            has_numbers=is_split,
            foreign_keys=list(self._foreign_keys(structure, to)),
            with_grants=self._with_grants,
        )
        if not is_split:
            self._schemas[structure.schema] = None
        if self._with_grants:
            granted = (*structure.grants, *(grant for one in structure.sequences for grant in one.grants))
            self.roles |= {one.role for one in granted if one.role is not None}
        make_table(making, to)

    def _is_split(self, name: str) -> bool:
        return self._plans[name].kind in _SPLIT

    def _foreign_keys(self, table: Structure, to: Statements) -> Iterator[tuple[Constraint, str]]:
        for key in table.constraints:
            if key.kind != "f":
                continue
            parent = self._names.get(key.referenced or "")
            subject = f"{table.name}, {key.name}"
            if parent is None:
                to.differs.append(
                    f"{subject}: left out, since it refers to {key.referenced}, which stays at the source"
                )
            elif not self._is_split(parent):
                yield key, self._structures[parent].qualified
            elif not self._is_split(table.name):
                to.differs.append(f"{subject}: left out, since it refers to {key.referenced}, which is split")
            elif column_name(table.name, *key.columns) in self._crossing:
                to.differs.append(f"{subject}: left out, since it may refer to rows of other shards")
            else:
                yield key, self._structures[parent].table

    def prepared(self) -> Prepared:
        """Returns the statements."""
        made = [name for name in self._schemas if name != "public"]
        schemas = [f"create schema if not exists {name}" for name in made]
        if self._with_grants and made:
            roles = sorted(self.roles)
            schemas += [f"grant usage on schema {name} to {role}" for name in made for role in roles]
        return Prepared(
            node=(*schemas, *self._node.all),
            shard=self._shard.all,
            node_undo=tuple(self._node.undo),
            shard_undo=tuple(self._shard.undo),
            differs=(*self._node.differs, *self._shard.differs),
        )


def _keys(table: TablePlan) -> set[str]:
    """Returns the columns that hold IDs of the cluster."""
    own = table.key if table.kind is not Kind.DERIVED else None
    return {name for name in (table.id, own) if name is not None}


def _is_there(sides: Sides, look_up: str, name: str) -> bool:
    """Returns whether every node has an object."""
    found = []
    query = text(f"select {look_up}(:name) is not null")
    for taker in sides.takers:
        with taker.side.autocommit() as connection:
            found.append(bool(connection.scalar(query, {"name": name})))
    return all(found)


def _missing_roles(sides: Sides, roles: set[str]) -> Iterator[Refusal]:
    for taker in sides.takers:
        with taker.side.autocommit() as connection:
            missing = connection.scalars(
                text("select r from unnest(cast(:roles as text[])) r where to_regrole(r) is null order by r"),
                {"roles": sorted(roles)},
            )
            for role in missing:
                yield Refusal(
                    reason=f'node "{taker.side.name}" has no role {role}, which has privileges on tables',
                    remedy=f"create role {role} there, or prepare without privileges: --no-grants",
                )


def _try(taker: Taker, prepared: Prepared) -> None:
    """Runs the statements on a node and in one of its shards, and rolls back.

    Raises:
        AdoptionRefused: one fails.
    """
    with taker.side.engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("select set_config('lock_timeout', '5s', true)"))
        try:
            connection.execute(text("select set_config('search_path', 'public', true)"))
            _run(connection, prepared.node)
            connection.execute(
                text("select set_config('search_path', shardids.revision_path(:shard), true)"),
                {"shard": taker.shards[0]},
            )
            _run(connection, prepared.shard)
        except ShardidsError as error:
            raise AdoptionRefused(
                f'node "{taker.side.name}" can\'t have the tables: {error.message}',
                hint="What they use (functions, extensions, types) has to be there first: shardids migrate"
                " revision --node. Tables of their names must not.",
            ) from error
        finally:
            transaction.rollback()


def _run(connection: Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        connection.exec_driver_sql(statement, execution_options=AS_IS)
