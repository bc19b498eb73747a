"""Prepares the shards for an adoption: writes revisions that make their tables like those of the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import text

from shardids.adopt.plan.belongings import (
    FUNCTION,
    POLICY,
    VIEW,
    Belonging,
    Sorting,
    read_belongings,
    sort_belongings,
)
from shardids.adopt.plan.document import Kind, Plan, TablePlan
from shardids.adopt.plan.drawing import drawn_keys
from shardids.adopt.plan.facts import column_name
from shardids.adopt.plan.findings import is_crossing
from shardids.adopt.run.making import (
    Making,
    Statements,
    is_obeyed,
    make_belonging,
    make_table,
    make_type,
    widened,
)
from shardids.adopt.run.requirements import refuse
from shardids.adopt.run.sides import Sides, Taker, opened_sides, source_url
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, ConnectionFailed, ShardidsError
from shardids.migrate.environment import Environment
from shardids.migrate.scaffold import write_environment, write_revision
from shardids.pg.definitions import Constraint, Definition, Type, read_definitions, read_types
from shardids.pg.queries import AS_IS
from shardids.pg.queries import prepare as set_limits
from shardids.replication.subscriptions import Refusal

_MESSAGE: Final = "tables of the adopted database"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Statements that make the tables.

    Attributes:
        node: to run once on each node; none if all is there.
        shard: to run in each shard.
        node_undo, shard_undo: SQL that takes them back.
        differs: differences from the source, with the reason.
    """

    node: tuple[str, ...]
    shard: tuple[str, ...]
    node_undo: tuple[str, ...]
    shard_undo: tuple[str, ...]
    differs: tuple[str, ...]


def prepare(catalog: Catalog, plan: Plan, *, source: str | None = None, with_grants: bool = True) -> Prepared:
    """Return statements that make the plan's tables, having tried them on each node; change nothing.

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
        sides.await_source()
        with sides.source.engine.connect() as connection:
            structures = read_definitions(connection, wanted, is_whole=True)
            types = read_types(connection, wanted)
            with connection.begin():
                set_limits(connection)
                belongings = read_belongings(connection)
        missing = [name for name in wanted if name not in structures]
        again = "Write the plan again: shardids adopt plan"
        refuse(plan, [Refusal(reason=f"the source has no table {name}", remedy=again) for name in missing])
        new_types = [one for one in types if not _is_there(sides, "to_regtype", one.name)]
        there = {
            table.name
            for table in wanted.values()
            if table.kind is Kind.REFERENCE and _is_there(sides, "to_regclass", table.name)
        }
        there |= {one.name for one in belongings if _is_on_nodes(sides, one)}
        refused: dict[tuple[str, int], str] = {}
        while True:
            kinds = {table.name: table.kind for table in plan.tables}
            sorting = sort_belongings(belongings, kinds, refused)
            writer = _Writer(plan, structures, sorting, there, with_grants=with_grants)
            for one in new_types:
                writer.add_type(one)
            writer.add_functions()
            for table in wanted.values():
                if table.name not in there:
                    writer.add_table(table)
            writer.add_others()
            refuse(plan, list(_missing_roles(sides, writer)))
            prepared = writer.prepared()
            found: dict[tuple[str, int], str] = {}
            for taker in sides.takers:
                found = _try(taker, prepared, writer.optional) | found
            if not found:
                return prepared
            # What names these is not made either.
            refused |= found


def write(prepared: Prepared, folder: Path) -> list[Path]:
    """Write the statements as revisions of the application, after the newest; return their files.

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
    """Collects statements for the nodes and for their shards.

    Attributes:
        roles: that have privileges; ``policy_roles``: that policies name.
        optional: statements that may fail, each with the object that it makes.
    """

    def __init__(
        self,
        plan: Plan,
        structures: Mapping[str, Definition],
        sorting: Sorting,
        there: set[str],
        *,
        with_grants: bool,
    ) -> None:
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
        self.policy_roles: set[str] = set()
        self.optional: dict[str, Belonging] = {}
        self._functions = [one for one in sorting.on_nodes if one.kind == FUNCTION and one.name not in there]
        # A table that is there has its policies, and may have others.
        self._on_nodes = [
            one for one in sorting.on_nodes if one.kind != FUNCTION and one.relation not in there
        ]
        self._in_shards = sorting.in_shards
        self._with_policies = {
            one.relation for one in (*self._on_nodes, *self._in_shards) if one.kind == POLICY
        }
        self._node.differs += [f"{one.shown}: the {one.kind} is left out: {why}" for one, why in sorting.left]

    def add_type(self, type_: Type) -> None:
        self._schemas[type_.schema] = None
        make_type(type_, self._node)

    def add_functions(self) -> None:
        """Add functions, once all types are there."""
        if self._functions:
            # They name tables of the shards, which come later. Each is checked when these have been tried.
            self._node.tables.append("set local check_function_bodies = off")
        for one in self._functions:
            self._add(one, {}, self._node)

    def add_others(self) -> None:
        """Add views, triggers and policies, once all tables are there."""
        bare = {
            one.qualified: one.table_sql for name, one in self._structures.items() if self._is_split(name)
        }
        bare |= {one.name: one.bare for one in self._in_shards if one.kind == VIEW}
        for one in self._on_nodes:
            self._add(one, {}, self._node)
        for one in self._in_shards:
            self._add(one, bare, self._shard)

    def _add(self, one: Belonging, names: Mapping[str, str], to: Statements) -> None:
        self.optional |= dict.fromkeys(make_belonging(one, names, to, with_grants=self._with_grants), one)
        if one.kind in (FUNCTION, VIEW) and to is self._node:
            self._schemas[one.schema] = None
        if self._with_grants:
            self.roles |= {grant.role for grant in one.grants if grant.role is not None}
        self.policy_roles |= {*one.roles}

    def add_table(self, table: TablePlan) -> None:
        structure, is_split = self._structures[table.name], self._is_split(table.name)
        to = self._shard if is_split else self._node
        making = Making(
            structure=structure,
            name=structure.table_sql if is_split else structure.qualified,
            drawn=drawn_keys(structure.columns, table.id, table.root_key) if is_split else {},
            wide=self._wide[table.name],
            has_numbers=is_split,
            foreign_keys=list(self._foreign_keys(structure, to)),
            with_grants=self._with_grants,
            has_policies=structure.qualified in self._with_policies,
        )
        if not is_split:
            self._schemas[structure.schema_sql] = None
        if self._with_grants:
            granted = (*structure.grants, *(grant for one in structure.sequences for grant in one.grants))
            self.roles |= {one.role for one in granted if one.role is not None}
        make_table(making, to)

    def _is_split(self, name: str) -> bool:
        return self._plans[name].kind.is_split

    def _foreign_keys(self, table: Definition, to: Statements) -> Iterator[tuple[Constraint, str]]:
        for key in table.constraints:
            if key.kind != "f":
                continue
            parent = self._names.get(key.referenced or "")
            subject = f"{table.name}, {key.name}"
            if not is_obeyed(key, table, to):
                continue
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
                yield key, self._structures[parent].table_sql

    def prepared(self) -> Prepared:
        """Return the statements."""
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
    """Return the columns that hold IDs of the cluster."""
    own = table.key if table.kind is not Kind.DERIVED else None
    return {name for name in (table.id, own) if name is not None}


