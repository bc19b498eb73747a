"""A store whose rows find their key in other tables, a relay for it, and a cluster that is to adopt it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from sqlalchemy import text

from shardids.adopt.plan.document import Plan
from shardids.adopt.plan.planning import make_plan
from shardids.catalog.old_ids import forget_old_ids
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import shard_for_key
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.testing.devcluster import create_cluster
from tests.support.adoptions import schema
from tests.support.faults import scaled

SHARDS = 6
SOURCE_TABLES = """
    create type mood as enum ('low', 'high');
    create domain share as numeric(5, 2);
    create schema "The Store";
    create table public.countries (code text primary key, name text not null);
    create table public.users (
      id serial primary key, name text not null, mood mood, country text references countries,
      initial text generated always as (left(name, 1)) stored);
    create table "The Store"."Orders" (
      id bigint generated always as identity primary key, user_id integer not null references users,
      amount numeric(10, 2), at timestamptz not null default now());
    create table public.items (
      order_id bigint not null references "The Store"."Orders" on delete cascade deferrable,
      number integer, "what's: 100%% {of} it" text, moods mood[], took interval, discount share,
      price numeric(10, 2), doubled numeric generated always as (price * 2) stored,
      primary key (order_id, number)) partition by range (number);
    create table public.items_low partition of items for values from (minvalue) to (2);
    create table public.items_high partition of items for values from (2) to (maxvalue);
    create table public.parts (
      id bigserial primary key, order_id bigint not null, item integer not null, note text,
      data bytea, j jsonb,
      constraint parts_item foreign key (order_id, item) references items on update cascade on delete cascade
        deferrable);
    create table public.marks (
      id uuid primary key default gen_random_uuid(), part_id bigint, mark text, weight numeric,
      constraint marks_part foreign key (part_id) references parts on delete cascade deferrable);
    insert into countries values ('at', 'Österreich'), ('de', 'Deutschland');
    insert into users (name, mood, country) select 'user ' || n, 'high', 'at' from generate_series(1, 200) n;
    insert into "The Store"."Orders" (user_id, amount)
    select n % 200 + 1, n / 7.0 from generate_series(1, 600) n;
    insert into items (order_id, number, "what's: 100%% {of} it", moods, took, discount, price)
    select id, n, 'thing ' || id, '{low,high}', '1 day 2 hours', 1.5, id / 3.0
    from "The Store"."Orders", generate_series(1, 2) n;
    insert into parts (order_id, item, note, data, j)
    select order_id, number,
      (select string_agg(md5((order_id + n)::text), '') from generate_series(1, 200) n), '\\x00ff',
           '{"a": [1.50, null]}'
    from items;
    insert into marks (part_id, mark) select id, 'mark ' || id from parts"""
NODE_TABLES = """
    create type public.mood as enum ('low', 'high');
    create domain public.share as numeric(5, 2);
    create table public.countries (code text primary key, name text not null);"""
SHARD_TABLES = """
    create table {s}.users (
      id bigint primary key default {s}.next_id(), name text not null, mood public.mood,
      country text references public.countries,
      initial text generated always as (left(name, 1)) stored, seen_at timestamptz);
    create table {s}."Orders" (
      id bigint primary key default {s}.next_id(), user_id bigint not null references {s}.users,
      amount numeric(10, 2), at timestamptz not null default now());
    create table {s}.items (
      order_id bigint not null references {s}."Orders" on delete cascade, number integer,
      "what's: 100%% {of} it" text, moods public.mood[], took interval, discount public.share,
      price numeric(10, 2), doubled numeric generated always as (price * 2) stored,
      primary key (order_id, number));
    create table {s}.parts (
      id bigint primary key default {s}.next_id(), order_id bigint not null, item integer not null, note text,
      data bytea, j jsonb,
      foreign key (order_id, item) references {s}.items on update cascade on delete cascade);
    create table {s}.marks (
      id uuid primary key default gen_random_uuid(), part_id bigint references {s}.parts on delete cascade,
      mark text, weight numeric);"""
OWNERS = {
    "users": ("public.users", "t.id", ""),
    '"Orders"': ('"The Store"."Orders"', "t.user_id", ""),
    "items": ("public.items", "o.user_id", 'join "The Store"."Orders" o on o.id = t.order_id'),
    "parts": ("public.parts", "o.user_id", 'join "The Store"."Orders" o on o.id = t.order_id'),
    "marks": (
        "public.marks",
        "o.user_id",
        'join parts p on p.id = t.part_id join "The Store"."Orders" o on o.id = p.order_id',
    ),
}
"""By table of a shard: that of the source, its key, and the joins to it."""
_LEFTOVERS = """
    select slot_name::text from pg_replication_slots
    union all select pubname from pg_publication
    union all select subname from pg_subscription where subdbid = (
      select oid from pg_database where datname = current_database())
    union all select tgname from pg_trigger where tgname ~ 'shardids_(barrier|adoption|place|pass)'
    union all select nspname from pg_namespace where nspname ~ 'shardids_(adopt|relay)'
    union all select attrelid::regclass || '.' || attname from pg_attribute a
              where attname = 'shardids_shard' and not attisdropped
    union all select oid::regclass::text from pg_class where relkind in ('r', 'p')
              and relnamespace::regnamespace::text in ('public', '"The Store"')"""


@dataclass
class Store:
    """The source, a relay in a database of its own on a's server, and nodes a and b."""

    source: EmbeddedServer
    nodes: Sequence[EmbeddedServer]
    catalog_url: str
    catalog: Catalog
    plan: Plan
    before: list[str] = field(default_factory=list)

    @property
    def relay_url(self) -> str:
        return self.nodes[0].url("relay")

    def urls(self) -> dict[str, str]:
        a, b = self.nodes
        return {"source": self.source.url(), "relay": self.relay_url, "a": a.url(), "b": b.url()}

    @contextmanager
    def connected(self, name: str) -> Iterator[psycopg.Connection]:
        with psycopg.connect(self.urls()[name], autocommit=True) as connection:
            yield connection

    def leftovers(self) -> list[str]:
        """What is on all servers that an adoption could have made."""
        create_cluster = []
        for name in self.urls():
            with self.connected(name) as connection:
                create_cluster += [f"{name}: {one}" for (one,) in connection.execute(_LEFTOVERS).fetchall()]
        return sorted(create_cluster)

    def rows(self, table: str, columns: str) -> list[tuple[int, str]]:
        """The rows of a table in the shards as text, each with its shard."""
        create_cluster = []
        for node, shards in self.catalog.placement().by_node().items():
            with self.connected(node) as connection:
                connection.execute("set timezone = 'UTC'")
                for shard in shards:
                    statement = f"select row({columns})::text from {schema(shard)}.{table}"
                    create_cluster += [(shard, row) for (row,) in connection.execute(statement).fetchall()]
        return sorted(create_cluster)

    def source_rows(
        self, table: str, home_of: Callable[[int], int] = lambda key: shard_for_key(key, SHARDS)
    ) -> tuple[str, list[tuple[int, str]]]:
        """The columns of a table of the source, and its rows with the shards that they belong to."""
        name, key, joins = OWNERS[table]
        with self.connected("source") as source:
            source.execute("set timezone = 'UTC'")
            (columns,) = source.execute(
                "select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute"
                f" where attrelid = '{name}'::regclass and attnum > 0 and not attisdropped"
            ).fetchone()
            own = ", ".join(f"t.{one}" for one in columns.split(", "))
            create_cluster = source.execute(
                f"select {key}, row({own})::text from {name} t {joins}"
            ).fetchall()
            (count,) = source.execute(f"select count(*) from {name}").fetchone()
        assert len(create_cluster) == count
        return columns, sorted((home_of(key), row) for key, row in create_cluster)


