"""IDs of rows that have left the shard they were born in: an ID leads to the key, the key to the shard.

A move first lists the IDs of the key's rows, in as many transactions as it likes: nothing heeds them yet.
:func:`~shardids.catalog.keys.homes.write_home` then switches the key and all its IDs at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.keys.id_lists import IdList
from shardids.catalog.keys.known import Key, key_text, parse_key
from shardids.catalog.old_ids import overwrite_directory
from shardids.catalog.rows import describe_in
from shardids.catalog.topology import BY_DIRECTORY
from shardids.errors import BadArgument, ClusterConflict
from shardids.ids.layout import Layout

_MOST_SLOTS: Final = 65_535
FIRST_MS: Final = 1_000
"""IDs of earlier milliseconds are none: there are small numbers that count something else."""
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedKey:
    """A key with rows that were born in ``origin`` and may live elsewhere.

    Attributes:
        kind: its kind.
        key: the key, as text.
        origin: the shard in its rows' IDs.
        shard: the shard where the rows are: that of the key, by the directory or the hash.
    """

    kind: str
    key: str
    origin: int
    shard: int


def list_ids(connection: Connection, kind: str, key: str | Key, ids: Iterable[int], *, shard: int) -> None:
    """List the IDs of a key's rows, so that they follow the key; calls are idempotent.

    A key that has not been moved yet gets its number in each origin, and its IDs lead nowhere until it has.
    Once it has, they lead to its shard from the COMMIT on. IDs of ``shard`` are left out unless rows of the
    key were there before: rows that are where they were born need no entry.

    Args:
        connection: to the catalog.
        kind: the key's kind.
        key: the key, or its text.
        ids: IDs of the cluster, of any of its tables; not old ones: see :func:`move_old_ids`.
        shard: the shard where the key lives now.

    Raises:
        BadArgument: not a key of the kind.
        ClusterConflict: an origin has numbers for no more keys: 65,535.
    """
    layout = describe_in(connection, connection.engine.url).layout
    by_origin: defaultdict[int, list[int]] = defaultdict(list)
    for id_ in ids:
        by_origin[layout.shard_of(id_)].append(id_)
    written = _text(kind, key)
    # First of all, since new ones lock the placement.
    slots = {origin: _slot(connection, kind, written, origin, shard) for origin in sorted(by_origin)}
    for origin, slot in slots.items():
        its = by_origin[origin]
        where = {"origin": origin, "slot": slot}
        # Those who change one list take turns; a switch of the key waits for its row.
        connection.execute(
            text("select from shardids_catalog.placement where shard = :origin for no key update"), where
        )
        now = connection.scalar(
            text("""
                select shard from shardids_catalog.moved_key
                where origin = :origin and slot = :slot for update"""),
            where,
        )
        list_of(origin).add(connection, dict.fromkeys(its, slot), None)
        # Setting the shard notifies clients: those who know the list have not seen these IDs.
        heeded = ", shard = shard" if now != origin else ""
        connection.execute(
            text(f"""
                update shardids_catalog.moved_key
                set lowest = least(lowest, :lowest), highest = greatest(highest, :highest){heeded}
                where origin = :origin and slot = :slot"""),  # noqa: S608 -- constants
            {**where, "lowest": min(its), "highest": max(its)},
        )


def is_id(layout: Layout, value: int, shards: Container[int]) -> bool:
    """Return whether a value can be an ID of one of the shards."""
    if (value & _MASK) >> (layout.shard_bits + layout.sequence_bits) < FIRST_MS:
        return False
    try:
        return layout.shard_of(value) in shards
    except BadArgument:
        return False


def redirect(connection: Connection, kind: str, key: str, shard: int) -> None:
    """Let all listed IDs of a key lead to a shard; ``write_home`` and ``delete_home`` call it."""
    connection.execute(
        text("""
            update shardids_catalog.moved_key set shard = :shard
            where kind = :kind and key = :key and shard <> :shard"""),
        {"kind": kind, "key": key, "shard": shard},
    )


def moved_keys(connection: Connection, kind: str, key: str | Key) -> list[MovedKey]:
    """Return the origins of a key's listed IDs."""
    rows = connection.execute(
        text("""
            select kind, key, origin, shard from shardids_catalog.moved_key
            where kind = :kind and key = :key order by origin"""),
        {"kind": kind, "key": _text(kind, key)},
    )
    return [MovedKey(**row._mapping) for row in rows]


