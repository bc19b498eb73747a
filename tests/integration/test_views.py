"""Views over a table of all shards: what they read, by which plans, and how they follow the placement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids import doctor, views
from shardids.catalog.connections import open_engine
from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, ConnectionFailed, MissingPrivilege, StatementFailed
from shardids.install import provision
from shardids.views import database
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected, contents, objects

Blank = Callable[[], URL]
Pair = tuple[URL, URL]

PHOTOS = """
    create type {s}.mood as enum ('good', 'bad');
    create table {s}.photos (id bigint primary key default {s}.next_id(), user_id integer not null,
                             title varchar(40), mood {s}.mood default 'good', size numeric(8, 2) default 1.5);
    insert into {s}.photos (user_id, title) select n, 'photo ' || n from generate_series(1, 10) n;"""
ROWS = 8 * 10


@pytest.fixture
def pair(blank_database: Blank) -> Pair:
    """A cluster of 8 shards with photos, the lower half on node a, which holds the catalog, the rest on b."""
    a, b = blank_database(), blank_database()
    found_cluster(a, {"a": a, "b": b}, 8)
    for url, shards in ((a, range(4)), (b, range(4, 8))):
        run(url, *(PHOTOS.format(s=f"shard_{shard:04}") for shard in shards))
    return a, b


def run(url: URL, *statements: str) -> None:
    with connected(url) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def rows(url: URL, query: str) -> list[tuple[Any, ...]]:
    with connected(url) as connection:
        return connection.execute(query.encode()).fetchall()


def make(catalog: Catalog, **options: Any) -> list[str]:
    # The servers of the tests ask for passwords, which postgres_fdw has only if they are stored.
    wanted = {"table": "photos", "node": "a", "store_password": True} | options
    return views.create(catalog, "photos", **wanted)


def move(pair: Pair, shard: int, *, back: bool = False) -> None:
    """Moves a shard with its rows from a to b, or back; the old copy stays, stopped."""
    source, target = reversed(pair) if back else pair
    name, schema = ("a" if back else "b"), f"shard_{shard:04}"
    engine = open_engine(target, what="node")
    with engine.connect() as connection:
        provision.create_shard(connection, shard)
    engine.dispose()
    run(target, PHOTOS.partition("insert")[0].format(s=schema))
    with connected(source) as there, connected(target) as here:
        moved = there.execute(
            f"select id, user_id, title, mood::text, size from {schema}.photos".encode()
        ).fetchall()
        for row in moved:
            here.execute(f"insert into {schema}.photos values (%s, %s, %s, %s, %s)".encode(), row)
    run(source, f"select shardids.fence({shard}, '{name}')")
    run(pair[0], f"update shardids_catalog.placement set node = '{name}' where shard = {shard}")


def plan(url: URL, query: str, *settings: str) -> dict[str, Any]:
    """The plan of a query; async scans only come out in the text, so both forms are asked for."""
    with connected(url) as connection:
        for setting in settings:
            connection.execute(f"set {setting}".encode())
        (found,) = connection.execute(
            f"explain (verbose, costs off, format json) {query}".encode()
        ).fetchall()
        return dict(found[0][0]["Plan"])


def scans(node: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Kind, table, and whether it is asynchronous, of every scan of a plan."""
    own = [(node["Node Type"], node.get("Relation Name", ""), bool(node.get("Async Capable")))]
    children = [scan for child in node.get("Plans", []) for scan in scans(child)]
    return ([] if "Scan" not in node["Node Type"] else own) + children


def test_a_view_on_a_node(pair: Pair) -> None:
    a, _ = pair
    with catalog_at(a) as catalog:
        made = make(catalog)
        assert made
        assert not any(word in json.dumps(made) for word in password_of(a))
        assert make(catalog, store_password=False) == []
        assert [row["stale"] for row in views.listed(catalog)] == [0]
    assert rows(
        a, "select shard, count(*), sum(user_id) from shardids_views.photos group by 1 order by 1"
    ) == [(shard, 10, 55) for shard in range(8)]
    (column_types,) = rows(
        a,
        "select array_agg(attname || ' ' || format_type(atttypid, atttypmod) order by attnum) from"
        " pg_attribute where attrelid = 'shardids_views.photos'::regclass and attnum > 0",
    )
    assert column_types[0] == [
        "shard integer",
        "id bigint",
        "user_id integer",
        "title character varying(40)",
        "mood text",
        "size numeric(8,2)",
    ]
    assert {row[0] for row in rows(a, "select distinct (mood, size)::text from shardids_views.photos")} == {
        "(good,1.50)"
    }
    with pytest.raises(psycopg.Error):
        run(a, "update shardids_views.photos set title = null")
    with pytest.raises(psycopg.Error, match="does not allow inserts"):
        run(a, "insert into shardids_views.photos_0005 (id, user_id) values (5120, 1)")