@contextmanager
def store_of(source_programs: Path | None = None, *, can_go_back: bool = False) -> Iterator[Store]:
    """A store with rows, its source run by other programs if they are given, and an empty cluster.

    ``can_go_back`` says that the source takes every row of the shards: bigint keys, and all their columns.
    """
    given = os.environ.get("SHARDIDS_PG_BIN")
    if source_programs is not None:
        os.environ["SHARDIDS_PG_BIN"] = str(source_programs)
    try:
        with temporary_servers(1) as (source,):
            if source_programs is not None:
                os.environ.pop("SHARDIDS_PG_BIN")
                if given is not None:
                    os.environ["SHARDIDS_PG_BIN"] = given
            with temporary_servers(2) as nodes:
                store = new_store(source, nodes, can_go_back=can_go_back)
                yield store
                store.catalog.close()
    finally:
        if given is not None:
            os.environ["SHARDIDS_PG_BIN"] = given


def new_store(source: EmbeddedServer, nodes: Sequence[EmbeddedServer], *, can_go_back: bool) -> Store:
    source_tables, shard_tables = SOURCE_TABLES, SHARD_TABLES
    if can_go_back:
        source_tables = source_tables.replace("id serial", "id bigserial")
        source_tables = source_tables.replace("user_id integer", "user_id bigint")
        shard_tables = shard_tables.replace(", seen_at timestamptz", "")
    with psycopg.connect(source.url(), autocommit=True) as connection:
        connection.execute(source_tables)
        connection.execute("analyze")
    with psycopg.connect(nodes[0].url(), autocommit=True) as connection:
        connection.execute("create database relay")
    url = create_cluster(nodes, SHARDS)
    catalog = Catalog(url)
    plan = make_plan(source.url(), root="users", shard_count=SHARDS, via=nodes[0].url("relay")).plan
    store = Store(source=source, nodes=nodes, catalog_url=url, catalog=catalog, plan=plan)
    for node, shards in catalog.placement().by_node().items():
        with store.connected(node) as connection:
            connection.execute(NODE_TABLES)
            for shard in shards:
                connection.execute(shard_tables.replace("{s}", schema(shard)))
    store.before = store.leftovers()
    return store


