"""The statements that put other columns in the place of a key and of what refers to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, LiteralString

from psycopg import sql

from shardids.inplace.inventory import ForeignKey, Index, Key, Pair, Sequence

SCHEMA: Final = "shardids_inplace"
TRIGGER: Final = "~shardids"
"""Triggers run in the order of their names' bytes: it comes after those that change the row."""
LIMITS: Final = {"integer": (-(1 << 31), (1 << 31) - 1), "smallint": (-(1 << 15), (1 << 15) - 1)}
_ON_DELETE: Final[dict[str, LiteralString]] = {
    "a": "no action",
    "r": "restrict",
    "c": "cascade",
    "n": "set null",
}

Sql = sql.Composable


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From the integer columns to the bigint ones, or back."""

    is_forward: bool

    def other(self, pair: Pair) -> str:
        """The column that is to take the place."""
        return pair.new_name if self.is_forward else pair.old_name

    def parked(self, pair: Pair) -> str:
        """What the column that has it now is called afterwards."""
        return pair.old_name if self.is_forward else pair.new_name


FORWARD: Final = Way(is_forward=True)
BACK: Final = Way(is_forward=False)


def joined(statements: Iterator[Sql]) -> Sql:
    """One text, which is sent at once."""
    return sql.SQL(";\n").join(list(statements))


def lock_all(names: list[sql.Identifier]) -> Sql:
    """Locks tables against everybody."""
    return sql.SQL("lock table {} in access exclusive mode").format(sql.SQL(", ").join(names))


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
        sql.SQL("new.{} := {}; ").format(
            sql.Identifier(way.other(pair)),
            value(way, pair, sql.SQL("new.{}").format(sql.Identifier(pair.column))),
        )
        for pair in pairs
    ]
    body = sql.SQL("begin {}return new; end").format(sql.SQL("").join(lines)).as_string(None)
    return sql.SQL(
        "create or replace function {name}() returns trigger language plpgsql as {body};\n"
        "do $$ begin execute format('alter function {name}() owner to %I',"
        " (select pg_get_userbyid(nspowner) from pg_namespace where nspname = {schema})); end $$"
    ).format(name=step_function(pairs[0].relid), body=sql.Literal(body), schema=sql.Literal(SCHEMA))


def add_columns(pairs: tuple[Pair, ...]) -> Iterator[Sql]:
    """Adds the bigint columns of a table, and the trigger that fills them from now on."""
    relation, relid = pairs[0].relation, pairs[0].relid
    for pair in pairs:
        yield sql.SQL("alter table {} add column {} bigint").format(relation, sql.Identifier(pair.new_name))
    yield make_function(FORWARD, pairs)
    yield sql.SQL(
        "create trigger {} before insert or update on {} for each row execute function {}()"
    ).format(sql.Identifier(TRIGGER), relation, step_function(relid))
    yield sql.SQL("alter table {} enable always trigger {}").format(relation, sql.Identifier(TRIGGER))
    for pair in pairs:
        yield add_check(FORWARD, pair)


def add_check(way: Way, pair: Pair) -> Sql:
    """Holds the two columns in step: PostgreSQL then refuses a row where they are not."""
    other, live = sql.Identifier(way.other(pair)), sql.Identifier(pair.column)
    test = sql.SQL("{} is not distinct from {}").format(other, live)
    if pair.not_null:
        # As it is written, SET NOT NULL finds in it that no row has to be read.
        test = sql.SQL("{other} is not null and {other} = {live}").format(other=other, live=live)
    return sql.SQL("alter table {} add constraint {} check ({}) not valid").format(
        pair.relation, pair.check, test
    )


def fill(way: Way, pairs: tuple[Pair, ...], first_block: int, end_block: int) -> Sql:
    """Fills the other columns of the rows in some blocks of a table."""
    live = [(pair, value(way, pair, sql.Identifier(pair.column))) for pair in pairs]
    return sql.SQL("update {} set {} where ctid >= '({},0)' and ctid < '({},0)' and ({})").format(
        pairs[0].relation,
        sql.SQL(", ").join(sql.SQL("{} = {}").format(sql.Identifier(way.other(p)), v) for p, v in live),
        sql.SQL(str(first_block)),
        sql.SQL(str(end_block)),
        sql.SQL(" or ").join(
            sql.SQL("{} is distinct from {}").format(sql.Identifier(way.other(p)), v) for p, v in live
        ),
    )


def make_index(way: Way, key: Key, index: Index) -> Sql:
    """Builds an index over the other columns, while rows are written."""
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
        keys.append(sql.SQL("{}{}").format(text, sql.SQL(order)))
    parts: list[Sql] = [
        sql.SQL("create {}index concurrently {} on {} ({})").format(
            sql.SQL("unique " if index.is_unique else ""),
            sql.Identifier(index.new_name),
            sql.Identifier(index.schema, index.table),
            sql.SQL(", ").join(keys),
        )
    ]
    if included:
        parts.append(sql.SQL("include ({})").format(sql.SQL(", ").join(included)))
    if index.nulls_not_distinct:
        parts.append(sql.SQL("nulls not distinct"))
    if index.options:
        options = [option.partition("=") for option in index.options]
        parts.append(
            sql.SQL("with ({})").format(
                sql.SQL(", ").join(
                    sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(its))
                    for name, _, its in options
                )
            )
        )
    if index.tablespace:
        parts.append(sql.SQL("tablespace {}").format(sql.Identifier(index.tablespace)))
    if index.predicate:
        parts.append(sql.SQL("where {}").format(sql.SQL(index.predicate)))
    return sql.SQL(" ").join(parts)


def add_foreign_key(way: Way, key: Key, one: ForeignKey) -> Sql:
    """Adds a foreign key between the other columns; rows that are there are checked later."""
    own = key.pair_of(one.schema, one.table, one.column)
    theirs = key.pair_of(one.referenced_schema, one.referenced_table, one.referenced_column)
    return sql.SQL(
        "alter table {} add constraint {} foreign key ({}) references {} ({})"
        " on delete {} on update {} not valid"
    ).format(
        sql.Identifier(one.schema, one.table),
        sql.Identifier(one.new_name),
        sql.Identifier(way.other(own) if own else one.column),
        sql.Identifier(one.referenced_schema, one.referenced_table),
        sql.Identifier(way.other(theirs) if theirs else one.referenced_column),
        sql.SQL(_ON_DELETE[one.on_delete]),
        sql.SQL(_ON_DELETE[one.on_update]),
    )


def swap(way: Way, key: Key) -> Iterator[Sql]:
    """Gives the other columns the place, under locks on all tables: the catalogs change, no row does."""
    for one in key.foreign_keys:
        yield _drop_constraint(one.schema, one.table, one.name)
    # What foreign keys refer to is dropped after them.
    for index in key.indexes:
        if index.constraint:
            yield _drop_constraint(index.schema, index.table, index.constraint)
        else:
            yield sql.SQL("drop index {}").format(sql.Identifier(index.schema, index.name))
    if key.sequence and key.sequence.identity:
        yield _identity_off(key.key, key.key.column)
    for pair in key.pairs:
        yield from _swap_columns(way, pair)
    for index in key.indexes:
        yield from _take_name(index)
    for one in key.foreign_keys:
        relation = sql.Identifier(one.schema, one.table)
        yield sql.SQL("alter table {} rename constraint {} to {}").format(
            relation, sql.Identifier(one.new_name), sql.Identifier(one.name)
        )
        if one.comment:
            yield _comment("constraint {} on {}", one.comment, sql.Identifier(one.name), relation)
    reverse = BACK if way.is_forward else FORWARD
    for pairs in key.tables.values():
        yield make_function(reverse, pairs)


def _swap_columns(way: Way, pair: Pair) -> Iterator[Sql]:
    relation, live = pair.relation, sql.Identifier(pair.column)
    parked = sql.Identifier(way.parked(pair))
    yield sql.SQL("alter table {} drop constraint {}").format(relation, pair.check)
    yield sql.SQL("alter table {} rename column {} to {}").format(relation, live, parked)
    yield sql.SQL("alter table {} rename column {} to {}").format(
        relation, sql.Identifier(way.other(pair)), live
    )
    yield sql.SQL("alter table {} alter column {} drop not null").format(relation, parked)
    if pair.not_null_name:
        yield sql.SQL("alter table {} rename constraint {} to {}").format(
            relation, pair.not_null_constraint, sql.Identifier(pair.not_null_name)
        )
    if pair.comment:
        yield _comment("column {}.{}", pair.comment, relation, live)
        yield sql.SQL("comment on column {}.{} is null").format(relation, parked)


def _take_name(index: Index) -> Iterator[Sql]:
    relation = sql.Identifier(index.schema, index.table)
    name = sql.Identifier(index.schema, index.name)
    if index.constraint:
        kind = sql.SQL("primary key" if index.is_primary else "unique")
        constraint = sql.Identifier(index.constraint)
        yield sql.SQL("alter table {} add constraint {} {} using index {}").format(
            relation, constraint, kind, sql.Identifier(index.new_name)
        )
        if index.constraint_comment:
            yield _comment("constraint {} on {}", index.constraint_comment, constraint, relation)
    else:
        yield sql.SQL("alter index {} rename to {}").format(
            sql.Identifier(index.schema, index.new_name), sql.Identifier(index.name)
        )
    if index.comment:
        yield _comment("index {}", index.comment, name)


def _comment(what: LiteralString, comment: str, *names: Sql) -> Sql:
    return sql.SQL("comment on " + what + " is {}").format(*names, sql.Literal(comment))


def _drop_constraint(schema: str, table: str, name: str) -> Sql:
    return sql.SQL("alter table {} drop constraint {}").format(
        sql.Identifier(schema, table), sql.Identifier(name)
    )


def _identity_off(pair: Pair, column: str) -> Sql:
    return sql.SQL("alter table {} alter column {} drop identity").format(
        pair.relation, sql.Identifier(column)
    )


def identity_on(pair: Pair, sequence: Sequence, last: tuple[int, bool]) -> Iterator[Sql]:
    """Makes the live column an identity column, with the sequence as it was. ``last``: its last value, and
    whether that was issued."""
    yield sql.SQL(
        "alter table {} alter column {} add generated {} as identity (sequence name {} start {} increment {}"
        " minvalue {} maxvalue {} cache {} {})"
    ).format(
        pair.relation,
        sql.Identifier(pair.column),
        sql.SQL("always" if sequence.identity == "a" else "by default"),
        sql.Identifier(sequence.schema, sequence.name),
        sequence.start,
        sequence.increment,
        sequence.minimum,
        sequence.maximum,
        sequence.cache,
        sql.SQL("cycle" if sequence.cycle else "no cycle"),
    )
    name = sql.Literal(sql.Identifier(sequence.schema, sequence.name).as_string(None))
    yield sql.SQL("select setval({}::regclass, {}, {})").format(name, last[0], sql.Literal(last[1]))


def serial_on(pair: Pair, sequence: Sequence, parked: str | None) -> Iterator[Sql]:
    """Lets the live column take its values from the sequence, and the parked one no more."""
    if parked is not None:
        yield sql.SQL("alter table {} alter column {} drop default").format(
            pair.relation, sql.Identifier(parked)
        )
    yield sql.SQL("alter table {} alter column {} set default {}").format(
        pair.relation,
        sql.Identifier(pair.column),
        sql.SQL(str(sequence.default)),
    )
    if sequence.is_owned and parked is not None:
        yield sql.SQL("alter sequence {} owned by {}.{}").format(
            sql.Identifier(sequence.schema, sequence.name), pair.relation, sql.Identifier(pair.column)
        )


def default_off(pair: Pair) -> Iterator[Sql]:
    """Takes the live column's default away."""
    yield sql.SQL("alter table {} alter column {} drop default").format(
        pair.relation, sql.Identifier(pair.column)
    )


def draw_on(pair: Pair, sequence: Sequence, next_id: Sql) -> Iterator[Sql]:
    """Lets the live column draw from the shard."""
    if sequence.identity:
        yield _identity_off(pair, pair.column)
    yield sql.SQL("alter table {} alter column {} set default {}").format(
        pair.relation, sql.Identifier(pair.column), next_id
    )


def drop_columns(way: Way, key: Key) -> Iterator[Sql]:
    """Drops what was added beside the live columns, with what hangs on it."""
    for one in key.foreign_keys:
        yield sql.SQL("alter table if exists {} drop constraint if exists {}").format(
            sql.Identifier(one.schema, one.table), sql.Identifier(one.new_name)
        )
    for relid, pairs in key.tables.items():
        relation = pairs[0].relation
        yield sql.SQL("drop trigger if exists {} on {}").format(sql.Identifier(TRIGGER), relation)
        for pair in pairs:
            yield sql.SQL("alter table if exists {} drop constraint if exists {}").format(
                relation, pair.check
            )
            yield sql.SQL("alter table if exists {} drop column if exists {}").format(
                relation, sql.Identifier(way.other(pair))
            )
        yield sql.SQL("drop function if exists {}()").format(step_function(relid))
