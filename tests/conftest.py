"""Databases, roles and clusters on a real server; if there is no server, the run fails."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql
from sqlalchemy.engine import URL

from shardids import Cluster, Layout
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision, trees
from shardids.migrate.install.provision import create_shard
from shardids.pg.connections import open_engine
from shardids.tables import views
from tests.support.servers import server_for_tests

CLUSTER = "00000000-0000-4000-8000-000000000001"
"""The cluster that the ``node`` fixture's databases belong to."""


MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30
"""What the servers and files of two workers may take, and more."""

LONGEST_FIRST = (
    "test_references",
    "test_metrics",
    "test_damages",
    "test_console_faults",
    "test_references_interrupted",
    "test_moved",
    "test_lookups",
    "test_adopt_table",
    "test_moving_outside",
    "test_moving",
    "test_listener",
    "test_django",
    "test_generator",
    "test_moving_regions",
    "test_copy",
    "test_doctor",
    "test_adopt_run",
    "test_cdc",
    "test_cli",
    "test_migrate",
    "test_provision",
    "test_adopt_relay",
    "test_dry_runs",
    "test_logs",
    "test_console_access",
    "test_migrate_runs",
    "test_twophase",
    "test_migrate_nodes",
    "test_async",
    "test_migrate_edited",
    "test_moving_cli",
    "test_migrate_parts",
    "test_adopt_plan",
    "test_generator_model",
    "test_adopt_back",
    "test_upgrade",
    "test_adopt_in_place",
    "test_tenant_move",
    "test_tenant_move_others",
    "test_tenant_move_keys",
    "test_tenant_move_shapes",
    "test_tenant_move_fan_out",
    "test_load",
    "test_recording",
    "test_adopt_prepare",
    "test_adopt_compare",
    "test_adopt_identities",
    "test_adopt_past_the_log",
    "test_routing_compared",
)
"""Modules that take longest: they begin first, so that no worker waits in the end for one that began last."""


def pytest_configure() -> None:
    if "TMPDIR" not in os.environ and _is_roomy(MEMORY):
        # In memory, databases are made and dropped five times as fast as on a disk.
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None
    # A shell without job control lets its background jobs ignore SIGINT, and so do their children.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # No test is timed: a busy machine takes a second where an idle one takes a millisecond.
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")


def _is_roomy(folder: Path) -> bool:
    """Whether it can hold the servers' files, and run programs."""
    if not os.access(folder, os.W_OK):
        return False
    return shutil.disk_usage(folder).free > ROOM_BYTES and not os.statvfs(folder).f_flag & os.ST_NOEXEC


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    # Tests wait for servers, for a good part of their time.
    return (os.cpu_count() or 1) * 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    # What was collected stays to the end: the garbage collector need not look at it again and again.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server_url() -> Iterator[URL]:
    with server_for_tests() as url:
        yield url


def dsn(url: URL) -> str:
    """The URL as libpq reads it, with its password."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture(scope="session")
def admin(server_url: URL) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn(server_url), autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def needs_row_filters(admin: psycopg.Connection) -> None:
    """Skips tests whose nodes publish some rows of a table: PostgreSQL 14 can't, and is refused."""
    if admin.info.server_version < 150000:
        pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")


@pytest.fixture(scope="session")
def _numbers() -> Iterator[int]:
    return count()


MakeDatabase = Callable[..., URL]


@pytest.fixture
def make_database(
    server_url: URL, admin: psycopg.Connection, _numbers: Iterator[int]
) -> Iterator[MakeDatabase]:
    """Makes empty databases, or copies of ``template``, that are dropped after the test."""
    names: list[str] = []

    def make(template: str = "template0") -> URL:
        name = f"shardids_test_{os.getpid()}_{next(_numbers)}"
        admin.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )
        names.append(name)
        return server_url.set(database=name)

    yield make
    for name in names:
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def engine_template(
    server_url: URL, admin: psycopg.Connection, _numbers: Iterator[int]
) -> Iterator[Callable[[Layout], str]]:
    """Names of databases with the engine of a layout and no shards, to make copies of."""
    made: dict[Layout, str] = {}

    def template(layout: Layout) -> str:
        if layout not in made:
            name = f"shardids_template_{os.getpid()}_{next(_numbers)}"
            admin.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
            made[layout] = name
            engine = open_engine(server_url.set(database=name), what="template")
            settings = trees.layout_settings(layout, "shard_") | {"cluster": CLUSTER, "node": "a"}
            with engine.begin() as connection:
                trees.upgrade(connection, "node", settings)
            engine.dispose()
        return made[layout]

    yield template
    for name in made.values():
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


MakeNode = Callable[..., URL]


@pytest.fixture
def make_node(make_database: MakeDatabase, engine_template: Callable[[Layout], str]) -> MakeNode:
    """Makes databases with the engine and some active shards (default: 5 and 6)."""

    def make(shards: tuple[int, ...] = (5, 6), layout: Layout | None = None) -> URL:
        url = make_database(engine_template(layout or Layout.preset("default")))
        engine = open_engine(url, what="node")
        with engine.connect() as connection:
            for shard in shards:
                create_shard(connection, shard)
        engine.dispose()
        return url

    return make


@pytest.fixture
def node(make_node: MakeNode) -> str:
    """The DSN of a database with the default layout and the active shards 5 and 6."""
    return dsn(make_node())


@pytest.fixture
def db(node: str) -> Iterator[psycopg.Connection]:
    """An autocommit connection to ``node``."""
    with psycopg.connect(node, autocommit=True) as connection:
        yield connection


MakeRole = Callable[..., URL]


