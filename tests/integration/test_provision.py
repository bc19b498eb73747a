"""Clusters are made step by step; each step can be repeated, raced, killed and refused."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids import Cluster, Layout
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    ConnectionFailed,
    MissingPrivilege,
    ShardidsError,
    UnknownShard,
    UnsupportedServer,
)
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.migrate.install.inspecting import inspect_shard
from shardids.pg import connections
from shardids.pg.urls import parse_url
from tests.conftest import BlankDatabases, MakeDatabase, MakeRole, dsn, found_cluster
from tests.support.clusters import (
    Nursery,
    catalog_at,
    connected,
    contents,
    everything,
    objects,
    sessions,
    shards_there,
    whole_story,
)
from tests.support.waiting import wait_for

Blank = Callable[[], URL]
Pair = tuple[URL, URL]


@pytest.fixture
def pair(blank_database: Blank) -> Pair:
    """Two empty databases."""
    return blank_database(), blank_database()


@pytest.fixture(scope="module")
def made(databases: BlankDatabases) -> Iterator[Pair]:
    """A cluster of 8 shards on two databases, nodes a and b, that the tests leave as it is."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]})
    yield urls
    for url in urls:
        databases.give_back(url)


@pytest.fixture
def catalog(made: Pair) -> Iterator[Catalog]:
    with catalog_at(made[0]) as catalog:
        yield catalog


@pytest.fixture
def new(pair: Pair) -> Iterator[Catalog]:
    """The catalog of a new cluster of 8 shards, with the nodes a and b, and no shards."""
    with catalog_at(pair[0]) as catalog:
        provision.init(catalog, DEFAULT, 8)
        provision.add_node(catalog, "a", dsn(pair[0]))
        provision.add_node(catalog, "b", dsn(pair[1]))
        yield catalog


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def grant_create(admin: psycopg.Connection, url: URL, role: URL) -> None:
    admin.execute(
        sql.SQL("grant create on database {} to {}").format(
            sql.Identifier(str(url.database)), sql.Identifier(str(role.username))
        )
    )


def as_role(url: URL, role: URL) -> URL:
    return url.set(username=role.username, password=str(role.password))


# Every step, and again.


