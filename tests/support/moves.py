"""Two servers that shards are moved between, shards with all that a schema can hold, and clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count

import psycopg
import pytest
from sqlalchemy.engine import URL, make_url

from shardids import mover
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.pg.embedded import EmbeddedServer
from shardids.pg.reader import reading_as_reader
from shardids.pg.urls import parse_url
from shardids.replication.sides import Digest, Side, digests
from shardids.testing.devcluster import create_cluster
from tests.support.proxy import Proxy
from tests.support.writing import Threads, Written, change_users

APPLICATION = """
    create type {s}.mood as enum ('low', 'high');
    create table {s}.users (
      id bigint primary key default {s}.next_id(), name text not null, mood {s}.mood, number serial unique);
    create table {s}.photos (
      id bigint primary key default {s}.next_id(),
      user_id bigint not null references {s}.users on delete cascade,
      at timestamptz not null default now(), size numeric, body bytea);
    create index on {s}.photos (user_id);
    create index photos_size on {s}.photos (size) where size > 10;
    create table {s}.events (id bigint not null, day date not null, what text) partition by range (day);
    create table {s}.events_old partition of {s}.events for values from (minvalue) to ('2026-01-01');
    create table {s}.events_new partition of {s}.events for values from ('2026-01-01') to (maxvalue);
    alter table {s}.events add primary key (id, day);
    create table {s}.notes (body text);
    alter table {s}.notes replica identity full;
    create table {s}.seats (place integer not null, taken text);
    create unique index seats_place on {s}.seats (place);
    alter table {s}.seats replica identity using index seats_place;
    create sequence {s}.invoices start 100 increment 7;
    create materialized view {s}.sizes as select count(*) from {s}.photos;
    create view {s}.big as select * from {s}.photos where size > 10;
    create function {s}.touched() returns trigger language plpgsql as
      'begin new.name := new.name; return new; end';
    create trigger touched before update on {s}.users for each row execute function {s}.touched();
    insert into {s}.users (name, mood) select 'user ' || n, 'high' from generate_series(1, 500) n;
    insert into {s}.photos (user_id, size, body) select id, number, decode('00ff', 'hex') from {s}.users;
    insert into {s}.events select {s}.next_id(), date '2025-12-01' + n, 'e' from generate_series(1, 60) n;
    insert into {s}.notes values ('one'), (null);
    insert into {s}.seats values (1, 'ann');
    select nextval('{s}.invoices'), nextval('{s}.invoices');"""


def url_of(server: EmbeddedServer) -> URL:
    return make_url(server.url()).set(drivername="postgresql")


@dataclass
class TwoNodes:
    """Nodes a and b on servers of their own, and shards that nobody else uses."""

    catalog_url: str
    servers: dict[str, EmbeddedServer]
    catalog: Catalog
    _unused: Iterator[int] = field(default_factory=count)

    def url(self, node: str) -> URL:
        return url_of(self.servers[node])

    @contextmanager
    def connected(self, node: str) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.servers[node].url(), autocommit=True) as connection:
            yield connection

    def new_shard(self, tables: str = APPLICATION) -> int:
        """A shard on node a, with tables."""
        shard = next(self._unused)
        assert self.catalog.node_of(shard).name == "a"
        with self.connected("a") as connection:
            connection.execute(tables.replace("{s}", schema(shard)))
        return shard

    def leftovers(self) -> list[str]:
        """Slots, publications and subscriptions on both servers."""
        create_cluster = []
        for node in self.servers:
            with self.connected(node) as connection:
                create_cluster += connection.execute(
                    """select slot_name::text from pg_replication_slots
                       union all select pubname from pg_publication
                       union all select subname from pg_subscription
                       union all select roname from pg_replication_origin"""
                ).fetchall()
        return [name for (name,) in create_cluster]


def schema(shard: int) -> str:
    return f"shard_{shard:04}"


def two_nodes(servers: Sequence[EmbeddedServer], shard_count: int) -> TwoNodes:
    """A cluster whose lower half of shards is on node a."""
    url = create_cluster(servers, shard_count)
    return TwoNodes(catalog_url=url, servers=dict(zip("ab", servers, strict=True)), catalog=Catalog(url))


@contextmanager
def proxies_of(nodes: TwoNodes) -> Iterator[dict[str, Proxy]]:
    """One before each node and one before the catalog, for whoever reads the nodes' URLs there."""
    with ExitStack() as kept:
        create_cluster = {}
        for name, server in nodes.servers.items():
            create_cluster[name] = kept.enter_context(Proxy(server.port))
            url = make_url(server.url()).set(host="127.0.0.1", port=create_cluster[name].port)
            nodes.catalog.point_node(Node(name=name, url=url.render_as_string(hide_password=False)))
        create_cluster["catalog"] = kept.enter_context(Proxy(make_url(nodes.catalog_url).port or 5432))
        yield create_cluster
        for name, server in nodes.servers.items():
            nodes.catalog.point_node(Node(name=name, url=server.url()))


