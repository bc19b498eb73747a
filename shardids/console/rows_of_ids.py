"""Looks for the rows of IDs: in the tables of each ID's shard, on the node where the shard lives now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.reader import Refused, reading_as_reader
from shardids.console.databases import STATEMENT, Databases
from shardids.console.figures import owner_of, told
from shardids.console.watching import Seen
from shardids.errors import ShardidsError
from shardids.ids.layout import Layout

MOST_SHARDS: Final = 32
"""In how many shards rows are looked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of an ID: the tables that hold a row with it; ``there`` is ``None`` where nobody could look."""

    there: bool | None = None
    table: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What was found, by ID, and what could not be read, a sentence each."""

    found: Mapping[int, Found]
    unread: Sequence[str]


# Tables whose primary key is one bigint; parts of a partitioned table are read through it.
_KEYS: Final = text("""
    select s.id as shard, n.nspname as schema, c.relname as table_name, a.attname as column_name
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'p') and not c.relispartition
    join pg_index i on i.indrelid = c.oid and i.indisprimary and i.indnkeyatts = 1
    join pg_attribute a on a.attrelid = c.oid and a.attnum = i.indkey[0] and a.atttypid = 'bigint'::regtype
    where s.id = any(:shards)
    order by 1, 3""")


def look(
    databases: Databases, seen: Seen, layout: Layout, ids: Sequence[int], old_ids_below: int | None
) -> Looked:
    """Looks for the rows of IDs. Rows of old IDs are not looked for: any shard may have them."""
    found: dict[int, Found] = {}
    wanted: defaultdict[int, list[int]] = defaultdict(list)
    for id_ in ids:
        if old_ids_below is None or not 0 <= id_ < old_ids_below:
            wanted[layout.decode(id_).shard].append(id_)
    per_node: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)
    unread: list[str] = []
    for number, (shard, mine) in enumerate(wanted.items()):
        node = owner_of(seen, shard)
        if node is None:
            continue
        if number >= MOST_SHARDS:
            found |= dict.fromkeys(
                mine, Found(note=f"not looked for: only in the first {MOST_SHARDS} shards")
            )
            continue
        per_node[node][shard] = mine
    answers = databases.of_nodes({name: _Question(name, shards) for name, shards in per_node.items()})
    for name, answer in answers.items():
        if isinstance(answer, ShardidsError):
            unread.append(str(told(answer)))
            note = f'node "{name}" could not be asked for the row'
            found |= {id_: Found(note=note) for mine in per_node[name].values() for id_ in mine}
        else:
            found |= answer.found
            unread += answer.unread
    return Looked(found=found, unread=unread)


class _Question:
    """Asks a node for the rows of IDs, by shard: three statements, whatever the number of tables."""

    def __init__(self, node: str, wanted: Mapping[int, Sequence[int]]) -> None:
        self._what = f'node "{node}"'
        self._wanted = wanted

    def __call__(self, connection: Connection) -> Looked:
        keys = connection.execute(_KEYS, {"shards": list(self._wanted)}).all()
        query = sql.SQL("select {column} as id from {table} where {column} = any({ids}::bigint[])")
        with reading_as_reader(connection.engine, self._what) as reader:
            answers = reader.read(
                [
                    query.format(
                        column=sql.Identifier(key.column_name),
                        table=sql.Identifier(key.schema, key.table_name),
                        ids=sql.Literal(list(self._wanted[key.shard])),
                    ).as_string()
                    for key in keys
                ],
                statement_timeout=STATEMENT,
            )
        rows: defaultdict[int, list[str]] = defaultdict(list)
        hidden: set[int] = set()
        unread: list[str] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, Refused):
                hidden.add(key.shard)
                unread.append(f"{key.schema}.{key.table_name} was not looked at: {answer.reason}")
                continue
            for row in answer:
                rows[row["id"]].append(key.table_name)
        found = {}
        for shard, ids in self._wanted.items():
            for id_ in ids:
                if id_ in rows:
                    found[id_] = Found(there=True, table=", ".join(sorted(rows[id_])))
                else:
                    found[id_] = Found(there=None if shard in hidden else False)
        return Looked(found=found, unread=unread)