def listed_ids(connection: Connection, kind: str, key: str | Key) -> list[int]:
    """Return the IDs that are listed as a key's. It reads the list of each origin of them."""
    slots = connection.execute(
        text("select origin, slot from shardids_catalog.moved_key where kind = :kind and key = :key"),
        {"kind": kind, "key": _text(kind, key)},
    ).all()
    return [id_ for row in slots for id_ in list_of(row.origin).of(connection, row.slot)]


def keys_of_ids(connection: Connection, ids: Sequence[int]) -> dict[int, MovedKey]:
    """Return the keys of listed IDs, with the shards where their rows are; IDs that are not listed lack.

    It asks for each origin among them once.
    """
    layout = describe_in(connection, connection.engine.url).layout
    by_origin: defaultdict[int, list[int]] = defaultdict(list)
    for id_ in ids:
        with suppress(BadArgument):  # It is of no shard.
            by_origin[layout.shard_of(id_)].append(id_)
    found: dict[int, MovedKey] = {}
    for origin, its in by_origin.items():
        rows = connection.execute(
            text("select * from shardids_catalog.moved_key where origin = :origin"), {"origin": origin}
        )
        keys = {
            row.slot: MovedKey(kind=row.kind, key=row.key, origin=origin, shard=row.shard) for row in rows
        }
        listed = list_of(origin).read(connection, its) if keys else {}
        found |= {id_: keys[listed[id_]] for id_ in its if id_ in listed}
    return found


def move_old_ids(connection: Connection, table: str, shards: Mapping[int, int]) -> None:
    """Let old IDs of an adopted table lead to other shards, in place of those that its directory has.

    Nothing is to be done for tables of the other rules: by ``key`` an ID is the key, and by ``fan-out`` all
    shards are asked. Clients are notified by the change of the key's entry.

    Raises:
        BadArgument: an ID that is not old, or a shard that is not in the cluster.
    """
    rule = connection.scalar(
        text("select rule from shardids_catalog.old_id_rule where table_name = :table"), {"table": table}
    )
    if rule == BY_DIRECTORY:
        overwrite_directory(connection, table, shards)


def _slot(connection: Connection, kind: str, key: str, origin: int, shard: int) -> int:
    """Return the key's number in an origin, made if it has none."""
    where = {"kind": kind, "key": key, "origin": origin}
    numbered: int | None = connection.scalar(
        text("""
            select slot from shardids_catalog.moved_key
            where kind = :kind and key = :key and origin = :origin"""),
        where,
    )
    if numbered is not None:
        return numbered
    connection.execute(text("select from shardids_catalog.cluster for update"))
    slot: int = connection.scalar(
        text("select coalesce(max(slot) + 1, 0) from shardids_catalog.moved_key where origin = :origin"),
        {"origin": origin},
    )
    if slot >= _MOST_SLOTS:
        raise ClusterConflict(
            f"{_MOST_SLOTS} keys have left shard {origin}: IDs of one more could not be distinguished",
            hint="Move a key of another shard.",
        )
    connection.execute(
        text("""
            insert into shardids_catalog.moved_key (origin, slot, kind, key, shard)
            values (:origin, :slot, :kind, :key, :shard)"""),
        {**where, "slot": slot, "shard": shard},
    )
    return slot


def list_of(origin: int) -> IdList:
    """Return the list of a shard's moved IDs; its numbers are slots of ``shardids_catalog.moved_key``."""
    return IdList("moved_id_list", "origin", origin, "slots")


def _text(kind: str, key: str | Key) -> str:
    return key_text(parse_key(key, kind) if isinstance(key, str) else key)