class Traffic:
    """Threads that change the store in every way until it refuses them; each counts what was committed."""

    def __init__(self, store: Store, number: int = 2, every_s: float = 0.004) -> None:
        self._store, self._every_s = store, every_s
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.done = [0] * number
        self.refused = [False] * number
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(number)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failures:
            raise self._failures[0]

    def _run(self, number: int) -> None:
        try:
            with psycopg.connect(self._store.source.url(), autocommit=True) as connection:
                while not self._stop.wait(self._every_s):
                    try:
                        change(connection, number, self.done[number])
                    except psycopg.Error as error:
                        if error.sqlstate == "40P01":
                            continue
                        if error.sqlstate != "SI003":
                            raise
                        self.refused[number] = True
                        return
                    self.done[number] += 1
        except BaseException as failure:  # noqa: BLE001 -- raised again at the end
            self._failures.append(failure)


def change(connection: psycopg.Connection, number: int, turn: int) -> None:
    """One transaction of an application, of one of ten kinds."""
    user = turn * 7 % 200 + 1
    (order,) = connection.execute(
        'select id from "The Store"."Orders" where mod(id, 2) = %s order by id offset %s limit 1',
        [number % 2, turn * 13 % 250],
    ).fetchone()
    match turn % 10:
        case 0 | 5:
            # Children before parents.
            with connection.transaction():
                connection.execute("set constraints all deferred")
                (new,) = connection.execute(
                    "select nextval(pg_get_serial_sequence('\"The Store\".\"Orders\"', 'id'))"
                ).fetchone()
                (part,) = connection.execute(
                    "insert into parts (order_id, item, note) values (%s, 1, 'early') returning id", [new]
                ).fetchone()
                connection.execute("insert into marks (part_id, mark) values (%s, 'early')", [part])
                connection.execute("insert into items (order_id, number) values (%s, 1)", [new])
                connection.execute(
                    'insert into "The Store"."Orders" (id, user_id) overriding system value values (%s, %s)',
                    [new, user],
                )
        case 1 | 6:
            # The key moves, and three levels of rows with it.
            connection.execute('update "The Store"."Orders" set user_id = %s where id = %s', [user, order])
        case 2:
            # Rows get another parent.
            connection.execute(
                "update marks set part_id = coalesce("
                "  (select min(id) from parts where order_id = %s), part_id)"
                " where id = (select min(id::text)::uuid from marks where mark like %s)",
                [order, f"%{turn % 7}"],
            )
        case 3:
            connection.execute("delete from items where order_id = %s and number = 2", [order])
        case 4:
            connection.execute("update parts set note = note || '!' where order_id = %s", [order])
        case 7:
            # The parent's own key changes, and its children follow it.
            connection.execute(
                "update items set number = number + 10 where order_id = %s and number < 10", [order]
            )
        case 8:
            connection.execute('delete from "The Store"."Orders" where id = %s', [order])
        case _:
            with connection.transaction():
                (new,) = connection.execute(
                    'insert into "The Store"."Orders" (user_id) values (%s) returning id', [user]
                ).fetchone()
                connection.execute(
                    "insert into items (order_id, number, moods, took) values (%s, 1, '{low}', '3 min')",
                    [new],
                )


def assert_adopted(store: Store) -> None:
    """Every row of the source is in its shard, once and whole, and nothing else is."""
    for table in OWNERS:
        columns, wanted = store.source_rows(table)
        assert store.rows(table, columns) == wanted, table


def assert_as_before(store: Store) -> None:
    """Nothing is left of the adoption, the source takes writes, and the shards are empty and active."""
    assert store.leftovers() == store.before
    with store.connected("source") as connection:
        connection.execute("update users set name = name where id = 1")
    for table in OWNERS:
        assert not store.rows(table, "1")
    for node, shards in store.catalog.placement().by_node().items():
        with store.connected(node) as connection:
            connection.execute(f"select {schema(shards[0])}.next_id()")


def begin_anew(store: Store) -> None:
    """Forgets an adoption that is over, and empties the shards; the source takes writes again."""
    with store.connected("source") as connection:
        connection.execute("drop schema if exists shardids_adopt cascade")
    for node, shards in store.catalog.placement().by_node().items():
        with store.connected(node) as connection:
            tables = [f"{schema(shard)}.{table}" for shard in shards for table in OWNERS]
            connection.execute(f"truncate {', '.join(tables)}, public.countries")
    with store.catalog.engine.begin() as catalog:
        forget_old_ids(catalog)
        catalog.execute(text("delete from shardids_catalog.adoption where ended_at is not null"))


def await_lull(traffic: Traffic, changes: int) -> None:
    """Waits until the traffic has made so many more changes."""
    wanted, deadline = sum(traffic.done) + scaled(changes, changes * 4), time.monotonic() + 60
    while sum(traffic.done) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
