"""Old IDs in the catalog: which IDs were issued before the cluster, and the shards of their rows.

An old ID does not contain its shard. Each adopted table has a rule that finds the shards of its old IDs. For
rule ``directory`` the catalog has a list: 4,096 consecutive IDs are a row of
``shardids_catalog.old_id_directory``. Each function runs in the connection's transaction.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.topology import BY_DIRECTORY, BY_FAN_OUT, BY_KEY, OldIdRule, OldIdRules, shard_for_key
from shardids.errors import BadArgument, ClusterConflict
from shardids.ids.layout import Layout
from shardids.ids.text import checked_integer
from shardids.pg.queries import batches

__all__ = [
    "BY_DIRECTORY",
    "BY_FAN_OUT",
    "BY_KEY",
    "OldIdRule",
    "OldIdRules",
    "chunk_of",
    "fill_directory",
    "forget_old_ids",
    "lowest_new_id",
    "read_directory",
    "shard_in",
    "tables_of",
    "write_old_ids",
]

_CHUNK_BITS: Final = 12
_CHUNK: Final = 1 << _CHUNK_BITS
_NONE: Final = 0xFFFF
"""The entry of a directory for an ID that no row had."""
_IDS_A_TIME: Final = 200_000
"""How many IDs are collected before they are written."""
_CHUNKS_A_TIME: Final = 512
"""How many chunks are written together: 4 MiB."""
_CLOCKS_DIFFER: Final = timedelta(days=1)
"""By how much a node's clock may have been behind the catalog's when the cluster was made."""


def lowest_new_id(layout: Layout, created_at: datetime) -> int:
    """Return a lower bound of the IDs of a cluster that was made then: its clock counts from there."""
    return layout.min_id(max(created_at - _CLOCKS_DIFFER, layout.first_time))


def write_old_ids(connection: Connection, *, rules: Iterable[OldIdRule], below: int | None = None) -> int:
    """Write the rules of adopted tables, in place of those that they had; return which IDs are old.

    Clients are notified at COMMIT. Then they refuse IDs below the returned number, unless they know the
    table and its rule.

    Args:
        connection: to the catalog.
        rules: one for each adopted table that has an ID column.
        below: IDs below it are old: above all that the source may still issue. Default: all that the cluster
            can't have issued. With keys that were made from the past (``created_at``) it lies below those.

    Raises:
        BadArgument: ``below`` is not above 0, or the cluster may have issued IDs below it.
        ClusterConflict: the catalog has another number already, or a directory can't hold this many
            shards.
    """
    wanted = list(rules)
    cluster: Any = connection.execute(text("select * from shardids_catalog.cluster for update")).one()
    bits = {name: getattr(cluster, name) for name in ("time_bits", "shard_bits", "sequence_bits")}
    lowest = lowest_new_id(Layout(epoch_ms=cluster.epoch_ms, **bits), cluster.created_at)
    number = _below(below, cluster.old_ids_below, lowest)
    if cluster.shard_count > _NONE and any(rule.rule == BY_DIRECTORY for rule in wanted):
        raise ClusterConflict(f"a directory of old IDs can't tell {cluster.shard_count} shards apart")
    if wanted:
        connection.execute(
            text("update shardids_catalog.cluster set old_ids_below = :below"), {"below": number}
        )
    for rule in wanted:
        connection.execute(
            text("""
                insert into shardids_catalog.old_id_rule (table_name, id_column, rule)
                values (:table, :column, :rule)
                on conflict (table_name) do update
                set id_column = excluded.id_column, rule = excluded.rule"""),
            {"table": rule.table, "column": rule.column, "rule": str(rule.rule)},
        )
        if rule.rule != BY_DIRECTORY:
            connection.execute(
                text("delete from shardids_catalog.old_id_directory where table_name = :table"),
                {"table": rule.table},
            )
    return number


def _below(wanted: int | None, there: int | None, lowest_new: int) -> int:
    if there is not None:
        if wanted not in (None, there):
            raise ClusterConflict(
                f"IDs below {there} are old in this cluster already, not those below {wanted}",
                hint="The number is fixed for good: new IDs may lie just above it.",
            )
        return there
    if lowest_new < 1:
        raise BadArgument(
            "the cluster's epoch is so late that its IDs begin at 0: old and new IDs would overlap",
            hint="Make the cluster with an epoch of some days before its first ID: --layout T-S-Q@EPOCH_MS",
        )
    return checked_integer(
        "the number below which IDs are old", lowest_new if wanted is None else wanted, 1, lowest_new
    )


def forget_old_ids(connection: Connection, tables: Iterable[str] | None = None) -> None:
    """Delete the rules of tables, and their directories; default: of all. Without rules no ID is old."""
    if tables is None:
        connection.execute(text("delete from shardids_catalog.old_id_rule"))
    else:
        connection.execute(
            text("delete from shardids_catalog.old_id_rule where table_name = any(:tables)"),
            {"tables": list(tables)},
        )
    connection.execute(
        text("""
            update shardids_catalog.cluster set old_ids_below = null
            where not exists (select from shardids_catalog.old_id_rule)""")
    )


def fill_directory(connection: Connection, table: str, pairs: Iterable[tuple[int, int]]) -> int:
    """Add old IDs with their shards to a table's directory; return how many it read.

    It is quickest in order of the IDs. Calls are idempotent.

    Args:
        connection: to the catalog.
        table: an adopted table with rule ``directory``.
        pairs: IDs, each with the shard of its row.

    Raises:
        BadArgument: an ID that is not old, or a shard that is not in the cluster.
        ClusterConflict: the table has no directory, or an ID is in it with another shard.
    """
    old, shard_count = _directory(connection, table)
    lowest, below = old.start, old.stop
    chunks: defaultdict[int, dict[int, int]] = defaultdict(dict)
    count = 0
    for id_, shard in pairs:
        if not (lowest <= id_ < below and 0 <= shard < shard_count):
            raise BadArgument(
                f"{table}: ID {id_} in shard {shard} can't be in a directory",
                hint=f"It is for IDs below {below} in shards 0 to {shard_count - 1}.",
            )
        there = chunks[id_ >> _CHUNK_BITS].setdefault(id_ & (_CHUNK - 1), shard)
        if there != shard:
            raise _two_shards(table, id_, there, shard)
        count += 1
        if count % _IDS_A_TIME == 0:
            _write(connection, table, chunks)
            chunks.clear()
    _write(connection, table, chunks)
    return count


def _directory(connection: Connection, table: str) -> tuple[range, int]:
    """Return which IDs are old, and the number of shards; lock the directory until the end."""
    row = connection.execute(
        text("""
            select c.old_ids_below as below, c.shard_count,
                   case c.time_bits + c.shard_bits + c.sequence_bits
                     when 64 then 0 else -1::bigint << 63 end as lowest
            from shardids_catalog.old_id_rule r, shardids_catalog.cluster c
            where r.table_name = :table and r.rule = 'directory' for update of r"""),
        {"table": table},
    ).one_or_none()
    if row is None:
        raise ClusterConflict(f"table {table} has no directory of old IDs", hint="Write its rule first.")
    return range(row.lowest, row.below), int(row.shard_count)


def _write(connection: Connection, table: str, chunks: Mapping[int, Mapping[int, int]]) -> None:
    for numbers in batches(sorted(chunks), _CHUNKS_A_TIME):
        there = read_directory(connection, table, numbers)
        stored = [_with(there.get(number, b""), table, number, chunks[number]) for number in numbers]
        connection.execute(
            text("""
                insert into shardids_catalog.old_id_directory (table_name, chunk, shards)
                select :table, chunk, shards from unnest(cast(:chunks as bigint[]), cast(:shards as bytea[]))
                       as filled (chunk, shards)
                on conflict (table_name, chunk) do update set shards = excluded.shards"""),
            {"table": table, "chunks": numbers, "shards": stored},
        )


def _with(stored: bytes, table: str, number: int, ids: Mapping[int, int]) -> bytes:
    """Return a chunk with further IDs, by their places in it."""
    found = _swapped(array("H", stored))
    found.extend([_NONE] * (max(ids) + 1 - len(found)))
    for place, shard in ids.items():
        if found[place] not in (_NONE, shard):
            raise _two_shards(table, (number << _CHUNK_BITS) + place, found[place], shard)
        found[place] = shard
    return _swapped(found).tobytes()


def read_directory(connection: Connection, table: str, chunks: Sequence[int]) -> dict[int, bytes]:
    """Return those chunks of a table's directory that are there; :func:`shard_in` reads one."""
    rows = connection.execute(
        text("""
            select chunk, shards from shardids_catalog.old_id_directory
            where table_name = :table and chunk = any(:chunks)"""),
        {"table": table, "chunks": chunks},
    )
    return {row.chunk: bytes(row.shards) for row in rows}