@pytest.fixture(scope="session")
def make_role(
    server_url: URL, admin: psycopg.Connection, _numbers: Iterator[int]
) -> Iterator[Callable[..., URL]]:
    """Makes login roles with a password; the server's URL as that role."""
    names: list[str] = []

    def make(prefix: str = "Role") -> URL:
        # Capitals and a hyphen: whoever quotes names wrongly is found out.
        name = f"{prefix}-{os.getpid()}-{next(_numbers)}"
        password = f"word-{secrets.token_hex(8)}"
        admin.execute(
            sql.SQL("create role {} login password {}").format(sql.Identifier(name), sql.Literal(password))
        )
        names.append(name)
        return server_url.set(username=name, password=password)

    yield make
    for name in names:
        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


class BlankDatabases:
    """Databases to be used again, which is quicker than making new ones."""

    def __init__(self, server_url: URL, admin: psycopg.Connection, numbers: Iterator[int]) -> None:
        self._server_url = server_url
        self._admin = admin
        self._numbers = numbers
        self._free: list[URL] = []
        self._all: list[URL] = []

    def take(self) -> URL:
        """An empty database."""
        if self._free:
            return self._free.pop()
        url = self._server_url.set(database=f"shardids_blank_{os.getpid()}_{next(self._numbers)}")
        self._admin.execute(
            sql.SQL("create database {} template template0").format(sql.Identifier(str(url.database)))
        )
        self._all.append(url)
        self._empty(url)
        return url

    def give_back(self, url: URL) -> None:
        """Empties a database, for the next who takes one."""
        self._end_sessions(url)
        self._empty(url)
        self._free.append(url)

    def _empty(self, url: URL) -> None:
        """Makes schema public again, too: a database that was in use differs in nothing from a new one."""
        with psycopg.connect(dsn(url), autocommit=True) as connection:
            for (name,) in connection.execute("select pubname from pg_publication").fetchall():
                connection.execute(sql.SQL("drop publication {}").format(sql.Identifier(name)))
            schemas = connection.execute(
                "select nspname from pg_namespace where nspname !~ '^(pg_|information_schema$)'"
            ).fetchall()
            for (name,) in schemas:
                connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(name)))
            connection.execute("create schema public")

    def drop(self) -> None:
        """Drops them all."""
        for url in self._all:
            self._admin.execute(
                sql.SQL("drop database {} with (force)").format(sql.Identifier(str(url.database)))
            )

    def _end_sessions(self, url: URL) -> None:
        self._admin.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [url.database]
        )


@pytest.fixture(scope="session")
def databases(
    server_url: URL, admin: psycopg.Connection, _numbers: Iterator[int], make_role: MakeRole
) -> Iterator[BlankDatabases]:
    """Empty databases for modules that keep one for several tests; roles outlive them."""
    pool = BlankDatabases(server_url, admin, _numbers)
    yield pool
    pool.drop()


@pytest.fixture
def blank_database(databases: BlankDatabases) -> Iterator[Callable[[], URL]]:
    """Makes empty databases, much quicker than ``make_database`` does. They have no settings of their own."""
    taken: list[URL] = []

    def take() -> URL:
        taken.append(databases.take())
        return taken[-1]

    yield take
    for url in taken:
        databases.give_back(url)


@pytest.fixture(scope="session")
def cluster_templates(
    server_url: URL, admin: psycopg.Connection, _numbers: Iterator[int]
) -> Iterator[dict[str, str]]:
    """By node, the names of the databases of a cluster that has no shards yet, to make copies of."""
    names = {node: f"shardids_template_{os.getpid()}_{next(_numbers)}" for node in "ab"}
    for name in names.values():
        admin.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
    urls = {node: server_url.set(database=name) for node, name in names.items()}
    found_cluster(urls["a"], urls, 8, created=())
    yield names
    for name in names.values():
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def cluster_urls(make_database: MakeDatabase, cluster_templates: dict[str, str]) -> dict[str, URL]:
    """The nodes of a cluster of 8 shards: the lower half on a, which holds the catalog too, the rest on b."""
    urls = {node: make_database(template) for node, template in cluster_templates.items()}
    catalog = Catalog(urls["a"])
    try:
        for name, url in urls.items():
            catalog.point_node(Node(name=name, url=dsn(url)))
        provision.create_shards(catalog, range(8))
    finally:
        catalog.close()
    return urls


@pytest.fixture
def cluster_url(cluster_urls: dict[str, URL]) -> URL:
    """The catalog of the cluster of ``cluster_urls``."""
    return cluster_urls["a"]


def found_cluster(
    catalog_url: URL,
    nodes: Mapping[str, URL],
    count: int = 8,
    layout: Layout = DEFAULT,
    prefix: str = "shard_",
    *,
    created: Sequence[int] | None = None,
    query_node: str | None = None,
) -> dict[int, str]:
    """Makes a cluster with all its shards, or those ``created``, or finds it made; returns what it made.

    ``query_node``: the node that is to be the query node.
    """
    catalog = Catalog(catalog_url)
    try:
        provision.init(catalog, layout, count, prefix)
        for name, url in nodes.items():
            provision.add_node(catalog, name, dsn(url))
        made = provision.create_shards(catalog, range(count) if created is None else created)
        if query_node is not None:
            views.create_query_node(catalog, node=query_node, store_password=True)
        return made
    finally:
        catalog.close()


@pytest.fixture
def cluster(cluster_url: URL) -> Iterator[Cluster]:
    """The cluster of ``cluster_url``."""
    with Cluster.connect(cluster_url) as cluster:
        yield cluster
