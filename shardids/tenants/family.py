"""The rows of one key: the tables of its shard that they are in, and a condition in SQL for each of them.

The root is the table with one row per key. Rows of other tables find it by foreign keys, as in an adoption:
:mod:`shardids.adopt.plan.paths` has the walk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.adopt.plan.document import Kind
from shardids.adopt.plan.inventory import ForeignKey, Inventory, Table, read_inventory
from shardids.adopt.plan.paths import Sorted, Way, find_column, parents_first, read_wishes, sort_tables
from shardids.catalog.keys.known import Key, key_text, parse_key
from shardids.errors import BadArgument
from shardids.pg.definitions import Column
from shardids.pg.queries import AS_IS

_OWN: Final = ("shardids_version", "shardids_load", "alembic_version")
"""Tables of a shard that say something of the shard, and hold no rows of keys."""
_DIRECT: Final = Kind.DIRECT
_KINDS: Final = {"integer": "bigint", "text": "text", "uuid": "uuid"}
COUNTERS: Final = ("shardids_counter", "shardids_counter_zone", "shardids_counter_change")
"""The tables of numbers for people; their column ``tenant`` is the key or the root's primary key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The caller's description of a key's rows; names as SQL writes them, without the shard's schema.

    Attributes:
        root: the table with the key's row and, after a dot, the column that holds the key; without it that is
            the primary key.
        keys: columns, with their tables, that hold the root's primary key and have no foreign key.
        loose: tables whose rows stay, although they are found by no path or by one. With ``shardids_counter``
            those counters stay that are named after no row of the root.
        refers: columns, with their tables, that hold IDs of other rows and have no foreign key.
        region: the region that the key is of.
    """

    root: str
    keys: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    refers: tuple[str, ...] = ()
    region: str | None = None

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "root": self.root,
            "keys": list(self.keys),
            "loose": list(self.loose),
            "refers": list(self.refers),
            "region": self.region,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Choices:
        """Return it as :meth:`document` wrote it."""
        return cls(
            root=document["root"],
            keys=tuple(document["keys"]),
            loose=tuple(document["loose"]),
            refers=tuple(document["refers"]),
            region=document["region"],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A table with rows of the key.

    Attributes:
        number: its position, parents first.
        name: its name in each shard.
        columns: those that are copied: not those which are generated.
        key: the columns of its primary key.
        is_direct: a column of the table says whose a row is.
        is_fixed: rows of other tables find their key by its rows.
        ids: columns that may hold IDs of the cluster, of these rows.
        unclear: columns that may hold such IDs, or those of other rows.
    """

    number: int
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    way: Way
    is_direct: bool
    is_fixed: bool
    owner: sql.Composable
    """The value of the root's key, as a literal; for a counter any of its names."""
    ids: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the columns that are copied."""
        return tuple(column.name for column in self.columns)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The tables with a key's rows, parents first.

    Attributes:
        kind, key: the key, as the directory of keys has it.
        schema: the schema of the shard that it was read from.
        root: the name of the table with the key's row.
        anchor: the value of the root's primary key, as text; ``None`` if the key has no row there.
        strays: tables of the shard that no path connects with the root.
        outside: foreign keys of tables of other schemas that refer to a part.
        further: for each part, foreign keys to others that don't say that both rows have the same key.
        backward: foreign keys between parts to one that is filled later.
        others: tables of the shard, as the inventory has them.
    """

    kind: str
    key: str
    schema: str
    root: str
    anchor: str | None
    parts: Sequence[Part]
    strays: Sequence[Table]
    outside: Sequence[ForeignKey]
    further: Mapping[str, Sequence[ForeignKey]]
    backward: Sequence[ForeignKey]
    tables: Mapping[str, Table] = field(repr=False)
    root_columns: tuple[str, str, str] = field(repr=False)
    """The root, its primary key, and the column with the key."""
    named: tuple[str, str, sql.Composable] | None = field(default=None, repr=False)
    """The root, its column with the key, and the key, if that column is not its primary key."""

    def part(self, name: str) -> Part | None:
        """Return the part of a table's name."""
        return next((part for part in self.parts if part.name == name), None)

    def owns(self, part: Part, row: str, schema: str) -> sql.Composed:
        """Return the condition that a row of a part is the key's.

        Args:
            part: the part.
            row: the name that the row has in the statement.
            schema: the shard's schema.
        """
        last = sql.SQL("{} = {}").format(sql.Identifier(part.way.key), part.owner)
        return _owns(part.way.path, last, row, schema)

    def guards(self, part: Part, row: str) -> sql.Composed:
        """Return the condition that writers of a row pass the key's barrier: it is the key's, or has the key.

        A row of the root with the key in its column would be a second home of the key.
        """
        return self.is_of(part, row, self.schema)

    def is_of(self, part: Part, row: str, schema: str) -> sql.Composed:
        """Return the condition that a row is the key's, or a row of the root with the key in its column."""
        owned = self.owns(part, row, schema)
        if self.named is None or part.name != self.named[0]:
            return owned
        _, column, key = self.named
        return sql.SQL("({} or {} = {})").format(owned, sql.Identifier(row, column), key)

    def is_whole(self, row: str) -> sql.Composed | None:
        """Return the condition that a row of the root has both the key and the root's primary key.

        ``None`` if the primary key is the key.
        """
        root = self.part(self.root)
        if self.named is None or root is None:
            return None
        _, column, key = self.named
        owned = self.owns(root, row, self.schema)
        return sql.SQL("({} and {} = {})").format(owned, sql.Identifier(row, column), key)

    def leads_to(self, path: Sequence[ForeignKey], row: str, parent: str) -> sql.Composed:
        """Return the condition that a row finds its key by another one, the last of a path that it begins."""
        return _leads(path, row, parent, self.schema)

    def key_of(self, part: Part, row: str, schema: str) -> sql.Composed:
        """Return the key of a row of a part, any key's, as text; null if it has none."""
        return _key_of(self.root_columns, part.way, row, schema)


