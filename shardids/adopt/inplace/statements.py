"""The statements that put other columns in the place of a key and of what refers to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from shardids.adopt.inplace.key import SCHEMA, ForeignKey, Index, Key, Pair, Sequence
from shardids.pg.queries import quoted, statement

TRIGGER: Final = "~shardids"
"""Triggers run in the order of their names' bytes: it comes after those that change the row."""
LIMITS: Final = {"integer": (-(1 << 31), (1 << 31) - 1), "smallint": (-(1 << 15), (1 << 15) - 1)}
_ON_DELETE: Final[dict[str, LiteralString]] = {
    "a": "no action",
    "r": "restrict",
    "c": "cascade",
    "n": "set null",
}

DROP_CONSTRAINT: Final = "alter table if exists {} drop constraint if exists {}"

Sql = sql.Composable


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From the integer columns to the bigint ones, or back."""

    is_forward: bool

    def other(self, pair: Pair) -> str:
        """The column that is to take the place."""
        return pair.new_name if self.is_forward else pair.old_name

    def parked(self, pair: Pair) -> str:
        """The later name of the column that has it now."""
        return pair.old_name if self.is_forward else pair.new_name


FORWARD: Final = Way(is_forward=True)
BACK: Final = Way(is_forward=False)


def lock_all(names: list[sql.Identifier]) -> Sql:
    """Lock tables against everybody."""
    return statement("lock table {} in access exclusive mode", sql.SQL(", ").join(names))


def step_function(relid: int) -> sql.Identifier:
    """The function of a table's trigger."""
    return sql.Identifier(SCHEMA, f"step_{relid}")


def value(way: Way, pair: Pair, live: Sql) -> Sql:
    """The value of the other column, from that of the live one; NULL where the type can't hold it."""
    if way.is_forward:
        return live
    lowest, highest = LIMITS[pair.type]
    return sql.SQL(
        "case when {live} operator(pg_catalog.>=) {lowest} and {live} operator(pg_catalog.<=) {highest}"
        " then {live} end"
    ).format(live=live, lowest=lowest, highest=highest)


def make_function(way: Way, pairs: tuple[Pair, ...]) -> Sql:
    """Create the trigger's function, which fills the other columns, and give it to its schema's owner."""
    lines = [
        statement("new.{} := {}; ", way.other(pair), value(way, pair, statement("new.{}", pair.column)))
        for pair in pairs
    ]
    body = statement("begin {}return new; end", sql.SQL("").join(lines)).as_string(None)
    return sql.SQL(
        "create or replace function {name}() returns trigger language plpgsql as {body};\n"
        "do $$ begin execute format('alter function {name}() owner to %I',"
        " (select pg_get_userbyid(nspowner) from pg_namespace where nspname = {schema})); end $$"
    ).format(name=step_function(pairs[0].relid), body=sql.Literal(body), schema=sql.Literal(SCHEMA))


def add_columns(pairs: tuple[Pair, ...]) -> Iterator[Sql]:
    """Add the bigint columns of a table, and the trigger that fills them from now on."""
    relation, relid = pairs[0].relation, pairs[0].relid
    for pair in pairs:
        yield statement("alter table {} add column {} bigint", relation, pair.new_name)
    yield make_function(FORWARD, pairs)
    create = "create trigger {} before insert or update on {} for each row execute function {}()"
    yield statement(create, TRIGGER, relation, step_function(relid))
    yield statement("alter table {} enable always trigger {}", relation, TRIGGER)
    for pair in pairs:
        yield add_check(FORWARD, pair)


def add_check(way: Way, pair: Pair) -> Sql:
    """Hold the two columns in step: PostgreSQL then refuses a row where they are not."""
    other, live = way.other(pair), pair.column
    test = statement("{} is not distinct from {}", other, live)
    if pair.not_null:
        # As it is written, SET NOT NULL finds in it that no row has to be read.
        test = statement("{} is not null and {} = {}", other, other, live)
    return statement("alter table {} add constraint {} check ({}) not valid", pair.relation, pair.check, test)


