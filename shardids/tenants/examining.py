"""Reasons to refuse the move of a key. Each function returns its own and changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from shlex import quote
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.adopt.plan.inventory import ForeignKey
from shardids.errors import MoveRefused
from shardids.pg.definitions import Column
from shardids.pg.schemas import untrusted
from shardids.replication.subscriptions import Refusal
from shardids.tenants.family import COUNTERS, Family, Part, bare, run
from shardids.tenants.sequences import sequences_apart

_KEY_TYPES: Final = ("int2", "int4", "int8", "text", "varchar", "uuid", "date", "numeric", "bpchar")
"""Types of primary keys whose values JSON keeps."""
_NAMED: Final = 10
MOST_GUARDS: Final = 200
"""How many keys a table refuses at most: each costs every writer the comparison of a value."""


def require_trusted(connection: Connection, shard: int, trusted: Sequence[str]) -> None:
    """Refuse a shard where code of roles that are not trusted could run, in the open transaction.

    Its tables are read and written as the session's role. To read one runs code already, at planning.

    Raises:
        MoveRefused: there is such a role.
    """
    tables = connection.scalars(_TABLES, {"shard": shard}).all()
    for refusal in code_of_others(connection, tables, trusted):
        raise MoveRefused(f"shard {shard}: {refusal.reason}", hint=refusal.remedy)


def code_of_others(connection: Connection, tables: Sequence[str], trusted: Sequence[str]) -> list[Refusal]:
    """Return the roles that are not trusted, and whose code could run when tables are read or written.

    In the open transaction, as :func:`shardids.pg.schemas.untrusted` says. Tables by their names in SQL.
    """
    with connection.begin_nested() as looking:
        found = untrusted(connection, tables, trusted=trusted)
        # Its settings end with it.
        looking.rollback()
    return [Refusal(reason=one.reason, remedy=one.remedy) for one in found]


def examine(family: Family, source: Connection, target: tuple[Connection, str] | None) -> list[Refusal]:
    """Return every reason against a move; the connections are in open transactions.

    ``target`` is a connection and the schema there; ``None`` while the shard is not made yet.
    """
    found = [*_roots(family), *tables(family, source)]
    if found:
        # What counts rows needs tables that can be read as planned.
        return found
    return [
        *references(family, source),
        *firing_on_removal(source, family.schema, [part.name for part in family.parts]),
        *(_target(family, source, *target) if target is not None else ()),
        *_large(family, source),
        *_guards(family, source),
    ]


def _roots(family: Family) -> Iterator[Refusal]:
    if family.anchor is None:
        yield Refusal(
            reason=f"key {family.key!r} has no row in the root of schema {family.schema}",
            remedy=f"Look where it lives: shardids tenant show {quote(family.key)} --kind {family.kind}"
            + ("" if family.named else f"; or name the column that holds it: --root {family.root}.COLUMN"),
        )


def tables(family: Family, source: Connection) -> Iterator[Refusal]:
    """Require tables whose rows are found, and can be followed one by one."""
    yield from _tables(family)
    yield from _shapes(family, source, family.schema)


def _tables(family: Family) -> Iterator[Refusal]:
    if family.strays:
        names = sorted(table.name for table in family.strays)
        yield Refusal(
            reason=f"table {names[0]} has no path to the key"
            if len(names) == 1
            else f"{len(names)} tables have no path to the key: {_list(names)}",
            remedy="Name the column with the root's primary key by --key TABLE.COLUMN, or leave the table's"
            " rows where they are with --loose TABLE.",
        )
    for key in family.outside:
        yield Refusal(
            reason=f"table {key.table} is in another schema, and its foreign key {key.name} refers to"
            f" {key.referenced_table}: its rows would stay",
            remedy="Move the table into the shard, or drop the foreign key.",
        )
    for key in family.backward:
        yield Refusal(
            reason=f"foreign key {key.name} of table {key.table} and others go round in a circle: no order of"
            " the tables lets their rows arrive",
            remedy=f"alter table {key.table} drop constraint {key.name}, and add it again after the move.",
        )
    yield from _foreign_keys(family)
    yield from _columns_of_keys(family)
    for part in family.parts:
        table = next((t for t in family.tables.values() if t.name == part.name), None)
        if table is not None and table.relkind != "r":
            yield Refusal(
                reason=f"table {part.name} is partitioned: its changes can't be followed row by row",
                remedy=f"Leave its rows where they are with --loose {part.name}.",
            )
        if not part.key:
            yield Refusal(
                reason=f"table {part.name} has no primary key: its rows have no name to be noted by",
                remedy=f"alter table {part.name} add primary key (…)",
            )
        odd = [
            column.name
            for column in part.columns
            if column.name in part.key and column.builtin_type not in _KEY_TYPES and part.name not in COUNTERS
        ]
        if odd:
            yield Refusal(
                reason=f"the primary key of table {part.name} has columns of types that can't be noted:"
                f" {_list(odd)}",
                remedy="Primary keys may be of integers, numeric, text, uuid and dates.",
            )


def _columns_of_keys(family: Family) -> Iterator[Refusal]:
    """Require columns that are known before a row is written, and whose equal values are the same.

    By others, rows would be found under a key that the directory has written otherwise, or not at all.
    """
    tables = {table.name: table for table in family.tables.values()}
    hops = [key for part in family.parts for key in part.way.path]
    for part in family.parts:
        if (table := tables.get(part.name)) is None:
            continue
        own = [*part.key, *([part.way.key] if part.is_direct else [])]
        if part.name == family.root:
            own += family.root_columns[1:]
        linked = [name for hop in hops if bare(hop.table) == part.name for name in hop.columns]
        linked += [name for hop in hops if bare(hop.referenced_table) == part.name for name in hop.referenced]
        for name in dict.fromkeys([*own, *linked]):
            column = table.columns[name]
            which = f"column {name} of table {part.name}, which leads to rows of the key,"
            alter = f"alter table {part.name} alter column {column.sql or name}"
            if column.is_generated and name in own:
                yield Refusal(
                    reason=f"{which} is generated: it has no value before a row is written",
                    remedy=f"Let the application write it: {alter} drop expression. Or name another column.",
                )
            if not column.is_deterministic:
                yield Refusal(
                    reason=f"{which} has a collation that takes different values for equal: the directory of"
                    " keys does not",
                    remedy=f'{alter} type {column.type} collate "C"',
                )


def _shapes(family: Family, connection: Connection, schema: str) -> Iterator[Refusal]:
    """Require tables whose rows are in no others, and are found by a key that is checked at once."""
    names = [part.name for part in family.parts]
    for row in connection.execute(_SHAPES, {"schema": schema, "names": names}):
        table = sql.Identifier(schema, row.name).as_string()
        if row.heir:
            yield Refusal(
                reason=f"table {row.heir} inherits from {row.parent}: its rows are read as rows of both",
                remedy=f"alter table {row.heir} no inherit {row.parent}",
            )
        if row.deferrable:
            yield Refusal(
                reason=f"primary key {row.deferrable} of table {row.name} of schema {schema} is deferrable:"
                " rows can't be put in place by it",
                remedy=f"alter table {table} drop constraint {sql.Identifier(row.deferrable).as_string()},"
                " and add it again without DEFERRABLE.",
            )


def _foreign_keys(family: Family) -> Iterator[Refusal]:
    """Require that the server and the statements of a move see the same rows by each foreign key.

    These statements find no operators of extensions. A foreign key on a path that rows need not obey leads to
    a row that may be entered after the one that refers to it, and makes that one the key's without a note.
    """
    ahead = [key for part in family.parts for key in part.way.path]
    firsts = [part.way.first for part in family.parts if part.way.first is not None]
    for key in dict.fromkeys([*ahead, *firsts, *(key for key, _, _ in referring(family))]):
        name = sql.Identifier(key.name).as_string()
        if not key.is_builtin:
            yield Refusal(
                reason=f"foreign key {key.name} of table {key.table} does not compare by PostgreSQL's own"
                " equality: the rows that it leads to can't be found",
                remedy=f"Use a type of PostgreSQL for its columns, or: alter table {key.table} drop"
                f" constraint {name}",
            )
        if not key.is_checked and key in ahead:
            yield Refusal(
                reason=f"foreign key {key.name} of table {key.table}, on the path to the key, is not enforced"
                " or not valid: a row may come before the one that says whose it is",
                remedy=f"alter table {key.table} validate constraint {name}. From PostgreSQL 18 on it may"
                f" need first: alter table {key.table} alter constraint {name} enforced",
            )


def referring(family: Family) -> Iterator[tuple[ForeignKey, Part | None, Part]]:
    """Yield foreign keys that let rows of others refer to the key's, and both ends.

    The first end is ``None`` for a table whose rows are not the key's.
    """
    for keys in family.further.values():
        for key in keys:
            # Whether the target has rows of a table that stays, the copy finds out.
            if (theirs := family.part(bare(key.referenced_table))) is not None:
                yield key, family.part(bare(key.table)), theirs


def deferrable(connection: Connection, schema: str) -> frozenset[tuple[str, str]]:
    """Return a shard's foreign keys that may be checked at COMMIT, each with its table, by bare names."""
    return frozenset((row.name, row.key) for row in connection.execute(_DEFERRABLE, {"schema": schema}))


