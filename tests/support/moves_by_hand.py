"""A cluster with a shard to be moved, and moves by hand, step by step, as somebody with psql makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, MetaData, insert, select, text
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shardids import Cluster, primary_key
from shardids.catalog.nodes import administrative_engine
from shardids.migrate.install import provision
from shardids.pg.urls import parse_url, with_password_of
from tests.conftest import dsn, found_cluster
from tests.support.clusters import catalog_at, connected

SHARD = 2
"""On node a at first, and to be moved to b."""


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"

    id: Mapped[int] = primary_key()
    words: Mapped[str] = mapped_column(unique=True)


def two_nodes(blank_database: Callable[[], URL]) -> dict[str, URL]:
    """Databases of a cluster: the catalog's own, node a with 4 shards that have notes, node b with none."""
    urls = {name: blank_database() for name in ("catalog", "a", "b")}
    found_cluster(urls["catalog"], {"a": urls["a"]}, 4)
    with catalog_at(urls["catalog"]) as catalog:
        provision.add_node(catalog, "b", dsn(urls["b"]))
    with Cluster.connect(urls["catalog"], listen=False) as cluster:
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
    return urls


def words_on(url: URL) -> list[str]:
    """The notes of the shard in a database, oldest first."""
    with connected(url) as connection:
        found = connection.execute(f"select words from shard_{SHARD:04}.notes order by id").fetchall()
    return [words for (words,) in found]


def draw_at_commit(url: URL) -> None:
    """Lets the shard draw an ID in a deferred trigger of its notes, which COMMIT runs."""
    with connected(url) as connection:
        connection.execute(
            """create function shard_0002.late() returns trigger language plpgsql as
               $$ begin perform shard_0002.next_id(); return null; end $$"""
        )
        connection.execute(
            """create constraint trigger late after insert on shard_0002.notes
               deferrable initially deferred for each row execute function shard_0002.late()"""
        )


def move_shard(catalog_url: URL, shard: int, to: str, tables: MetaData) -> None:
    """Fences, copies, activates and places: all of it."""
    high_water_tick = fence(catalog_url, shard, to)
    copy(catalog_url, shard, to, tables, high_water_tick)
    place(catalog_url, shard, to)


def fence(catalog_url: URL, shard: int, to: str | None) -> int:
    """Stops the shard where it is; its high-water tick."""
    with _on(catalog_url, shard) as source:
        fencing = text("select high_water_tick from shardids.fence(:shard, :to)")
        return int(source.execute(fencing, {"shard": shard, "to": to}).scalar_one())


def copy(catalog_url: URL, shard: int, to: str, tables: MetaData, high_water_tick: int) -> None:
    """Makes the shard, its tables and their rows on another node, where it issues IDs above a tick."""
    with _on(catalog_url, shard, to) as target:
        provision.create_shard(target, shard)
    with _on(catalog_url, shard) as source, _on(catalog_url, shard, to) as target:
        tables.create_all(target)
        for table in tables.sorted_tables:
            rows = source.execute(select(table)).mappings().all()
            if rows:
                target.execute(insert(table), [dict(row) for row in rows])
        activating = text("select shardids.activate(:shard, :tick)")
        target.execute(activating, {"shard": shard, "tick": high_water_tick})


def place(catalog_url: URL, shard: int, to: str) -> None:
    """Enters the shard's new node in the catalog."""
    with catalog_at(catalog_url) as catalog, catalog.engine.begin() as connection:
        moving = text("update shardids_catalog.placement set node = :to where shard = :shard")
        connection.execute(moving, {"to": to, "shard": shard})


def drop(catalog_url: URL, shard: int, node: str) -> None:
    """Takes a shard's schema away from a node."""
    with _on(catalog_url, shard, node) as connection:
        connection.execute(text(f"drop schema shard_{shard:04} cascade"))
        connection.execute(text("delete from shardids.shard where id = :shard"), {"shard": shard})


@contextmanager
def _on(catalog_url: URL, shard: int, node: str | None = None) -> Iterator[Connection]:
    """A connection to a node, by default the shard's own, in a transaction on the shard's schema."""
    with catalog_at(catalog_url) as catalog:
        there = catalog.nodes()[node] if node else catalog.node_of(shard)
        url = with_password_of(parse_url(there.url), catalog.url)
        engine = administrative_engine(url, what=f'node "{there.name}"')
        try:
            with engine.connect() as connection:
                yield connection.execution_options(schema_translate_map={None: f"shard_{shard:04}"})
                connection.commit()
        finally:
            engine.dispose()