def fill(way: Way, pairs: tuple[Pair, ...], first_block: int, end_block: int) -> Sql:
    """Fill the other columns of the rows in some blocks of a table."""
    live = [(way.other(pair), value(way, pair, sql.Identifier(pair.column))) for pair in pairs]
    return statement(
        "update {} set {} where ctid >= '({},0)' and ctid < '({},0)' and ({})",
        pairs[0].relation,
        sql.SQL(", ").join(statement("{} = {}", *one) for one in live),
        first_block,
        end_block,
        sql.SQL(" or ").join(statement("{} is distinct from {}", *one) for one in live),
    )


def make_index(way: Way, key: Key, index: Index) -> Sql:
    """Build an index over the other columns, while rows are written."""
    keys, included = [], []
    for column in index.columns:
        if column.name is None:
            text: Sql = sql.SQL(str(column.expression))
        else:
            pair = key.pair_of(index.schema, index.table, column.name)
            text = sql.Identifier(way.other(pair) if pair else column.name)
        if column.is_included:
            included.append(text)
            continue
        order = " desc" if column.is_descending else ""
        order += " nulls first" if column.is_nulls_first else " nulls last"
        keys.append(text + sql.SQL(order))
    unique = sql.SQL("unique " if index.is_unique else "")
    relation, columns = sql.Identifier(index.schema, index.table), sql.SQL(", ").join(keys)
    make: LiteralString = "create {}index concurrently {} on {} ({})"
    parts: list[Sql] = [statement(make, unique, index.new_name, relation, columns)]
    if included:
        parts.append(statement("include ({})", sql.SQL(", ").join(included)))
    if index.nulls_not_distinct:
        parts.append(sql.SQL("nulls not distinct"))
    if index.options:
        options = [option.partition("=") for option in index.options]
        given = [statement("{} = {}", name, sql.Literal(its)) for name, _, its in options]
        parts.append(statement("with ({})", sql.SQL(", ").join(given)))
    if index.tablespace:
        parts.append(statement("tablespace {}", index.tablespace))
    if index.predicate:
        parts.append(statement("where {}", sql.SQL(index.predicate)))
    return sql.SQL(" ").join(parts)


def add_foreign_key(way: Way, key: Key, one: ForeignKey) -> Sql:
    """Add a foreign key between the other columns; rows that are there are checked later."""
    own = key.pair_of(one.schema, one.table, one.column)
    theirs = key.pair_of(one.referenced_schema, one.referenced_table, one.referenced_column)
    return statement(
        "alter table {} add constraint {} foreign key ({}) references {} ({})"
        " on delete {} on update {} not valid",
        sql.Identifier(*one.child),
        one.new_name,
        way.other(own) if own else one.column,
        sql.Identifier(*one.parent),
        way.other(theirs) if theirs else one.referenced_column,
        sql.SQL(_ON_DELETE[one.on_delete]),
        sql.SQL(_ON_DELETE[one.on_update]),
    )


def swap(way: Way, key: Key) -> Iterator[Sql]:
    """Give the other columns the place, under locks on all tables: the catalogs change, no row does."""
    for one in key.foreign_keys:
        yield _drop_constraint(one.schema, one.table, one.name)
    # What foreign keys refer to is dropped after them.
    for index in key.indexes:
        if index.constraint:
            yield _drop_constraint(index.schema, index.table, index.constraint)
        else:
            yield statement("drop index {}", sql.Identifier(index.schema, index.name))
    if key.sequence and key.sequence.identity:
        yield _identity_off(key.key)
    for pair in key.pairs:
        yield from _swap_columns(way, pair)
    for index in key.indexes:
        yield from _take_name(index)
    for one in key.foreign_keys:
        relation = sql.Identifier(*one.child)
        yield statement("alter table {} rename constraint {} to {}", relation, one.new_name, one.name)
        if one.comment:
            yield _comment("constraint {} on {}", one.comment, one.name, relation)
    reverse = BACK if way.is_forward else FORWARD
    for pairs in key.tables.values():
        yield make_function(reverse, pairs)


def _swap_columns(way: Way, pair: Pair) -> Iterator[Sql]:
    relation, live, parked = pair.relation, pair.column, way.parked(pair)
    yield statement("alter table {} drop constraint {}", relation, pair.check)
    yield statement("alter table {} rename column {} to {}", relation, live, parked)
    yield statement("alter table {} rename column {} to {}", relation, way.other(pair), live)
    yield statement("alter table {} alter column {} drop not null", relation, parked)
    if pair.not_null_name:
        rename: LiteralString = "alter table {} rename constraint {} to {}"
        yield statement(rename, relation, pair.not_null_constraint, pair.not_null_name)
    if pair.comment:
        yield _comment("column {}.{}", pair.comment, relation, live)
        yield statement("comment on column {}.{} is null", relation, parked)


