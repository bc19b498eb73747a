"""The query node: what its views show, and how they follow moves, migrations and whatever else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids.catalog.query_node import query_node_of
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, MissingPrivilege, StatementFailed
from shardids.migrate.install import provision
from shardids.pg.urls import shown_url
from shardids.tables import views
from shardids.tables.views import refresh
from shardids.watch import doctor
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected, objects

Blank = Callable[[], URL]
Pair = tuple[URL, URL]

TABLES = """
    create type {s}.mood as enum ('good', 'bad', 'average');
    create domain {s}.label as varchar(40) collate "C";
    create type {s}.pair as (a integer, b integer);
    create table {s}.users (id bigint primary key default {s}.next_id(), name text collate "C" unique);
    create table {s}.photos (id bigint primary key default {s}.next_id(), user_id bigint references {s}.users,
                             title {s}.label,
                             mood {s}.mood default 'good', moods {s}.mood[] default '{{bad}}',
                             size numeric(8, 2) default 1.5, pair {s}.pair);
    create table {s}.likes (photo_id bigint not null references {s}.photos, stars integer not null);
    create table {s}.countries (code text primary key);
    create table {s}.settings (name text primary key);
    insert into {s}.countries values ('NO'), ('SE');
    insert into {s}.settings values ('{s}');
    insert into {s}.users (name) select '{s} ' || n from generate_series(1, 3) n;
    insert into {s}.photos (user_id, title, mood) select id, name, 'bad' from {s}.users;
    insert into {s}.likes select id, 3 from {s}.photos;"""


@pytest.fixture
def pair(blank_database: Blank) -> Pair:
    """A cluster of 4 shards with tables of many types, the lower half on node a, which holds the catalog."""
    a, b = blank_database(), blank_database()
    found_cluster(a, {"a": a, "b": b}, 4)
    for url, shards in ((a, (0, 1)), (b, (2, 3))):
        run(url, *(TABLES.format(s=f"shard_{shard:04}") for shard in shards))
    return a, b


def run(url: URL, *statements: str) -> None:
    with connected(url) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def rows(url: URL, query: str) -> list[tuple[Any, ...]]:
    with connected(url) as connection:
        return connection.execute(query.encode()).fetchall()


def make(catalog: Catalog, **options: Any) -> views.Refreshed:
    # The servers of the tests ask for passwords, which postgres_fdw has only if they are stored.
    return views.create_query_node(catalog, **{"node": "a", "store_password": True} | options)


def test_every_table_is_shown_with_the_rows_of_all_shards(pair: Pair) -> None:
    a, b = pair
    with catalog_at(a) as catalog:
        made = make(catalog, sharded=["settings"], reference=["countries"])
        assert made.left_out == ('column "pair" of table "photos" is left out: not all shards have it alike',)
        again = make(catalog, sharded=["settings"], reference=["countries"], store_password=False)
        assert again.statements == []
    assert rows(
        a,
        """select (select count(*) from shardids_query.users), (select count(*) from shardids_query.photos),
                  (select count(*) from shardids_query.likes),
                  (select count(*) from shardids_query.countries),
                  (select count(distinct name) from shardids_query.settings)""",
    ) == [(12, 12, 12, 2, 4)]
    (types,) = rows(
        a,
        """select array_agg(concat_ws(' ', attname, format_type(atttypid, atttypmod), collname)
                              order by attnum)
           from pg_attribute left join pg_collation l on l.oid = attcollation and collname <> 'default'
           where attrelid = 'shardids_query.photos'::regclass and attnum > 0""",
    )
    assert types[0] == [
        *("id bigint", "user_id bigint", "title character varying(40) C"),
        *("mood shardids_query.mood", "moods shardids_query.mood[]", "size numeric(8,2)"),
    ]
    # Enums sort by their order, as in a shard, not as text.
    run(b, "update shard_0003.photos set mood = 'average'")
    assert rows(a, "select p.mood::text from shardids_query.photos p order by p.mood desc limit 1") == [
        ("average",)
    ]
    assert rows(
        a, "select shardids_node, count(distinct shardids_shard) from shardids_nodes.users group by 1"
    ) == [
        ("a", 2),
        ("b", 2),
    ]


TOTAL = "select count(*), count(distinct id) from shardids_query.users"


def test_what_nobody_can_say_of_a_table_is_left_out(pair: Pair) -> None:
    a, b = pair
    # As `shardids load` makes it in the shards that it has written to.
    run(b, "create table shard_0003.shardids_load (load text primary key)")
    run(b, "create table shard_0003.bare ()")
    with catalog_at(a) as catalog:
        before = objects(a)
        made = make(catalog, dry_run=True)
        assert any("create view" in statement for statement in made.statements)
        why = "it is unknown whether each shard has other rows (--sharded) or all have the same"
        assert [line for line in made.left_out if line.startswith("table")] == [
            'table "bare" is left out: 3 shards don\'t have it, for example shard 0',
            *(f'table "{name}" is left out: {why} (--reference)' for name in ("countries", "settings")),
        ]
        assert objects(a) == before
        assert query_node_of(catalog) is None
        for wrong, error, why in (
            ({"sharded": ["none"]}, BadArgument, 'no shard has a table "none"'),
            ({"url": "postgresql://x/y"}, BadArgument, "a query node needs a node or another database"),
            ({"node": "c"}, ClusterConflict, 'there is no node "c"'),
        ):
            with pytest.raises(error, match=why):
                make(catalog, **wrong)
        make(catalog)
        with pytest.raises(ClusterConflict, match='node "a" holds 2 shards'):
            provision.remove_node(catalog, "a")


def test_tables_change_without_regard_to_the_views(pair: Pair, make_role: MakeRole) -> None:
    a, b = pair
    reader = make_role("reader")
    shards = [(a, 0), (a, 1), (b, 2), (b, 3)]
    with catalog_at(a) as catalog:
        make(catalog)
        run(
            a,
            f'grant usage on schema shardids_query to "{reader.username}"',
            f'grant select on shardids_query.users to "{reader.username}"',
        )
        # Nothing depends on the shards' tables: they are changed as if the views were not there.
        for url, shard in shards:
            schema = f"shard_{shard:04}"
            run(
                url,
                f"alter table {schema}.users drop name, add born date default '2000-01-01'",
                f"alter type {schema}.mood add value 'better' before 'good'",
                f"create table {schema}.notes (id bigint primary key default {schema}.next_id())",
                f"drop table {schema}.likes",
            )
            if shard == 0:
                # Halfway through a migration a view shows what all shards have, and no wrong rows.
                with pytest.raises(psycopg.Error, match=r"column t\.name does not exist"):
                    rows(a, "select name from shardids_query.users")
        # The doctor compares what is shown with what the shards have.
        found = [one for one in doctor.examine(catalog).findings if one.check == "query-node"]
        assert [one.what for one in found] == [
            'the query node, node "a": tables have changed since it was refreshed:'
            " likes, notes, photos, users"
        ]
        views.refresh_query_node(catalog)
        assert not [one for one in doctor.examine(catalog).findings if one.check == "query-node"]
        assert views.refresh_query_node(catalog, dry_run=True) == views.Refreshed(
            statements=[], left_out=make(catalog).left_out
        )
        assert rows(a, "select born::text, count(*) from shardids_query.users group by 1") == [
            ("2000-01-01", 12)
        ]
        assert rows(a, "select count(*) from shardids_query.notes") == [(0,)]
        assert rows(a, "select enum_range(null::shardids_query.mood)::text") == [
            ("{better,good,bad,average}",)
        ]
        assert rows(a, "select to_regclass('shardids_query.likes')") == [(None,)]
        with psycopg.connect(
            dsn(a.set(username=reader.username, password=str(reader.password)))
        ) as connection:
            assert connection.execute(TOTAL.encode()).fetchall() == [(12, 12)]
        run(a, "create view public.mine as select id from shardids_query.users")
        run(a, "alter table shard_0000.users add x integer")
        views.refresh_query_node(catalog)
        for url, shard in shards[1:]:
            run(url, f"alter table shard_{shard:04}.users add x integer")
        with pytest.raises(StatementFailed, match="other objects depend on it"):
            views.refresh_query_node(catalog)
        (complaint,) = views.follow(catalog)
        assert complaint.startswith("the query node does not show today's shards and tables")
        run(a, "drop view public.mine", f'drop owned by "{reader.username}"')
        assert views.follow(catalog) == ()


def test_a_shard_without_its_tables_keeps_the_query_node_as_it_is(pair: Pair) -> None:
    a, b = pair
    with catalog_at(a) as catalog:
        make(catalog)
        run(b, "drop table shard_0002.likes")
        with pytest.raises(
            ClusterConflict, match='1 shards have no table "likes", for example shard 2 on node "b"'
        ):
            views.refresh_query_node(catalog)
        assert rows(a, TOTAL) == [(12, 12)]


def test_dropping_the_query_node_leaves_nothing(pair: Pair, blank_database: Blank) -> None:
    a, b = pair
    own = blank_database()
    with catalog_at(a) as catalog:
        before = [objects(url) for url in (a, b)]
        make(catalog, node=None, url=dsn(own))
        assert rows(own, TOTAL) == [(12, 12)]
        assert [objects(url) for url in (a, b)] != before
        state = views.state_of(catalog)
        assert state is not None
        assert (state.there.node, state.there.url, state.tables) == (None, shown_url(own), 3)
        assert state.faults == ()
        assert views.drop_query_node(catalog, dry_run=True)
        assert rows(own, TOTAL) == [(12, 12)]
        run(own, "create view shardids_query.mine as select 1")
        with pytest.raises(StatementFailed, match="cannot drop schema shardids_query"):
            views.drop_query_node(catalog)
        assert rows(own, TOTAL) == [(12, 12)]
        run(own, "drop view shardids_query.mine")
        views.drop_query_node(catalog)
        assert [objects(url) for url in (a, b)] == before
        assert rows(own, "select nspname from pg_namespace where starts_with(nspname, 'shardids')") == []
        with pytest.raises(ClusterConflict, match="the cluster has no query node"):
            views.drop_query_node(catalog)


def test_a_database_that_compares_text_otherwise_is_refused(
    pair: Pair, admin: psycopg.Connection[Any]
) -> None:
    a, _ = pair
    name = f"{a.database}_other"
    made = sql.SQL("create database {} template template0 encoding 'LATIN1' locale 'C'")
    admin.execute(made.format(sql.Identifier(name)))
    try:
        with catalog_at(a) as catalog, pytest.raises(ClusterConflict, match="the query node has encoding"):
            make(catalog, node=None, url=dsn(a.set(database=name)))
    finally:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_a_long_query_keeps_others_waiting_for_moments_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    monkeypatch.setattr(refresh, "_PATIENCE_S", 1.0)
    with catalog_at(a) as catalog:
        make(catalog)
        for url, shard in ((a, 0), (a, 1), (b, 2), (b, 3)):
            run(url, f"alter table shard_{shard:04}.users add x integer")
        with psycopg.connect(dsn(a)) as other:
            other.execute(TOTAL.encode())
            with pytest.raises(
                ClusterConflict, match='queries on node "a" have been reading the views for 1 s'
            ):
                views.refresh_query_node(catalog)
        views.refresh_query_node(catalog)
    assert rows(a, "select count(x) from shardids_query.users") == [(0,)]


def test_another_database_becomes_the_query_node(pair: Pair, blank_database: Blank) -> None:
    a, b = pair
    own = blank_database()
    with catalog_at(a) as catalog:
        before = objects(a)
        make(catalog, reference=["countries"])
        assert make(catalog, node=None, url=dsn(own), sharded=["settings"]).left_out == (
            'column "pair" of table "photos" is left out: not all shards have it alike',
        )
        there = query_node_of(catalog)
        assert there is not None
        assert (there.node, there.sharded, there.reference) == (None, ("settings",), ("countries",))
        assert rows(own, "select count(*) from shardids_query.settings") == [(4,)]
        # Only the views over the shards of node a are there still.
        assert {name for kind, name, _ in objects(a) if kind == "schema"} - {
            name for kind, name, _ in before if kind == "schema"
        } == {"shardids_local"}
        # A table that is sharded after all, and one that is gone since.
        make(catalog, node=None, url=dsn(own), sharded=["countries"])
        for url, shard in ((a, 0), (a, 1), (b, 2), (b, 3)):
            run(url, f"drop table shard_{shard:04}.settings")
        assert rows(own, "select count(*) from shardids_query.countries") == [(8,)]
        views.refresh_query_node(catalog)
        assert rows(own, "select to_regclass('shardids_query.settings')") == [(None,)]
        run(own, "create view public.mine as select id from shardids_query.users")
        (left,) = make(catalog, node="b", reference=["countries"]).left_out[1:]
        assert left.startswith("the views of the former query node stay on postgresql://")
        assert rows(b, TOTAL) == [(12, 12)]


def test_a_database_that_would_be_copied_or_is_taken_is_refused(
    pair: Pair, blank_database: Blank, admin: psycopg.Connection[Any]
) -> None:
    a, _ = pair
    own, other = blank_database(), blank_database()
    template = sql.SQL("alter database {} is_template {}")
    with catalog_at(a) as catalog:
        admin.execute(template.format(sql.Identifier(str(own.database)), True))
        try:
            with pytest.raises(ClusterConflict, match="is a template: every database made from it"):
                make(catalog, node=None, url=dsn(own))
        finally:
            admin.execute(template.format(sql.Identifier(str(own.database)), False))
        make(catalog, node=None, url=dsn(own))
        found_cluster(other, {"a": other}, 1)
        with (
            catalog_at(other) as another,
            pytest.raises(ClusterConflict, match="is the query node of another cluster"),
        ):
            make(another, node=None, url=dsn(own))
        assert rows(own, TOTAL) == [(12, 12)]


def test_a_server_of_another_role_gets_no_password(pair: Pair, make_role: MakeRole) -> None:
    a, _ = pair
    mallory = make_role("mallory")
    run(
        a,
        "create extension postgres_fdw",
        f'grant usage on foreign data wrapper postgres_fdw to "{mallory.username}"',
        "create server shardids_b foreign data wrapper postgres_fdw options (host 'evil')",
        f'alter server shardids_b owner to "{mallory.username}"',
    )
    with catalog_at(a) as catalog:
        with pytest.raises(MissingPrivilege, match="server shardids_b belongs to role "):
            make(catalog)
        run(a, f'drop owned by "{mallory.username}"')
        make(catalog)


def test_a_role_that_is_no_superuser_needs_a_stored_password_or_passes_its_login_on(
    blank_database: Blank, make_role: MakeRole, admin: psycopg.Connection[Any]
) -> None:
    owner, reader = make_role("owner"), make_role("reader")
    databases = blank_database(), blank_database()
    for url in databases:
        run(
            url,
            f'grant create on database "{url.database}" to "{owner.username}"',
            "create extension postgres_fdw",
            f'grant usage on foreign data wrapper postgres_fdw to "{owner.username}"',
        )
    a, b = (url.set(username=owner.username, password=str(owner.password)) for url in databases)
    found_cluster(a, {"a": a, "b": b}, 4)
    for url, shards in ((a, (0, 1)), (b, (2, 3))):
        run(url, *(TABLES.format(s=f"shard_{shard:04}") for shard in shards))
    stored = "select umoptions::text from pg_user_mappings where srvname like 'shardids%'"
    with catalog_at(a) as catalog:
        if admin.info.server_version < 180000:
            with pytest.raises(MissingPrivilege, match="lets only superusers log in to other servers"):
                make(catalog, store_password=False)
            (line,) = views.found_query_node(catalog, node="a")
            assert line.endswith("shardids query-node refresh --store-password")
            state = views.state_of(catalog)
            assert state is not None
            assert [str(fault) for fault in state.faults] == [
                "it has not been created. Create it; if the nodes require a password: --store-password."
            ]
        else:
            make(catalog, store_password=False)
            assert make(catalog, store_password=False).statements == []
            assert rows(a, TOTAL) == [(12, 12)]
            assert str(owner.password) not in str(rows(a, stored))
            views.grant(catalog, str(reader.username))
            other = a.set(username=reader.username, password=str(reader.password))
            with pytest.raises(psycopg.errors.SqlclientUnableToEstablishSqlconnection):
                rows(other, TOTAL)
        make(catalog)
        assert str(owner.password) in str(rows(a, stored))
        assert rows(a, TOTAL) == [(12, 12)]
        run(a, "alter user mapping for current_user server shardids_b options (set password 'other')")
        state = views.state_of(catalog)
        assert state is not None
        (fault,) = state.faults
        assert fault.what.startswith('node "a" can\'t read from shardids_b: ')
        found = [one for one in doctor.examine(catalog).findings if one.check == "query-node"]
        assert [one.commands[0].text for one in found] == ["shardids query-node refresh --store-password"]
        views.drop_query_node(catalog)
    for url in databases:
        run(url, f'drop owned by "{owner.username}" cascade')


def test_reference_tables_are_shown_as_their_writer_has_them(pair: Pair) -> None:
    a, b = pair
    run(b, "create table shardids_ref.currencies (code text primary key)")
    run(b, "insert into shardids_ref.currencies values ('EUR'), ('NOK')")
    with catalog_at(a) as catalog:
        run(
            a,
            "insert into shardids_catalog.reference_writer (node) values ('b')",
            "insert into shardids_catalog.reference_table (name, state) values ('currencies', 'active')",
        )
        make(catalog)
        assert rows(
            a, "select code, shardids_node, shardids_shard from shardids_nodes.currencies order by code"
        ) == [("EUR", "b", None), ("NOK", "b", None)]
        run(a, "update shardids_catalog.reference_table set state = 'dropping'")
        views.refresh_query_node(catalog)
        assert rows(a, "select to_regclass('shardids_query.currencies')") == [(None,)]


def test_a_role_may_be_let_read_all_tables(pair: Pair, make_role: MakeRole) -> None:
    a, b = pair
    reader = make_role("reader")
    with catalog_at(a) as catalog:
        with pytest.raises(ClusterConflict, match="the cluster has no query node"):
            views.grant(catalog, "reader")
        make(catalog)
        with pytest.raises(ClusterConflict, match='the query node has no role "no one"'):
            views.grant(catalog, "no one")
        assert views.grant(catalog, str(reader.username), dry_run=True)
        own = a.set(username=reader.username, password=str(reader.password))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            rows(own, TOTAL)
        views.grant(catalog, str(reader.username))
        for url, shard in ((a, 0), (a, 1), (b, 2), (b, 3)):
            schema = f"shard_{shard:04}"
            run(url, f"create table {schema}.notes (id bigint primary key default {schema}.next_id())")
        views.refresh_query_node(catalog)
        assert rows(own, "select count(*) from shardids_query.notes") == [(0,)]
        assert rows(own, "select count(*) from shardids_nodes.users") == [(12,)]
        run(a, f'drop owned by "{reader.username}"')
