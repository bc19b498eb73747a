"""A key gets a shard of its own, which is made for it, and which no hash leads to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError

from shardids import Cluster, mover, tenants
from shardids.catalog.topology import shard_for_key
from shardids.errors import BadArgument, ClusterConflict, UnknownId
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.tables import lookups
from shardids.tables.views import refresh_query_node
from shardids.watch import doctor
from tests.conftest import dsn, found_cluster
from tests.support.clusters import catalog_at, command_here
from tests.support.migrations import App
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.signups import EMAIL, Photo, User, claims, rows
from tests.support.tenants import home

SHARDS = 4
TABLES = """
    create table if not exists {s}.users (
      id bigint primary key default {s}.next_id(), name text not null unique, email text not null unique,
      age integer);
    create table if not exists {s}.photos (
      id bigint primary key default {s}.next_id(), user_id bigint not null references {s}.users);"""
"""Those of the models of tests.support.signups."""
CHOICES = tenants.Choices(root="users.name")
QUICK = tenants.Options(settle_s=0.3)


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard in range(SHARDS):
            make_tables(nodes, nodes.catalog.node_of(shard).name, shard)
        lookups.create(nodes.catalog, EMAIL)
        lookups.backfill(nodes.catalog, EMAIL)
        for name in nodes.servers:
            with nodes.connected(name) as connection:
                connection.execute("create role app login")
        provision.grant(nodes.catalog, "app")
        for shard in range(SHARDS):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(f"grant select, insert on {schema(shard)}.users to app")
                connection.execute(
                    "select shardids.define_counter(%s, kind => 'order', per => 'day')", [shard]
                )
        refresh_query_node(nodes.catalog)
        yield nodes
        nodes.catalog.close()


def make_tables(nodes: TwoNodes, node: str, shard: int) -> None:
    with nodes.connected(node) as connection:
        connection.execute(TABLES.replace("{s}", schema(shard)))


@pytest.fixture
def new(nodes: TwoNodes) -> tenants.NewShard:
    """A new shard with the tables."""

    def migrate(node: str, shards: Sequence[int]) -> None:
        for shard in shards:
            make_tables(nodes, node, shard)

    return tenants.NewShard(migrate=migrate)


def placed(nodes: TwoNodes) -> dict[int, str]:
    with nodes.catalog.engine.connect() as connection:
        found = connection.execute(text("select shard, state from shardids_catalog.placement"))
        return {row.shard: row.state for row in found}


def sign_up(cluster: Cluster, name: str) -> int:
    with cluster.session(key=name) as session:
        user = User(name=name, email=f"{name}@example.com")
        session.add(user)
        session.commit()
        return user.id


def test_a_whale_gets_its_own_shard(nodes: TwoNodes, new: tenants.NewShard) -> None:
    with Cluster.connect(nodes.catalog_url) as cluster:
        born = sign_up(cluster, "whale")
        source = home(nodes, "whale")
        planned = tenants.plan(nodes.catalog, "whale", None, CHOICES, new=new)
        assert (planned.source, planned.target) == (source, SHARDS)
        assert {table: rows for table, rows in planned.rows.items() if rows} == {"users": 1}
        assert placed(nodes).keys() == set(range(SHARDS))
        done = tenants.move(nodes.catalog, "whale", None, CHOICES, new=new, options=QUICK)
        assert done.target == SHARDS == home(nodes, "whale")
        assert done.stale_views == ()
        assert nodes.catalog.shard_total() == SHARDS + 1
        cluster.refresh()
        # The hash leads where it led.
        assert cluster.shard_count == SHARDS
        assert {cluster.shard_for(str(n)) for n in range(500)} == set(range(SHARDS))
        assert all(cluster.shard_for(str(n)) == shard_for_key(str(n), SHARDS) for n in range(500))
        # The key, its IDs from before and its new ones lead to its shard.
        assert cluster.at(key="whale").number == SHARDS
        assert cluster.at(id=born).number == SHARDS
        with cluster.session(key="whale") as session:
            session.add(photo := Photo(user_id=born))
            session.commit()
            second = photo.id
        assert cluster.layout.shard_of(second) == SHARDS
        assert cluster.at(id=second).number == SHARDS
        assert cluster.at(lookup=User.email == "whale@example.com").number == SHARDS
        with cluster.session(key="another") as session:
            session.add(User(name="another", email="whale@example.com"))
            with pytest.raises(IntegrityError):
                session.commit()
        there = claims(cluster)
        assert {email: there[email] for email in rows(cluster)} == rows(cluster)
        with cluster.sharded_session() as session:
            assert [photo.id for photo in session.query(Photo)] == [second]
        with pytest.raises(UnknownId):
            cluster.at(id=cluster.layout.encode(ms=10**9, shard=SHARDS + 1))
    with nodes.connected(nodes.catalog.node_of(SHARDS).name) as connection:
        s = schema(SHARDS)
        connection.execute("set role app")
        connection.execute(f"select {s}.next_id()")
        connection.execute(f"select count(*) from {s}.users")
        connection.execute("reset role")
        draw = f"select {s}.next_number('whale', 'order', '2026-11-22 12:00Z')"
        assert connection.execute(draw).fetchone() == ("whale-2026-11-22-0001",)
    with nodes.connected("a") as connection:
        seen = connection.execute("select count(*) from shardids_query.users where name = 'whale'")
        assert seen.fetchone() == (1,)
    found = doctor.examine(nodes.catalog).findings
    # Of all shards: their schema is not recorded, since no migration made it.
    assert [one for one in found if SHARDS in one.shards and one.check != "schema-unrecorded"] == []


def test_the_shard_is_moved_as_others_are(nodes: TwoNodes) -> None:
    owner = nodes.catalog.node_of(SHARDS).name
    to = "a" if owner == "b" else "b"
    assert mover.move(nodes.catalog, SHARDS, to).outcome == "moved"
    with Cluster.connect(nodes.catalog_url) as cluster:
        assert cluster.at(key="whale").node.name == to
        assert cluster.at(key="whale").run(lambda session: session.query(User).count()) == 1


def test_the_shard_is_pinned_as_others_are(nodes: TwoNodes) -> None:
    for which, count in ((str(SHARDS), 1), ("all", nodes.catalog.shard_total())):
        for verb in ("pin", "unpin"):
            ran = command_here("shard", verb, which, "--json", SHARDIDS_CATALOG=nodes.catalog_url)
            assert ran.returncode == 0, ran.stderr
            done = [row["shard"] for row in json.loads(ran.stdout)]
            assert (len(done), done[-1]) == (count, SHARDS)


def test_an_empty_one_is_taken_before_another_is_made(nodes: TwoNodes, new: tenants.NewShard) -> None:
    """Also one that an interrupted command has made, and one that an undone move has left."""
    with Cluster.connect(nodes.catalog_url) as cluster:
        sign_up(cluster, "second")
    source = home(nodes, "second")

    def die(when: Event) -> tenants.KeyResult:
        def stop(event: Event) -> None:
            if event == when:
                raise KeyboardInterrupt

        return tenants.move(nodes.catalog, "second", None, CHOICES, new=new, options=QUICK, on_event=stop)

    for when in (StepDone(step="make"), StepBegun(step="guard"), StepDone(step="copy")):
        with pytest.raises(KeyboardInterrupt):
            die(when)
        assert placed(nodes).keys() == set(range(SHARDS + 2))
        if tenants.open_key_moves(nodes.catalog):
            assert tenants.abort(nodes.catalog, "second", options=QUICK).outcome == "aborted"
        assert home(nodes, "second") == source
        assert tenants.plan(nodes.catalog, "second", None, CHOICES, new=new).target == SHARDS + 1
    # The tables are there already, so nothing has to say how they are made.
    done = tenants.move(nodes.catalog, "second", None, CHOICES, new=tenants.NewShard(), options=QUICK)
    assert done.target == SHARDS + 1
    tenants.move(nodes.catalog, "second", options=QUICK, back=True)
    assert home(nodes, "second") == source
    assert tenants.plan(nodes.catalog, "second", None, CHOICES, new=new).target == SHARDS + 1


def test_a_shard_that_is_half_made_is_completed(nodes: TwoNodes, new: tenants.NewShard) -> None:
    with Cluster.connect(nodes.catalog_url) as cluster:
        sign_up(cluster, "third")
    # The one that is empty is given away first.
    tenants.move(nodes.catalog, "third", None, CHOICES, new=new, options=QUICK)
    with Cluster.connect(nodes.catalog_url) as cluster:
        sign_up(cluster, "fourth")

    def fail(_node: str, _shards: Sequence[int]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tenants.move(
            nodes.catalog, "fourth", None, CHOICES, new=tenants.NewShard(migrate=fail), options=QUICK
        )
    assert placed(nodes)[SHARDS + 2] == "creating"
    with pytest.raises(BadArgument, match="nothing says how the tables of a new shard are made"):
        tenants.move(nodes.catalog, "fourth", None, CHOICES, new=tenants.NewShard(), options=QUICK)
    done = tenants.move(nodes.catalog, "fourth", None, CHOICES, new=new, options=QUICK)
    assert done.target == SHARDS + 2
    assert placed(nodes)[SHARDS + 2] == "active"


def test_refusals(nodes: TwoNodes, new: tenants.NewShard) -> None:
    with Cluster.connect(nodes.catalog_url) as cluster:
        sign_up(cluster, "refused")
    before = placed(nodes)
    begun: list[Event] = []
    with pytest.raises(BadArgument, match="nothing says how the tables of a new shard are made"):
        tenants.move(nodes.catalog, "refused", None, CHOICES, new=tenants.NewShard(), on_event=begun.append)
    nowhere = tenants.NewShard(node="c")
    with pytest.raises(ClusterConflict, match='there is no node "c"'):
        tenants.move(nodes.catalog, "refused", None, CHOICES, new=nowhere, on_event=begun.append)
    assert begun == []
    with pytest.raises(BadArgument, match="has no table customers"):
        tenants.move(nodes.catalog, "refused", None, tenants.Choices(root="customers"), new=new)
    with nodes.catalog.engine.begin() as connection:
        connection.execute(text("insert into shardids_catalog.placement values (4095, 'a', 'creating')"))
        connection.execute(text("insert into shardids_catalog.key_home values ('text', 'x', 4095)"))
    try:
        with pytest.raises(ClusterConflict, match="has 4096 shards, and all are there"):
            tenants.move(nodes.catalog, "refused", None, CHOICES, new=new)
    finally:
        with nodes.catalog.engine.begin() as connection:
            connection.execute(text("delete from shardids_catalog.key_home where key = 'x'"))
            connection.execute(text("delete from shardids_catalog.placement where shard = 4095"))
    assert placed(nodes) == before


def test_the_command(nodes: TwoNodes) -> None:
    common = ["tenant", "move", "refused", "--root", "users.name", "--catalog", nodes.catalog_url]
    ran = command_here(*common, "--new-shard", "--dry-run")
    assert ran.returncode == 2
    assert "--migrations DIR" in ran.stderr.replace("\n", " ")
    assert command_here(*common, "--to-shard", "1", "--to", "b").returncode == 2
    assert command_here(*common, "--to-shard", "1", "--new-shard").returncode == 2
    assert (
        f"shard {SHARDS}"
        not in command_here("shard", "list", str(SHARDS), "--catalog", nodes.catalog_url).stderr
    )


def test_the_command_with_migrations(
    blank_database: Callable[[], URL],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new shard has the revision of the others, also of those that come after it."""
    url, other = blank_database(), blank_database()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(url))
    app = App(tmp_path / "migrations", url, capsys)
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(app.folder))
    app.add(
        "one",
        'op.create_table("users", key_column(), sa.Column("name", sa.Text, nullable=False, unique=True))',
    )
    with catalog_at(url) as catalog:
        found_cluster(url, {"a": url, "b": other}, SHARDS)
        assert app.up().keys() == set(range(SHARDS))
        words = ("tenant", "move", "ann", "--new-shard", "--to", "b", "--root", "users.name")
        refused = app.command(*words)
        assert refused.code == 1
        assert "key 'ann' has no row in the root" in refused.err
        assert catalog.shard_total() == SHARDS
        with Cluster.connect(dsn(url), listen=False) as cluster, cluster.at(key="ann").connection() as there:
            users = f"{cluster.schema_of(cluster.shard_for('ann'))}.users"
            born = there.exec_driver_sql(
                f"insert into {users} (name) values ('ann') returning id"
            ).scalar_one()
            there.commit()
        planned = app.command(*words, "--dry-run")
        assert f"to new shard {SHARDS} on node" in planned.out, planned
        assert catalog.shard_total() == SHARDS
        done = app.command(*words, "--settle", "100ms")
        assert done.code == 0, done
        assert f"key 'ann' lives in shard {SHARDS}, 1 row" in done.out
        assert catalog.node_of(SHARDS).name == "b"
        assert f"its tenant ann lives in {SHARDS}" in app.command("id", "decode", str(born)).out
        app.add("two", 'op.add_column("users", sa.Column("age", sa.Integer))', after="one")
        assert app.up().keys() == set(range(SHARDS + 1))
        assert app.command("shard", "list", str(SHARDS)).code == 0
        assert app.command("tenant", "move", "ann", "--back", "--settle", "100ms").code == 0
        assert [one for one in doctor.examine(catalog).findings if SHARDS in one.shards] == []