def _key_of(root: tuple[str, str, str], way: Way, row: str, schema: str, depth: int = 1) -> sql.Composed:
    parent = f"shardids_{depth}"
    if not way.path:
        table, anchor, key = root
        return sql.SQL("(select {}::text from {} {} where {} = {})").format(
            sql.Identifier(parent, key),
            sql.Identifier(schema, table),
            sql.Identifier(parent),
            sql.Identifier(parent, anchor),
            sql.Identifier(row, way.key),
        )
    return sql.SQL("(select {} from {} {} where {})").format(
        _key_of(root, replace(way, path=way.path[1:]), parent, schema, depth + 1),
        sql.Identifier(schema, bare(way.path[0].referenced_table)),
        sql.Identifier(parent),
        _joined(way.path[0], row, parent),
    )


def _joined(key: ForeignKey, row: str, parent: str) -> sql.Composed:
    return sql.SQL(" and ").join(
        sql.SQL("{} = {}").format(sql.Identifier(parent, theirs), sql.Identifier(row, mine))
        for mine, theirs in zip(key.columns, key.referenced, strict=True)
    )


def _owns(
    path: Sequence[ForeignKey], last: sql.Composable, row: str, schema: str, depth: int = 1
) -> sql.Composed:
    if not path:
        return sql.SQL("{}.{}").format(sql.Identifier(row), last)
    first, parent = path[0], f"shardids_{depth}"
    return sql.SQL("exists (select from {} {} where {} and {})").format(
        sql.Identifier(schema, bare(first.referenced_table)),
        sql.Identifier(parent),
        _joined(first, row, parent),
        _owns(path[1:], last, parent, schema, depth + 1),
    )


def _leads(path: Sequence[ForeignKey], row: str, last: str, schema: str, depth: int = 1) -> sql.Composed:
    if len(path) == 1:
        return _joined(path[0], row, last)
    parent = f"shardids_{depth}"
    return sql.SQL("exists (select from {} {} where {} and {})").format(
        sql.Identifier(schema, bare(path[0].referenced_table)),
        sql.Identifier(parent),
        _joined(path[0], row, parent),
        _leads(path[1:], parent, last, schema, depth + 1),
    )