def test_a_cluster_is_made_and_all_of_it_can_be_repeated(pair: Pair) -> None:
    nodes = {"a": pair[0], "b": pair[1]}
    assert found_cluster(pair[0], nodes) == {shard: "ab"[shard // 4] for shard in range(8)}
    assert (shards_there(pair[0]), shards_there(pair[1])) == ({0, 1, 2, 3}, {4, 5, 6, 7})
    before = everything(*pair)
    assert found_cluster(pair[0], nodes) == {}
    assert everything(*pair) == before


def test_init_gives_the_same_cluster_again(blank_database: Blank) -> None:
    with catalog_at(blank_database()) as catalog:
        first = provision.init(catalog, DEFAULT, 8)
        assert provision.init(catalog, DEFAULT, 8) == first == catalog.describe()
        assert (first.layout, first.shard_count, first.schema_prefix) == (DEFAULT, 8, "shard_")


def test_the_catalog_has_no_password(made: Pair, catalog: Catalog) -> None:
    told = str(contents(made[0]))
    assert "postgresql://" in told
    assert made[0].password is None or str(made[0].password) not in told
    assert all(parse_url(node.url).password is None for node in catalog.nodes().values())


def test_a_password_among_the_urls_parameters_is_not_kept_either(new: Catalog, own_database: URL) -> None:
    url = own_database
    bare = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    with_it = bare.update_query_dict({"password": str(url.password)})
    provision.add_node(new, "c", with_it.render_as_string(hide_password=False))
    assert str(url.password) not in str(contents(new.url))
    assert str(url.password) not in repr(new.nodes()) + new.nodes()["c"].url


def test_a_step_before_its_turn(blank_database: Blank) -> None:
    url = blank_database()
    before = everything(url)
    with catalog_at(url) as catalog:
        for step in (
            catalog.describe,
            catalog.placement,
            catalog.nodes,
            lambda: catalog.node_of(1),
            lambda: provision.add_node(catalog, "a", dsn(url)),
            lambda: provision.remove_node(catalog, "a"),
            lambda: provision.create_shards(catalog, [1]),
            lambda: inspect_shard(catalog, 1),
            lambda: provision.grant(catalog, "anybody"),
        ):
            with pytest.raises(ClusterConflict, match="holds no shardids catalog") as caught:
                step()
            assert "shardids init" in caught.value.hint
        provision.init(catalog, DEFAULT, 8)
        with pytest.raises(ClusterConflict, match="no node yet") as caught:
            provision.create_shards(catalog, [1])
        assert "shardids node add" in caught.value.hint
    assert everything(url) != before


def test_a_template_is_refused(new: Catalog, blank_database: Blank) -> None:
    template = dsn(blank_database())
    name = parse_url(template).database
    with psycopg.connect(template, autocommit=True) as db:
        db.execute(sql.SQL("alter database {} is_template true").format(sql.Identifier(str(name))))
        try:
            for what, make in (
                ('node "c"', lambda: provision.add_node(new, "c", template)),
                ('node "c"', lambda: provision.add_node(new, "c", template, dry_run=True)),
                ("the catalog", lambda: _init(template)),
            ):
                with pytest.raises(
                    ClusterConflict, match=f'{what}: database "{name}" is a template'
                ) as refused:
                    make()
                assert "createdb NAME" in refused.value.hint
            there = (
                "select to_regnamespace('shardids') is null and to_regnamespace('shardids_catalog') is null"
            )
            assert db.execute(there).fetchone() == (True,)
            assert "c" not in new.nodes()
        finally:
            db.execute(sql.SQL("alter database {} is_template false").format(sql.Identifier(str(name))))
    with pytest.raises(ClusterConflict, match='database "template1" is a template') as refused:
        provision.add_node(new, "c", parse_url(template).set(database="template1").render_as_string(False))
    assert "IS_TEMPLATE" not in refused.value.hint


def _init(url: str) -> None:
    catalog = Catalog(url)
    try:
        provision.init(catalog, DEFAULT, 1)
    finally:
        catalog.close()


def test_shards_of_a_node_that_is_new_go_there(new: Catalog, blank_database: Blank) -> None:
    assert provision.create_shards(new, range(6)) == {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
    provision.add_node(new, "c", dsn(blank_database()))
    assert provision.create_shards(new, range(8)) == {6: "c", 7: "c"}
    assert Counter(new.placement().node_of.values()) == {"a": 3, "b": 3, "c": 2}


def test_a_node_can_be_chosen(new: Catalog, pair: Pair) -> None:
    assert provision.create_shards(new, [7, 2], node="b") == {2: "b", 7: "b"}
    assert provision.create_shards(new, [7, 2], node="b") == {}
    assert shards_there(pair[1]) == {2, 7}
    before = everything(*pair)
    with pytest.raises(ClusterConflict, match='shard 2 is on node "b", not "a"'):
        provision.create_shards(new, [1, 2], node="a")
    with pytest.raises(ClusterConflict, match='there is no node "A"') as caught:
        provision.create_shards(new, [1], node="A")
    assert '"a", "b"' in caught.value.hint
    assert everything(*pair) == before
    provision.create_shards(new, range(8))
    assert Counter(new.placement().node_of.values()) == {"a": 4, "b": 4}


def test_another_prefix_and_layout(pair: Pair) -> None:
    layout = Layout.preset("js53")
    found_cluster(pair[0], {"A.eu-1_x": pair[1]}, 64, layout, "p")
    with catalog_at(pair[0]) as catalog:
        assert catalog.describe().layout.name == "js53"
        assert catalog.placement().nodes.keys() == {"A.eu-1_x"}
        assert inspect_shard(catalog, 63)["schema"] == "p0063"
    with Cluster.connect(pair[0]) as cluster:
        (drawn,) = cluster.at(shard=63).reserve(1)
        assert layout.decode(drawn).shard == cluster.shard_of(drawn) == 63


def test_a_node_can_leave_and_serve_another_cluster(new: Catalog, pair: Pair, blank_database: Blank) -> None:
    provision.create_shards(new, range(8), node="a")
    before = everything(*pair)
    for name, refusal in (("a", "holds 8 shards"), ("c", 'there is no node "c"')):
        for dry_run in (True, False):
            with pytest.raises(ClusterConflict, match=refusal) as caught:
                provision.remove_node(new, name, dry_run=dry_run)
            assert name == "c" or 'node "a"' in caught.value.message
    provision.remove_node(new, "b", dry_run=True)
    assert everything(*pair) == before
    provision.remove_node(new, "b")
    assert set(new.nodes()) == {"a"}
    left = {kind for kind, *_ in objects(pair[1])} - {"schema", "column", "constraint", "index"}
    assert left == {"relation r", "relation i"}  # the version table, without a version
    with pytest.raises(ClusterConflict, match='there is no node "b"'):
        provision.remove_node(new, "b")
    other = blank_database()
    found_cluster(other, {"z": pair[1]}, 2)
    assert shards_there(pair[1]) == {0, 1}


def test_a_node_that_awaits_shards_stays(new: Catalog, pair: Pair) -> None:
    # What a crash between the plan and the first shard leaves.
    assert new.plan_shards(range(8)) == {shard: "ab"[shard // 4] for shard in range(8)}
    before = everything(*pair)
    for dry_run in (True, False):
        with pytest.raises(ClusterConflict, match='node "b" holds 4 shards'):
            provision.remove_node(new, "b", dry_run=dry_run)
        assert everything(*pair) == before
    provision.create_shards(new, range(8))
    assert shards_there(pair[1]) == {4, 5, 6, 7}


def test_dry_runs_change_nothing(pair: Pair, make_role: MakeRole) -> None:
    role = str(make_role().username)
    nothing = everything(*pair)
    with catalog_at(pair[0]) as catalog:
        assert provision.init(catalog, DEFAULT, 8, dry_run=True).shard_count == 8
        assert everything(*pair) == nothing
        provision.init(catalog, DEFAULT, 8)
        provision.init(catalog, DEFAULT, 8, dry_run=True)
        empty = everything(*pair)
        for url in pair:
            provision.add_node(catalog, "a", dsn(url), dry_run=True)
            assert everything(*pair) == empty
        provision.add_node(catalog, "a", dsn(pair[0]))
        provision.add_node(catalog, "b", dsn(pair[1]))
        before = everything(*pair)
        planned = catalog.plan_shards(range(8), dry_run=True)
        assert everything(*pair) == before
        assert provision.create_shards(catalog, range(8)) == planned
        before = everything(*pair)
        assert provision.grant(catalog, role, dry_run=True) == 8
        assert everything(*pair) == before


def test_what_is_known_of_a_shard(new: Catalog, pair: Pair) -> None:
    provision.create_shards(new, range(8))
    facts = inspect_shard(new, 5)
    assert (facts["shard"], facts["node"], facts["schema"], facts["state"]) == (
        5,
        "b",
        "shard_0005",
        "active",
    )
    assert "2024-01-01" not in str(facts)  # nothing was issued at the epoch
    for shard in (-1, 8, 4096):
        with pytest.raises(UnknownShard, match=f"shard {shard}"):
            inspect_shard(new, shard)
    with connected(pair[1]) as connection:
        connection.execute("select shardids.fence(5, 'a')")
    facts = inspect_shard(new, 5)
    assert (facts["state"], facts["moved_to"]) == ("moved", "a")


def test_a_shard_that_its_node_lost_is_made_as_the_hint_says(new: Catalog, pair: Pair) -> None:
    provision.create_shards(new, range(8))
    with connected(pair[1]) as connection:
        connection.execute("delete from shardids.shard where id = 5")
        connection.execute("drop schema shard_0005 cascade")
    with pytest.raises(UnknownShard, match='shard 5 on node "b", which does not have it') as caught:
        inspect_shard(new, 5)
    if "shard create 5" in caught.value.hint:
        assert provision.create_shards(new, [5]) == {5: "b"}
        assert inspect_shard(new, 5)["state"] == "active"


# Many at once.


@pytest.mark.long
def test_ten_installers_at_once(pair: Pair, nursery: Nursery) -> None:
    script = f"""
catalog = Catalog({dsn(pair[0])!r})
provision.init(catalog, layout.DEFAULT, 12)
for name, url in (("a", {dsn(pair[0])!r}), ("b", {dsn(pair[1])!r})):
    provision.add_node(catalog, name, url)
provision.create_shards(catalog, range(12))
catalog.close()
"""
    assert nursery.run([script] * 10) == ["done"] * 10
    assert (shards_there(pair[0]), shards_there(pair[1])) == (set(range(6)), set(range(6, 12)))
    with catalog_at(pair[0]) as catalog:
        assert catalog.placement().node_of == {shard: "ab"[shard // 6] for shard in range(12)}
        assert catalog.placement().nodes.keys() == {"a", "b"}
        cluster = catalog.describe().cluster
    for url in pair:
        with connected(url) as connection:
            assert connection.execute("select cluster from shardids.node").fetchall() == [(cluster,)]
            assert connection.execute("select count(*) from shardids.shardids_version").fetchall() == [(1,)]


def test_installers_do_not_depend_on_the_databases_isolation_level(
    make_database: MakeDatabase, admin: psycopg.Connection
) -> None:
    url = make_database()
    admin.execute(f"alter database {url.database} set default_transaction_isolation = 'serializable'")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: found_cluster(url, {"a": url}, 4), range(8)))
    assert shards_there(url) == {0, 1, 2, 3}
    # Some found shards that others had created; between them they created all, each once.
    assert set().union(*made) == {0, 1, 2, 3}
    with connected(url) as connection:
        assert connection.execute("select count(*) from shardids.shard").fetchall() == [(4,)]
    assert found_cluster(url, {"a": url}, 4) == {}


def test_grants_to_several_roles_at_once(made: Pair, make_role: MakeRole) -> None:
    roles = [str(make_role().username) for _ in range(6)]

    def grant(role: str) -> int:
        with catalog_at(made[0]) as catalog:
            return provision.grant(catalog, role)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(grant, roles)) == [8] * 6
    told = "\n".join(acl for *_, acl in objects(made[1], "shard_0007"))
    assert all(role in told for role in roles)


def test_one_name_for_two_databases_at_once(pair: Pair, blank_database: Blank) -> None:
    home = blank_database()
    with catalog_at(home) as catalog:
        provision.init(catalog, DEFAULT, 4)

    def add(url: URL) -> ShardidsError | None:
        with catalog_at(home) as catalog:
            try:
                provision.add_node(catalog, "a", dsn(url))
            except ShardidsError as error:
                return error
            return None

    with connected(home) as blocker, ThreadPoolExecutor(2) as pool:
        blocker.execute("begin; lock table shardids_catalog.node in share row exclusive mode")
        adding = [pool.submit(add, url) for url in pair]
        waiting = """select count(*) = 2 from pg_stat_activity
                     where datname = current_database() and wait_event_type = 'Lock'"""
        with connected(home) as watcher:
            wait_for(lambda: watcher.execute(waiting).fetchone() == (True,), "both wait for the catalog")
        blocker.execute("commit")
        ended = [one.result() for one in adding]
    (error,) = [one for one in ended if one is not None]
    assert isinstance(error, ClusterConflict)
    loser = pair[0] if ended[0] else pair[1]
    with catalog_at(home) as catalog:
        # The one that was refused is free for another name.
        provision.add_node(catalog, "b", dsn(loser))
        assert set(catalog.nodes()) == {"a", "b"}


# In the middle.


@pytest.mark.long
def test_killed_in_the_middle_it_goes_on_where_it_was(
    pair: Pair, nursery: Nursery, admin: psycopg.Connection
) -> None:
    count = 800  # more than can be made before the last kill
    with catalog_at(pair[0]) as catalog:
        provision.init(catalog, DEFAULT, count)
        provision.add_node(catalog, "a", dsn(pair[0]))
        provision.add_node(catalog, "b", dsn(pair[1]))
    script = f"""
catalog = Catalog({dsn(pair[0])!r})
def planned(counts):
    sys.stdout.write("planned" + chr(10))
    sys.stdout.flush()
provision.create_shards(catalog, range({count}), on_plan=planned)
catalog.close()
"""
    chance = random.Random()
    there = []
    for _ in range(4):
        child = nursery.start(script)
        assert nursery.line() == "planned"
        time.sleep(chance.uniform(0.02, 0.1))
        os.kill(child, signal.SIGKILL)
        for url in pair:
            wait_for(lambda url=url: not sessions(admin, url), "the sessions of the killed one end")
        there.append(len(shards_there(pair[0])) + len(shards_there(pair[1])))
        with catalog_at(pair[0]) as catalog:
            active = set(catalog.placement().node_of)
            assert len(active) <= there[-1]
    assert there == sorted(there)
    found_cluster(pair[0], {"a": pair[0], "b": pair[1]}, count)
    assert shards_there(pair[0]) == set(range(count // 2))
    assert shards_there(pair[1]) == set(range(count // 2, count))
    with catalog_at(pair[0]) as catalog:
        assert catalog.placement().node_of == {shard: "ab"[2 * shard // count] for shard in range(count)}


def test_a_shard_that_cannot_be_made_stops_its_node(new: Catalog, pair: Pair) -> None:
    with connected(pair[0]) as connection:
        connection.execute("create schema shard_0002; create table shard_0002.id_counter (precious int)")
    with pytest.raises(ShardidsError, match="id_counter") as caught:
        provision.create_shards(new, range(8))
    assert 'node "a"' in caught.value.message
    assert "shard_0002" in caught.value.message or "shard 2" in caught.value.message
    with connected(pair[0]) as connection:
        assert connection.execute("select id from shardids.shard order by id").fetchall() == [(0,), (1,)]
        connection.execute("drop table shard_0002.id_counter")
    assert shards_there(pair[1]) == {4, 5, 6, 7}
    assert set(new.placement().node_of) <= {0, 1, 4, 5, 6, 7}
    provision.create_shards(new, range(8))
    assert shards_there(pair[0]) == {0, 1, 2, 3}
    assert set(new.placement().node_of) == set(range(8))
    assert provision.create_shards(new, range(8)) == {}


def test_a_schema_that_is_there_already_is_used(new: Catalog, pair: Pair) -> None:
    with connected(pair[0]) as connection:
        connection.execute("create schema shard_0000; create table shard_0000.kept as select 1 as one")
    provision.create_shards(new, [0], node="a")
    with connected(pair[0]) as connection:
        assert connection.execute("select one, shard_0000.next_id() > 0 from shard_0000.kept").fetchall() == [
            (1, True)
        ]


# Bad input: a clear error, and nothing is changed.


def test_shards_that_are_not_in_the_cluster(made: Pair, catalog: Catalog) -> None:
    before = everything(*made)
    for shards in ([8], [-1], [0, 1, 4096], [2**70]):
        with pytest.raises(BadArgument, match="does not exist in this cluster") as caught:
            provision.create_shards(catalog, shards)
        assert "0 to 7" in caught.value.hint
        with pytest.raises(UnknownShard, match=f"no node holds shard {shards[-1]}\n"):
            provision.grant(catalog, "anybody", shards)
    assert everything(*made) == before


def test_more_shards_than_the_layout_has(blank_database: Blank) -> None:
    url = blank_database()
    before = everything(url)
    with catalog_at(url) as catalog:
        for name, count in (("default", 4097), ("default", 0), ("js53", 65), ("js53", -1)):
            layout = Layout.preset(name)
            with pytest.raises(BadArgument, match=f"{count} shards") as caught:
                provision.init(catalog, layout, count)
            assert f"1 to {layout.shard_limit}" in caught.value.hint
    assert everything(url) == before


def test_a_cluster_stays_as_it_was_made(made: Pair, catalog: Catalog) -> None:
    before = everything(*made)
    for layout, count, prefix, words in (
        ("default", 9, "shard_", ("number of shards", "8", "9")),
        ("instagram", 8, "shard_", ("layout", "41-12-10", "41-13-10")),
        ("41-12-10@0", 8, "shard_", ("layout", "@1704067200000", "@0")),
        ("default", 8, "other_", ("schema prefix", "shard_", "other_")),
    ):
        for dry_run in (True, False):
            with pytest.raises(ClusterConflict) as caught:
                provision.init(catalog, Layout.parse(layout), count, prefix, dry_run=dry_run)
            assert all(word in caught.value.message for word in words)
    assert everything(*made) == before


def test_a_database_is_one_node_of_one_cluster(made: Pair, catalog: Catalog, blank_database: Blank) -> None:
    other = blank_database()
    before = everything(*made)
    for dry_run in (True, False):
        with pytest.raises(ClusterConflict, match='already node "b"'):
            provision.add_node(catalog, "c", dsn(made[1]), dry_run=dry_run)
        with pytest.raises(ClusterConflict, match=r'node "b" is postgresql.* already, not postgresql'):
            provision.add_node(catalog, "b", dsn(other), dry_run=dry_run)
        with pytest.raises(ClusterConflict, match=r'node "b" is postgresql.* already, not postgresql'):
            provision.add_node(catalog, "b", dsn(made[0]), dry_run=dry_run)
    assert everything(*made) == before
    found_cluster(other, {"z": other}, 2)
    with catalog_at(other) as foreign:
        before = everything(*made, other)
        with pytest.raises(ClusterConflict, match="a node of another cluster"):
            provision.add_node(foreign, "b", dsn(made[1]))
        assert everything(*made, other) == before


def test_names_that_nodes_cannot_have(made: Pair, catalog: Catalog) -> None:
    before = everything(*made)
    for name in ("", "a b", "a'b", 'a"b', "1a", "ä", "a\n", "a;drop", "x" * 41, "_a"):
        with pytest.raises(BadArgument, match="can't be a node's name"):
            provision.add_node(catalog, name, dsn(made[1]))
    assert everything(*made) == before


def test_prefixes_that_schemas_cannot_have(blank_database: Blank) -> None:
    url = blank_database()
    before = everything(url)
    for prefix in ("", "Shard_", "a b", "a'b", 'a"b', "1a", "pg_x", "shardids_", "ä", "x" * 41, "a-b"):
        with catalog_at(url) as catalog, pytest.raises(BadArgument, match="can't be a schema prefix"):
            provision.init(catalog, DEFAULT, 8, prefix)
    assert everything(url) == before


URLS_THAT_LEAD_NOWHERE = (
    "mysql://ann:hidden-word@localhost/app",
    "postgresql+asyncpg://ann:hidden-word@localhost/app",
    "sqlite://",
    "hidden-word",
    "",
    "host=localhost password=hidden-word",
    "postgresql://ann:hidden-word@localhost:port/app",
    "postgresql://ann:hidden-word@",
    "postgresql://ann:rose@hidden-word@127.0.0.1:1/app",
    "postgresql://ann:hidden-word@127.0.0.1:1/app?colour=blue",
    "postgresql://ann@127.0.0.1:1/app?password=hidden-word",
    "postgresql://ann:hidden-word@127.0.0.1:1/app?sslmode=blue",
    "postgresql://ann:hidden-word@127.0.0.1:99999/app",
)


def test_urls_that_lead_nowhere(made: Pair, catalog: Catalog) -> None:
    before = everything(*made)
    for url in URLS_THAT_LEAD_NOWHERE:
        with pytest.raises((BadArgument, ConnectionFailed)) as caught, catalog_at(url) as nowhere:
            nowhere.describe()
        assert "hidden-word" not in whole_story(caught.value), url
        assert caught.value.hint
        with pytest.raises((BadArgument, ConnectionFailed)) as caught:
            provision.add_node(catalog, "c", url)
        assert "hidden-word" not in whole_story(caught.value), url
    assert everything(*made) == before


def unwelcome(server_url: URL) -> tuple[URL, str]:
    """A URL with a password that the server refuses, and the word that its refusal has.

    A server that trusts everybody refuses no password; it refuses a database that is not there.
    """
    url = server_url.set(password="hidden-word")
    with suppress(psycopg.OperationalError), psycopg.connect(dsn(url)):
        return url.set(database="no_such_database"), "no_such_database"
    return url, "authentication"


def test_a_refused_login(server_url: URL, made: Pair, catalog: Catalog) -> None:
    url, word = unwelcome(server_url)
    before = everything(*made)
    with pytest.raises(ConnectionFailed, match=word) as caught, catalog_at(url) as nowhere:
        nowhere.describe()
    assert "the catalog" in caught.value.message
    assert "hidden-word" not in whole_story(caught.value)
    with pytest.raises(ConnectionFailed, match=word) as caught:
        provision.add_node(catalog, "c", dsn(url))
    assert 'node "c"' in caught.value.message
    assert "hidden-word" not in whole_story(caught.value)
    with pytest.raises(ConnectionFailed, match=word) as caught:
        Cluster.connect(url)
    assert "hidden-word" not in whole_story(caught.value)
    assert everything(*made) == before


def test_a_port_where_nobody_listens(made: Pair, catalog: Catalog) -> None:
    url = "postgresql://ann:hidden-word@127.0.0.1:1/app"
    before = everything(*made)
    with pytest.raises(ConnectionFailed, match="refused") as caught:
        provision.add_node(catalog, "c", url)
    assert "postgresql://ann@127.0.0.1:1/app" in caught.value.message
    assert "PGPASSWORD" in caught.value.hint
    assert "hidden-word" not in whole_story(caught.value)
    assert everything(*made) == before


@pytest.mark.parametrize(("version", "shown"), [(130012, "13"), (90624, "9"), (0, "0")])
def test_servers_that_are_too_old(version: int, shown: str) -> None:
    with pytest.raises(UnsupportedServer, match=f'node "a" runs PostgreSQL {shown}.*needs 14'):
        connections.check_version(version, what='node "a"')


def test_servers_that_are_new_enough() -> None:
    for version in (140000, 140005, 180000, 990000):
        connections.check_version(version, what="the catalog")


def test_a_server_that_is_refused_is_left_at_once(
    made: Pair, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "OLDEST_SERVER", 99)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(UnsupportedServer, match=r"the catalog runs PostgreSQL \d+; shardids needs 99"):
            Cluster.connect(made[0])
    assert [str(warning.message) for warning in warned] == []
    wait_for(lambda: not sessions(admin, made[0]), "the session ends")


def test_a_database_that_cannot_be_written(make_database: MakeDatabase, admin: psycopg.Connection) -> None:
    url = make_database()
    admin.execute(f"alter database {url.database} set default_transaction_read_only = on")
    with catalog_at(url) as catalog, pytest.raises(UnsupportedServer, match="read-only"):
        provision.init(catalog, DEFAULT, 8)


def test_a_database_without_an_encoding(server_url: URL, admin: psycopg.Connection) -> None:
    url = server_url.set(database=f"shardids_test_{os.getpid()}_ascii")
    admin.execute(f"create database {url.database} template template0 encoding 'SQL_ASCII' locale 'C'")
    try:
        found_cluster(url, {"a": url}, 2)
        assert shards_there(url) == {0, 1}
        with Cluster.connect(url) as cluster:
            assert len(cluster.at(shard=1).reserve(3)) == 3
    finally:
        admin.execute(f"drop database {url.database} with (force)")


def test_a_catalog_of_a_newer_version(new: Catalog, pair: Pair) -> None:
    with connected(pair[0]) as connection:
        connection.execute("update shardids_catalog.shardids_version set version_num = 'catalog_9999'")
    with connected(pair[1]) as connection:
        connection.execute("update shardids.shardids_version set version_num = 'node_9999'")
    before = everything(*pair)
    with pytest.raises(ShardidsError, match="catalog_9999"):
        provision.init(new, DEFAULT, 8)
    with pytest.raises(ShardidsError, match="node_9999"):
        provision.add_node(new, "b", dsn(pair[1]))
    assert everything(*pair) == before


def test_a_schema_of_somebody_else(pair: Pair) -> None:
    with connected(pair[0]) as connection:
        connection.execute("create schema shardids_catalog; create table shardids_catalog.cluster (a int)")
    with connected(pair[1]) as connection:
        connection.execute("create schema shardids; create table shardids.node (a int)")
    before = everything(*pair)
    with catalog_at(pair[0]) as catalog, pytest.raises(ShardidsError, match="cluster"):
        provision.init(catalog, DEFAULT, 8)
    assert everything(*pair) == before
    with connected(pair[0]) as connection:
        connection.execute("drop schema shardids_catalog cascade")
    with catalog_at(pair[0]) as catalog:
        provision.init(catalog, DEFAULT, 8)
        before = everything(*pair)
        with pytest.raises(ShardidsError, match=r'node "a".*"node" already exists'):
            provision.add_node(catalog, "a", dsn(pair[1]))
    assert everything(*pair) == before


# Privileges.


@pytest.fixture
def own_database(make_database: MakeDatabase, make_role: MakeRole, admin: psycopg.Connection) -> URL:
    """A database as a role that has CREATE on it and is nothing else."""
    url, role = make_database(), make_role("Dba")
    grant_create(admin, url, role)
    return as_role(url, role)


def test_create_on_the_database_is_all_that_it_takes(own_database: URL) -> None:
    found_cluster(own_database, {"a": own_database})
    assert shards_there(own_database) == set(range(8))
    with catalog_at(own_database) as catalog:
        assert found_cluster(own_database, {"a": own_database}) == {}
        assert inspect_shard(catalog, 3)["state"] == "active"
        provision.grant(catalog, str(own_database.username), [3])


def test_a_role_without_create(own_database: URL, make_role: MakeRole, made: Pair, catalog: Catalog) -> None:
    weak = make_role("Weak")
    before = everything(own_database, *made)
    with (
        catalog_at(as_role(own_database, weak)) as refused,
        pytest.raises(MissingPrivilege, match="the catalog") as caught,
    ):
        provision.init(refused, DEFAULT, 8)
    for word in (f'role "{weak.username}"', "CREATE", f'database "{own_database.database}"'):
        assert word in caught.value.message
    assert f'GRANT CREATE ON DATABASE "{own_database.database}" TO "{weak.username}"' in caught.value.hint
    with pytest.raises(MissingPrivilege, match='node "c"') as caught:
        provision.add_node(catalog, "c", dsn(as_role(own_database, weak)))
    for word in (f'role "{weak.username}"', "CREATE", f'database "{own_database.database}"'):
        assert word in caught.value.message
    with (
        catalog_at(as_role(made[0], weak)) as refused,
        pytest.raises(MissingPrivilege, match=f'role "{weak.username}".*shardids_catalog'),
    ):
        refused.describe()
    assert everything(own_database, *made) == before


def test_the_role_is_named_that_the_server_knows(
    made: Pair, make_role: MakeRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = make_role("Weak")
    monkeypatch.setenv("PGUSER", str(weak.username))
    monkeypatch.setenv("PGPASSWORD", str(weak.password))
    url = made[0]
    nobody = URL.create(url.drivername, None, None, url.host, url.port, url.database)
    with catalog_at(nobody) as refused, pytest.raises(MissingPrivilege) as caught:
        refused.describe()
    assert "None" not in caught.value.message
    assert f'role "{weak.username}"' in caught.value.message


def test_only_members_of_the_engines_owner_make_shards(
    own_database: URL, make_role: MakeRole, admin: psycopg.Connection
) -> None:
    other = make_role("Other")
    grant_create(admin, own_database, other)
    with catalog_at(own_database) as catalog:
        provision.init(catalog, DEFAULT, 4)
        provision.add_node(catalog, "a", dsn(own_database))
        provision.create_shards(catalog, [0])
    with connected(own_database) as owner:
        name = sql.Identifier(str(other.username))
        owner.execute(sql.SQL("grant usage on schema shardids_catalog, shardids to {}").format(name))
        owner.execute(
            sql.SQL("grant all on all tables in schema shardids_catalog, shardids to {}").format(name)
        )
    before = objects(own_database)
    engine = connections.open_engine(as_role(own_database, other), what='node "a"')
    with (
        engine.connect() as connection,
        pytest.raises(MissingPrivilege, match=f'role "{other.username}".*shards') as caught,
    ):
        provision.create_shard(connection, 1)
    engine.dispose()
    assert str(own_database.username) in caught.value.message
    assert objects(own_database) == before


def test_a_connection_that_a_check_refuses_is_closed(own_database: URL) -> None:
    opened: list[psycopg.Connection] = []

    def refuse(connection: psycopg.Connection, _record: object) -> None:
        opened.append(connection)
        raise MissingPrivilege("not this one")

    engine = connections.open_engine(own_database, what='node "a"', administrative=True)
    connections.on_connect(engine, refuse)
    with pytest.raises(MissingPrivilege), engine.connect():
        pass
    engine.dispose()
    assert [connection.closed for connection in opened] == [True]


def test_a_member_of_the_owner_makes_shards_for_all_members(
    make_database: MakeDatabase, make_role: MakeRole, admin: psycopg.Connection
) -> None:
    url, team, member = make_database(), make_role("Team"), make_role("Member")
    grant_create(admin, url, team)
    admin.execute(
        sql.SQL("grant {} to {}").format(
            sql.Identifier(str(team.username)), sql.Identifier(str(member.username))
        )
    )
    found_cluster(as_role(url, team), {"a": as_role(url, team)}, 1)
    engine = connections.open_engine(as_role(url, member), what='node "a"')
    with engine.connect() as connection:
        provision.create_shard(connection, 1)
    engine.dispose()
    assert shards_there(url) == {0, 1}
    # Nothing is the member's own, or the next migration by another member would fail.
    assert [made for made in objects(url) if str(member.username) in made[2]] == []


def test_a_shards_schema_that_belongs_to_another_role(
    own_database: URL, make_role: MakeRole, admin: psycopg.Connection
) -> None:
    other = make_role("Other")
    grant_create(admin, own_database, other)
    with connected(as_role(own_database, other)) as connection:
        connection.execute("create schema shard_0001")
    with pytest.raises(MissingPrivilege, match="shard_0001") as caught:
        found_cluster(own_database, {"a": own_database}, 4)
    assert 'node "a"' in caught.value.message
    assert f'role "{own_database.username}"' in caught.value.message
    with connected(own_database) as connection:
        assert connection.execute("select id from shardids.shard").fetchall() == [(0,)]
    with connected(as_role(own_database, other)) as connection:
        connection.execute("drop schema shard_0001")
    found_cluster(own_database, {"a": own_database}, 4)
    assert shards_there(own_database) == {0, 1, 2, 3}


def test_a_function_that_another_role_put_into_a_shards_schema_does_not_become_the_shards(
    new: Catalog, pair: Pair, make_role: MakeRole, admin: psycopg.Connection
) -> None:
    other = make_role("Other")
    grant_create(admin, pair[0], other)
    planted = "create function shard_0000.next_id_0() returns bigint language sql as 'select 1::bigint'"
    with connected(pair[0]) as connection:
        connection.execute("create schema shard_0000")
        connection.execute(
            sql.SQL("grant usage, create on schema shard_0000 to {}").format(
                sql.Identifier(str(other.username))
            )
        )
    with connected(as_role(pair[0], other)) as connection:
        connection.execute(planted.encode())
    before = objects(pair[0])
    with pytest.raises(ShardidsError, match=r"next_id_0.*already exists"):
        provision.create_shards(new, [0], node="a")
    assert objects(pair[0]) == before


def test_a_granted_role_draws_and_nothing_else(new: Catalog, pair: Pair, make_role: MakeRole) -> None:
    provision.create_shards(new, range(8))
    role = make_role("App")
    assert provision.grant(new, str(role.username), [5, 6]) == 2
    assert provision.grant(new, str(role.username), [5, 6]) == 2
    with connected(as_role(pair[1], role)) as app:
        drawn = app.execute(
            "select shardids.shard_of(shard_0005.next_id()), count(*) from shard_0006.next_ids(9)"
        )
        assert drawn.fetchall() == [(5, 9)]
        for refused in (
            "select shard_0004.next_id()",
            "select setval('shard_0005.id_counter', 1)",
            "select setval('shard_0005.id_offset', 1)",
            "select shardids.fence(5)",
            "select shardids.activate(5)",
            "update shardids.shard set state = 'fenced'",
            "update shardids.node set max_reserve = 1",
            "create table shard_0005.mine (a int)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                app.execute(refused)


def test_a_granted_role_has_the_use_of_the_cluster(new: Catalog, pair: Pair, make_role: MakeRole) -> None:
    provision.create_shards(new, range(8))
    role = make_role("App")
    provision.grant(new, str(role.username))
    with Cluster.connect(as_role(pair[0], role)) as cluster:
        for shard in range(8):
            (drawn,) = cluster.at(shard=shard).reserve(1)
            assert cluster.shard_of(drawn) == shard
            with cluster.at(shard=shard).connection() as connection:
                assert connection.exec_driver_sql("select current_user").scalar_one() == role.username


def test_a_role_that_is_not_there(made: Pair, catalog: Catalog) -> None:
    before = everything(*made)
    for role in ("nobody here", "", 'quo"te', "x" * 70):
        for dry_run in (True, False):
            with pytest.raises(ClusterConflict, match="has no role") as caught:
                provision.grant(catalog, role, dry_run=dry_run)
            assert f'"{role}"' in caught.value.message
    assert everything(*made) == before


def test_a_node_that_is_down_is_named(new: Catalog, pair: Pair) -> None:
    new.add_node(Node(name="c", url="postgresql://ann@127.0.0.1:1/app"))
    with pytest.raises(ConnectionFailed, match='node "c" can\'t be reached'):
        provision.create_shards(new, range(8))
    # The others are done; c's wait for it.
    there = shards_there(pair[0]) | shards_there(pair[1])
    assert set(new.placement().node_of) == there == {0, 1, 2, 3, 4, 5}
    with pytest.raises(ConnectionFailed, match='node "c" can\'t be reached'):
        provision.create_shards(new, [6])