def takers(
    family: Family, part: Part, late: Collection[tuple[str, str]]
) -> Iterator[tuple[Part, Sequence[ForeignKey]]]:
    """Yield tables whose rows may find the key by a row of a part that is younger, and the path to it.

    With a foreign key that is deferrable, a ``late`` one, it may take the place of another key's row.
    """
    for other in family.parts:
        for length, key in enumerate(other.way.path, 1):
            if bare(key.referenced_table) == part.name and (bare(key.table), key.name) in late:
                yield other, other.way.path[:length]


def references(family: Family, source: Connection) -> Iterator[Refusal]:
    """Require that no row refers from the key's rows to another key's, or the other way."""
    for key, mine, theirs in referring(family):
        for outward in (True, False):
            if mine is None and outward:
                continue
            count = run(source, _crossing(family, key, mine, theirs, outward=outward)).scalar_one()
            if count:
                a, b = (family.key, "another key") if outward else ("another key", family.key)
                yield Refusal(
                    reason=f"{count} rows of table {bare(key.table)} of {a} refer by {key.name} to rows"
                    f" of {b} in {bare(key.referenced_table)}",
                    remedy="Rows of one key may refer to rows of that key only: change or delete them.",
                )


def _crossing(
    family: Family, key: ForeignKey, mine: Part | None, theirs: Part, *, outward: bool
) -> sql.Composed:
    joined = sql.SQL(" and ").join(
        sql.SQL("b.{} = a.{}").format(sql.Identifier(there), sql.Identifier(here))
        for here, there in zip(key.columns, key.referenced, strict=True)
    )
    a = sql.SQL("false") if mine is None else family.owns(mine, "a", family.schema)
    b = family.owns(theirs, "b", family.schema)
    return sql.SQL("select count(*) from {} a join {} b on {} where {} and not coalesce({}, false)").format(
        sql.Identifier(family.schema, bare(key.table)),
        sql.Identifier(family.schema, theirs.name),
        joined,
        *((a, b) if outward else (b, a)),
    )


