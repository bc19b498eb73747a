"""Roles, row security, subscriptions and collations of a source: refused by name, or adopted right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from shardids.adopt import adoption
from shardids.adopt.run import comparing
from shardids.errors import AdoptionFailed, AdoptionRefused
from shardids.pg.urls import parse_url
from tests.support.adoptions import Shop, assert_as_before, schema
from tests.support.waiting import wait_for


def test_columns_of_several_collations_are_compared(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("""
            alter table users alter country type text collate "C", alter "od:d %s" type text collate "POSIX";
            alter table cities alter name type text collate "C", alter country type text collate "POSIX" """)
    adoption.run(shop.catalog, shop.plan)
    adoption.abort(shop.catalog)
    assert_as_before(shop)


def test_texts_that_a_collation_calls_equal_differ(shop: Shop) -> None:
    with shop.connected("source") as source:
        try:
            source.execute(
                "create collation any_case"
                " (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
            )
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this build of PostgreSQL has no ICU")
        hashed = f"hashtextextended({comparing._text(['a', 'b'])}, 0)"
        found = source.execute(
            f"select count(distinct {hashed}) from (values ('x' collate any_case, 1), ('X', 1)) t (a, b)"
        )
        assert found.fetchone() == (2,)


@contextmanager
def written_by_a_subscription(shop: Shop) -> Iterator[None]:
    """Let the source's users come from another database, on node a's server."""
    with shop.connected("a") as admin:
        admin.execute("create database upstream")
        i = admin.info
        conninfo = make_conninfo(
            host=i.host, port=i.port, user=i.user, password=i.password, dbname="upstream"
        )
    url = shop.servers["a"].url("upstream")
    with psycopg.connect(url, autocommit=True) as upstream, shop.connected("source") as source:
        upstream.execute("create table users (id integer primary key, name text not null)")
        upstream.execute("create publication upstream for table users")
        source.execute(f"create subscription upstream connection '{conninfo}' publication upstream")
        try:
            upstream.execute("insert into users values (5001, 'from upstream')")
            there = "select count(*) from users where id = 5001"
            wait_for(lambda: source.execute(there).fetchone() == (1,), "the row comes")
            yield
        finally:
            source.execute("drop subscription upstream")
            source.execute("delete from users where id = 5001")
    with shop.connected("a") as admin:
        admin.execute("drop database upstream with (force)")


def test_a_table_that_a_subscription_writes_to_is_refused(shop: Shop) -> None:
    with written_by_a_subscription(shop):
        with pytest.raises(AdoptionRefused, match=r"subscription upstream writes to it") as no:
            adoption.check(shop.catalog, shop.plan)
        assert "DROP SUBSCRIPTION upstream" in (no.value.hint or "")


def test_a_subscription_that_writes_past_the_barrier_stops_the_switch(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    try:
        with written_by_a_subscription(shop):
            with pytest.raises(AdoptionFailed, match=r"subscription upstream writes to public\.users"):
                adoption.switch(shop.catalog)
            status = adoption.status(shop.catalog)
            assert status is not None
            assert not status.is_source_closed
    finally:
        adoption.abort(shop.catalog)
    assert_as_before(shop)


KEEPER = """
    create role keeper login replication password 'k'; grant create on database postgres to keeper;
    grant pg_read_all_data to keeper; grant usage on schema "The Shop" to keeper;
    alter table countries owner to keeper; alter table cities owner to keeper;
    alter table users owner to keeper; alter table "The Shop"."Orders" owner to keeper;
    alter table lines owner to keeper; alter table lines_low owner to keeper;
    alter table lines_high owner to keeper"""


@pytest.fixture
def keeper(shop: Shop) -> Iterator[str]:
    """The source's URL as a role that owns the tables and is no superuser."""
    with shop.connected("source") as source:
        source.execute(KEEPER)
        url = parse_url(shop.servers["source"].url()).set(username="keeper", password="k")
        yield url.render_as_string(hide_password=False)
        source.execute("reassign owned by keeper to postgres; drop owned by keeper; drop role keeper")


def test_the_owner_of_all_tables_may_adopt_them(shop: Shop, keeper: str) -> None:
    adoption.check(shop.catalog, shop.plan, source=keeper, trusted=["keeper"])


def test_row_security_that_binds_a_role_is_refused(shop: Shop, keeper: str) -> None:
    """PostgreSQL would copy the rows that the role may see, and say nothing."""
    with shop.connected("source") as source:
        source.execute("alter table users enable row level security, force row level security")
        try:
            with pytest.raises(AdoptionRefused) as no:
                adoption.check(shop.catalog, shop.plan, source=keeper, trusted=["keeper"])
            assert "row security of public.users hides rows from the role: they would stay behind" in str(
                no.value
            )
            assert 'row security of public.users hides rows from role "keeper", which compares' in str(
                no.value
            )
        finally:
            source.execute("alter table users disable row level security, no force row level security")