def _is_there(sides: Sides, look_up: str, name: str) -> bool:
    """Return whether every node has an object."""
    found = []
    query = text(f"select {look_up}(:name) is not null")
    for taker in sides.takers:
        with taker.side.autocommit() as connection:
            found.append(bool(connection.scalar(query, {"name": name})))
    return all(found)


def _is_on_nodes(sides: Sides, one: Belonging) -> bool:
    """Return whether every node has a function, or a view that names no split table, of this name."""
    if one.kind not in (FUNCTION, VIEW):
        return False
    return _is_there(sides, "to_regprocedure" if one.kind == FUNCTION else "to_regclass", one.name)


def _missing_roles(sides: Sides, writer: _Writer) -> Iterator[Refusal]:
    for taker in sides.takers:
        with taker.side.autocommit() as connection:
            missing = connection.scalars(
                text("select r from unnest(cast(:roles as text[])) r where to_regrole(r) is null order by r"),
                {"roles": sorted(writer.roles | writer.policy_roles)},
            )
            for role in missing:
                is_named = role in writer.policy_roles
                why = "policies name" if is_named else "has privileges on tables"
                otherwise = "" if is_named else ", or prepare without privileges: --no-grants"
                yield Refusal(
                    reason=f'node "{taker.side.name}" has no role {role}, which {why}',
                    remedy=f"create role {role} there{otherwise}",
                )


def _try(taker: Taker, prepared: Prepared, optional: Mapping[str, Belonging]) -> dict[tuple[str, int], str]:
    """Run the statements on a node and in one of its shards, and roll back.

    ``optional``: statements that may fail, each with the object that it makes. Returns the keys of those that
    did, each with the reason.

    Raises:
        AdoptionRefused: another one fails.
    """
    refused: dict[tuple[str, int], str] = {}

    def run(statements: Iterable[str]) -> None:
        for statement in statements:
            one = optional.get(statement)
            if one is None:
                connection.exec_driver_sql(statement, execution_options=AS_IS)
            elif one.key not in refused:
                attempt(one, statement)

    def attempt(one: Belonging, statement: str) -> None:
        try:
            with connection.begin_nested():
                connection.exec_driver_sql(statement, execution_options=AS_IS)
        except ConnectionFailed:
            raise
        except ShardidsError as error:
            refused[one.key] = error.message

    with taker.side.engine.connect() as connection, connection.begin() as transaction:
        connection.execute(text("select set_config('lock_timeout', '5s', true)"))
        try:
            connection.execute(text("select set_config('search_path', 'public', true)"))
            run(prepared.node)
            connection.execute(
                text("select set_config('search_path', shardids.revision_path(:shard), true)"),
                {"shard": taker.shards[0]},
            )
            run(prepared.shard)
            connection.execute(text("select set_config('check_function_bodies', 'on', true)"))
            for one in dict.fromkeys(optional.values()):
                if one.kind == FUNCTION and one.key not in refused:
                    # Replaced by itself, with its body checked.
                    attempt(one, one.definition or "")
        except ShardidsError as error:
            raise AdoptionRefused(
                f'node "{taker.side.name}" can\'t have the tables: {error.message}',
                hint="Create the functions, extensions and types that they use first: shardids migrate"
                " revision --node. Tables of their names must not.",
            ) from error
        finally:
            transaction.rollback()
    return refused