def password_of(url: URL) -> list[str]:
    with connected(url) as connection:
        return [connection.info.password] if connection.info.password else []


def test_the_plans(pair: Pair) -> None:
    a, _ = pair
    with catalog_at(a) as catalog:
        make(catalog)
    # Local shards are read directly, the others asynchronously.
    assert scans(plan(a, "select * from shardids_views.photos where user_id = 3")) == [
        *[("Seq Scan", "photos", False)] * 4,
        *[("Foreign Scan", f"photos_{shard:04}", True) for shard in range(4, 8)],
    ]
    assert scans(plan(a, "select count(*) from shardids_views.photos")) == [
        *[("Seq Scan", "photos", False)] * 4,
        *[("Foreign Scan", f"photos_{shard:04}", True) for shard in range(4, 8)],
    ]
    # One shard: one scan, by its own index.
    assert scans(plan(a, "select * from shardids_views.photos where shard = 6"))[0][1] == "photos_0006"
    ids = dict(rows(a, "select shard, min(id) from shardids_views.photos group by 1"))
    far = plan(a, f"select * from shardids_views.photos_by_id({ids[5]})")
    assert scans(far) == [("Foreign Scan", "photos_0005", False)]
    assert f"id = '{ids[5]}'" in far["Remote SQL"].replace(f"id = {ids[5]}::bigint", f"id = '{ids[5]}'")
    near = plan(a, f"select * from shardids_views.photos_by_id({ids[2]})", "enable_seqscan = off")
    assert (near["Node Type"], near["Schema"]) == ("Index Scan", "shard_0002")
    where = f"id = {ids[7]} and shard = shardids.shard_of({ids[7]})"
    assert [scan[1] for scan in scans(plan(a, f"select * from shardids_views.photos where {where}"))] == [
        "photos_0007"
    ]
    for shard, id_ in ids.items():
        assert rows(a, f"select shard, id from shardids_views.photos_by_id({id_})") == [(shard, id_)]
    # A parameter: shards that are not asked for are not run.
    with connected(a) as connection:
        connection.execute("set plan_cache_mode = force_generic_plan")
        connection.execute(
            "prepare one (bigint) as select * from shardids_views.photos"
            " where id = $1 and shard = shardids_views.shard_of($1)"
        )
        lines = connection.execute(f"explain (analyze, costs off) execute one ({ids[6]})".encode()).fetchall()
    ran = [line for (line,) in lines if "Scan" in line and "never executed" not in line]
    assert len(ran) == 1, lines
    assert "photos_0006" in ran[0]
    # Grouping by shard is done where the rows are.
    pushed = plan(
        a,
        "select shardids_views.shard_of(id), count(*) from shardids_views.photos_foreign group by 1",
        "enable_partitionwise_aggregate = on",
    )
    assert all("count(*)" in child["Remote SQL"] for child in pushed["Plans"])


def test_a_view_in_a_database_of_its_own(pair: Pair, blank_database: Blank) -> None:
    a, _ = pair
    own = blank_database()
    with catalog_at(a) as catalog:
        make(catalog, node=None, url=dsn(own))
        # PostgreSQL 14 computes nothing on top of asynchronous scans, so not the shard either.
        assert [scan[::2] for scan in scans(plan(own, "select id, title from shardids_views.photos"))] == [
            ("Foreign Scan", True)
        ] * 8
        assert rows(own, "select count(*), count(distinct shard) from shardids_views.photos") == [(ROWS, 8)]
        (listed,) = views.listed(catalog)
        assert (listed["on"], listed["stale"]) == (views.views_of(catalog)[0].url, 0)
        move(pair, 2)
        assert [f.check for f in examined(catalog)] == ["view-stale", "old-copy"]
        views.refresh(catalog, "photos", store_password=True)
        assert [f.check for f in examined(catalog)] == ["old-copy"]
        views.drop(catalog, "photos")
        assert views.views_of(catalog) == []
    assert [row for row in objects(own) if row[0].startswith("relation")] == []
    assert rows(own, "select count(*) from pg_foreign_server") == [(0,)]


