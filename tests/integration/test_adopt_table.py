"""Integer keys that become bigint where they are, from a shard, while clients write; and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids.adopt.inplace.changing import How
from shardids.adopt.inplace.key import read_document
from shardids.adopt.inplace.keys import change_key, finish, status, take_back
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionRefused, BadArgument, ClusterConflict, ShardidsError
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.replication.steps import Event, Waiting
from tests.conftest import dsn, found_cluster
from tests.integration.test_cli import Run, run  # noqa: F401 # a fixture
from tests.support.clusters import connected, objects
from tests.support.keys import Clients, assert_consistent, dumped, fill_shop, on_steps, one
from tests.support.lengths import sampled

ORDERS = "public.orders"
COLUMNS = ("orders.id", "Lines.order_id", "orders.parent_id")


class Stopped(Exception):
    """What a test stops the work with."""


@pytest.fixture
def shop(blank_database: Callable[[], URL]) -> Iterator[tuple[URL, Catalog]]:
    url = blank_database()
    fill_shop(url)
    catalog = Catalog(url)
    yield url, catalog
    catalog.close()


@pytest.fixture
def database(blank_database: Callable[[], URL]) -> Iterator[tuple[URL, Catalog]]:
    """A database with shard 0 and no tables."""
    url = blank_database()
    found_cluster(url, {"main": url}, 1, DEFAULT)
    catalog = Catalog(url)
    yield url, catalog
    catalog.close()


def types(url: URL) -> dict[str, str]:
    names = {"orders.id", "orders.parent_id", "orders.customer_id", '"Lines".order_id', "customers.id"}
    return {
        f"{table}.{column}": kind for table, column, kind in _columns(url) if f"{table}.{column}" in names
    }


def _columns(url: URL) -> list[tuple[str, str, str]]:
    with connected(url) as connection:
        return connection.execute(
            """select attrelid::regclass::text, attname, format_type(atttypid, null) from pg_attribute
               where attnum > 0 and not attisdropped and attrelid in (select oid from pg_class
                 where relkind = 'r' and relnamespace = 'public'::regnamespace)"""
        ).fetchall()


def stop_at(place: int) -> How:
    """Ends the work where the given step would begin, counted from 0."""
    steps: list[str] = []

    def step(name: str) -> None:
        steps.append(name)
        if len(steps) > place:
            raise Stopped(name)

    return How(on_event=on_steps(step))


def test_widened_and_drawn_while_clients_write(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop
    touched = one(url, "select sum(touched) from orders where id <= 3000")
    with Clients(url) as clients:
        assert change_key(catalog, ORDERS, 0, dry_run=True).columns == COLUMNS
        assert status(catalog, ORDERS, 0).state is None
        done = change_key(catalog, ORDERS, 0)
        assert (done.state, done.columns) == ("swapped", COLUMNS)
        assert change_key(catalog, ORDERS, 0) == done
        assert finish(catalog, ORDERS, 0).state is None
        drawn = len(clients.orders)
    assert_consistent(url, clients)
    assert types(url) == {
        "orders.id": "bigint",
        "orders.parent_id": "bigint",
        '"Lines".order_id': "bigint",
        "orders.customer_id": "integer",
        "customers.id": "integer",
    }
    new = [id_ for id_ in clients.orders if id_ > 1 << 40]
    assert clients.orders[drawn + 20 :]
    assert set(clients.orders[drawn + 20 :]) <= set(new)
    assert {DEFAULT.shard_of(id_) for id_ in new} == {0}
    # The application's trigger did not run for rows that were filled, and nothing of ours is left.
    assert one(url, "select sum(touched) from orders where id <= 3000") == touched
    assert [row for row in objects(url) if "shardids_new" in str(row) or "inplace" in str(row[:2])] == []
    assert "'the key'" in dumped(url)


@pytest.mark.parametrize(("table", "stops"), [(ORDERS, (0, 2, 7, 13)), ("public.customers", (1, 8, 11))])
def test_a_step_has_a_way_on_and_a_way_back(
    shop: tuple[URL, Catalog], table: str, stops: tuple[int, ...]
) -> None:
    url, catalog = shop
    before, rows = dumped(url), one(url, "select count(*) from orders")
    for stop in stops:
        with pytest.raises(Stopped):
            change_key(catalog, table, 0, stop_at(stop))
        assert status(catalog, table, 0).state == "widening"
        take_back(catalog, table, 0)
        assert dumped(url) == before
    # The way back from the swap, itself interrupted.
    change_key(catalog, table, 0)
    for stop in stops:
        with suppress(Stopped):
            take_back(catalog, table, 0, stop_at(stop))
        assert one(url, "select count(*) from orders") == rows
        assert_consistent(url)
    if status(catalog, table, 0).state is not None:
        take_back(catalog, table, 0)
    assert dumped(url) == before


@pytest.mark.long
@pytest.mark.parametrize("table", [ORDERS, "public.customers"])
def test_forward_again_after_a_way_back_that_ended_before_its_last_step(
    shop: tuple[URL, Catalog], table: str
) -> None:
    url, catalog = shop
    before = dumped(url)

    def step(name: str) -> None:
        if name == "drop":
            raise Stopped(name)

    with Clients(url) as clients:
        change_key(catalog, table, 0)
        with pytest.raises(Stopped):
            take_back(catalog, table, 0, How(on_event=on_steps(step)))
        assert status(catalog, table, 0).state == "widening"
        assert change_key(catalog, table, 0).state == "swapped"
        take_back(catalog, table, 0)
        assert dumped(url) == before
        change_key(catalog, table, 0)
        finish(catalog, table, 0)
    assert_consistent(url, clients)


@pytest.mark.long
def test_one_step_a_run_leads_to_the_end(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop
    with Clients(url) as clients:
        for _ in range(40):
            with suppress(Stopped):
                change_key(catalog, ORDERS, 0, stop_at(1))
            if status(catalog, ORDERS, 0).state == "swapped":
                break
        finish(catalog, ORDERS, 0)
    assert_consistent(url, clients)


def test_an_updated_key_is_cascaded_at_every_step(database: tuple[URL, Catalog]) -> None:
    url, catalog = database
    with connected(url) as connection:
        connection.execute("""
            create table t (id serial primary key);
            create table u (
              n int primary key, x int not null references t on update cascade on delete restrict);
            insert into t select generate_series(1, 9);
            insert into u select n, n from generate_series(1, 9) n""")
    moved: list[int] = []

    def step(_name: str) -> None:
        key = len(moved) + 1
        with connected(url) as connection:
            connection.execute("update t set id = id + 100 where id = %s", [key])
            found = connection.execute("select x from u where n = %s", [key]).fetchone()
        assert found == (key + 100,)
        moved.append(key)
        if key == 9:
            with connected(url) as connection:
                connection.execute("update t set id = id - 100 where id > 100")
                assert connection.execute("select count(*) from u where x = n").fetchone() == (9,)
            moved.clear()

    change_key(catalog, "public.t", 0, How(on_event=on_steps(step)))
    step("swapped")
    take_back(catalog, "public.t", 0, How(on_event=on_steps(step)))
    change_key(catalog, "public.t", 0)
    finish(catalog, "public.t", 0)
    step("finished")
    assert "ON UPDATE CASCADE ON DELETE RESTRICT" in dumped(url)


def test_rows_written_past_the_trigger_are_filled(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop
    with pytest.raises(Stopped):
        change_key(catalog, ORDERS, 0, stop_at(3))
    with connected(url) as connection:
        connection.execute("alter table orders disable trigger all, drop constraint shardids_step_1")
        connection.execute("insert into orders (customer_id) select 1 from generate_series(1, 10)")
        connection.execute(
            """alter table orders enable trigger all, enable always trigger "~shardids",
               add constraint shardids_step_1
                 check (shardids_new_1 is not null and shardids_new_1 = id) not valid"""
        )
    assert change_key(catalog, ORDERS, 0).state == "swapped"
    assert one(url, "select count(*) = max(id) from orders")


def test_ids_that_an_integer_cant_hold_end_the_way_back(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop
    change_key(catalog, ORDERS, 0)
    with connected(url) as connection:
        connection.execute("insert into orders (id, customer_id) values (5000000000, 1)")
    with pytest.raises(AdoptionRefused, match="can't hold"):
        take_back(catalog, ORDERS, 0)
    assert status(catalog, ORDERS, 0).state == "swapped"
    with connected(url) as connection:
        connection.execute("insert into orders (id, customer_id) values (5000000001, 1)")
        connection.execute("delete from orders where id >= 5000000000")
    take_back(catalog, ORDERS, 0)
    assert types(url)["orders.id"] == "integer"


@pytest.mark.parametrize("kind", ["bigserial", "bigint generated always as identity (increment 2 cache 5)"])
def test_a_bigint_key_only_gets_another_default(database: tuple[URL, Catalog], kind: str) -> None:
    url, catalog = database
    with connected(url) as connection:
        connection.execute(
            f"create table t (id {kind} primary key, a int); insert into t (a) select 1".encode()
        )
    before = dumped(url)
    file = one(url, "select pg_relation_filenode('t')")
    done = change_key(catalog, "public.t", 0)
    assert done.state == "drawing"
    insert = "insert into t (a) values (1) returning id"
    assert one(url, insert) > 1 << 40
    take_back(catalog, "public.t", 0)
    assert (dumped(url), one(url, "select pg_relation_filenode('t')")) == (before, file)
    assert 1 < one(url, insert) < 20
    change_key(catalog, "public.t", 0)
    finish(catalog, "public.t", 0)
    assert one(url, insert) > 1 << 40
    assert status(catalog, "public.t", 0).state is None


REFUSED = {
    "has no primary key": "create table t (id int)",
    "primary key of public.t has several": "create table t (a int, b int, primary key (a, b))",
    "no ordinary table": "create table t (id serial primary key) partition by range (id)",
    "of type uuid": "create table t (id uuid primary key)",
    "is not the nextval": "create table t (id int primary key)",
    "generated": "create table t (a int, id int generated always as (a + 1) stored primary key)",
    "on view public.v": "create table t (id serial primary key); create view v as select id from t",
    "materialized view": """create table t (id serial primary key);
        create materialized view v as select id from t""",
    "has rules": "create table t (id serial primary key); create rule r as on delete to t do also select 1",
    "policy p": "create table t (id serial primary key); create policy p on t using (id > 1)",
    'publication "p"': "create table t (id serial primary key); create publication p for table t",
    "constraint t_id_check": "create table t (id serial primary key check (id > 0))",
    "trigger g on": """create table t (id serial primary key);
        create function f() returns trigger language plpgsql as 'begin return new; end';
        create trigger g before update of id on t for each row execute function f()""",
    "runs after ours": """create table t (id serial primary key);
        create function f() returns trigger language plpgsql as 'begin return new; end';
        create trigger "é" before update on t for each row execute function f()""",
    "statistics object": "create table t (id serial primary key, a int); create statistics s on id, a from t",
    "several columns": """create table t (id serial primary key, a int, unique (id, a));
        create table u (x int, y int, foreign key (x, y) references t (id, a))""",
    "is deferrable": "create table t (id serial primary key); create table u (x int references t deferrable)",
    "ON UPDATE": """create table t (id serial primary key);
        create table u (x int references t on update set null)""",
    "no ordinary table.*u": """create table t (id serial primary key);
        create table u (x int references t) partition by list (x)""",
    "has a default": "create table t (id serial primary key); create table u (x int default 1 references t)",
    "privileges of its own": "create table t (id serial primary key); grant select (id) on t to public",
    "may insert, but not draw": "create table t (id serial primary key); grant insert on t to public",
    "index .*i can't be built": """create table t (id serial primary key);
        create index i on t (id) where id > 5""",
    "index .*h can't be built": """create table t (id serial primary key);
        create index h on t using hash (id)""",
    "column t of table public.w": "create table t (id serial primary key); create table w (t t)",
    "inherited": "create table t (id serial primary key); create table u () inherits (t)",
    "function public.f": """create table t (id serial primary key);
        create function f() returns bigint language sql begin atomic select max(id) from t; end""",
    "highest key is": "create table t (id bigserial primary key); insert into t values (9000000000000000000)",
}


def test_column_options_that_postgresql_does_not_know_are_left_alone(database: tuple[URL, Catalog]) -> None:
    url, catalog = database
    with connected(url) as connection:
        connection.execute(
            "create table t (id serial primary key); set allow_system_table_mods = on;"
            " update pg_attribute set attoptions = '{pg_attver=22158952}' where attrelid = 't'::regclass"
        )
        change_key(catalog, "public.t", 0, dry_run=True)
        connection.execute(
            "update pg_attribute set attoptions = '{pg_attver=22158952,n_distinct=7}'"
            " where attrelid = 't'::regclass"
        )
    with pytest.raises(AdoptionRefused, match=r"t\.id has options"):
        change_key(catalog, "public.t", 0, dry_run=True)


@pytest.mark.parametrize("says", sampled(REFUSED, every=3))
def test_what_is_not_known_is_refused(database: tuple[URL, Catalog], says: str) -> None:
    url, catalog = database
    with connected(url) as connection:
        connection.execute(REFUSED[says].encode())
    before = left_in(url)
    with pytest.raises(AdoptionRefused, match=says) as ran:
        change_key(catalog, "public.t", 0)
    assert left_in(url) == before
    with pytest.raises(AdoptionRefused, match=says) as dry:
        change_key(catalog, "public.t", 0, dry_run=True)
    assert left_in(url) == before
    if says != "highest key is":
        # That message ends with the ID that the shard would issue at the moment.
        assert dry.value.message == ran.value.message


def left_in(url: URL) -> tuple[object, ...]:
    """All objects, and the states of all sequences, which no rollback takes back."""
    with connected(url) as connection:
        sequences = connection.execute(
            "select c.oid::regclass::text, pg_sequence_last_value(c.oid) from pg_class c where relkind = 'S'"
        ).fetchall()
    return objects(url), sequences


def test_a_dry_run_leaves_nothing_behind_and_reports_as_the_run(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop
    before = left_in(url)
    for dry in (change_key(catalog, ORDERS, 0, dry_run=True), status(catalog, ORDERS, 0)):
        assert dry.state is None
    for command in (take_back, finish):
        with pytest.raises(ClusterConflict, match="nothing is under way"):
            command(catalog, ORDERS, 0, dry_run=True)
    assert left_in(url) == before
    with connected(url) as other:
        other.execute("select pg_advisory_lock(1936220532, 'public.orders'::regclass::integer)")
        for dry_run in (True, False):
            with pytest.raises(ClusterConflict, match="another process works at this table"):
                change_key(catalog, ORDERS, 0, dry_run=dry_run)
    with pytest.raises(Stopped):
        change_key(catalog, ORDERS, 0, stop_at(2))
    # Tables that another change shares.
    for dry_run in (True, False):
        with pytest.raises(ClusterConflict, match="shares tables"):
            change_key(catalog, "public.customers", 0, dry_run=dry_run)
    change_key(catalog, ORDERS, 0)
    before = left_in(url)
    assert take_back(catalog, ORDERS, 0, dry_run=True).state == "swapped"
    assert finish(catalog, ORDERS, 0, dry_run=True).state == "swapped"
    assert left_in(url) == before
    with connected(url) as connection:
        connection.execute("insert into orders (id, customer_id) values (5000000000, 1)")
    for dry_run in (True, False):
        with pytest.raises(AdoptionRefused, match="can't hold"):
            take_back(catalog, ORDERS, 0, dry_run=dry_run)
    with connected(url) as connection:
        connection.execute("insert into orders (id, customer_id) values (9000000000000000000, 1)")
    for dry_run in (True, False):
        with pytest.raises(AdoptionRefused, match="highest key is"):
            finish(catalog, ORDERS, 0, dry_run=dry_run)


def test_a_change_between_two_steps_is_noticed(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop

    def step(name: str) -> None:
        if name == "swap":
            with connected(url) as connection:
                connection.execute("create index late on orders (id, note)")

    with pytest.raises(ClusterConflict, match="were changed meanwhile"):
        change_key(catalog, ORDERS, 0, How(on_event=on_steps(step)))
    assert types(url)["orders.id"] == "integer"
    take_back(catalog, ORDERS, 0)
    assert change_key(catalog, ORDERS, 0).state == "swapped"


CHANGED = {
    "default of its sequence was": (
        ORDERS,
        """create sequence orders_new start 100000;
           alter table orders alter id set default nextval('orders_new')""",
        "alter table orders alter id set default nextval('orders_id_seq'); drop sequence orders_new",
    ),
    "name of its sequence was orders_id_seq, is other": (
        ORDERS,
        "alter sequence orders_id_seq rename to other",
        "alter sequence other rename to orders_id_seq",
    ),
    "owned of its sequence was True, is False": (
        ORDERS,
        "alter sequence orders_id_seq owned by none",
        "alter sequence orders_id_seq owned by orders.id",
    ),
    "is not the nextval": (
        ORDERS,
        "alter table orders alter id drop default",
        "alter table orders alter id set default nextval('orders_id_seq')",
    ),
    "increment of its sequence was 1, is 10": (
        "public.customers",
        "alter table customers alter id set increment by 10",
        "alter table customers alter id set increment by 1",
    ),
    "identity of its sequence was d, is a": (
        "public.customers",
        "alter table customers alter id set generated always",
        "alter table customers alter id set generated by default",
    ),
    "privileges of its sequence was False": (
        "public.customers",
        "grant usage on sequence customers_id_seq to public",
        None,
    ),
}


@pytest.mark.parametrize("says", sampled([*CHANGED], every=3))
def test_a_changed_sequence_is_noticed(shop: tuple[URL, Catalog], says: str) -> None:
    url, catalog = shop
    table, change, undo = CHANGED[says]

    def step(name: str) -> None:
        if name == "swap":
            with connected(url) as connection:
                connection.execute(change.encode())
            before.append(dumped(url))

    before: list[str] = []
    with pytest.raises(ClusterConflict, match=says):
        change_key(catalog, table, 0, How(on_event=on_steps(step)))
    assert dumped(url) == before[0]
    if undo is None:
        take_back(catalog, table, 0)
        return
    with connected(url) as connection:
        connection.execute(undo.encode())
    assert change_key(catalog, table, 0).state == "swapped"
    # The same on the way back.
    with pytest.raises(ClusterConflict, match=says):
        take_back(catalog, table, 0, How(on_event=on_steps(step)))
    assert dumped(url) == before[1]
    with connected(url) as connection:
        connection.execute(undo.encode())
    take_back(catalog, table, 0)


@pytest.mark.parametrize(
    "change",
    [
        "create publication p for all tables",
        "alter sequence orders_id_seq increment 7",
        "select pg_create_logical_replication_slot('late', 'pgoutput')",
    ],
)
def test_a_change_between_the_description_and_the_lock_is_noticed(
    shop: tuple[URL, Catalog], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    url, catalog = shop

    def describe(*given: Any) -> dict[str, Any]:
        document = read_document(*given)
        with connected(url) as connection:
            connection.execute(change.encode())
        return document

    with monkeypatch.context() as patched:
        patched.setattr("shardids.adopt.inplace.changing.read_document", describe)
        with pytest.raises(ClusterConflict, match="changed meanwhile: just now"):
            change_key(catalog, ORDERS, 0)
    assert types(url)["orders.id"] == "integer"
    with connected(url) as connection:
        connection.execute(
            "drop publication if exists p;"
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = 'late'"
        )
    assert change_key(catalog, ORDERS, 0).state == "swapped"


def test_a_long_transaction_is_waited_for_and_named(shop: tuple[URL, Catalog]) -> None:
    url, catalog = shop
    waits: list[str] = []
    with psycopg.connect(dsn(url)) as holder:
        pid = holder.info.backend_pid
        holder.execute("update orders set note = 'held' where id = 7")

        def wait(event: Event) -> None:
            if isinstance(event, Waiting):
                waits.append(event.reason)
                holder.rollback()

        change_key(catalog, ORDERS, 0, How(on_event=wait))
    assert f"process {pid}" in waits[0]
    assert "in a transaction for" in waits[0]


def test_two_processes_and_two_tables_keep_apart(shop: tuple[URL, Catalog]) -> None:
    _, catalog = shop

    def meanwhile(_name: str) -> None:
        with pytest.raises(ClusterConflict, match="another process"):
            change_key(catalog, ORDERS, 0)
        raise Stopped

    with pytest.raises(Stopped):
        change_key(catalog, ORDERS, 0, How(on_event=on_steps(meanwhile)))
    with pytest.raises(ClusterConflict, match="shares tables"):
        change_key(catalog, "public.customers", 0)


def test_nothing_is_under_way(shop: tuple[URL, Catalog]) -> None:
    _, catalog = shop
    for what in (take_back, finish):
        with pytest.raises(ClusterConflict, match="nothing is under way"):
            what(catalog, ORDERS, 0)
    for name in ("orders", "public.none"):
        with pytest.raises(BadArgument):
            change_key(catalog, name, 0)
    with pytest.raises(ShardidsError):
        change_key(catalog, ORDERS, 3)


def test_an_owner_who_is_no_superuser(shop: tuple[URL, Catalog], make_role: Callable[..., URL]) -> None:
    url, catalog = shop
    role = make_role()
    name = sql.Identifier(str(role.username))
    with connected(url) as connection:
        connection.execute(
            sql.SQL("grant create on database {} to {}").format(sql.Identifier(str(url.database)), name)
        )
        connection.execute(
            sql.SQL("alter table orders owner to {n}; alter table audit owner to {n}").format(n=name)
        )
        connection.execute(sql.SQL("grant usage, create on schema public to {n}").format(n=name))
        connection.execute(sql.SQL("grant references on customers to {n}").format(n=name))
    provision.grant(catalog, str(role.username))
    own = Catalog(url.set(username=role.username, password=role.password))
    try:
        with connected(url) as connection:
            connection.execute(
                "update shardids_catalog.node set url = replace(url, %s, %s)",
                [f"//{url.username}@", f"//{role.username}@"],
            )
        with pytest.raises(AdoptionRefused, match='"Lines" belongs to role'):
            change_key(own, ORDERS, 0)
        with connected(url) as connection:
            connection.execute(sql.SQL('alter table "Lines" owner to {}').format(name))
        with pytest.raises(AdoptionRefused, match=r'"touch" of public\.orders'):
            change_key(own, ORDERS, 0)
        with connected(url) as connection:
            connection.execute("drop trigger touch on orders")
        assert change_key(own, ORDERS, 0).state == "swapped"
        assert finish(own, ORDERS, 0).state is None
    finally:
        own.close()
        with connected(url) as connection:
            connection.execute(
                sql.SQL("reassign owned by {n} to current_user; drop owned by {n}").format(n=name)
            )
    assert_consistent(url)


def test_the_command(shop: tuple[URL, Catalog], run: Run) -> None:  # noqa: F811
    url, _ = shop
    words = ("key", "adopt", ORDERS, "--shard", "0", "--catalog", dsn(url))
    dry = run(*words, "--dry-run")
    assert dry.code == 0
    assert dry.out == "No obstacles found: orders.id, Lines.order_id, orders.parent_id; nothing was changed\n"
    ran = run(*words, "--batch", "500")
    assert (ran.code, ran.out.split(".")[-3][-6:]) == (0, "bigint") or "bigint" in ran.out
    assert "fill orders" in ran.err
    assert json.loads(run(*words, "--status", "--json").out)["state"] == "swapped"
    assert run(*words, "--finish", "--dry-run").out.endswith("Nothing was changed\n")
    assert run(*words, "--back").code == 0
    assert run(*words, "--back", "--finish").code == 2
    assert run(*words).code == 0
    assert run(*words, "--finish", "--yes").code == 0
    assert one(url, "insert into orders (customer_id) values (1) returning id") > 1 << 40
