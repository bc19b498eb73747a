"""Looks for the rows of IDs: in the tables of each ID's shard, on the node where the shard lives now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.strangers import strangers_code
from shardids.console.databases import Databases
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
    select s.id as shard, n.nspname as schema, c.relname as table_name, a.attname as column_name,
           has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select') as may_read
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
    answers = databases.of_nodes({name: _Question(shards) for name, shards in per_node.items()})
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

    def __init__(self, wanted: Mapping[int, Sequence[int]]) -> None:
        self._wanted = wanted

    def __call__(self, connection: Connection) -> Looked:
        keys = connection.execute(_KEYS, {"shards": list(self._wanted)}).all()
        allowed = [key for key in keys if key.may_read]
        # In this transaction: the tables stay as they were looked at.
        code = strangers_code(connection, [(key.schema, key.table_name) for key in allowed])
        readable = [key for key in allowed if (key.schema, key.table_name) not in code]
        forbidden = sorted({f"{key.schema}.{key.table_name}" for key in keys if not key.may_read})
        hidden = {key.shard for key in keys if key not in readable}
        rows: defaultdict[int, list[str]] = defaultdict(list)
        if readable:
            query = sql.SQL(" union all ").join(
                sql.SQL("select {}::text, {} from {} where {} = any({}::bigint[])").format(
                    sql.Literal(key.table_name),
                    sql.Identifier(key.column_name),
                    sql.Identifier(key.schema, key.table_name),
                    sql.Identifier(key.column_name),
                    sql.Literal(list(self._wanted[key.shard])),
                )
                for key in readable
            )
            raw = connection.execution_options(no_parameters=True)
            for table, id_ in raw.exec_driver_sql(query.as_string()):
                rows[id_].append(table)
        found = {}
        for shard, ids in self._wanted.items():
            for id_ in ids:
                if id_ in rows:
                    found[id_] = Found(there=True, table=", ".join(sorted(rows[id_])))
                else:
                    found[id_] = Found(there=None if shard in hidden else False)
        unread = [f"the role may not read {table}" for table in forbidden]
        unread += [f"{schema}.{table} was not looked at: {why}" for (schema, table), why in code.items()]
        return Looked(found=found, unread=unread)