class Writers(Threads[Written]):
    """Threads that insert, update and delete in a shard, wherever it is, and try again when refused."""

    def __init__(self, nodes: TwoNodes, shard: int, number: int = 4, every_s: float = 0.0) -> None:
        super().__init__(Written, number, every_s)
        self._nodes, self._shard = nodes, shard

    @property
    def rows(self) -> int:
        """How many rows they have inserted."""
        return sum(len(one.users) + len(one.deleted) + len(one.photos) for one in self.written)

    def _run(self, index: int, written: Written) -> None:
        connections: dict[str, psycopg.Connection | None] = dict.fromkeys(self._nodes.servers)
        last = None
        own: list[int] = []
        s, turn = schema(self._shard), 0
        catalog = psycopg.connect(self._nodes.catalog_url, autocommit=True)
        try:
            name = self._place(catalog)
            while not self._stop.is_set():
                turn += 1
                try:
                    connection = connections[name] or psycopg.connect(self._nodes.servers[name].url())
                    connections[name] = connection
                    with connection.transaction():
                        change = change_users(connection, s, index, turn, own)
                    change(written)
                    now = time.monotonic()
                    if last is not None:
                        written.pauses_s.append(now - last)
                    last = now
                    if self._every_s:
                        self._stop.wait(self._every_s)
                except psycopg.Error as error:
                    written.refusals.add(error.sqlstate)
                    if error.sqlstate not in ("SI002", "SI003"):
                        if not isinstance(error, psycopg.OperationalError):
                            raise
                        connections[name] = None
                    time.sleep(0.005)
                    name = self._place(catalog)
        finally:
            for connection in (*connections.values(), catalog):
                if connection is not None:
                    connection.close()

    def _place(self, catalog: psycopg.Connection) -> str:
        return catalog.execute(
            "select node from shardids_catalog.placement where shard = %s", [self._shard]
        ).fetchone()[0]


def assert_nothing_lost(nodes: TwoNodes, shard: int, writers: Writers) -> None:
    """Every write that was acknowledged is where the shard is, once; none is there that was rolled back."""
    s = schema(shard)
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        users = dict(connection.execute(f"select id, name from {s}.users").fetchall())
        photos = dict(connection.execute(f"select id, user_id from {s}.photos").fetchall())
        (orphans,) = connection.execute(
            f"select count(*) from {s}.photos where user_id not in (select id from {s}.users)"
        ).fetchone()
    assert orphans == 0
    ids: list[int] = []
    for written in writers.written:
        assert written.is_in(users, photos)
        ids += [*written.users, *written.deleted, *written.photos]
    assert len(ids) == len(set(ids))
    assert len(ids) > 0


def assert_one_owner(nodes: TwoNodes, shard: int) -> None:
    """The shard takes writes and issues IDs where it is placed and nowhere else; nothing is left behind."""
    s, owner = schema(shard), nodes.catalog.node_of(shard).name
    for node in nodes.servers:
        with nodes.connected(node) as connection:
            there = connection.execute(
                "select count(*) from shardids.shard where id = %s", [shard]
            ).fetchone()[0]
            if node == owner:
                connection.execute(f"begin; insert into {s}.users (name) values ('x'); rollback")
                barriers = (
                    "select count(*) from pg_trigger where tgname = 'shardids_barrier' and tgrelid = any (%s)"
                )
                tables = connection.execute("select shardids.tables_of(%s)::oid[]", [shard]).fetchone()[0]
                assert connection.execute(barriers, [tables]).fetchone() == (0,)
            elif there:
                for change in (f"insert into {s}.users (name) values ('x')", f"delete from {s}.notes"):
                    with pytest.raises(psycopg.Error) as refused:
                        connection.execute(change)
                    assert refused.value.sqlstate == "SI003"
            else:
                schemas = connection.execute("select count(*) from pg_namespace where nspname = %s", [s])
                assert schemas.fetchone() == (0,)
    assert nodes.leftovers() == []
    assert mover.open_moves(nodes.catalog, [shard]) == []


def digests_at(url: str | URL, shard: int) -> Mapping[str, Digest]:
    """What the mover compares of a shard in the database at ``url``."""
    engine = administrative_engine(parse_url(url), what="the node")
    try:
        with reading_as_reader(engine, "the node") as reader:
            return digests(reader, Side(name="node", engine=engine), shard)
    finally:
        engine.dispose()