_DEFERRABLE: Final = text("""
    select c.relname::text as name, k.conname::text as key from pg_constraint k
    join pg_class c on c.oid = k.conrelid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and k.contype = 'f' and k.condeferrable""")
_SHAPES: Final = text("""
    select c.relname::text as name, k.conname::text as deferrable, h.heir, h.parent
    from pg_class c
    left join pg_constraint k on k.conrelid = c.oid and k.contype = 'p' and k.condeferrable
    left join lateral (
      select i.inhrelid::regclass::text as heir, i.inhparent::regclass::text as parent from pg_inherits i
      where c.oid in (i.inhparent, i.inhrelid) order by 1 limit 1) h on c.relkind = 'r'
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relname = any (:names)
      and (k.oid is not null or h.heir is not null)
    order by 1""")
_TABLES: Final = text("select name::text from unnest(shardids.tables_of(:shard)) name")
_COLUMNS: Final = text("""
    select c.relname::text as name, a.attname::text as column,
           replace(format_type(a.atttypid, a.atttypmod), :schema || '.', '') as type
    from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'""")
# Bits of tgtype and kinds of rules: INSERT, UPDATE and DELETE, or DELETE alone.
_ARRIVING: Final = {"events": 4 | 8 | 16, "rules": ["2", "3", "4"]}
_LEAVING: Final = {"events": 8, "rules": ["4"]}
# Functions of triggers of shardids are in its schema, but for numbers: those leave rows alone that have one.
_FIRING: Final = text("""
    select c.relname::text as name, t.tgname::text as firing, 'trigger' as kind from pg_trigger t
    join pg_class c on c.oid = t.tgrelid
    join pg_proc p on p.oid = t.tgfoid
    join pg_namespace e on e.nspname = 'shardids'
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relname = any (:names)
      and not t.tgisinternal and t.tgenabled <> 'D' and (t.tgtype & :events) <> 0 and p.pronamespace <> e.oid
      and not (starts_with(t.tgname, 'shardids_number_') and p.proname = t.tgname and p.proowner = e.nspowner)
    union all
    select c.relname, r.rulename, 'rule' from pg_rewrite r join pg_class c on c.oid = r.ev_class
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relname = any (:names)
      and c.relkind = 'r' and r.ev_enabled <> 'D' and r.ev_type::text = any (:rules)
    order by 1, 2""")


