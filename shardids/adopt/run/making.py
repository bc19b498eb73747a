"""Statements that make objects of the source again, from what PostgreSQL prints of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardids.adopt.plan.belongings import FUNCTION, TRIGGER, VIEW, Belonging, in_shards
from shardids.errors import AdoptionRefused
from shardids.pg.definitions import Column, Constraint, Definition, Grant, Index, Type
from shardids.pg.definitions import Sequence as Numbers


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
        has_policies: its row security policies are also made.
    """

    structure: Definition
    name: str
    drawn: Mapping[str, str | None] = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    has_numbers: bool = False
    foreign_keys: Sequence[tuple[Constraint, str]] = ()
    with_grants: bool = True
    has_policies: bool = False


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
        if one.kind != "f" and is_obeyed(one, table, to)
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
    if not table.primary_key:
        # Without a key that replication can use, a row that is copied or moved is found by all of it: no row
        # is, if a column's type has no equality.
        how = f"using index {table.identity_index}" if table.identity_index is not None else "full"
        to.tables.append(f"alter table {name} replica identity {how}")
    if table.has_row_security:
        to.tables.append(f"alter table {name} enable row level security")
    if table.has_row_security and not making.has_policies:
        to.differs.append(f"{table.name}: its policies are not made: until they are, clients see no row")
    if making.with_grants:
        to.tables += _grants(f"table {name}", table.grants)
        for one in drawn:
            to.tables += _grants(f"sequence {one.name}", one.grants)
    to.after += [_foreign_key(one, table, name, refers_to) for one, refers_to in making.foreign_keys]


def make_belonging(
    one: Belonging, names: Mapping[str, str], to: Statements, *, with_grants: bool
) -> list[str]:
    """Add a function, view, trigger or policy; return its statements.

    ``names``: as :func:`in_shards` takes them.
    """
    relation = names.get(one.relation or "", one.relation)
    definition = in_shards(one.definition or "", names)
    more = []
    if one.kind == FUNCTION:
        # It is not to replace a function that somebody else has made.
        made, subject = definition.replace("CREATE OR REPLACE ", "CREATE ", 1), f"routine {one.name}"
        more += [f"revoke all on {subject} from public"] if one.has_grants else []
    elif one.kind == VIEW:
        options = f" with ({one.options})" if one.options else ""
        made, subject = f"create view {relation}{options} as\n{definition.rstrip(';')}", f"view {relation}"
    elif one.kind == TRIGGER:
        made, subject = definition, f"trigger {one.name} on {relation}"
        more += [f"alter table {relation} disable trigger {one.name}"] if one.options else []
    else:
        subject = f"policy {one.name} on {relation}"
        made = f"create {subject} {definition}"
    if with_grants:
        more += _grants(f"table {relation}" if one.kind == VIEW else subject, one.grants)
    statements = [made, *more, *_comment(subject, one.comment)]
    (to.tables if one.kind == FUNCTION else to.after).extend(statements)
    to.undo.insert(0, f"drop {subject}")
    return statements


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


def is_obeyed(constraint: Constraint, table: Definition, to: Statements) -> bool:
    """Return whether all rows obey a constraint; if they may not, say so."""
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
