"""Which tables are split, and how rows find the key: foreign keys from the root, and the caller's wishes."""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from shardids.adopt.plan.document import STAYS, Kind
from shardids.adopt.plan.inventory import ForeignKey, Inventory, Table
from shardids.errors import BadArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The caller's corrections of the foreign keys; tables by their names in SQL.

    ``keys``: the column of a table that holds the root's key. ``references``: tables that every node gets.
    ``loose``: tables that stay at the source. ``unowned``: where rows without a key go, as the plan says it.
    """

    root: str
    root_key: str
    keys: Mapping[str, str] = field(default_factory=dict)
    references: Collection[str] = ()
    loose: Collection[str] = ()
    unowned: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the rows of a table find the key.

    ``key``: the column that holds it, in the table itself, or at the end of ``path``. ``first``: the foreign
    key that makes a column hold it, or that the path begins with; None for the root, and if the caller said
    the column. ``is_nullable``: a row may have no key, and ``unowned`` does not say where such rows go.
    """

    kind: Kind
    key: str
    path: tuple[ForeignKey, ...] = ()
    first: ForeignKey | None = None
    is_nullable: bool = False
    unowned: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """All tables by what becomes of them.

    ``ways``: of those that are split; ``guessed``: those of them that find their key by a guess.
    ``further``: their other foreign keys to tables that are split, which
    hold in a shard only if both rows have the same key.
    """

    ways: Mapping[str, Way]
    references: frozenset[str]
    further: Mapping[str, Sequence[ForeignKey]]
    guessed: frozenset[str] = frozenset()

    def first(self, table: str) -> ForeignKey | None:
        """Return the foreign key that begins the way of a table's rows to their key."""
        return self.ways[table].first if table in self.ways else None

    def is_direct(self, table: str) -> bool:
        """Return whether a column of a table holds the root's key."""
        return self.kind(table) is Kind.DIRECT

    def kind(self, table: str) -> Kind:
        """Return what becomes of a table."""
        if table in self.ways:
            return self.ways[table].kind
        return Kind.REFERENCE if table in self.references else Kind.LOOSE


def sort_tables(inventory: Inventory, wishes: Wishes, guesses: Sequence[ForeignKey] = ()) -> Sorted:
    """Sort the tables of a source by walking its foreign keys from the root.

    ``guesses``: foreign keys that the schema does not have; rows may find their key by them.
    """
    usable = [key for key in inventory.foreign_keys if not key.is_to_partition]
    ways = _walk(inventory.tables, [*usable, *guesses], wishes)
    references = _references(inventory, ways, wishes)
    further = defaultdict(list)
    for foreign_key in usable:
        if foreign_key.table in ways and foreign_key.referenced_table in ways:
            way, theirs = ways[foreign_key.table], ways[foreign_key.referenced_table]
            if not _says_key(foreign_key, way, theirs):
                further[foreign_key.table].append(foreign_key)
    guessed = {
        name
        for name, way in ways.items()
        if (way.first is not None and way.first in guesses) or any(key in guesses for key in way.path)
    }
    return Sorted(
        ways=ways,
        references=frozenset(references),
        further=dict(further),
        guessed=frozenset(guessed),
    )


def _walk(tables: Mapping[str, Table], foreign_keys: Sequence[ForeignKey], wishes: Wishes) -> dict[str, Way]:
    """Find each table's best way: its own column before a path, without NULL before with, then short."""
    children = defaultdict(list)
    for foreign_key in foreign_keys:
        children[foreign_key.referenced_table].append(foreign_key)
    given = {wishes.root: Way(kind=Kind.ROOT, key=wishes.root_key)} | {
        table: _direct(tables[table], column, wishes.unowned) for table, column in wishes.keys.items()
    }
    kept_out = {*wishes.references, *wishes.loose}
    ways: dict[str, Way] = {}
    count = len(given)
    queue = [(False, False, 0, 0, number, table, way) for number, (table, way) in enumerate(given.items())]
    heapq.heapify(queue)
    while queue:
        *_, depth, _position, _number, name, way = heapq.heappop(queue)
        if name in ways:
            continue
        ways[name] = way
        for foreign_key in children[name]:
            child = tables[foreign_key.table]
            if child.sql in ways or child.sql in given or child.sql in kept_out or child.relkind == "f":
                continue
            next_way = _way(child, foreign_key, way, wishes.unowned)
            position = list(child.columns).index(foreign_key.columns[0])
            rank = (next_way.kind is Kind.DERIVED, next_way.is_nullable, depth + 1, position, count)
            heapq.heappush(queue, (*rank, child.sql, next_way))
            count += 1
    return ways


