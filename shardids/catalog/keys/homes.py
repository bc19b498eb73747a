"""The entries of the directory of keys in the catalog: written, read, and read into memory.

An entry names the shard where the rows of a key live. Without one they live in the shard of the key's hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import Connection, text

from shardids.catalog.keys.known import (
    MOST_CHANGES,
    NO_HOMES,
    Departures,
    Key,
    KnownHomes,
    key_text,
    kind_of,
    numbers_of,
    parse_key,
    region_of,
)
from shardids.catalog.keys.moved_ids import redirect
from shardids.catalog.regions import existing_region
from shardids.catalog.rows import Catalog, describe_in, lock_placement, read_placement
from shardids.catalog.topology import shard_for_key
from shardids.errors import BadArgument, ClusterConflict

_COLUMNS: Final = "kind, key, shard, since"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """An entry of the directory: a key, and the shard where its rows live.

    Attributes:
        kind: the SQL type of the key, as :func:`~shardids.catalog.keys.known.kind_of` returns it.
        key: the key as text, as :func:`~shardids.catalog.keys.known.key_text` returns it.
        shard: the shard.
        since: when it was entered.
    """

    kind: str
    key: str
    shard: int
    since: datetime


def put_home(
    catalog: Catalog, kind: str, key: str | Key, shard: int, *, source: int | None = None
) -> Home | None:
    """Write where the rows of a key live; return the entry, ``None`` if that is the shard of its hash.

    It commits; see :func:`write_home`, also for the errors. The rows are not moved, and
    the nodes' copies not changed: ``shardids.catalog.keys.copies.bring_homes`` does that.
    """
    with catalog.engine.begin() as connection:
        return write_home(connection, kind, key, shard, source=source)


def drop_home(catalog: Catalog, kind: str, key: str | Key, *, source: int | None = None) -> bool:
    """Delete a key's entry, so that its shard is that of its hash; return whether it had one.

    Raises:
        BadArgument: no such kind, or not a key of it.
        ClusterConflict: the key does not live in ``source``.
    """
    with catalog.engine.begin() as connection:
        return delete_home(connection, kind, key, source=source)


def homes(
    catalog: Catalog,
    *,
    kind: str | None = None,
    shard: int | None = None,
    after: tuple[str, str] | None = None,
    limit: int | None = None,
) -> list[Home]:
    """Return the entries of the directory, by kind and key: of one kind, or of one shard.

    ``after`` is the kind and the key of the last entry of the page before; ``limit`` is the size of a page.
    """
    with catalog.engine.connect() as connection:
        return read_homes(connection, kind=kind, shard=shard, after=after, limit=limit)


def home_of(catalog: Catalog, kind: str, key: str | Key) -> Home | None:
    """Return the entry of a key; ``None`` if it lives in the shard of its hash.

    Raises:
        BadArgument: no such kind, or not a key of it.
    """
    with catalog.engine.connect() as connection:
        return read_home(connection, kind, key)


def write_home(
    connection: Connection, kind: str, key: str | Key, shard: int, *, source: int | None = None
) -> Home | None:
    """Do what :func:`put_home` does in the connection's transaction: its commit is the switch.

    The listed IDs of the key's rows (:func:`~shardids.catalog.keys.moved_ids.list_ids`) follow it. Clients
    are notified at COMMIT. It locks the placement until then.

    Args:
        connection: to the catalog.
        kind: ``text``, ``bigint``, ``uuid`` or ``bytea``, with ``@eu`` for a key of region ``eu``.
        key: the key, or its text.
        shard: the shard where its rows live from now on. The entry of a key that returns to the shard of its
            hash is deleted.
        source: the shard where they live now, by the directory or the hash; it is not checked without.

    Raises:
        BadArgument: no such kind, region or shard, or not a key of the kind; or the directory can't hold it.
        ClusterConflict: the shard is not active, or not of the key's region; or the key does not live in
            ``source``.
    """
    lock_placement(connection)
    written = key_text(_key(key, kind))
    placement = read_placement(connection)
    _require_source(connection, kind, written, source)
    count = describe_in(connection, connection.engine.url).shard_count
    if not 0 <= shard < count:
        raise BadArgument(
            f"shard {shard} does not exist in this cluster", hint=f"Shards are numbered 0 to {count - 1}."
        )
    if shard not in placement.node_of:
        state = f'was lost with node "{placement.lost[shard]}"' if shard in placement.lost else "has no node"
        raise ClusterConflict(
            f"shard {shard} {state}: no key can live there", hint="List the shards with: shardids shard list"
        )
    region = region_of(kind)
    if region is not None and shard not in existing_region(region, placement.regions).shards:
        raise ClusterConflict(
            f'shard {shard} is not of region "{region}", whose keys live only there',
            hint=f"Its shards: {placement.regions[region]}.",
        )
    if shard == _shard_of_hash(connection, kind, written):
        delete_home(connection, kind, key)
        return None
    redirect(connection, kind, written, shard)
    row = connection.execute(
        text(f"""
            insert into shardids_catalog.key_home as there (kind, key, shard) values (:kind, :key, :shard)
            on conflict (kind, key) do update set shard = excluded.shard, since = excluded.since
            where there.shard <> excluded.shard
            returning {_COLUMNS}"""),  # noqa: S608 -- a constant
        {"kind": kind, "key": written, "shard": shard},
    ).one_or_none()
    return read_home(connection, kind, key) if row is None else Home(**row._mapping)


def delete_home(connection: Connection, kind: str, key: str | Key, *, source: int | None = None) -> bool:
    """Do what :func:`drop_home` does, in the connection's transaction."""
    lock_placement(connection)
    written = key_text(_key(key, kind))
    _require_source(connection, kind, written, source)
    if read_home(connection, kind, key) is None:
        return False
    redirect(connection, kind, written, _shard_of_hash(connection, kind, written))
    connection.execute(
        text("delete from shardids_catalog.key_home where kind = :kind and key = :key"),
        {"kind": kind, "key": written},
    )
    return True


