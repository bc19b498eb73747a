"""A shop in one database, a cluster of two nodes that is to adopt it, and clients of the shop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psycopg
from sqlalchemy import text

from shardids.adopt.plan.document import Kind, OldIds, Plan, TablePlan
from shardids.catalog.old_ids import forget_old_ids
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import shard_for_key
from shardids.ids.layout import Layout
from shardids.pg.embedded import EmbeddedServer
from shardids.testing.devcluster import create_cluster
from tests.support.writing import Threads

SHARDS = 6
TABLES = ("users", '"Orders"', "lines")
SOURCE_TABLES = """
    create type mood as enum ('low', 'high');
    create schema "The Shop";
    create table public.countries (code text primary key, name text not null);
    create table public.cities (name text primary key, country text not null references countries);
    create table public.users (
      id serial primary key, name text not null, mood mood, country text references countries,
      "od:d %s" text, initial text generated always as (left(name, 1)) stored);
    create table "The Shop"."Orders" (
      id bigint generated always as identity primary key, user_id integer not null references users,
      amount numeric(10, 2), at timestamptz not null default now());
    create unique index orders_identity on "The Shop"."Orders" (id, user_id);
    alter table "The Shop"."Orders" replica identity using index orders_identity;
    create table public.lines (
      order_id bigint not null references "The Shop"."Orders" on delete cascade, number integer,
      user_id integer not null,
      what text, primary key (order_id, number, user_id)) partition by range (user_id);
    create table public.lines_low partition of lines for values from (minvalue) to (300);
    create table public.lines_high partition of lines for values from (300) to (maxvalue);
    alter table lines_low replica identity full;
    alter table lines_high replica identity full;
    create table public.notes (body text);
    insert into countries values ('at', 'Österreich'), ('de', 'Deutschland');
    insert into cities values ('Wien', 'at');
    insert into users (name, mood, country, "od:d %s")
    select 'user ' || n, 'high', 'at', '%' || n from generate_series(1, 600) n;
    insert into "The Shop"."Orders" (user_id, amount)
    select n % 600 + 1, n / 7.0 from generate_series(1, 1800) n;
    insert into lines select id, 1, user_id, 'thing ' || id from "The Shop"."Orders";"""
NODE_TABLES = """
    create type public.mood as enum ('low', 'high');
    create table public.countries (code text primary key, name text not null);
    create table public.cities (name text primary key, country text not null references public.countries);"""
SHARD_TABLES = """
    create table {s}.users (
      id bigint primary key default {s}.next_id(), name text not null, mood public.mood,
      country text references public.countries, "od:d %s" text,
      initial text generated always as (left(name, 1)) stored, seen_at timestamptz);
    create table {s}."Orders" (
      id bigint primary key default {s}.next_id(), user_id bigint not null references {s}.users,
      amount numeric(10, 2), at timestamptz not null default now());
    create index on {s}."Orders" (user_id);
    create table {s}.lines (
      order_id bigint not null references {s}."Orders" on delete cascade, number integer,
      user_id bigint not null,
      what text, primary key (order_id, number, user_id));"""


_LEFTOVERS = """
    select slot_name::text from pg_replication_slots
    union all select pubname from pg_publication
    union all select subname from pg_subscription
    union all select roname from pg_replication_origin
    union all select tgname from pg_trigger where tgname ~ 'shardids_(barrier|adoption|back)'
    union all select nspname from pg_namespace where nspname ~ 'shardids_(adopt|relay)|The Shop'"""


def schema(shard: int) -> str:
    return f"shard_{shard:04}"


@dataclass
class Shop:
    """The source, and nodes a and b; the catalog and the relay are on a's server."""

    servers: dict[str, EmbeddedServer]
    catalog_url: str
    catalog: Catalog
    plan: Plan

    @property
    def has_row_filters(self) -> bool:
        """Whether the servers can publish some rows of a table, as the relay has to."""
        return self.plan.server_version >= 150000

    @contextmanager
    def connected(self, name: str) -> Iterator[psycopg.Connection]:
        """Yield a connection to a server's database, or to the relay."""
        url = self.plan.via if name == "relay" else self.servers[name].url()
        with psycopg.connect(str(url), autocommit=True) as connection:
            yield connection

    def leftovers(self) -> list[str]:
        """What an adoption makes, on all servers."""
        create_cluster = []
        for name in (*self.servers, "relay"):
            with self.connected(name) as connection:
                create_cluster += [f"{name}: {one}" for (one,) in connection.execute(_LEFTOVERS).fetchall()]
        return create_cluster

    def rows(self, table: str) -> dict[int, list[tuple[object, ...]]]:
        """The rows of a table in each shard."""
        rows = {}
        placement = self.catalog.placement()
        for node, shards in placement.by_node().items():
            with self.connected(node) as connection:
                for shard in shards:
                    rows[shard] = connection.execute(f"select * from {schema(shard)}.{table}").fetchall()
        return rows