def examined(catalog: Catalog) -> tuple[doctor.Finding, ...]:
    return doctor.examine(catalog, [c.name for c in doctor.CHECKS if c.name != "tick-rate"]).findings


def test_a_view_follows_moves_and_migrations(pair: Pair, make_role: MakeRole) -> None:
    a, b = pair
    reader = make_role("Reader")
    role = str(reader.username)
    total = "select count(*), count(distinct id), count(distinct shard) from shardids_views.photos"
    with catalog_at(a) as catalog:
        make(catalog)
        run(
            a,
            f'grant usage on schema shardids_views to "{role}"',
            f'grant select on shardids_views.photos to "{role}"',
            "create view public.titles as select title from shardids_views.photos",
        )
        assert examined(catalog) == ()
        move(pair, 1)
        move(pair, 3)
        findings = examined(catalog)
        assert [(f.check, str(f.severity), f.nodes, f.shards, f.thing) for f in findings] == [
            ("view-stale", "warning", ("a",), (1, 3), "photos"),
            ("old-copy", "info", ("a",), (1, 3), ""),
        ]
        assert [row["stale"] for row in views.listed(catalog)] == [2]
        run(b, "insert into shard_0003.photos (user_id) values (1)")
        before = objects(a)
        assert any("photos_0003" in statement for statement in views.refresh(catalog, "photos", dry_run=True))
        assert objects(a) == before
        views.refresh(catalog, "photos")
        assert rows(a, total) == [(ROWS + 1, ROWS + 1, 8)]
        assert [f.check for f in examined(catalog)] == ["old-copy"]
        # The copy can go now; the view does not use it.
        run(a, "drop schema shard_0003 cascade", "delete from shardids.shard where id = 3")
        move(pair, 3, back=True)
        for url, shards in ((a, (0, 2, 3)), (b, (1, 4, 5, 6, 7))):
            run(
                url,
                *(f"alter table shard_{shard:04}.photos add liked boolean default true" for shard in shards),
            )
        views.refresh(catalog, "photos")
        assert rows(a, f"{total} where liked") == [(ROWS + 1, ROWS + 1, 8)]
        # Who was granted the view before reads all of it, and needs no right on a shard.
        with psycopg.connect(dsn(a.set(username=role, password=str(reader.password)))) as connection:
            assert connection.execute(total).fetchall() == [(ROWS + 1, ROWS + 1, 8)]
        for url, shards in ((a, (0, 2, 3)), (b, (1, 4, 5, 6, 7))):
            for shard in shards:
                if url is b:
                    run(url, f"alter table shard_{shard:04}.photos drop size")
        with pytest.raises(ClusterConflict, match="other columns in shard 1 than in shard 0"):
            views.refresh(catalog, "photos")
        with pytest.raises(StatementFailed, match="other objects depend on it"):
            views.drop(catalog, "photos")
        run(a, "drop view public.titles")
        before = contents(a)
        assert views.drop(catalog, "photos", dry_run=True)
        assert contents(a) == before
        views.drop(catalog, "photos")
        run(a, *(f"alter table shard_{shard:04}.photos drop size" for shard in (0, 2, 3)))
        make(catalog)
        assert rows(a, total) == [(ROWS + 1, ROWS + 1, 8)]
        run(a, f'drop owned by "{role}"')


def test_a_view_that_was_lost_with_a_schema(pair: Pair) -> None:
    a, _ = pair
    with catalog_at(a) as catalog:
        make(catalog)
        move(pair, 0)
        run(a, "drop schema shard_0000 cascade", "delete from shardids.shard where id = 0")
        (finding,) = examined(catalog)
        assert (finding.check, finding.shards) == ("view-stale", tuple(range(8)))
        assert [command.text for command in finding.commands] == ["shardids view refresh photos"]
        views.refresh(catalog, "photos")
        assert examined(catalog) == ()
    assert rows(a, "select count(*) from shardids_views.photos") == [(ROWS,)]


def test_a_node_with_a_view_stays(pair: Pair, blank_database: Blank) -> None:
    url = blank_database()
    with catalog_at(pair[0]) as catalog:
        provision.add_node(catalog, "c", dsn(url))
        make(catalog, node="c")
        before = objects(url)
        with pytest.raises(ClusterConflict, match='node "c" has view "photos"'):
            provision.remove_node(catalog, "c")
        assert objects(url) == before
        views.drop(catalog, "photos")
        provision.remove_node(catalog, "c")