def read_home(connection: Connection, kind: str, key: str | Key) -> Home | None:
    """Do what :func:`home_of` does, in the connection's transaction."""
    row = connection.execute(
        text(f"select {_COLUMNS} from shardids_catalog.key_home where kind = :kind and key = :key"),  # noqa: S608 -- a constant
        {"kind": kind, "key": key_text(_key(key, kind))},
    ).one_or_none()
    return None if row is None else Home(**row._mapping)


def read_homes(
    connection: Connection,
    *,
    kind: str | None = None,
    shard: int | None = None,
    after: tuple[str, str] | None = None,
    limit: int | None = None,
) -> list[Home]:
    """Do what :func:`homes` does, in the connection's transaction."""
    rows = connection.execute(
        text(f"""
            select {_COLUMNS} from shardids_catalog.key_home
            where (cast(:kind as text) is null or kind = :kind)
              and (cast(:shard as integer) is null or shard = :shard)
              and (cast(:after_kind as text) is null
                   or (kind, key) > (cast(:after_kind as text), cast(:after_key as text)))
            order by kind, key limit cast(:limit as bigint)"""),  # noqa: S608 -- a constant
        {
            "kind": kind,
            "shard": shard,
            "after_kind": None if after is None else after[0],
            "after_key": None if after is None else after[1],
            "limit": limit,
        },
    )
    return [Home(**row._mapping) for row in rows]


def homeless(connection: Connection, limit: int) -> list[Home]:
    """Return entries whose shard is not active, or not of the key's region; at most so many."""
    rows = connection.execute(
        text("""
            select h.kind, h.key, h.shard, h.since from shardids_catalog.key_home h
            join shardids_catalog.placement p on p.shard = h.shard
            left join shardids_catalog.region r on r.name = split_part(h.kind, '@', 2)
            where p.state <> 'active'
               or h.kind like '%@%' and (h.shard between r.first_shard and r.last_shard) is not true
            order by 1, 2 limit :limit"""),
        {"limit": limit},
    )
    return [Home(**row._mapping) for row in rows]


