"""Old IDs in the catalog: which IDs were issued before the cluster, and the shards of their rows.

An old ID does not contain its shard. Each adopted table has a rule that finds the shards of its old IDs. For
rule ``directory`` the catalog has them: where IDs lie close, 4,096 consecutive ones are a row of
``shardids_catalog.old_id_directory``; those that lie far apart, as such that carry a time do, are listed in
``shardids_catalog.old_id_list``. Each function with a connection runs in its transaction.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any, Final

from sqlalchemy import Connection, Engine, text

from shardids.catalog.keys.id_lists import IdList, swapped
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
    "fill_from",
    "forget_old_ids",
    "lowest_new_id",
    "overwrite_directory",
    "read_chunks",
    "read_directory",
    "read_list",
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
_DENSE: Final = 64
"""From how many IDs on a chunk takes less room than a list of them."""
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
            for name in ("directory", "list"):
                connection.execute(
                    text(f"delete from shardids_catalog.old_id_{name} where table_name = :table"),  # noqa: S608 -- a constant
                    {"table": rule.table},
                )
        connection.execute(
            text("delete from shardids_catalog.old_id_filling where table_name = :table"),
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
        table: an adopted table with rule ``directory``, or ``fan-out`` until the directory is whole.
        pairs: IDs, each with the shard of its row.

    Raises:
        BadArgument: an ID that is not old, or a shard that is not in the cluster.
        ClusterConflict: the table has no directory, or an ID is in it with another shard.
    """
    old, shard_count = _directory(connection, table)
    chunks: defaultdict[int, dict[int, int]] = defaultdict(dict)
    count = 0
    for id_, shard in pairs:
        _require_fit(table, id_, shard, old, shard_count)
        there = chunks[id_ >> _CHUNK_BITS].setdefault(id_ & (_CHUNK - 1), shard)
        if there != shard:
            raise _two_shards(table, id_, there, shard)
        count += 1
        if count % _IDS_A_TIME == 0:
            _write(connection, table, chunks)
            chunks.clear()
    _write(connection, table, chunks)
    return count


def overwrite_directory(connection: Connection, table: str, shards: Mapping[int, int]) -> None:
    """Give old IDs other shards in a table's directory than it had for them.

    Raises:
        BadArgument: an ID that is not old, or a shard that is not in the cluster.
        ClusterConflict: the table has no directory.
    """
    old, shard_count = _directory(connection, table)
    for id_, shard in shards.items():
        _require_fit(table, id_, shard, old, shard_count)
    by_chunk: defaultdict[int, list[int]] = defaultdict(list)
    for id_ in shards:
        by_chunk[chunk_of(id_)].append(id_)
    for numbers in batches(sorted(by_chunk), _CHUNKS_A_TIME):
        some = [id_ for number in numbers for id_ in by_chunk[number]]
        far = _list(table).read(connection, some).keys() & set(some)
        there = {
            number: swapped(array("H", chunk))
            for number, chunk in read_chunks(connection, table, numbers).items()
        }
        for id_ in some:
            chunk, place = there.get(chunk_of(id_)), id_ & (_CHUNK - 1)
            if chunk is not None and place < len(chunk) and chunk[place] != _NONE:
                chunk[place] = shards[id_]
            else:
                far.add(id_)
        _write_chunks(
            connection, table, {number: swapped(chunk).tobytes() for number, chunk in there.items()}
        )
        _list(table).add(connection, {id_: shards[id_] for id_ in far}, None)


def _require_fit(table: str, id_: int, shard: int, old: range, shard_count: int) -> None:
    if not (old.start <= id_ < old.stop and 0 <= shard < shard_count):
        raise BadArgument(
            f"{table}: ID {id_} in shard {shard} can't be in a directory",
            hint=f"It is for IDs below {old.stop} in shards 0 to {shard_count - 1}.",
        )


def _directory(connection: Connection, table: str) -> tuple[range, int]:
    """Return which IDs are old, and the number of shards; lock the directory until the end."""
    row = connection.execute(
        text("""
            select c.old_ids_below as below,
                   greatest(c.shard_count, (select max(p.shard) + 1 from shardids_catalog.placement p))
                     as shard_count,
                   case c.time_bits + c.shard_bits + c.sequence_bits
                     when 64 then 0 else -1::bigint << 63 end as lowest
            from shardids_catalog.old_id_rule r, shardids_catalog.cluster c
            where r.table_name = :table and r.rule <> 'key' for update of r"""),
        {"table": table},
    ).one_or_none()
    if row is None:
        raise ClusterConflict(f"table {table} has no directory of old IDs", hint="Write its rule first.")
    return range(row.lowest, row.below), int(row.shard_count)


def fill_from(
    engine: Engine, table: str, node: str, pairs_after: Callable[[int | None], Iterable[tuple[int, int]]]
) -> None:
    """Add the old IDs of a node to a table's directory, some at a time; go on where an earlier call ended.

    ``pairs_after``: returns the IDs above one, each with its shard, in order; ``None``: all.

    Raises:
        BadArgument, ClusterConflict: see :func:`fill_directory`.
    """
    where = {"table": table, "node": node}
    with engine.begin() as connection:
        last = connection.scalar(
            text(
                "select last from shardids_catalog.old_id_filling where table_name = :table and node = :node"
            ),
            where,
        )
    pairs = iter(pairs_after(last))
    while some := list(islice(pairs, _IDS_A_TIME)):
        with engine.begin() as connection:
            fill_directory(connection, table, some)
            connection.execute(
                text("""
                    insert into shardids_catalog.old_id_filling values (:table, :node, :last)
                    on conflict (table_name, node) do update set last = excluded.last"""),
                where | {"last": some[-1][0]},
            )


