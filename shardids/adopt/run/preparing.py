"""Prepares the shards for an adoption: writes revisions that make their tables like those of the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.plan.document import Kind, Plan, TablePlan
from shardids.adopt.plan.drawing import drawn_keys
from shardids.adopt.plan.facts import column_name
from shardids.adopt.plan.findings import is_crossing
from shardids.adopt.run.requirements import refuse
from shardids.adopt.run.sides import Sides, Taker, opened_sides, source_url
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, ShardidsError
from shardids.migrate.environment import Environment
from shardids.migrate.scaffold import write_environment, write_revision
from shardids.pg.definitions import (
    Column,
    Constraint,
    Definition,
    Grant,
    Index,
    Type,
    read_definitions,
    read_types,
)
from shardids.pg.definitions import Sequence as Numbers
from shardids.pg.queries import AS_IS
from shardids.replication.subscriptions import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """How a table is made.

    Attributes:
        structure: the table of the source.
        name: how the statements call it: bare in a shard, with its schema on a node.
        drawn: defaults other than at the source, by column.
        wide: the columns that become ``bigint``.
        has_numbers: sequences of the source come along, one for each shard.
        foreign_keys: those that hold, each with the name of the table that it refers to.
        with_grants: roles get the privileges that they have at the source.
    """

    structure: Definition
    name: str
    drawn: Mapping[str, str | None] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    has_numbers: bool = False
    foreign_keys: Sequence[tuple[Constraint, str]] = ()
    with_grants: bool = True


@dataclass(slots=True)
class Statements:
    """SQL that makes objects, SQL that undoes it, and differences from the source, each with the reason."""

    tables: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    undo: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    @property
    def all(self) -> tuple[str, ...]:
        """Returns the statements in their order: foreign keys once all tables are there."""
        return (*self.tables, *self.after)


def make_type(type_: Type, to: Statements) -> None:
    """Add an enum or a domain, under the name that it has at the source."""
    if type_.kind == "e":
        to.tables.append(f"create type {type_.name} as enum ({', '.join(map(literal, type_.labels))})")
    else:
        parts = [f"create domain {type_.name} as {type_.base}"]
        parts += [f"collate {type_.collation}"] if type_.collation else []
        parts += [f"default {type_.default}"] if type_.default is not None else []
        parts += ["not null"] if type_.not_null else []
        to.tables.append(" ".join([*parts, *type_.checks]))
    what = "type" if type_.kind == "e" else "domain"
    to.tables += _comment(f"{what} {type_.name}", type_.comment)
    to.undo.insert(0, f"drop {what} {type_.name}")


def make_table(making: Making, to: Statements) -> None:
    """Add a table with all that comes along, and name the rest."""
    table, name = making.structure, making.name
    numbers = table.sequences if making.has_numbers else ()
    drawn = [one for one in numbers if any(one.qualified in c.sequences for c in _numbered(making))]
    for one in drawn:
        to.tables.append(_create_sequence(one))
        to.tables += _comment(f"sequence {one.name}", one.comment)
    body = [_column(column, making, to) for column in table.columns.values()]
    body += [
        f"constraint {one.name} {one.definition}"
        for one in table.constraints
        if one.kind != "f" and _is_obeyed(one, table, to)
    ]
    options = f" with ({', '.join(table.options)})" if table.options else ""
    lines = ",\n  ".join(body)
    to.tables.append(f"create table {name} (\n  {lines}\n){options}")
    to.undo.insert(0, f"drop table {name}")
    for one in drawn:
        if one.owner is not None:
            owner = table.columns[one.owner].sql
            to.tables.append(f"alter sequence {one.name} owned by {name}.{owner}")
        else:
            to.undo.insert(1, f"drop sequence {one.name}")
    to.tables += _column_settings(making)
    to.tables += [_index(one, table, name) for one in table.indexes if _is_usable(one, table, to)]
    to.tables += _comments(making)
    if not any(one.kind == "p" for one in table.constraints):
        # Without a key a changed row is found, while rows are copied or moved, by all of it.
        to.tables.append(f"alter table {name} replica identity full")
    if table.has_row_security:
        to.tables.append(f"alter table {name} enable row level security")
        to.differs.append(f"{table.name}: its policies are not made: until they are, clients see no row")
    if making.with_grants:
        to.tables += _grants(f"table {name}", table.grants)
        for one in drawn:
            to.tables += _grants(f"sequence {one.name}", one.grants)
    to.after += [_foreign_key(one, table, name, refers_to) for one, refers_to in making.foreign_keys]


def _numbered(making: Making) -> Iterator[Column]:
    return (
        one for one in making.structure.columns.values() if one.sequences and one.name not in making.drawn
    )


def _column(column: Column, making: Making, to: Statements) -> str:
    parts = [column.sql, "bigint" if column.name in making.wide else column.type]
    parts += [f"collate {column.collation}"] if column.collation else []
    if column.generated:
        how = "virtual" if column.generated == "v" else "stored"
        parts.append(f"generated always as ({column.default}) {how}")
    elif (default := _default(column, making, to)) is not None:
        parts.append(f"default {default}")
    parts += ["not null"] if column.never_null else []
    return " ".join(parts)


def _default(column: Column, making: Making, to: Statements) -> str | None:
    subject = f"{making.structure.name}.{column.sql}"
    if column.name in making.drawn:
        if (default := making.drawn[column.name]) is None:
            to.differs.append(f"{subject}: no default: applications make the key, which decides the shard")
        elif not column.sequences:
            to.differs.append(f"{subject}: draws from {default}, at the source from {column.default}")
        return default
    if not column.sequences:
        return column.default
    if not making.has_numbers:
        to.differs.append(f"{subject}: no default: each node would number its own rows")
        return None
    by_name = {one.qualified: one for one in making.structure.sequences}
    to.differs.append(
        f"{subject}: each shard numbers its own rows: the same number is drawn in several shards"
    )
    default = column.default
    if default is None:
        return f"nextval({_regclass(by_name[column.sequences[0]].name)})"
    for one in column.sequences:
        default = _once(default, _regclass(one), _regclass(by_name[one].name), subject)
    return default


def _regclass(name: str) -> str:
    return f"{literal(name)}::regclass"


def _create_sequence(one: Numbers) -> str:
    return (
        f"create sequence {one.name} as {one.type} increment by {one.increment}"
        f" minvalue {one.least} maxvalue {one.greatest} start with {one.start} cache {one.cache}"
        f"{' cycle' if one.cycles else ''}"
    )


def _column_settings(making: Making) -> Iterator[str]:
    for column in making.structure.columns.values():
        alter = f"alter table {making.name} alter column {column.sql} set"
        if column.storage:
            yield f"{alter} storage {column.storage}"
        if column.compression:
            yield f"{alter} compression {column.compression}"
        if column.statistics is not None:
            yield f"{alter} statistics {column.statistics}"


def _is_obeyed(constraint: Constraint, table: Definition, to: Statements) -> bool:
    if not constraint.is_valid:
        to.differs.append(
            f"{table.name}, {constraint.name}: left out, since rows may not obey it: it is NOT VALID"
        )
    return constraint.is_valid


def _is_usable(index: Index, table: Definition, to: Statements) -> bool:
    if not index.is_valid:
        to.differs.append(f"{table.name}, {index.name}: left out, since it is invalid at the source")
    return index.is_valid


def _index(index: Index, table: Definition, name: str) -> str:
    # Of a partitioned table the definition has ONLY.
    found = next(
        (one for one in ("ON ONLY ", "ON ") if f" {one}{table.qualified} USING " in index.definition), "ON "
    )
    return _once(index.definition, f" {found}{table.qualified} USING ", f" ON {name} USING ", index.name)


def _foreign_key(key: Constraint, table: Definition, name: str, refers_to: str) -> str:
    definition = _once(
        key.definition,
        f" REFERENCES {key.referenced}(",
        f" REFERENCES {refers_to}(",
        f"{table.name}, {key.name}",
    )
    return f"alter table {name} add constraint {key.name} {definition}"


def _comments(making: Making) -> Iterator[str]:
    table, name = making.structure, making.name
    yield from _comment(f"table {name}", table.comment)
    for column in table.columns.values():
        yield from _comment(f"column {name}.{column.sql}", column.comment)
    for one in table.constraints:
        if one.kind != "f" and one.is_valid:
            yield from _comment(f"constraint {one.name} on {name}", one.comment)
    schema, _, _ = name.rpartition(table.table_sql)
    for index in table.indexes:
        if index.is_valid:
            yield from _comment(f"index {schema}{index.name}", index.comment)


def _comment(subject: str, comment: str | None) -> Iterator[str]:
    if comment is not None:
        yield f"comment on {subject} is {literal(comment)}"


def _grants(subject: str, grants: Iterable[Grant]) -> Iterator[str]:
    granted: dict[tuple[str, bool], list[str]] = {}
    for one in grants:
        what = one.privilege.lower() + (f" ({one.column})" if one.column else "")
        granted.setdefault((one.role or "public", one.may_grant), []).append(what)
    for (role, may_grant), privileges in granted.items():
        option = " with grant option" if may_grant else ""
        yield f"grant {', '.join(privileges)} on {subject} to {role}{option}"


def _once(text: str, old: str, new: str, subject: str) -> str:
    """Replace what must be there exactly once.

    Raises:
        AdoptionRefused: it is not: replacing might change something else.
    """
    if text.count(old) != 1:
        raise AdoptionRefused(
            f"{subject} can't be made for the shards: {text}",
            hint="Make the tables by a migration of your own; see docs/how-to/adopt.md.",
        )
    return text.replace(old, new)


def literal(value: str) -> str:
    """Return a text as SQL writes it."""
    quoted = "'" + value.replace("'", "''") + "'"
    return f"E{quoted.replace(chr(92), chr(92) * 2)}" if "\\" in value else quoted


def widened(
    structures: Mapping[str, Definition], keys: Mapping[str, Iterable[str]]
) -> dict[str, frozenset[str]]:
    """Return the columns of each table that have to take IDs of the shards: keys, and what refers to them.

    ``keys``: the columns of the tables that are split.
    """
    reached = {(name, column) for name, columns in keys.items() for column in columns}
    names = {one.qualified: one.name for one in structures.values()}
    hops = [
        ((name, own), (names[key.referenced], theirs))
        for name, table in structures.items()
        if name in keys
        for key in table.constraints
        if key.referenced in names
        for own, theirs in zip(key.columns, key.referenced_columns, strict=True)
    ]
    while found := {own for own, theirs in hops if theirs in reached} - reached:
        reached |= found
    return {
        name: frozenset(c.name for c in table.columns.values() if c.is_narrow and (name, c.name) in reached)
        for name, table in structures.items()
    }


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
    """Collects statements for the nodes and for their shards."""

    def __init__(self, plan: Plan, structures: Mapping[str, Definition], *, with_grants: bool) -> None:
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
        to = self._shard if is_split else self._node
        making = Making(
            structure=structure,
            name=structure.table_sql if is_split else structure.qualified,
            drawn=drawn_keys(structure.columns, table.id, table.root_key) if is_split else {},
            wide=self._wide[table.name],
            has_numbers=is_split,
            foreign_keys=list(self._foreign_keys(structure, to)),
            with_grants=self._with_grants,
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
    """Run the statements on a node and in one of its shards, and roll back.

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
                hint="Create the functions, extensions and types that they use first: shardids migrate"
                " revision --node. Tables of their names must not.",
            ) from error
        finally:
            transaction.rollback()


def _run(connection: Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        connection.exec_driver_sql(statement, execution_options=AS_IS)