def plan_of(source: EmbeddedServer, **changes: object) -> Plan:
    tables = (
        TablePlan(name="public.countries", kind=Kind.REFERENCE, rows=2),
        TablePlan(name="public.cities", kind=Kind.REFERENCE, rows=1),
        TablePlan(
            name="public.users", kind=Kind.ROOT, key="id", id="id", old_ids=OldIds.KEY, rows=600, size_bytes=1
        ),
        TablePlan(
            name='"The Shop"."Orders"',
            kind=Kind.DIRECT,
            key="user_id",
            id="id",
            old_ids=OldIds.DIRECTORY,
            rows=1800,
        ),
        TablePlan(name="public.lines", kind=Kind.DIRECT, key="user_id", rows=1800),
        TablePlan(name="public.notes", kind=Kind.LOOSE),
    )
    values = {
        "source": source.url(),
        "server_version": 180000,
        "root": "public.users",
        "shard_count": SHARDS,
        "tables": tables,
    }
    return Plan(**values | changes)  # type: ignore[arg-type]  # a test's own values


def new_shop(
    servers: Sequence[EmbeddedServer], shard_count: int = SHARDS, *, can_go_back: bool = False
) -> Shop:
    """A shop with rows, and an empty cluster with its tables.

    ``can_go_back`` says that the source takes every row of the shards: bigint keys, and all their columns.
    """
    source_tables, shard_tables = SOURCE_TABLES, SHARD_TABLES
    if can_go_back:
        source_tables = source_tables.replace("id serial", "id bigserial")
        source_tables = source_tables.replace("user_id integer", "user_id bigint")
        shard_tables = shard_tables.replace(", seen_at timestamptz", "")
    source, *nodes = servers
    url = create_cluster(nodes, shard_count)
    catalog = Catalog(url)
    shop = Shop(
        servers={"source": source, **dict(zip("ab", nodes, strict=True))},
        catalog_url=url,
        catalog=catalog,
        plan=plan_of(source, via=nodes[0].url("relay")),
    )
    with shop.connected("a") as connection:
        connection.execute("create database relay")
    with shop.connected("source") as connection:
        version = connection.info.server_version
        connection.execute(source_tables)
    shop.plan = replace(shop.plan, shard_count=shard_count, server_version=version)
    for node, shards in catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            connection.execute(NODE_TABLES)
            for shard in shards:
                connection.execute(shard_tables.replace("{s}", schema(shard)))
    return shop


@dataclass
class Written:
    """What one client of the shop knows to be committed: names and moods of users, users of orders."""

    users: dict[int, str] = field(default_factory=dict)
    orders: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    longest_s: float = 0.0
    refused: bool = False