def test_a_reader_that_row_security_binds_is_refused(shop: Shop) -> None:
    reader = parse_url(shop.servers["source"].url()).set(username="reading", password="r")
    with shop.connected("source") as source:
        source.execute("""
            create role reading login password 'r'; grant pg_read_all_data to reading;
            alter table users enable row level security""")
        try:
            url = reader.render_as_string(hide_password=False)
            with pytest.raises(AdoptionRefused, match=r'hides rows from role "reading"') as no:
                adoption.check(shop.catalog, shop.plan, reader=url)
            assert 'alter role "reading" bypassrls' in (no.value.hint or "")
            source.execute("alter role reading bypassrls")
            adoption.check(shop.catalog, shop.plan, reader=url)
        finally:
            source.execute(
                "alter table users disable row level security; drop owned by reading; drop role reading"
            )


def test_a_partition_of_another_owner_is_refused(shop: Shop, keeper: str) -> None:
    """The write barrier is made on partitions too."""
    with shop.connected("source") as source:
        source.execute("alter table lines_low owner to postgres")
        with pytest.raises(AdoptionRefused, match=r"not an owner of public\.lines and of its partitions"):
            adoption.check(shop.catalog, shop.plan, source=keeper, trusted=["keeper"])


def test_a_sequence_that_the_role_may_not_read_is_refused(shop: Shop, keeper: str) -> None:
    """The shards' numbers go on after the source's."""
    with shop.connected("source") as source:
        source.execute(
            "create sequence bills; alter table users add column bill bigint default nextval('bills')"
        )
    for node, shards in shop.catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            for shard in shards:
                connection.execute(f"create sequence {schema(shard)}.bills")
                connection.execute(
                    f"alter table {schema(shard)}.users add column bill bigint"
                    f" default nextval('{schema(shard)}.bills')"
                )
    try:
        with shop.connected("source") as source:
            source.execute("revoke pg_read_all_data from keeper")
            with pytest.raises(AdoptionRefused, match=r"may not read sequence public\.bills") as no:
                adoption.check(shop.catalog, shop.plan, source=keeper, trusted=["keeper"])
            assert "grant select on sequence public.bills" in (no.value.hint or "")
    finally:
        with shop.connected("source") as source:
            source.execute("alter table users drop column bill; drop sequence bills")
        for node, shards in shop.catalog.placement().by_node().items():
            with shop.connected(node) as connection:
                for shard in shards:
                    connection.execute(f"alter table {schema(shard)}.users drop column bill")
                    connection.execute(f"drop sequence {schema(shard)}.bills")


@pytest.mark.parametrize(
    "function",
    [
        "language sql immutable strict as 'select lower(helper($1))'",
        "language plpgsql immutable strict as 'begin return lower(helper($1)); end'",
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        "create index plainly on {t} (plain(name))",
        "create unique index plainly on {t} (name) where plain(name) = 'x'",
        "alter table {t} add constraint plainly check (plain(name) <> 'x')",
        "alter table {t} add plainly text generated always as (plain(name)) stored",
    ],
)
def test_what_replication_can_not_compute_is_refused(shop: Shop, function: str, use: str) -> None:
    """It finds no function that is named without its schema."""
    for node, shards in shop.catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            connection.execute("""
                create function helper(text) returns text language sql immutable as 'select $1';
                create function plain(text) returns text language sql immutable as 'select lower($1)'""")
            # Columns are the same in all shards.
            some = shards if "add plainly" in use else shards[-1:]
            for table in ("public.countries", *(f"{schema(shard)}.users" for shard in some)):
                connection.execute(use.replace("{t}", table).encode())
            connection.execute(f"create or replace function plain(text) returns text {function}".encode())
    try:
        with pytest.raises(AdoptionRefused) as refused:
            adoption.run(shop.catalog, shop.plan)
        what = next(what for what in ("index", "constraint", "add") if what in use).replace("add", "column")
        shards = shop.catalog.placement().by_node()["a"]
        one = schema(shards[0 if "add plainly" in use else -1])
        for table in ("public.countries", f'"{one}"."users"'):
            reason = f"replication can't compute {what} plainly of {table}, since it has no search_path"
            assert f'node "a": {reason}: function helper' in refused.value.message
        for node in "ab":
            with shop.connected(node) as connection:
                connection.execute("alter function plain(text) set search_path = public")
        assert adoption.check(shop.catalog, shop.plan).split == 3
    finally:
        for node in "ab":
            with shop.connected(node) as connection:
                connection.execute("drop function plain(text) cascade; drop function helper(text)")


def test_a_value_that_names_something_is_not_taken_for_what_replication_can_not_compute(shop: Shop) -> None:
    with shop.connected("a") as node:
        node.execute("""
            create function words(text) returns text language plpgsql immutable as
              'begin return to_tsvector($1::regconfig, $1); end';
            create index words on countries (words(name))""")
        try:
            assert adoption.check(shop.catalog, shop.plan).split == 3
        finally:
            node.execute("drop function words cascade")