def _direct(table: Table, column: str, unowned: Mapping[str, str], first: ForeignKey | None = None) -> Way:
    """Return the way of a table whose column holds the key."""
    where = unowned.get(table.sql)
    is_nullable = where is None and not table.columns[column].not_null
    return Way(kind=Kind.DIRECT, key=column, first=first, is_nullable=is_nullable, unowned=where)


def _way(child: Table, foreign_key: ForeignKey, parent: Way, unowned: Mapping[str, str]) -> Way:
    """Return how the rows of a table find the key by a foreign key of theirs to a table that has a way."""
    if parent.kind is not Kind.DERIVED and parent.key in foreign_key.referenced:
        column = foreign_key.columns[foreign_key.referenced.index(parent.key)]
        return _direct(child, column, unowned, foreign_key)
    is_null = not all(child.columns[column].not_null for column in foreign_key.columns)
    return Way(
        kind=Kind.DERIVED,
        key=parent.key,
        path=(foreign_key, *parent.path),
        first=foreign_key,
        is_nullable=is_null or parent.is_nullable or not foreign_key.is_checked,
    )


def _says_key(foreign_key: ForeignKey, way: Way, theirs: Way) -> bool:
    """Return whether the foreign key itself says that both rows have the same key."""
    if foreign_key == way.first and way.kind is Kind.DERIVED:
        return True
    if Kind.DERIVED in (way.kind, theirs.kind) or not foreign_key.is_checked:
        return False
    return (way.key, theirs.key) in zip(foreign_key.columns, foreign_key.referenced, strict=True)


def _references(inventory: Inventory, ways: Mapping[str, Way], wishes: Wishes) -> set[str]:
    """Return the tables that those that are split refer to, and those that these refer to."""
    parents = defaultdict(list)
    for foreign_key in inventory.foreign_keys:
        parents[foreign_key.table].append(foreign_key.referenced_table)
    found: set[str] = set(wishes.references)
    ahead = [*ways, *wishes.references]
    while ahead:
        for parent in parents[ahead.pop()]:
            if parent not in ways and parent not in found and parent not in wishes.loose:
                found.add(parent)
                ahead.append(parent)
    return found


def parents_first(tables: Collection[str], sorted_: Sorted, foreign_keys: Sequence[ForeignKey]) -> list[str]:
    """Return the tables in an order for filling them: the targets of a table's foreign keys come before it.

    Where foreign keys go round, only those on the path to a key count; these never go round.
    """
    needs: dict[str, set[str]] = {table: set() for table in tables}
    children: dict[str, set[str]] = {table: set() for table in tables}
    for key in foreign_keys:
        if key.table != key.referenced_table:
            needs[key.table].add(key.referenced_table)
            children[key.referenced_table].add(key.table)
    firsts = {
        table: way.first.referenced_table for table, way in sorted_.ways.items() if way.first is not None
    }
    order: dict[str, None] = {}
    ready = sorted(table for table, parents in needs.items() if not parents)
    heapq.heapify(ready)
    left = dict.fromkeys(sorted(tables))
    while left:
        if not ready:
            ready = [next(table for table in left if firsts.get(table, "") not in left)]
        table = heapq.heappop(ready)
        if table in order:
            continue
        order[table] = None
        del left[table]
        for child in children[table]:
            needs[child].discard(table)
            if not needs[child] and child in left:
                heapq.heappush(ready, child)
    return list(order)


_PART: Final = re.compile(r'"((?:[^"]|"")+)"|([^\W\d][\w$]*)')


def read_wishes(
    inventory: Inventory,
    *,
    root: str,
    keys: Sequence[str] = (),
    references: Sequence[str] = (),
    loose: Sequence[str] = (),
    unowned: Sequence[str] = (),
    place: str = "the source",
) -> Wishes:
    """Find the tables and columns that are named.

    ``root``: a table, or a column of one that is unique. ``keys``: columns. ``unowned``: TABLE=source or
    TABLE=SHARD. The others: tables. ``place`` has the tables, as errors name it.

    Raises:
        BadArgument: a name is not found, or found twice; the root has no key that rows can be split by; or a
            table is named in two ways.
    """
    table, column = _root(inventory.tables, root, place)
    given = [find_column(inventory.tables, text, place) for text in keys]
    wishes = Wishes(
        root=table,
        root_key=column,
        keys=dict(given),
        references=frozenset(_table(inventory.tables, text, place) for text in references),
        loose=frozenset(_table(inventory.tables, text, place) for text in loose),
        unowned=dict(_unowned(inventory.tables, text, place) for text in unowned),
    )
    named = [table, *(name for name, _ in given), *wishes.references, *wishes.loose]
    if twice := sorted({name for name in named if named.count(name) > 1}):
        raise BadArgument(
            f"{', '.join(twice)}: more than one of --root, --key, --reference and --loose name it",
            hint="Say of each table one thing.",
        )
    return wishes