class Clients(Threads[Written]):
    """Threads that insert, update and delete at the source until it refuses them."""

    def __init__(self, shop: Shop, number: int = 3, every_s: float = 0.002) -> None:
        super().__init__(Written, number, every_s)
        self._shop = shop

    @property
    def count(self) -> int:
        return sum(len(one.users) + len(one.orders) for one in self.written)

    def _run(self, index: int, written: Written) -> None:
        turn = 0
        with psycopg.connect(self._shop.servers["source"].url(), autocommit=True) as connection:
            while not self._stop.wait(self._every_s):
                turn += 1
                begun = time.monotonic()
                try:
                    self._change(connection, index, turn, written)
                except psycopg.Error as error:
                    if error.sqlstate != "SI003":
                        raise
                    written.refused = True
                    return
                written.longest_s = max(written.longest_s, time.monotonic() - begun)

    @staticmethod
    def _change(connection: psycopg.Connection, index: int, turn: int, written: Written) -> None:
        own = list(written.users)
        if turn % 5 == 3 and written.orders:
            # The order moves to another user, and with its key to another shard.
            order, user = list(written.orders)[turn % len(written.orders)], own[turn % len(own)]
            connection.execute('update "The Shop"."Orders" set user_id = %s where id = %s', [user, order])
            written.orders[order] = user
            return
        if turn % 7 == 5 and written.orders:
            order = list(written.orders)[turn % len(written.orders)]
            connection.execute('delete from "The Shop"."Orders" where id = %s', [order])
            written.deleted.add(order)
            del written.orders[order]
            return
        if turn % 4 == 1:
            user = own[turn % len(own)] if own and turn % 8 == 1 else None
            name = f"{index}/{turn}"
            if user is not None:
                connection.execute("update users set name = %s where id = %s", [name, user])
                written.users[user] = name
                return
            (user,) = connection.execute(
                "insert into users (name, mood) values (%s, 'low') returning id", [name]
            ).fetchone()
            written.users[user] = name
            return
        if own:
            user = own[turn % len(own)]
            (order,) = connection.execute(
                'insert into "The Shop"."Orders" (user_id, amount) values (%s, 1) returning id', [user]
            ).fetchone()
            written.orders[order] = user


def home_of(user: int) -> int:
    """The shard of a user: an ID of the cluster names it."""
    return shard_for_key(user, SHARDS) if user < 10**17 else Layout.preset("default").shard_of(user)


def assert_in_shards(shop: Shop, clients: Clients | None = None) -> None:
    """Every row is in the shard of its key, once; acknowledged writes are there, deleted rows are not."""
    users = {(row[0], shard): row[1] for shard, rows in shop.rows("users").items() for row in rows}
    orders = {(row[0], shard): row[1] for shard, rows in shop.rows('"Orders"').items() for row in rows}
    for user, shard in users:
        assert shard == home_of(user)
    for (_order, shard), user in orders.items():
        assert shard == home_of(user)
    names, keys = {user: name for (user, _), name in users.items()}, {o: u for (o, _), u in orders.items()}
    assert (len(names), len(keys)) == (len(users), len(orders))
    for written in clients.written if clients else ():
        assert written.users.items() <= names.items()
        assert written.orders.items() <= keys.items()
        assert not written.deleted & keys.keys()


def assert_as_before(shop: Shop) -> None:
    """Nothing of the adoption is left, the source takes writes, and the shards are empty and active."""
    assert shop.leftovers() == ["source: The Shop"]
    with shop.connected("source") as connection:
        connection.execute("update users set name = name where id = 1")
    for table in TABLES:
        assert not any(shop.rows(table).values())
    for node, shards in shop.catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            count = "select (select count(*) from countries), (select count(*) from cities)"
            assert connection.execute(count).fetchone() == (0, 0)
            for shard in shards:
                connection.execute(f"insert into {schema(shard)}.users (name) values ('x')")
                connection.execute(f"delete from {schema(shard)}.users")


def begin_anew(shop: Shop) -> None:
    """Forgets an adoption that is over, unless it came back; empties the shards, and opens the source."""
    with shop.connected("source") as connection:
        connection.execute("drop schema if exists shardids_adopt cascade")
    for node, shards in shop.catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            tables = [f"{schema(shard)}.{table}" for shard in shards for table in TABLES]
            connection.execute(f"truncate {', '.join(tables)}, public.countries, public.cities")
    with shop.catalog.engine.begin() as catalog:
        forget_old_ids(catalog)
        catalog.execute(text("delete from shardids_catalog.adoption where outcome <> 'returned'"))