def _take_name(index: Index) -> Iterator[Sql]:
    relation = sql.Identifier(index.schema, index.table)
    if index.constraint:
        kind = sql.SQL("primary key" if index.is_primary else "unique")
        add: LiteralString = "alter table {} add constraint {} {} using index {}"
        yield statement(add, relation, index.constraint, kind, index.new_name)
        if index.constraint_comment:
            yield _comment("constraint {} on {}", index.constraint_comment, index.constraint, relation)
    else:
        new_name = sql.Identifier(index.schema, index.new_name)
        yield statement("alter index {} rename to {}", new_name, index.name)
    if index.comment:
        yield _comment("index {}", index.comment, sql.Identifier(index.schema, index.name))


def _comment(what: LiteralString, comment: str, *names: object) -> Sql:
    return statement("comment on " + what + " is {}", *names, sql.Literal(comment))


def _drop_constraint(schema: str, table: str, name: str) -> Sql:
    return statement("alter table {} drop constraint {}", sql.Identifier(schema, table), name)


def _identity_off(pair: Pair) -> Sql:
    return statement("alter table {} alter column {} drop identity", pair.relation, pair.column)


def _default(pair: Pair, value: Sql) -> Sql:
    return statement("alter table {} alter column {} set default {}", pair.relation, pair.column, value)


def identity_on(pair: Pair, sequence: Sequence, last: tuple[int, bool]) -> Iterator[Sql]:
    """Make the live column an identity column, with the sequence as it was. ``last``: its last value, and
    whether that was issued."""
    yield statement(
        "alter table {} alter column {} add generated {} as identity (sequence name {} start {} increment {}"
        " minvalue {} maxvalue {} cache {} {})",
        pair.relation,
        pair.column,
        sql.SQL("always" if sequence.identity == "a" else "by default"),
        sql.Identifier(sequence.schema, sequence.name),
        sequence.start,
        sequence.increment,
        sequence.minimum,
        sequence.maximum,
        sequence.cache,
        sql.SQL("cycle" if sequence.cycle else "no cycle"),
    )
    name = sql.Literal(quoted(sequence.schema, sequence.name))
    yield statement("select setval({}::regclass, {}, {})", name, *last)


def serial_on(pair: Pair, sequence: Sequence, parked: str | None) -> Iterator[Sql]:
    """Let the live column take its values from the sequence, and the parked one no more."""
    if parked is not None:
        yield statement("alter table {} alter column {} drop default", pair.relation, parked)
    yield _default(pair, sql.SQL(str(sequence.default)))
    if sequence.is_owned and parked is not None:
        name = sql.Identifier(sequence.schema, sequence.name)
        yield statement("alter sequence {} owned by {}.{}", name, pair.relation, pair.column)


def default_off(pair: Pair) -> Iterator[Sql]:
    """Take the live column's default away."""
    yield statement("alter table {} alter column {} drop default", pair.relation, pair.column)


def draw_on(pair: Pair, sequence: Sequence, next_id: Sql) -> Iterator[Sql]:
    """Let the live column draw from the shard."""
    if sequence.identity:
        yield _identity_off(pair)
    yield _default(pair, next_id)


def drop_columns(way: Way, key: Key) -> Iterator[Sql]:
    """Drop the objects added beside the live columns, with their dependents."""
    for one in key.foreign_keys:
        yield statement(DROP_CONSTRAINT, sql.Identifier(*one.child), one.new_name)
    for relid, pairs in key.tables.items():
        relation = pairs[0].relation
        yield statement("drop trigger if exists {} on {}", TRIGGER, relation)
        for pair in pairs:
            yield statement(DROP_CONSTRAINT, relation, pair.check)
            drop_column: LiteralString = "alter table if exists {} drop column if exists {}"
            yield statement(drop_column, relation, way.other(pair))
        yield statement("drop function if exists {}()", step_function(relid))