def test_who_else_changes_views_is_waited_for_no_longer_than_it_may_take(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    monkeypatch.setattr(database, "_LOCK_PATIENCE_S", 0.2)
    with catalog_at(a) as catalog:
        make(catalog)
        before = objects(a)
        with psycopg.connect(dsn(a)) as other:
            other.execute("select pg_advisory_xact_lock(%s, 0)", [AdvisoryLock.VIEWS])
            with pytest.raises(ClusterConflict, match=r'changing views on node "a" for 0\.2 s'):
                views.refresh(catalog, "photos")
            (complaint,) = views.follow_placement(catalog)
        assert complaint.endswith("when that is repaired: shardids view refresh photos")
        assert objects(a) == before
        assert views.follow_placement(catalog) == ()


def test_who_may_not_read_which_views_there_are_is_told_so(pair: Pair, make_role: MakeRole) -> None:
    a, _ = pair
    mover = make_role("Mover")
    run(a, f'grant usage on schema shardids_catalog to "{mover.username}"')
    with catalog_at(a.set(username=mover.username, password=str(mover.password))) as catalog:
        (complaint,) = views.follow_placement(catalog)
    assert "permission denied" in complaint
    run(a, f'drop owned by "{mover.username}"')


def test_what_is_refused(pair: Pair, blank_database: Blank, make_role: MakeRole) -> None:
    a, b = pair
    own = blank_database()
    with catalog_at(a) as catalog:
        before = [objects(url) for url in (a, b, own)]
        for options, error, words in (
            ({"node": None}, BadArgument, "on a node or in another database"),
            ({"url": dsn(own)}, BadArgument, "on a node or in another database"),
            ({"node": "c"}, ClusterConflict, 'no node "c"'),
            (
                {"table": "nonesuch"},
                ClusterConflict,
                '8 shards have no table "nonesuch", for example shard 0 on node "a"',
            ),
            ({"id_column": "nonesuch"}, BadArgument, 'no column "nonesuch" of type bigint'),
            ({"id_column": "user_id"}, BadArgument, 'no column "user_id" of type bigint'),
            (
                {"node": None, "url": dsn(own.set(port=1))},
                ConnectionFailed,
                "the database of the view can't be",
            ),
        ):
            with pytest.raises(error, match=words):
                make(catalog, **options)
        for name in ("Photos", "", "a b", "x" * 41, "1a", 'a"b'):
            with pytest.raises(BadArgument, match="can't be a view's name"):
                views.create(catalog, name, table="photos", node="a")
        for refused in (views.refresh, views.drop):
            with pytest.raises(ClusterConflict, match='there is no view "nonesuch"'):
                refused(catalog, "nonesuch")
        # The server that is asked wants a password, and there is none.
        if password_of(a):
            with pytest.raises(StatementFailed, match="no password supplied"):
                make(catalog, store_password=False)
        assert make(catalog, dry_run=True)
        assert [objects(url) for url in (a, b, own)] == before
        assert views.views_of(catalog) == []
        make(catalog)
        with pytest.raises(
            ClusterConflict, match='view "photos" exists already, over table "photos" by id, on node "a"'
        ):
            make(catalog, node="b")
    _non_superusers(pair, own, make_role)


def _non_superusers(pair: Pair, own: URL, make_role: MakeRole) -> None:
    """Who is no superuser has to store a password."""
    owner = make_role("Owner")
    run(own, "create extension postgres_fdw")
    run(own, f'grant usage on foreign data wrapper postgres_fdw to "{owner.username}"')
    with connected(own) as connection:
        connection.execute(
            sql.SQL("grant create on database {} to {}").format(
                sql.Identifier(str(own.database)), sql.Identifier(str(owner.username))
            )
        )
    url = dsn(own.set(username=owner.username, password=str(owner.password)))
    with catalog_at(pair[0]) as catalog:
        with pytest.raises(MissingPrivilege, match="only superusers") as refused:
            views.create(catalog, "mine", table="photos", url=url)
        assert "--store-password" in refused.value.hint
        if password_of(own):
            views.create(catalog, "mine", table="photos", url=url, store_password=True)
            assert rows(own, "select count(*) from shardids_views.mine") == [(ROWS,)]
            assert not re.search(str(owner.password), str(views.views_of(catalog)))
    run(own, f'drop owned by "{owner.username}" cascade')