def shard_of_key(connection: Connection, kind: str, key: str | Key) -> int:
    """Return the shard where the rows of a key live: by the directory, or else by its hash.

    Raises:
        BadArgument: no such kind or region, or not a key of the kind.
    """
    found = read_home(connection, kind, key)
    return _shard_of_hash(connection, kind, key) if found is None else found.shard


def _shard_of_hash(connection: Connection, kind: str, key: str | Key) -> int:
    region, value = region_of(kind), _key(key, kind)
    if region is not None:
        return existing_region(region, read_placement(connection).regions).shard_for(value)
    return shard_for_key(value, describe_in(connection, connection.engine.url).shard_count)


def _key(key: str | Key, kind: str) -> Key:
    """Return the key of a kind that is given as such or as text."""
    value = parse_key(key, kind) if isinstance(key, str) else key
    if kind_of(value) != kind.partition("@")[0]:
        raise BadArgument(f"{value!r} is a key of kind {kind_of(value)}, not {kind}")
    return value


def _require_source(connection: Connection, kind: str, key: str, source: int | None) -> None:
    if source is not None and (there := shard_of_key(connection, kind, key)) != source:
        raise ClusterConflict(
            f"key {key[:60]!r} lives in shard {there}, not in shard {source}",
            hint="Another command has moved it meanwhile. See: shardids tenant show KEY",
        )


# One statement, so one snapshot: the version belongs to just these rows.
_WHOLE: Final = text("""
    select c.homes_version as version, h.digests, h.shards
    from shardids_catalog.cluster c
    cross join (
      select string_agg(d.digest, ''::bytea) as digests,
             string_agg(substr(int4send(d.shard), 3), ''::bytea) as shards
      from (select digest, shard from shardids_catalog.key_home order by digest) d) h""")
_CHANGES: Final = text("""
    select h.digest, h.shard, h.version from shardids_catalog.key_home h where h.version > :version
    union all
    select g.digest, null, g.version from shardids_catalog.key_home_gone g
    where g.version > :version
      and not exists (select from shardids_catalog.key_home h where h.kind = g.kind and h.key = g.key)
    limit :most""")


def read_known(connection: Connection, known: KnownHomes = NO_HOMES) -> KnownHomes:
    """Return the directory as it is now, in memory; ``known`` is an earlier reading: it is not changed.

    It reads the changes since, or all of it if they are many or there is nothing to add them to.
    """
    state = connection.execute(text("select homes_version, homes_reset from shardids_catalog.cluster")).one()
    if state.homes_version == known.version:
        return known
    departures = _departures(connection)
    if state.homes_reset <= known.version and known.version:
        changed = connection.execute(_CHANGES, {"version": known.version, "most": MOST_CHANGES + 1}).all()
        if len(changed) + known.changes <= MOST_CHANGES:
            version = max(state.homes_version, *(row.version for row in changed), known.version)
            return known.with_changes(version, {bytes(row.digest): row.shard for row in changed}, departures)
    whole = connection.execute(_WHOLE).one()
    return KnownHomes(
        whole.version, bytes(whole.digests or b""), bytes(whole.shards or b""), departures=departures
    )


def _departures(connection: Connection) -> dict[int, Departures]:
    rows = connection.execute(
        text("""
            select origin, min(lowest) as lowest, max(highest) as highest, max(version) as version,
                   string_agg(substr(int4send(shard), 3), ''::bytea order by slot) as shards
            from shardids_catalog.moved_key
            group by origin having bool_or(shard <> origin and lowest is not null)""")
    )
    return {
        row.origin: Departures(
            lowest=row.lowest,
            highest=row.highest,
            shards=numbers_of("H", bytes(row.shards)),
            version=row.version,
        )
        for row in rows
    }