def tables_of(connection: Connection, rules: OldIdRules, shard_count: int, id_: int) -> dict[str, int | None]:
    """Return the adopted tables, each with the shard that a row with an old ID would be in, by name.

    ``None`` stands for those that all shards would have to be asked for, and where no row had the ID.
    """
    found: dict[str, int | None] = {}
    for table, rule in sorted(rules.of_table.items()):
        found[table] = None
        if rule.rule == BY_KEY:
            found[table] = shard_for_key(id_, shard_count)
        elif rule.rule == BY_DIRECTORY:
            chunk = read_directory(connection, table, [chunk_of(id_)]).get(chunk_of(id_), b"")
            found[table] = shard_in(chunk, id_)
    return found


def chunk_of(id_: int) -> int:
    """Return the number of the chunk that has an ID."""
    return id_ >> _CHUNK_BITS


def shard_in(chunk: bytes, id_: int) -> int | None:
    """Return the shard of an ID by its chunk; ``None`` if no row had it."""
    at = 2 * (id_ & (_CHUNK - 1))
    shard = int.from_bytes(chunk[at : at + 2] or b"\xff\xff", "big")
    return None if shard == _NONE else shard


def _swapped(numbers: array[int]) -> array[int]:
    """Turn a machine's numbers into the catalog's, whose higher byte is the first, and back."""
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _two_shards(table: str, id_: int, one: int, other: int) -> ClusterConflict:
    return ClusterConflict(
        f"{table}: ID {id_} would be in two shards, {one} and {other}",
        hint="Compare the two rows, and delete the wrong one.",
    )
