"""Regions are made, changed and refused; shards are placed, and keys found, by them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from click.testing import Result
from sqlalchemy import Column, ForeignKey, MetaData, Table, Text, select, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from typer.testing import CliRunner

from shardids import AsyncCluster, Cluster, mover, primary_key, sharding_key
from shardids.catalog.region_changes import assign_nodes, create_region
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog, lock_placement, point_node
from shardids.catalog.topology import Node
from shardids.cli import app
from shardids.errors import BadArgument, ClusterConflict, CopyFailed, WrongShard
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.models.columns import next_id
from shardids.tables import views
from shardids.watch import doctor
from shardids.watch.facts.rows import ShardingKey
from tests.conftest import dsn
from tests.support.clusters import catalog_at, connected, contents
from tests.support.waiting import wait_for

Run = Callable[..., Result]
Blank = Callable[[], URL]

EU = Region(name="eu", first_shard=0, last_shard=5)


@pytest.fixture
def run(cluster_url: URL) -> Run:
    """Runs a command on a cluster of 8 shards, 0-3 on node a and 4-7 on b."""

    def run(*words: str, code: int = 0) -> Result:
        environment = {"SHARDIDS_CATALOG": dsn(cluster_url), "COLUMNS": "200"}
        ran = CliRunner().invoke(app, [*words], env=environment, prog_name="shardids")
        assert ran.exit_code == code, ran.output
        return ran

    return run


def told(run: Run, *words: str) -> object:
    return json.loads(run(*words, "--json").stdout)


def test_a_region_is_made_shown_and_forgotten(run: Run) -> None:
    assert run("region", "list").stderr.startswith("No region yet")
    made = run("region", "create", "eu", "--shards", "0-5", "--node", "a")
    assert made.stdout == 'Created region "eu" of shards 0-5\nIts shards go to node "a"\n'
    assert made.stderr == (
        "shards 4-5 live on nodes outside of their region. To bring them home: shardids rebalance\n"
    )
    assert run("region", "create", "eu", "--shards", "0-5").stdout.startswith("Created")
    assert told(run, "region", "list") == [
        {"region": "eu", "first": 0, "last": 5, "nodes": ["a"], "elsewhere": 2}
    ]
    shown = told(run, "region", "list", "eu")
    assert shown == {
        "region": "eu", "first": 0, "last": 5, "nodes": ["a"], "elsewhere": [4, 5],
        "held": [{"node": "a", "region": "eu", "shards": 4}, {"node": "b", "region": None, "shards": 2}],
    }  # fmt: skip
    assert "shards 4-5 elsewhere" in run("region", "list", "eu").stdout
    assert [row["region"] for row in told(run, "node", "list")] == ["eu", None]
    assert Counter(row["region"] for row in told(run, "shard", "list")) == {"eu": 6, None: 2}
    assert told(run, "shard", "list", "2")[0]["region"] == "eu"
    born = DEFAULT.encode(at=DEFAULT.last_time.replace(year=2027), shard=4, sequence=0)
    assert (
        told(run, "id", "decode", str(born))[0] | {"node": "b", "region": "eu"}
        == told(run, "id", "decode", str(born))[0]
    )
    assert 'of region "eu", on node "b" now' in run("id", "decode", str(born)).stdout
    assert "no terminal to ask at" in run("region", "drop", "eu", code=2).stderr
    assert run("region", "drop", "eu", "--yes").stdout == 'Dropped region "eu"\n'
    assert [row["region"] for row in told(run, "node", "list")] == [None, None]


def test_dry_runs_change_nothing(run: Run, cluster_url: URL) -> None:
    run("region", "create", "eu", "--shards", "0-5", "--node", "a")
    before = contents(cluster_url)
    assert run("region", "create", "us", "--shards", "7", "--node", "b", "--dry-run").stdout.startswith(
        'Would create region "us" of shard 7'
    )
    assert run("region", "assign", "eu", "b", "--dry-run").stdout == 'Would assign node "b" to region "eu"\n'
    assert run("region", "assign", "--none", "a", "--dry-run").stdout == 'Would release node "a"\n'
    assert run("region", "drop", "eu", "--dry-run").stdout == 'Would drop region "eu"\n'
    assert contents(cluster_url) == before


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["create", "us", "--shards", "5-6"], 1, 'shard 5 of region "eu" can\'t be of region "us", too'),
        (["create", "eu", "--shards", "0-6"], 1, 'region "eu" has shards 0-5, not 0-6'),
        (["create", "us", "--shards", "6-8"], 2, "'6-8' is not a range of shards of this cluster"),
        (["create", "us", "--shards", "6,0"], 2, "'6,0' is not one range of shards"),
        (["create", "u s", "--shards", "6"], 2, "'u s' can't be a region's name"),
        (["create", "us", "--shards", "6", "--node", "z"], 1, 'there is no node "z"'),
        (["assign", "us", "a"], 2, 'there is no region "us"'),
        (["assign", "eu", "z"], 1, 'there is no node "z"'),
        (["assign", "--none", "z"], 1, 'there is no node "z"'),
        (["list", "us"], 2, 'there is no region "us"'),
        (["drop", "us", "--yes"], 2, 'there is no region "us"'),
    ],
)
def test_what_can_not_be_changes_nothing(
    run: Run, cluster_url: URL, words: list[str], code: int, message: str
) -> None:
    run("region", "create", "eu", "--shards", "0-5")
    before = contents(cluster_url)
    assert message in run("region", *words, code=code).stderr
    assert contents(cluster_url) == before


def test_nobody_takes_a_region_its_last_node_without_a_word(run: Run, cluster_url: URL) -> None:
    run("region", "create", "eu", "--shards", "0-3", "--node", "a")
    before = contents(cluster_url)
    refused = run("region", "create", "us", "--shards", "4-7", "--node", "a", code=1).stderr
    assert 'node "a" is of region "eu" already' in refused
    assert 'shardids region assign --none a (then no node is left to region "eu")' in refused
    added = run("node", "add", "a", "--url", dsn(cluster_url), "--region", "eu")
    assert "already" not in added.stderr
    assert contents(cluster_url) == before
    run("region", "create", "us", "--shards", "4-7", "--node", "b")
    moved = run("shard", "move", "3", "--to", "b", code=1).stderr
    assert 'shardids region assign eu b (then no node is left to region "us")' in moved
    bereft = (
        'Region "us" has no node; shards 4-7 stay where they are. To assign one: shardids region assign us'
        " NODE, or shardids node add NAME --url URL --region us"
    )
    for dry in (["--dry-run"], []):
        for words in (["assign", "eu", "b"], ["assign", "--none", "b"]):
            told = run("region", *words, *dry).stderr
            assert bereft in told
            assert "shardids rebalance" not in told
            assert ('Node "b" was of region "us"' in told) == ("eu" in words or bool(dry))
    assert 'there is no node of region "us" to take shards 4-7; no shard was moved' in (
        run("rebalance", code=1).stderr
    )


def test_the_database_refuses_two_regions_of_one_shard(cluster_url: URL) -> None:
    insert = "insert into shardids_catalog.region (name, first_shard, last_shard) values (%s, %s, %s)"
    with connected(cluster_url) as connection:
        connection.execute(insert, ["eu", 0, 5])
        with pytest.raises(psycopg.errors.ExclusionViolation, match="region_overlap"):
            connection.execute(insert, ["us", 5, 7])
        with pytest.raises(psycopg.errors.CheckViolation, match="region_shards"):
            connection.execute(insert, ["us", 7, 6])
        with pytest.raises(psycopg.errors.ForeignKeyViolation, match="region_of_node"):
            connection.execute("update shardids_catalog.node set region = 'us'")


def test_new_shards_go_to_the_nodes_of_their_region(blank_database: Blank) -> None:
    url, *others = (blank_database() for _ in range(3))
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 8)
        create_region(catalog, EU)
        provision.add_node(catalog, "a", dsn(url), region="eu")
        with pytest.raises(ClusterConflict, match="there is no node without a region to take shards 6-7"):
            provision.create_shards(catalog, range(8))
        assert catalog.placement().node_of == {}
        provision.add_node(catalog, "b", dsn(others[0]), region="eu")
        provision.add_node(catalog, "c", dsn(others[1]))
        with pytest.raises(ClusterConflict, match='shard 6 is of no region, and node "b" is of region "eu"'):
            provision.create_shards(catalog, range(8), node="b")
        assert provision.create_shards(catalog, [0], node="b") == {0: "b"}
        made = provision.create_shards(catalog, range(8))
        assert Counter(made.values()) == {"a": 3, "b": 2, "c": 2}
        assert catalog.placement().outside() == {}
        provision.add_node(catalog, "b", dsn(others[0]))  # Again, it stays of its region.
        with pytest.raises(BadArgument, match='there is no region "us"'):
            provision.add_node(catalog, "b", dsn(others[0]), region="us")
        create_region(catalog, Region(name="us", first_shard=6, last_shard=7))
        with pytest.raises(ClusterConflict, match='node "b" is of region "eu" already') as caught:
            provision.add_node(catalog, "b", dsn(others[0]), region="us")
        assert "shardids region assign us b" in caught.value.hint
        assert catalog.nodes()["b"].region == "eu"


def test_a_node_that_is_replaced_stays_in_its_region(cluster_url: URL) -> None:
    with catalog_at(cluster_url) as catalog:
        create_region(catalog, EU, ["a"])
        with catalog.engine.begin() as connection:
            point_node(connection, catalog.nodes()["a"], "postgresql://other", lost=[3], found=[])
        assert catalog.nodes()["a"] == Node(name="a", url="postgresql://other", region="eu")
        assert catalog.placement().outside() == {4: "b", 5: "b"}


def test_keys_are_found_among_the_shards_of_their_region(cluster: Cluster, cluster_url: URL) -> None:
    everywhere = [cluster.shard_for(number) for number in range(200)]
    with pytest.raises(BadArgument, match='there is no region "eu"') as caught:
        cluster.shard_for("ann", region="eu")
    assert caught.value.hint == "Regions: none yet."
    with catalog_at(cluster_url) as catalog:
        create_region(catalog, EU)
        create_region(catalog, Region(name="us", first_shard=6, last_shard=7))
    wait_for(lambda: len(cluster.placement.regions) == 2, "the listener to hear of it")
    assert [cluster.shard_for(number) for number in range(200)] == everywhere
    assert {cluster.shard_for(number, region="eu") for number in range(200)} == {*range(6)}
    assert {cluster.shard_for(number, region="us") for number in range(200)} == {6, 7}
    shard = cluster.shard_for("ann", region="us")
    with cluster.session(key="ann", region="us") as session:
        drawn = session.scalars(select(next_id())).one()
    assert cluster.shard_of(drawn) == shard
    assert cluster.placement.region_of(shard) == "us"
    drawn = cluster.at(key="ann", region="us").run(lambda session: session.scalars(select(next_id())).one())
    assert cluster.shard_of(drawn) == shard
    with pytest.raises(BadArgument, match="region= names the region of a key"):
        cluster.session(shard=1, region="eu")
    with pytest.raises(BadArgument, match='Regions: "eu", "us"'):
        cluster.session(key="ann", region="mars")


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customers"
    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(region=lambda name: name[:2] if name[2:3] == "-" else None)
    orders: Mapped[list[Order]] = relationship(back_populates="customer")


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = primary_key()
    customer_id: Mapped[int] = mapped_column(ForeignKey(Customer.id))
    customer: Mapped[Customer] = relationship(back_populates="orders")


def test_models_say_the_region_of_their_keys(cluster_url: URL) -> None:
    with catalog_at(cluster_url) as catalog, Cluster.connect(cluster_url, echo=False) as cluster:
        create_region(catalog, Region(name="eu", first_shard=0, last_shard=1))
        create_region(catalog, Region(name="us", first_shard=6, last_shard=6))
        cluster.refresh()
        for shard in range(8):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
        names = [f"{region}{number}" for region in ("eu-", "us-", "") for number in range(20)]
        with cluster.sharded_session() as session, session.begin():
            session.add_all(Customer(name=name, orders=[Order()]) for name in names)
        with cluster.sharded_session(fan_out="named") as session:
            found = session.scalars(select(Customer).where(Customer.name.in_(names))).all()
            assert {one.name for one in found} == {*names}
            lives = {one.name: cluster.shard_of(one.id) for one in found}
            assert session.scalars(select(Customer.id).where(Customer.name == "us-7")).one()
            with pytest.raises(BadArgument, match='there is no region "xx"'):
                session.scalars(select(Customer).where(Customer.name == "xx-1")).all()
        assert {shard for name, shard in lives.items() if name.startswith("eu-")} == {0, 1}
        assert {shard for name, shard in lives.items() if name.startswith("us-")} == {6}
        assert lives == {
            name: cluster.shard_for(name, region=name[:2] if "-" in name else None) for name in names
        }
        with cluster.session(key="eu-1", region="eu") as session, session.begin():
            session.add(
                Order(customer=session.scalars(select(Customer).where(Customer.name == "eu-1")).one())
            )
        with cluster.session(shard=7) as session:
            session.add(Customer(name="eu-99"))
            with pytest.raises(WrongShard):
                session.flush()
        assert cluster.copy(Customer, [{"name": "us-new"}]).by_shard == {6: 1}
        with pytest.raises(BadArgument, match="keys that already determine their region"):
            cluster.copy(Customer, [{"name": "us-other"}], key="name", region="eu")
        keys = [ShardingKey(table_name="customers", column_name="name")]
        assert not doctor.examine(catalog, ["key-in-wrong-shard"], keys, every_row=True).findings
        with cluster.at(shard=7).connection() as connection:
            wrong_name = next(name for n in range(99) if cluster.shard_for(name := f"us-w{n}") != 7)
            connection.execute(
                text("insert into shard_0007.customers (name) values (:name)"), {"name": wrong_name}
            )
            connection.commit()
        (wrong,) = doctor.examine(catalog, ["key-in-wrong-shard"], keys, every_row=True).findings
        assert wrong.shards == (7,)


def test_a_change_of_regions_leaves_connections_and_transactions_as_they_are(cluster_url: URL) -> None:
    with catalog_at(cluster_url) as catalog, Cluster.connect(cluster_url, listen=False) as cluster:
        for shard in range(8):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
        create_region(catalog, EU)
        engine = cluster.at(shard=0).engine
        ann = next(name for number in range(99) if cluster.shard_for(name := f"ann{number}") == 0)
        with cluster.sharded_session() as session:
            customer = Customer(name=ann)
            session.add(customer)
            session.flush()
            assign_nodes(catalog, "eu", ["a"])
            cluster.refresh()
            assert cluster.placement.nodes["a"].region == "eu"
            assert cluster.at(shard=0).engine.pool is engine.pool
            assert session.scalars(select(Customer.name).where(Customer.name == ann)).all() == [ann]
            session.delete(customer)
            session.commit()


def test_rows_are_copied_and_loaded_into_a_region(run: Run, cluster_url: URL, tmp_path: Path) -> None:
    run("region", "create", "us", "--shards", "6-7")
    people = Table("people", MetaData(), primary_key("id"), Column("name", Text))
    names = [f"person {number}" for number in range(50)]
    with Cluster.connect(cluster_url, listen=False) as cluster:
        for shard in range(8):
            with cluster.at(shard=shard).engine.begin() as connection:
                people.metadata.create_all(connection)
        rows = [{"name": name} for name in names]
        there = Counter(cluster.shard_for(name, region="us") for name in names)
        assert cluster.copy(people, rows, key="name", region="us").by_shard == there
        assert {*there} == {6, 7}
        with pytest.raises(BadArgument, match="requires key="):
            cluster.copy(people, rows, shard=1, region="us")
        with pytest.raises(CopyFailed, match='there is no region "mars"'):
            cluster.copy(people, rows, key="name", region="mars")
    file = tmp_path / "people.csv"
    file.write_text("name\n" + "\n".join(names) + "\n", encoding="utf-8")
    loaded = run("load", str(file), "--table", "people", "--key", "name", "--region", "us", "--json")
    assert json.loads(loaded.stdout)["by_shard"] == {str(shard): count for shard, count in there.items()}


def test_the_query_node_tells_the_region_of_a_shard(run: Run, cluster_url: URL) -> None:
    told = (
        "select shardids_shard, shardids_nodes.region_of(shardids_shard) from shardids_nodes.notes order by 1"
    )
    with Cluster.connect(cluster_url, listen=False) as cluster, catalog_at(cluster_url) as catalog:
        for shard in range(8):
            with cluster.at(shard=shard).engine.begin() as connection:
                schema = cluster.schema_of(shard)
                connection.execute(
                    text(f"create table {schema}.notes (id bigint default {schema}.next_id())")
                )
                connection.execute(text(f"insert into {schema}.notes default values"))
        views.create_query_node(catalog, node="a", store_password=True)
    run("region", "create", "eu", "--shards", "0-2")
    run("region", "create", "o'brien", "--shards", "7", code=2)
    run("region", "create", "us", "--shards", "7")
    with connected(cluster_url) as connection:
        found = dict(connection.execute(told).fetchall())
        assert found == dict.fromkeys(range(3), "eu") | dict.fromkeys(range(3, 7)) | {7: "us"}
        run("region", "drop", "us", "--yes")
        assert dict(connection.execute(told).fetchall()) == found | {7: None}
        run("region", "drop", "eu", "--yes")
        assert {*dict(connection.execute(told).fetchall()).values()} == {None}
    with catalog_at(cluster_url) as catalog:
        again = views.refresh_query_node(catalog)
        assert again is not None
        assert again.statements == []


def test_asyncio_finds_keys_by_region(cluster_url: URL) -> None:
    async def where(session: AsyncSession) -> str:
        return str((await session.execute(text("select current_database()"))).scalar_one())

    async def ask() -> None:
        async with await AsyncCluster.connect(cluster_url) as cluster:
            shard = cluster.shard_for("ann", region="us")
            there = cluster.node_of(shard).url.partition("?")[0].rpartition("/")[2]
            assert await cluster.at(key="ann", region="us").run(where) == there
            async with cluster.session(key="ann", region="us") as session:
                assert await where(session) == there
            with pytest.raises(BadArgument, match='there is no region "mars"'):
                cluster.session(key="ann", region="mars")

    with catalog_at(cluster_url) as catalog:
        create_region(catalog, Region(name="us", first_shard=6, last_shard=7))
    asyncio.run(ask())


def test_shards_that_are_being_created_end_inside_their_region(cluster_url: URL) -> None:
    with catalog_at(cluster_url) as catalog:
        with connected(cluster_url) as connection:
            connection.execute("update shardids_catalog.placement set state = 'creating' where shard = 0")
        with pytest.raises(ClusterConflict, match=r'shard 0, .*is being created on node "a"') as caught:
            create_region(catalog, EU, ["b"])
        assert "shardids shard create" in caught.value.hint
        assert not catalog.placement().regions
        create_region(catalog, EU, ["a"])


def test_a_node_that_is_excluded_is_not_said_to_be_missing(cluster_url: URL) -> None:
    with catalog_at(cluster_url) as catalog:
        create_region(catalog, EU, ["b"])
        with pytest.raises(ClusterConflict, match='can only go to a node of region "eu", and b is excluded'):
            mover.plan_balance(catalog, mover.By.ROWS, exclude=["b"])


def test_a_change_of_regions_waits_for_moves_that_begin(cluster_url: URL) -> None:
    """A move that was entered first is found by the change; one that comes later finds the change."""
    enter = """
        insert into shardids_catalog.move (shard, source, target, offline, step)
        values (1, 'a', 'b', false, 'tables')"""
    refused: list[str] = []

    def change() -> None:
        with catalog_at(cluster_url) as catalog:
            try:
                assign_nodes(catalog, None, ["b"])
            except ClusterConflict as error:
                refused.append(str(error))

    with catalog_at(cluster_url) as catalog, psycopg.connect(dsn(cluster_url)) as mover:
        create_region(catalog, Region(name="eu", first_shard=0, last_shard=1), ["a", "b"])
        mover.execute("select from shardids_catalog.cluster for update")
        mover.execute(enter)
        release = threading.Thread(target=change)
        release.start()
        wait_for(lambda: _is_waiting(cluster_url), "the change to wait")
        mover.commit()
        release.join()
        assert 'shard 1, which would be of region "eu", is being moved to node "b"' in refused[0]
        assert "shardids shard move 1 --resume, or --abort" in refused[0]
        assert catalog.nodes()["b"].region == "eu"
        with connected(cluster_url) as connection:
            connection.execute("update shardids_catalog.move set step = 'abort'")
        assign_nodes(catalog, None, ["b"])


CHANGES: dict[str, tuple[Callable[[Catalog], object], str]] = {
    "remove a node": (
        lambda catalog: catalog.remove_node("c"),
        "update shardids_catalog.node set region = null where name = 'c'",
    ),
    "point a node": (
        lambda catalog: catalog.point_node(Node(name="c", url="postgresql://127.0.0.1/d")),
        "update shardids_catalog.node set region = null where name = 'c'",
    ),
    "create a shard": (
        lambda catalog: catalog.mark_active([7]),
        "update shardids_catalog.placement set state = state where shard = 7",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_changes_nodes_or_shards_waits_for_a_change_of_regions(cluster_url: URL, name: str) -> None:
    """It holds no row that the change needs: else the server would roll one of the two back."""
    change, statement = CHANGES[name]
    failures: list[BaseException] = []

    def run(catalog: Catalog) -> None:
        try:
            change(catalog)
        except BaseException as failure:  # noqa: BLE001 -- compared below
            failures.append(failure)

    with connected(cluster_url) as connection:
        connection.execute(
            "insert into shardids_catalog.node (name, url) values ('c', 'postgresql://127.0.0.1/c')"
        )
        connection.execute("update shardids_catalog.placement set state = 'creating' where shard = 7")
    with catalog_at(cluster_url) as catalog, catalog.engine.connect() as regions, regions.begin():
        lock_placement(regions)
        running = threading.Thread(target=run, args=(catalog,))
        running.start()
        try:
            wait_for(lambda: _is_waiting(cluster_url), "the other to wait")
            regions.exec_driver_sql(statement)
            regions.commit()
        finally:
            regions.rollback()
            running.join()
    assert failures == []


def _is_waiting(url: URL) -> bool:
    with connected(url) as connection:
        row = connection.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and wait_event_type = 'Lock'"
        ).fetchone()
    return row is not None and row[0] == 1