def firing_on_arrival(target: Connection, schema: str, names: Sequence[str]) -> Iterator[Refusal]:
    """Require that no trigger or rule of the application runs when rows arrive in tables."""
    yield from _firing(target, schema, names, _ARRIVING, "when rows arrive in")


def firing_on_removal(source: Connection, schema: str, names: Sequence[str]) -> Iterator[Refusal]:
    """Require that no trigger or rule of the application runs when rows are removed from tables.

    It would take the move for the end of the rows, or keep them.
    """
    yield from _firing(source, schema, names, _LEAVING, "when the rows are removed from")


def _firing(
    connection: Connection, schema: str, names: Sequence[str], events: dict[str, object], when: str
) -> Iterator[Refusal]:
    for row in connection.execute(_FIRING, {"schema": schema, "names": list(names), **events}):
        table, firing = sql.Identifier(schema, row.name), sql.Identifier(row.firing)
        yield Refusal(
            reason=f"{row.kind} {row.firing} of table {row.name} would run {when} schema {schema}",
            remedy=f"alter table {table.as_string()} disable {row.kind} {firing.as_string()}; and enable it"
            " after the move. Stop the other keys' writers first if they need it: it does not run for them"
            " either.",
        )


def _target(family: Family, source: Connection, target: Connection, schema: str) -> Iterator[Refusal]:
    """Require the same tables on the target, no code that would run on arrival, and no rows of the key."""
    there: dict[str, dict[str, str]] = {}
    for row in target.execute(_COLUMNS, {"schema": schema}):
        there.setdefault(row.name, {})[row.column] = row.type
    missing = [part.name for part in family.parts if part.name not in there]
    if missing:
        yield Refusal(
            reason=f"schema {schema} lacks {len(missing)} tables with rows of the key: {_list(missing)}",
            remedy="Bring both shards to one revision: shardids migrate up. Numbers need their kinds there:"
            " shardids counter define.",
        )
        return
    for part in family.parts:
        odd = [c.name for c in part.columns if there[part.name].get(c.name) != _plain(c, family.schema)]
        if odd:
            yield Refusal(
                reason=f"columns of table {part.name} differ in schema {schema}: {_list(odd)}",
                remedy="Bring both shards to one revision: shardids migrate up.",
            )
    yield from _shapes(family, target, schema)
    yield from _kinds(family, source, target, schema)
    yield from sequences_apart(family, source, target, schema)
    yield from firing_on_arrival(target, schema, [part.name for part in family.parts])
    yield from _there(family, target, schema)


def _there(family: Family, target: Connection, schema: str) -> Iterator[Refusal]:
    """Require that the target has neither rows of the key nor another key with its primary key."""
    if (other := _namesake(family, target, schema)) is not None:
        yield Refusal(
            reason=f"table {family.root} of schema {schema} has another key's row with the same primary key"
            f" {family.anchor}: {other!r}",
            remedy="Move the key to another shard, or give one of the two another primary key, with all rows"
            " that have it.",
        )
        # Rows below it are the other key's.
        return
    for part in family.parts:
        there = sql.SQL("select count(*) from {} a where {}").format(
            sql.Identifier(schema, part.name), family.is_of(part, "a", schema)
        )
        if count := run(target, there).scalar_one():
            yield Refusal(
                reason=f"{count} rows of the key are in table {part.name} of schema {schema} already",
                remedy="Compare them with the others, and delete the wrong ones.",
            )


def _namesake(family: Family, target: Connection, schema: str) -> str | None:
    """Return another key whose row of the root has the key's primary key in the target."""
    root = family.part(family.root)
    if family.named is None or root is None:
        return None
    _, column, key = family.named
    query = sql.SQL("select a.{0}::text from {1} a where {2} and a.{0} is distinct from {3}").format(
        sql.Identifier(column), sql.Identifier(schema, root.name), family.owns(root, "a", schema), key
    )
    found: str | None = run(target, query).scalar_one_or_none()
    return found