def _value(key: str, kind: str, root: str) -> Key:
    """Return the key. Without a column of the root it is one of the primary key's type."""
    try:
        return parse_key(key, kind)
    except BadArgument as error:
        if "." in root:
            raise
        hint = f"If a column beside the primary key holds it: --root {root}.COLUMN"
        raise BadArgument(error.message, hint=hint) from None


def bare(name: str) -> str:
    """Return the name of a table without its schema, as the server's catalogs have it."""
    quoted = name.partition(".")[2] if not name.startswith('"') else name.rpartition('".')[2]
    return quoted[1:-1].replace('""', '"') if quoted.startswith('"') else quoted


def id_column(primary_key: Sequence[str], columns: Iterable[Column]) -> str | None:
    """Return the column of a primary key that holds IDs of the cluster, ``None`` if it does not."""
    column = next((c for c in columns if (c.name,) == tuple(primary_key)), None)
    is_id = column is not None and column.builtin_type == "int8" and "next_id" in (column.default or "")
    return primary_key[0] if is_id else None


def read_shard(connection: Connection, schema: str) -> tuple[Inventory, Inventory]:
    """Return the inventory of a node, and that of one shard's tables of the application."""
    whole = read_inventory(connection)
    tables = {
        name: table
        for name, table in whole.tables.items()
        if table.schema == schema and table.name not in _OWN and not table.name.startswith("shardids_")
    }
    inside = [k for k in whole.foreign_keys if k.table in tables and k.referenced_table in tables]
    return whole, Inventory(server=whole.server, tables=tables, foreign_keys=inside, things=whole.things)


def read_family(
    connection: Connection, schema: str, key: str, choices: Choices, *, anchor: str | None = None
) -> Family:
    """Read the family of a key in a shard's schema, in the open transaction.

    ``anchor`` is the value of the root's primary key, where it may be gone.

    Raises:
        BadArgument: a name is not found, or the root can't be one; or ``key`` is not a key of its type.
    """
    whole, inventory = read_shard(connection, schema)
    tables, inside = inventory.tables, inventory.foreign_keys
    wishes = read_wishes(
        inventory,
        root=choices.root,
        keys=choices.keys,
        loose=[name for name in choices.loose if name != COUNTERS[0]],
        place=f"schema {schema}",
    )
    root = tables[wishes.root]
    family = root.columns[wishes.root_key].family or ""
    kind = _KINDS[family] + (f"@{choices.region}" if choices.region else "")
    value = _value(key, kind, choices.root)
    # Foreign keys refer to the primary key, whatever column holds the key.
    column = root.primary_key[0] if len(root.primary_key) == 1 else wishes.root_key
    found = sort_tables(inventory, replace(wishes, root_key=column))
    ways = {name: way for name, way in found.ways.items() if name not in wishes.loose}
    owner = anchor or _anchor(connection, root, wishes.root_key, column, value)
    order = parents_first(
        list(ways), found, [k for k in inside if k.table in ways and k.referenced_table in ways]
    )
    literal = _literal(owner, root.columns[column])
    others = [find_column(tables, text, f"schema {schema}") for text in choices.refers]
    if column != wishes.root_key:
        others.append((wishes.root, wishes.root_key))
    needed = {key_.referenced_table for way in ways.values() for key_ in way.path}
    parts = [
        Part(
            number=number,
            name=tables[name].name,
            columns=tuple(c for c in tables[name].columns.values() if not c.is_generated),
            key=tables[name].primary_key,
            way=ways[name],
            is_direct=not ways[name].path,
            is_fixed=name in needed,
            owner=literal,
            **_ids(
                tables[name],
                {named for k in whole.foreign_keys if k.table == name for named in k.columns}
                | {named for table, named in others if table == name},
            ),
        )
        for number, name in enumerate(order)
    ]
    text = key_text(value)
    parts += _counters(whole, schema, text, owner, len(parts))
    return Family(
        kind=kind,
        key=text,
        schema=schema,
        root=root.name,
        anchor=owner,
        parts=parts,
        strays=[table for name, table in tables.items() if name not in ways and name not in wishes.loose],
        outside=[k for k in whole.foreign_keys if k.referenced_table in ways and k.table not in tables],
        further=_further(found, ways, inside),
        backward=[
            k
            for k in inside
            if k.table in ways
            and k.referenced_table in ways
            and order.index(k.referenced_table) > order.index(k.table)
        ],
        tables=tables,
        root_columns=(root.name, column, wishes.root_key),
        named=None
        if column == wishes.root_key
        else (root.name, wishes.root_key, _literal(value, root.columns[wishes.root_key])),
    )


