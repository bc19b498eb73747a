"""The nodes' copies of the directory of keys, for SQL: ``shardids.home_of(kind, key)`` reads them.

The catalog is written first. Each command that changes the directory, and each that adds a node, brings the
copies up to date; a node that was away is behind until the next one, and ``shardids doctor`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from shardids.catalog.nodes import Answers, Nodes
from shardids.catalog.rows import Catalog
from shardids.pg.queries import batches

_AT_ONCE: Final = 20_000
"""How many entries one statement writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """The directory in one place: its version, its number of keys, and a hash of them in any order."""

    version: int
    keys: int
    digest: str


def catalog_state(connection: Connection) -> CopyState:
    """Return the state of the catalog's directory."""
    return _state(connection, "shardids_catalog.key_home", "shardids_catalog.cluster")


def node_state(connection: Connection) -> CopyState:
    """Return the state of a node's copy."""
    return _state(connection, "shardids.key_home", "shardids.node")


def _state(connection: Connection, entries: str, versions: str) -> CopyState:
    row = connection.execute(
        text(f"""
            select v.homes_version as version, count(h.key) as keys,
                   coalesce(sum(hashtextextended(concat_ws(' ', h.kind, h.shard, h.key), 0)::numeric), 0)
                     ::text as digest
            from {versions} v left join {entries} h on true group by 1""")  # noqa: S608 -- constants
    ).one()
    return CopyState(**row._mapping)


def bring_homes(
    catalog: Catalog, names: Iterable[str] | None = None, *, verify: bool = False, dry_run: bool = False
) -> Answers[int]:
    """Bring the copies of nodes, by default of all, up to date; return how many entries each got.

    With ``verify`` a copy of the catalog's version is compared, and read anew if it differs. With
    ``dry_run`` the transactions are rolled back.

    A node that fails, as one that is down, is among the failures; the others have theirs.
    """
    there = catalog.nodes()
    chosen = there if names is None else {name: there[name] for name in names}

    def bring(_name: str, node: Any) -> int:
        with (
            catalog.engine.connect() as source,
            node.connect() as target,
            target.begin() as transaction,
        ):
            changed = bring_to(source, target, verify=verify)
            if dry_run:
                transaction.rollback()
            return changed

    with Nodes(chosen, catalog.url) as nodes:
        return nodes.each(bring)


def bring_to(catalog: Connection, node: Connection, *, verify: bool = False) -> int:
    """Bring a node's copy up to date in its open transaction; return how many entries it got."""
    # Those who bring copies take turns, so that no older state replaces a newer one.
    known = node.scalar(text("select homes_version from shardids.node for update"))
    state = catalog.execute(text("select homes_version, homes_reset from shardids_catalog.cluster")).one()
    differs = verify and state.homes_version == known and catalog_state(catalog) != node_state(node)
    if state.homes_version == known and not differs:
        return 0
    if differs or state.homes_reset > known or state.homes_version < known:
        node.execute(text("delete from shardids.key_home"))
        known = 0
    rows = catalog.execute(_CHANGES, {"version": known}).all()
    gone = [row for row in rows if row.shard is None]
    put = [row for row in rows if row.shard is not None]
    for some in batches(gone, _AT_ONCE):
        node.execute(_DELETE, {"kinds": [r.kind for r in some], "keys": [r.key for r in some]})
    for some in batches(put, _AT_ONCE):
        node.execute(
            _PUT,
            {
                "kinds": [row.kind for row in some],
                "keys": [row.key for row in some],
                "shards": [row.shard for row in some],
                "since": [row.since for row in some],
                "versions": [row.version for row in some],
            },
        )
    version = max(state.homes_version, *(row.version for row in rows), 0)
    node.execute(text("update shardids.node set homes_version = :version"), {"version": version})
    return len(rows)


_CHANGES: Final = text("""
    select h.kind, h.key, h.shard, h.since, h.version from shardids_catalog.key_home h
    where h.version > :version
    union all
    select g.kind, g.key, null, null, g.version from shardids_catalog.key_home_gone g
    where g.version > :version
      and not exists (select from shardids_catalog.key_home h where h.kind = g.kind and h.key = g.key)""")
_DELETE: Final = text("""
    delete from shardids.key_home h
    using unnest(cast(:kinds as text[]), cast(:keys as text[])) gone (kind, key)
    where h.kind = gone.kind and h.key = gone.key""")
_PUT: Final = text("""
    insert into shardids.key_home (kind, key, shard, since, version)
    select * from unnest(cast(:kinds as text[]), cast(:keys as text[]), cast(:shards as integer[]),
                         cast(:since as timestamptz[]), cast(:versions as bigint[]))
    on conflict (kind, key) do update
    set shard = excluded.shard, since = excluded.since, version = excluded.version""")