def _kinds(family: Family, source: Connection, target: Connection, schema: str) -> Iterator[Refusal]:
    """Require the kinds of the key's numbers, with the same properties."""
    counter = family.part(COUNTERS[0])
    if counter is None:
        return
    used = sql.SQL("select distinct a.kind from {} a where {}").format(
        sql.Identifier(family.schema, counter.name), family.owns(counter, "a", family.schema)
    )
    names = run(source, used).scalars().all()
    there, here = (
        dict(
            run(
                connection,
                sql.SQL("select k.kind, to_jsonb(k) from {} k").format(
                    sql.Identifier(where, "shardids_counter_kind")
                ),
            ).all()
        )
        for connection, where in ((source, family.schema), (target, schema))
    )
    if odd := sorted(name for name in names if there.get(name) != here.get(name)):
        yield Refusal(
            reason=f"kinds of numbers are others in schema {schema}, or missing: {_list(odd)}",
            remedy="Bring both shards to one revision: shardids migrate up.",
        )


def _plain(column: Column, schema: str) -> str:
    return column.type.replace(f"{schema}.", "")


_LARGE_OBJECTS: Final = text("""
    select c.relname::text as name, a.attname::text as column from pg_class c
    join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    join pg_type t on t.oid = a.atttypid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'
      and 'oid'::regtype in (t.oid, t.typbasetype) and exists (select from pg_largeobject_metadata)""")


def _large(family: Family, source: Connection) -> Iterator[Refusal]:
    names = {part.name for part in family.parts}
    for row in source.execute(_LARGE_OBJECTS, {"schema": family.schema}):
        if row.name in names:
            yield Refusal(
                reason=f"column {row.column} of table {row.name} may refer to large objects, which stay",
                remedy="Store them as bytea, or remove them.",
            )


_GUARDS: Final = text("""
    select c.relname::text as name, count(*) as keys from pg_trigger t
    join pg_class c on c.oid = t.tgrelid
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and t.tgname ~ '^shardids_key_\\d+_insert$'
    group by 1 having count(*) >= :most order by 1""")
_POLICIES: Final = text("""
    select c.relname::text from pg_class c
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relkind = 'r'
      and row_security_active(c.oid) order by 1""")


def _guards(family: Family, source: Connection) -> Iterator[Refusal]:
    for row in source.execute(_GUARDS, {"schema": family.schema, "most": MOST_GUARDS}):
        yield Refusal(
            reason=f"table {row.name} refuses {row.keys} keys already that have left",
            remedy="Split the load in another way: each of them costs every writer a comparison.",
        )
        return
    names = {part.name for part in family.parts}
    yield from _notes(family, source)
    hidden = [name for name in source.scalars(_POLICIES, {"schema": family.schema}) if name in names]
    if hidden:
        yield Refusal(
            reason=f"row security hides rows of {_list(hidden)} from the role that moves them",
            remedy="Use a role that owns the tables, or has BYPASSRLS.",
        )


_OWNERS_RIGHTS: Final = text("""
    select c.relname::text as name, o.rolname::text as owner,
           has_table_privilege(o.oid, c.oid, 'select') as reads,
           c.relrowsecurity and not (o.rolsuper or o.rolbypassrls)
           and (c.relforcerowsecurity or not pg_has_role(o.oid, c.relowner, 'usage')) as is_bound
    from pg_class c, pg_namespace e join pg_roles o on o.oid = e.nspowner
    where c.relnamespace = to_regnamespace(quote_ident(:schema)) and c.relname = any (:names)
      and e.nspname = 'shardids'
    order by 1""")


def _notes(family: Family, source: Connection) -> Iterator[Refusal]:
    """Require that triggers, which run as the engine's owner, can read the tables on the way to the key."""
    names = {bare(key.referenced_table) for part in family.parts for key in part.way.path}
    for _, mine, theirs in referring(family):
        names.update(part.name for part in (mine, theirs) if part is not None)
    late = deferrable(source, family.schema)
    names.update(other.name for part in family.parts for other, _ in takers(family, part, late))
    for row in source.execute(_OWNERS_RIGHTS, {"schema": family.schema, "names": sorted(names)}):
        table = sql.Identifier(family.schema, row.name).as_string()
        if not row.reads:
            yield Refusal(
                reason=f'role "{row.owner}", which owns the engine, may not read table {row.name}: triggers'
                " could not tell whose rows are written",
                remedy=f"grant select on {table} to {sql.Identifier(row.owner).as_string()}",
            )
        elif row.is_bound:
            yield Refusal(
                reason=f'row security hides rows of {row.name} from the engine\'s owner, role "{row.owner}"',
                remedy=f"alter role {sql.Identifier(row.owner).as_string()} bypassrls",
            )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