def _ids(table: Table, others: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns of a table that may hold IDs of its rows, and those that are unclear.

    ``others`` hold values of other rows, or the key. A column without a default that is only a part of a key
    may be either: (tenant, id), or (user, the photo that he likes).
    """
    ids: list[str] = []
    unclear: list[str] = []
    for column in table.columns.values():
        keys = [key.columns for key in table.keys if not key.is_exclusion and column.name in key.columns]
        default = column.default or ""
        drawn = "next_id" in default
        if column.name in others or column.is_identity or "nextval(" in default or not (keys or drawn):
            continue
        if column.builtin_type != "int8":
            if drawn:
                unclear.append(column.name)
        elif default or (column.name,) in keys:
            ids.append(column.name)
        else:
            unclear.append(column.name)
    return {"ids": tuple(ids), "unclear": tuple(unclear)}


def _literal(value: object, column: Column) -> sql.Composed:
    return sql.SQL("{}::{}").format(sql.Literal(str(value)), sql.SQL(_type(column)))


def _type(column: Column) -> str:
    """Return the type of a value of a column, without its length: a cast to that would cut the value off."""
    return "text" if column.family == "text" or column.builtin_type is None else column.builtin_type


def _anchor(connection: Connection, root: Table, column: str, anchor: str, value: object) -> str | None:
    query = sql.SQL("select {} from {} where {} = {}").format(
        sql.Identifier(anchor),
        sql.Identifier(root.schema, root.name),
        sql.Identifier(column),
        _literal(value, root.columns[column]),
    )
    found = run(connection, query).scalar_one_or_none()
    return None if found is None else str(found)


def _counters(whole: Inventory, schema: str, text: str, anchor: str | None, first: int) -> list[Part]:
    there = {table.name: table for table in whole.tables.values() if table.schema == schema}
    # An application names the tenant by either: next_number(name, …), or the column that refers to the root.
    names = sql.SQL(", ").join(map(sql.Literal, sorted({text} | ({anchor} if anchor is not None else set()))))
    return [
        Part(
            number=first + number,
            name=name,
            columns=tuple(there[name].columns.values()),
            key=there[name].primary_key,
            way=Way(kind=_DIRECT, key="tenant"),
            is_direct=True,
            is_fixed=False,
            owner=sql.SQL("any (array[{}]::text[])").format(names),
        )
        for number, name in enumerate(n for n in COUNTERS if n in there)
    ]


def _further(
    found: Sorted, ways: Mapping[str, Way], inside: Collection[ForeignKey]
) -> dict[str, list[ForeignKey]]:
    """Return foreign keys that could lead from the key's rows to another key's, or the other way."""
    further: dict[str, list[ForeignKey]] = {}
    for foreign_key in inside:
        mine, theirs = ways.get(foreign_key.table), ways.get(foreign_key.referenced_table)
        if (mine is None) != (theirs is None) or foreign_key in found.further.get(foreign_key.table, ()):
            further.setdefault(foreign_key.table, []).append(foreign_key)
    return further


def run(connection: Connection, query: sql.Composable) -> Any:
    """Run a statement whose values are in its text; a % in it is not a placeholder."""
    return connection.exec_driver_sql(query.as_string(), execution_options=AS_IS)