def parse_name(text: str) -> list[str]:
    """Parse a name as SQL reads it: parts with dots between them; without quotes, capitals don't count.

    Raises:
        BadArgument: no table has this name.
    """
    parts, position = [], 0
    while match := _PART.match(text, position):
        parts.append(match[1].replace('""', '"') if match[1] else match[2].lower())
        position = match.end()
        if position == len(text):
            return parts
        if text[position] != ".":
            break
        position += 1
    raise BadArgument(
        f"{text!r} is not a name",
        hint="""Write names as in SQL: users, shop.users, '"Order Items"' with the quotes.""",
    )


def _root(tables: Mapping[str, Table], text: str, place: str) -> tuple[str, str]:
    parts = parse_name(text)
    if len(parts) == 1 or _matches(tables, parts):
        table = tables[_one(tables, text, parts, place)]
        if len(table.primary_key) != 1:
            raise BadArgument(
                f"{table.sql} has no primary key of one column to split by",
                hint=f"Name a column that is unique: --root {table.sql}.COLUMN",
            )
        column = table.primary_key[0]
    else:
        name, column = find_column(tables, text, place)
        table = tables[name]
    plain = (key for key in table.keys if not (key.is_partial or key.is_exclusion or key.has_expression))
    if (column,) not in {key.columns for key in plain}:
        raise BadArgument(
            f"{table.sql}.{column} is not unique: rows of two keys could not be told apart",
            hint="Name the primary key, or a column with a unique index.",
        )
    if not table.columns[column].not_null:
        raise BadArgument(
            f"{table.sql}.{column} may be NULL: such rows have no shard", hint="Make it NOT NULL first."
        )
    if table.columns[column].family is None:
        raise BadArgument(
            f"{table.sql}.{column} is of type {table.columns[column].type}, which has no stable hash",
            hint="A key is smallint, integer, bigint, text, varchar or uuid.",
        )
    return table.sql, column


def find_column(tables: Mapping[str, Table], text: str, place: str) -> tuple[str, str]:
    """Return the table, by its name in SQL, and the column that a text names.

    Raises:
        BadArgument: there is none.
    """
    *parts, column = parse_name(text)
    if not parts:
        raise BadArgument(f"{text} is not a column", hint=f"Name a column with its table: TABLE.{text}")
    table = tables[_one(tables, text, parts, place)]
    if column not in table.columns:
        raise BadArgument(
            f"{table.sql} has no column {column!r}", hint="It has: " + ", ".join(sorted(table.columns))
        )
    return table.sql, column


def _unowned(tables: Mapping[str, Table], text: str, place: str) -> tuple[str, str]:
    name, is_said, where = text.rpartition("=")
    if not is_said or not (where == STAYS or (where.isascii() and where.isdigit())):
        raise BadArgument(
            f"{text!r} does not say where rows without a key go",
            hint=f"For example: --unowned media={STAYS}, or --unowned media=5 for shard 5",
        )
    return _table(tables, name, place), where if where == STAYS else f"shard {int(where)}"


def _table(tables: Mapping[str, Table], text: str, place: str) -> str:
    return _one(tables, text, parse_name(text), place)


def _one(tables: Mapping[str, Table], text: str, parts: Sequence[str], place: str) -> str:
    found = _matches(tables, parts)
    if len(found) > 1:
        raise BadArgument(
            f"{text} is more than one table: {', '.join(found)}", hint="Name it with its schema."
        )
    if not found:
        near = get_close_matches(parts[-1], {table.name for table in tables.values()})
        like = [table.sql for table in tables.values() if table.name in near]
        raise BadArgument(
            f"{place} has no table {'.'.join(parts)}",
            hint=f"Perhaps {' or '.join(like[:3])}?"
            if like
            else "Names are as in SQL: capitals need quotes.",
        )
    return found[0]


def _matches(tables: Mapping[str, Table], parts: Sequence[str]) -> list[str]:
    match list(parts):
        case [name]:
            return [table.sql for table in tables.values() if table.name == name]
        case [schema, name]:
            return [table.sql for table in tables.values() if (table.schema, table.name) == (schema, name)]
    return []