def _write(connection: Connection, table: str, chunks: Mapping[int, Mapping[int, int]]) -> None:
    if not chunks:
        return
    far: dict[int, int] = {}
    for numbers in batches(sorted(chunks), _CHUNKS_A_TIME):
        there = read_chunks(connection, table, numbers)
        dense = [number for number in numbers if number in there or len(chunks[number]) >= _DENSE]
        for number in set(numbers).difference(dense):
            far |= {(number << _CHUNK_BITS) + place: shard for place, shard in chunks[number].items()}
        stored = {number: _with(there.get(number, b""), table, number, chunks[number]) for number in dense}
        _write_chunks(connection, table, stored)
    _list(table).add(connection, far, partial(_two_shards, table))
    _require_one_shard(connection, table, chunks, far)


def _write_chunks(connection: Connection, table: str, chunks: Mapping[int, bytes]) -> None:
    connection.execute(
        text("""
            insert into shardids_catalog.old_id_directory (table_name, chunk, shards)
            select :table, chunk, shards from unnest(cast(:chunks as bigint[]), cast(:shards as bytea[]))
                   as filled (chunk, shards)
            on conflict (table_name, chunk) do update set shards = excluded.shards"""),
        {"table": table, "chunks": list(chunks), "shards": list(chunks.values())},
    )


def _require_one_shard(
    connection: Connection, table: str, chunks: Mapping[int, Mapping[int, int]], far: Mapping[int, int]
) -> None:
    """Require that IDs of chunks are not in the list with another shard."""
    dense = {
        id_: shard
        for number, places in chunks.items()
        for place, shard in places.items()
        if (id_ := (number << _CHUNK_BITS) + place) not in far
    }
    if not dense:
        return
    its = _list(table)
    for some in batches(its.firsts(connection, min(dense), max(dense)), _CHUNKS_A_TIME):
        for listed in its.rows(connection, some).values():
            for id_ in listed.keys() & dense.keys():
                if listed[id_] != dense[id_]:
                    raise _two_shards(table, id_, listed[id_], dense[id_])


def _with(stored: bytes, table: str, number: int, ids: Mapping[int, int]) -> bytes:
    """Return a chunk with further IDs, by their places in it."""
    found = swapped(array("H", stored))
    found.extend([_NONE] * (max(ids) + 1 - len(found)))
    for place, shard in ids.items():
        if found[place] not in (_NONE, shard):
            raise _two_shards(table, (number << _CHUNK_BITS) + place, found[place], shard)
        found[place] = shard
    return swapped(found).tobytes()


def read_directory(connection: Connection, table: str, ids: Collection[int]) -> dict[int, int]:
    """Return the shards that a table's directory has for IDs, without those that it does not have."""
    found: dict[int, int] = {}
    wanted = list(ids)
    for numbers in batches(sorted({chunk_of(id_) for id_ in wanted}), _CHUNKS_A_TIME):
        chunks = read_chunks(connection, table, numbers)
        for id_ in wanted:
            if (shard := shard_in(chunks.get(chunk_of(id_), b""), id_)) is not None:
                found[id_] = shard
    if missing := [id_ for id_ in wanted if id_ not in found]:
        listed = read_list(connection, table, missing)
        found |= {id_: listed[id_] for id_ in missing if id_ in listed}
    return found


def read_chunks(connection: Connection, table: str, chunks: Sequence[int]) -> dict[int, bytes]:
    """Return those chunks of a table's directory that are there; :func:`shard_in` reads one."""
    rows = connection.execute(
        text("""
            select chunk, shards from shardids_catalog.old_id_directory
            where table_name = :table and chunk = any(:chunks)"""),
        {"table": table, "chunks": chunks},
    )
    return {row.chunk: bytes(row.shards) for row in rows}


def read_list(connection: Connection, table: str, ids: Sequence[int]) -> dict[int, int]:
    """Return all of the rows of a table's list that may have these IDs, each ID with its shard."""
    return _list(table).read(connection, ids)


def _list(table: str) -> IdList:
    return IdList("old_id_list", "table_name", table, "shards")


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
            found[table] = read_directory(connection, table, [id_]).get(id_)
    return found


def chunk_of(id_: int) -> int:
    """Return the number of the chunk that has an ID."""
    return id_ >> _CHUNK_BITS


def shard_in(chunk: bytes, id_: int) -> int | None:
    """Return the shard of an ID by its chunk; ``None`` if no row had it."""
    at = 2 * (id_ & (_CHUNK - 1))
    shard = int.from_bytes(chunk[at : at + 2] or b"\xff\xff", "big")
    return None if shard == _NONE else shard


def _two_shards(table: str, id_: int, one: int, other: int) -> ClusterConflict:
    return ClusterConflict(
        f"{table}: ID {id_} would be in two shards, {one} and {other}",
        hint="Compare the two rows, and delete the wrong one.",
    )
