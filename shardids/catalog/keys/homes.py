"""The entries of the directory of keys in the catalog: written, read, and read into memory.

An entry names the shard where the rows of a key live. Without one they live in the shard of the key's hash.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from shlex import quote
from typing import Final, NamedTuple

from sqlalchemy import Connection, Engine, text

from shardids.catalog.keys.known import (
    KINDS,
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
    require_kind,
)
from shardids.catalog.keys.moved_ids import redirect
from shardids.catalog.regions import existing_region
from shardids.catalog.rows import Catalog, describe_in, lock_placement, read_placement
from shardids.catalog.topology import no_shard, shard_for_key
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

    Raises:
        BadArgument: nothing was found, and the kind, region or shard does not exist.
    """
    with catalog.engine.connect() as connection:
        found = read_homes(connection, kind=kind, shard=shard, after=after, limit=limit)
        if not found and kind is not None:
            require_kind(kind)
        if not found and (kind or shard is not None):
            placement = read_placement(connection)
            if kind is not None and (region := region_of(kind)) is not None:
                existing_region(region, placement.regions)
            count = describe_in(connection, connection.engine.url).shard_count
            if shard is not None and not placement.has(shard, count):
                raise no_shard(shard, placement.total(count))
        return found


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
    if not placement.has(shard, count):
        raise no_shard(shard, placement.total(count))
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


class Refused(NamedTuple):
    """A key that a shard refuses on its node: it has left by a move. Only the catalog knows the kind."""

    shard: int
    move: int
    target: int
    key: str
    kind: str = ""


def refused_keys(connection: Connection) -> list[Refused]:
    """Return the keys that shards of a node refuse for good, or while they are moved."""
    return [Refused(*row) for row in connection.execute(_REFUSED)]


def misled(connection: Connection, refused: Iterable[Refused]) -> list[Refused]:
    """Return those refused keys that the directory leads to the very shard that refuses them.

    A catalog that was restored, or a standby that took over, may lack the switch. Keys whose move is not over
    are passed over.
    """
    moves = {
        row.id: row
        for row in connection.execute(
            text("select id, kind, key, ended_at is null as is_open from shardids_catalog.key_move")
        )
    }
    regions = read_placement(connection).regions
    found: list[Refused] = []
    for one in refused:
        move = moves.get(one.move)
        if move is not None and move.key == one.key:
            kinds = [] if move.is_open else [move.kind]
        else:
            # A catalog without the move does not know the kind: the entry says it, or the key's form.
            kinds = kinds_of(connection, one.key) or [
                f"{kind}{of}" for kind in KINDS for of in ("", *(f"@{name}" for name in regions))
            ]
        found += [one._replace(kind=kind) for kind in kinds if _leads(connection, kind, one)][:1]
    return found


def kinds_of(connection: Connection, key: str) -> list[str]:
    """Return the kinds of keys of a text that have an entry."""
    found = connection.scalars(
        text("select kind from shardids_catalog.key_home where key = :key"), {"key": key}
    )
    return list(found)


def _leads(connection: Connection, kind: str, refused: Refused) -> bool:
    try:
        return shard_of_key(connection, kind, refused.key) == refused.shard
    except BadArgument:  # It is not a key of the kind.
        return False


# The arguments of the trigger: the move, the shard where the key went, and the key. A zero byte ends each.
_REFUSED: Final = text(r"""
    select distinct s.id, cast(a.parts[1] as bigint), cast(a.parts[2] as integer), a.parts[3]
    from pg_trigger t join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
    join shardids.shard s on s.schema = n.nspname and s.state = 'active'
    cross join lateral (
      select array(select convert_from(substring(t.tgargs from b.first for b.last - b.first),
                                       getdatabaseencoding())
                   from (select coalesce(lag(p) over (order by p), 0) + 1 as first, p as last
                         from generate_series(1, length(t.tgargs)) p where get_byte(t.tgargs, p - 1) = 0) b
                   order by b.first) as parts) a
    where t.tgfoid = to_regprocedure('shardids.pass_key()') and t.tgname ~ '^shardids_key_\d+_insert$'
    order by 1, 2""")


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
            hint="Another command has moved it meanwhile. See: shardids tenant show"
            f" {quote(key)} --kind {kind}",
        )


_WHOLE: Final = text("""
    select string_agg(d.digest, ''::bytea) as digests,
           string_agg(substr(int4send(d.shard), 3), ''::bytea) as shards
    from (select digest, shard from shardids_catalog.key_home order by digest) d""")
_CHANGES: Final = text("""
    select h.digest, h.shard, h.version from shardids_catalog.key_home h where h.version > :version
    union all
    select g.digest, null, g.version from shardids_catalog.key_home_gone g
    where g.version > :version
      and not exists (select from shardids_catalog.key_home h where h.kind = g.kind and h.key = g.key)
    limit :most""")


def read_known(catalog: Engine, known: KnownHomes = NO_HOMES) -> KnownHomes:
    """Return the directory as it is now, in memory; ``known`` is an earlier reading: it is not changed.

    It reads the changes since, or all of it if they are many or there is nothing to add them to. All queries
    see one moment: the version would include a switch between two of them, and the first one's rows not.
    """
    with catalog.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        return _known(connection, known)


def _known(connection: Connection, known: KnownHomes) -> KnownHomes:
    state = connection.execute(text("select homes_version, homes_reset from shardids_catalog.cluster")).one()
    if state.homes_version == known.version:
        return known
    departures = _departures(connection)
    if state.homes_reset <= known.version and known.version:
        changed = connection.execute(_CHANGES, {"version": known.version, "most": MOST_CHANGES + 1}).all()
        if len(changed) + known.changes <= MOST_CHANGES:
            newer = {bytes(row.digest): row.shard for row in changed}
            return known.with_changes(state.homes_version, newer, departures)
    whole = connection.execute(_WHOLE).one()
    return KnownHomes(
        state.homes_version, bytes(whole.digests or b""), bytes(whole.shards or b""), departures=departures
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
