"""shardids' own migrations: up, down and up again, by any way to run them, to the same objects."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import alembic.config
import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import URL

from shardids import Layout
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ShardidsError
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision, trees
from shardids.migrate.install.inspecting import inspect_shard
from shardids.migrate.install.provision import add_node, create_shard
from shardids.migrate.install.trees import Tree
from shardids.pg.connections import open_engine
from shardids.pg.sqlfiles import data_folder, read_sql, sql_names
from tests.conftest import CLUSTER, dsn
from tests.support.clusters import catalog_at, connected, contents, environment, objects

Blank = Callable[[], URL]
Objects = list[tuple[str, str, str]]

TREES: tuple[Tree, ...] = ("catalog", "node", "shard")
SCHEMAS = {"catalog": "shardids_catalog", "node": "shardids", "shard": "shard_0007"}
SETTINGS = trees.layout_settings(DEFAULT, "shard_") | {
    "cluster": CLUSTER,
    "node": "a",
    "shard_count": "8",
    "shard": "7",
}
ASKED = {
    # whose code runs where rows are written
    "tables",
    "trusted",
    "administers",
    # IDs of the past
    "id_column",
    "time_column",
    "order_column",
    "first_time",
    "end_time",
    "first_shard",
    "count",
    "last_shard",
    "shards",
    "schema",
    "dropped",
    "table_name",
    "column_name",
    "names",
    "is_whole",
    # Look-ups
    "column",
    "claims",
    "kind",
    "rights",
    # Clocks
    "of_shard",
    # Change capture
    "slot",
    # The reader
    "read_body",
    "is_node",
    # Reference tables
    "subscription",
    # Schemas
    "own_owner",
    "own_schema",
    # Adoptions
    "adoption",
    "table",
    "pairs",
}
"""Settings of queries, and of what a command installs in a shard."""
INI = data_folder("migrations") / "alembic.ini"


def run(url: URL, tree: Tree, way: Callable[..., None]) -> None:
    """Upgrades or downgrades one tree in a transaction of its own."""
    with closing_engine(url) as engine, engine.begin() as connection:
        way(connection, tree, SETTINGS)


@contextmanager
def closing_engine(url: URL) -> Iterator[Engine]:
    engine = open_engine(url, what="node")
    try:
        yield engine
    finally:
        engine.dispose()


def with_trees_before(tree: Tree, url: URL) -> URL:
    """Installs what a tree needs: a shard is on a node."""
    if tree == "shard":
        run(url, "node", trees.upgrade)
    return url


def whole(url: URL, tree: Tree) -> tuple[Objects, list[str]]:
    """What a tree has made, with its version."""
    schema = SCHEMAS[tree]
    return objects(url, schema), contents(url).get(f"{schema}.shardids_version", [])


def without_version_table(made: Objects) -> Objects:
    return [one for one in made if "shardids_version" not in one[1]]


def arguments(tree: Tree, url: URL | None, **more: str) -> list[str]:
    """The arguments for plain Alembic."""
    given: dict[Tree, dict[str, str]] = {
        "catalog": {"cluster": CLUSTER, "shard_count": "8"},
        "node": {"cluster": CLUSTER, "node": "a"},
        "shard": {"shard": "7"},
    }
    values = given[tree] | ({"url": dsn(url)} if url else {}) | more
    return [
        *("-c", str(INI), "--name", tree),
        *(word for name, value in values.items() for word in ("-x", f"{name}={value}")),
    ]


def plain_alembic(words: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """``alembic …`` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "alembic", *words],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def offline(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What Alembic prints."""
    capsys.readouterr()
    alembic.config.main([*words])
    return capsys.readouterr().out


@pytest.mark.parametrize("tree", TREES)
def test_up_down_and_up_again(tree: Tree, blank_database: Blank) -> None:
    url = with_trees_before(tree, blank_database())
    run(url, tree, trees.upgrade)
    first = whole(url, tree)
    assert any(kind == "function" for kind, *_ in first[0])
    run(url, tree, trees.upgrade)
    assert whole(url, tree) == first
    run(url, tree, trees.downgrade)
    left, versions = whole(url, tree)
    assert {name for kind, name, _ in left if kind in {"relation r", "relation S", "function"}} == {
        f"{SCHEMAS[tree]}.shardids_version"
    }
    assert versions == []
    run(url, tree, trees.downgrade)
    assert whole(url, tree) == (left, versions)
    run(url, tree, trees.upgrade)
    assert whole(url, tree) == first


@pytest.mark.parametrize("tree", TREES)
def test_plain_alembic_does_the_same(tree: Tree, blank_database: Blank, tmp_path: Path) -> None:
    ours = with_trees_before(tree, blank_database())
    run(ours, tree, trees.upgrade)
    theirs = with_trees_before(tree, blank_database())
    ran = plain_alembic([*arguments(tree, theirs), "upgrade", "head"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert whole(theirs, tree) == whole(ours, tree)
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("tree", TREES)
def test_the_sql_that_alembic_prints_does_the_same(
    tree: Tree, blank_database: Blank, capsys: pytest.CaptureFixture[str]
) -> None:
    url = with_trees_before(tree, blank_database())
    run(url, tree, trees.upgrade)
    online = whole(url, tree)
    run(url, tree, trees.downgrade)
    down = whole(url, tree)
    printed = {
        way: offline([*arguments(tree, None), *words, "--sql"], capsys)
        for way, words in (
            ("up", ["upgrade", "head"]),
            ("down", ["downgrade", f"{trees.head(tree)}:base"]),
        )
    }
    fresh = with_trees_before(tree, blank_database())
    with psycopg.connect(dsn(fresh), autocommit=True) as connection:
        connection.execute(printed["up"].encode())
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert whole(fresh, tree) == online
        connection.execute(printed["down"].encode())
        # Some versions of Alembic end a downgrade by dropping the version table, others keep it.
        left, versions = whole(fresh, tree)
        assert (without_version_table(left), versions) == (without_version_table(down[0]), down[1])


@pytest.mark.parametrize("layout", ["instagram", "41-6-6@0"])
def test_plain_alembic_takes_a_layout_and_a_prefix(
    layout: str, blank_database: Blank, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = blank_database(), blank_database()
    for tree in ("catalog", "node"):
        words = arguments(tree, theirs, layout=layout, schema_prefix="photos_")
        alembic.config.main([*words, "upgrade", "head"])
    alembic.config.main([*arguments("shard", theirs), "upgrade", "head"])
    capsys.readouterr()
    with catalog_at(theirs) as catalog:
        found = catalog.describe()
        assert (found.layout, found.schema_prefix, found.shard_count) == (Layout.parse(layout), "photos_", 8)
        assert found.cluster == UUID(CLUSTER)
        # The command's own steps find it all done, and do the rest.
        assert provision.init(catalog, found.layout, 8, "photos_") == found
        add_node(catalog, "a", dsn(theirs))
        with connected(theirs) as connection:
            connection.execute("insert into shardids_catalog.placement values (7, 'a', 'active')")
        assert inspect_shard(catalog, 7)["schema"] == "photos_0007"
    with catalog_at(ours) as catalog:
        provision.init(catalog, Layout.parse(layout), 8, "photos_")
    assert objects(theirs, "shardids_catalog") == objects(ours, "shardids_catalog")


def test_a_shard_is_the_same_however_it_was_made(
    blank_database: Blank, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs, by_migrator = (with_trees_before("shard", blank_database()) for _ in range(3))
    with closing_engine(ours) as engine, engine.connect() as connection:
        create_shard(connection, 7)
        create_shard(connection, 7)
    alembic.config.main([*arguments("shard", theirs), "upgrade", "head"])
    capsys.readouterr()
    run(by_migrator, "shard", trees.upgrade)
    assert whole(ours, "shard") == whole(theirs, "shard") == whole(by_migrator, "shard")
    for url in (ours, theirs, by_migrator):
        with connected(url) as connection:
            assert connection.execute("select id, schema, state from shardids.shard").fetchall() == [
                (7, "shard_0007", "active")
            ]
            assert connection.execute("select shardids.shard_of(shard_0007.next_id())").fetchone() == (7,)
    # Each finds what the other has made.
    run(ours, "shard", trees.upgrade)
    with closing_engine(theirs) as engine, engine.connect() as connection:
        create_shard(connection, 7)
    assert whole(ours, "shard") == whole(theirs, "shard")


# Refusals.


@pytest.mark.parametrize(
    ("tree", "given", "words"),
    [
        ("catalog", {}, ["-x cluster=…", "-x shard_count=…"]),
        ("node", {"cluster": CLUSTER}, ["-x node=…"]),
        ("shard", {}, ["-x shard=…"]),
        ("shard", {"shard": "7"}, ["-x url=postgresql://…"]),
        ("shard", {"shard": "-7"}, ["-x shard=-7"]),
        ("node", {"cluster": CLUSTER, "node": "a", "layout": "nonesuch"}, ["'nonesuch' is not a layout"]),
        ("node", {"cluster": CLUSTER, "node": "a b"}, ["'a b' can't be a node's name"]),
        ("node", {"cluster": "mine", "node": "a"}, ["-x cluster=mine"]),
        (
            "node",
            {"cluster": CLUSTER, "node": "a", "schema_prefix": "It's"},
            ["\"It's\" can't be a schema prefix"],
        ),
        ("catalog", {"cluster": CLUSTER, "shard_count": "many"}, ["-x shard_count=many"]),
        ("catalog", {"cluster": CLUSTER, "shard_count": "4097"}, ["4097 shards do not fit"]),
    ],
)
def test_arguments_that_are_missing_or_wrong(
    tree: Tree, given: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    xs = [word for name, value in given.items() for word in ("-x", f"{name}={value}")]
    # The database comes last: with --sql none is needed.
    offline = [] if "url" in words[0] else ["--sql"]
    # As Alembic says all that is wrong with its arguments: in a line, without a traceback.
    with pytest.raises(SystemExit) as stopped:
        alembic.config.main(["-c", str(INI), "--name", tree, *xs, "upgrade", "head", *offline])
    assert stopped.value.code not in {0, None}
    told = capsys.readouterr()
    assert all(word in told.err + told.out for word in words)


def test_a_node_with_shards_keeps_its_engine(blank_database: Blank) -> None:
    url = with_trees_before("shard", blank_database())
    run(url, "shard", trees.upgrade)
    before = objects(url)
    with pytest.raises(BadArgument, match="1 shards; its engine stays") as caught:
        run(url, "node", trees.downgrade)
    assert caught.value.sqlstate == "SI007"
    assert caught.value.hint
    assert objects(url) == before
    run(url, "shard", trees.downgrade)
    run(url, "node", trees.downgrade)


def test_a_shard_whose_default_is_in_use_keeps_its_generator(blank_database: Blank) -> None:
    url = with_trees_before("shard", blank_database())
    run(url, "shard", trees.upgrade)
    with connected(url) as connection:
        connection.execute("create table shard_0007.kept (id bigint default shard_0007.next_id())")
    before = objects(url)
    with pytest.raises(Exception, match="other objects depend on"):
        run(url, "shard", trees.downgrade)
    assert objects(url) == before
    with connected(url) as connection:
        # Draws had to wait, but the shard was not fenced.
        assert connection.execute("select shardids.shard_of(shard_0007.next_id())").fetchone() == (7,)


@pytest.mark.parametrize("shard", ["4096", "99999", "99999999999999999999"])
def test_a_shard_beyond_the_layout(
    shard: str, blank_database: Blank, capsys: pytest.CaptureFixture[str]
) -> None:
    url = with_trees_before("shard", blank_database())
    before = objects(url)
    with pytest.raises((ShardidsError, SystemExit)):
        alembic.config.main([*arguments("shard", url, shard=shard), "upgrade", "head"])
    assert objects(url) == before
    capsys.readouterr()


# The files themselves.


def test_every_file_runs_just_as_it_stands(blank_database: Blank) -> None:
    url = blank_database()
    order = [
        *(
            "catalog/catalog.v1.sql",
            "catalog/old_ids.v1.sql",
            "catalog/lookups.v1.sql",
            "catalog/adoption.v1.sql",
            "catalog/references.v1.sql",
            "catalog/recorded.v1.sql",
            "views/query_node.v1.sql",
            "catalog/homes.v1.sql",
            "catalog/moved_ids.v1.sql",
            "catalog/key_moves.v1.sql",
            "catalog/pins.v1.sql",
            "catalog/engine.v1.sql",
            "catalog/routes.v1.sql",
            "engine/layout.v1.sql",
            "engine/schemas.v1.sql",
            "engine/decode.v1.sql",
            "engine/keys.v1.sql",
        ),
        *("engine/node.v1.sql", "engine/identity.v1.sql", "engine/engine.v1.sql", "engine/admin.v1.sql"),
        *("engine/generator.v1.sql", "engine/leases.v1.sql"),
        *("mover/moving.v1.sql", "mover/objects.v1.sql", "migrate/migrate.v1.sql", "engine/decisions.v1.sql"),
        *(
            "adopt/staging.v1.sql",
            "counters/counters.v1.sql",
            "reference/reference.v1.sql",
            "lookups/node.v1.sql",
            "reading/reader.v1.sql",
        ),
        *("engine/homes.v1.sql", "tenants/leaving.v1.sql", "tenants/arrivals.v1.sql"),
        *("engine/shard.v1.sql", "engine/shard.v1.down.sql"),
        "reading/reader.v1.down.sql",
        *("engine/decisions.v1.down.sql", "migrate/migrate.v1.down.sql", "engine/node.v1.down.sql"),
        *("catalog/catalog.v1.down.sql", "adopt/barrier.v1.sql", "adopt/barrier.v1.down.sql"),
    ]
    # The rest installs nothing but what a load adds to a shard: queries, and what shardids is compared with.
    assert sorted(order) == [
        name
        for name in sql_names()
        if name in order
        or not name.startswith(
            (
                "adopt/",
                "beside/",
                "doctor/",
                "views/tables",
                "views/query_state",
                "compare/",
                "multimaster/",
                "catalog/objects",
                "catalog/contract",
                "catalog/prepared",
                "catalog/shards",
                "clocks/",
                "inplace/",
                "install/",
                "load/marks",
                "lookups/claims",
                "lookups/column",
                "lookups/drop",
                "lookups/guard",
                "facts/",
                "migrate/dropped",
                "migrate/hashes",
                "reading/definitions",
                "reading/owners",
                "reading/state",
                "reading/types",
            )
        )
    ]
    with psycopg.connect(dsn(url), autocommit=True) as connection:
        for name, value in SETTINGS.items():
            if name != "shard":
                connection.execute(f"set shardids.{name} = '{value}'".encode())
        for name in order:
            if name == "adopt/barrier.v1.sql":
                connection.execute("create schema shardids_adopt")
            if name.startswith("engine/shard.v1"):
                with connection.transaction():
                    connection.execute("select shardids.enter_shard(7)")
                    connection.execute(read_sql(name).encode())
            else:
                connection.execute(read_sql(name).encode())
            if name == "engine/shard.v1.sql":
                assert connection.execute("select shardids.shard_of(shard_0007.next_id())").fetchone() == (7,)
    assert {kind for kind, name, _ in objects(url) if name != "public"} == {"schema"}


def test_every_file_says_what_it_needs() -> None:
    for name in sql_names():
        head = re.match(r"(--.*\n)+", read_sql(name))
        assert head is not None
        for word in ("Purpose:", "Locks:", "Privileges:"):
            assert word in head[0], name
        named = set(re.findall(r"current_setting\('shardids\.(\w+)'\)", read_sql(name)))
        assert named <= SETTINGS.keys() | ASKED
        assert all(f"shardids.{setting}" in head[0] for setting in named), name


def test_upgrades_in_two_databases_at_once(blank_database: Blank) -> None:
    # Alembic's environment is global; two threads must not get each other's connection.
    urls = [blank_database(), blank_database()]

    def make(url: URL) -> None:
        catalog = Catalog(url)
        try:
            provision.init(catalog, DEFAULT, 8)
            add_node(catalog, "a", dsn(url))
        finally:
            catalog.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, urls))
    assert objects(urls[0]) == objects(urls[1])
