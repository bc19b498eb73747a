"""shardids' own objects brought up to date: the catalog, then the nodes, then the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from sqlalchemy import Connection, Engine
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from shardids.catalog.connections import open_engine
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.topology import Node
from shardids.errors import ShardidsError
from shardids.install import trees
from shardids.install.trees import Tree
from shardids.migrate.environment import Environment, run_environment
from shardids.migrate.migration import Migration, Prepared
from shardids.migrate.models import OWN_VERSION_TABLE
from shardids.migrate.report import Report
from shardids.migrate.runner import TRANSIENT, Observer, Settings
from shardids.migrate.state import migration_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The catalog or a node: which revision of its tree it is at, and which is the newest."""

    tree: Tree
    name: str
    revision: str
    newest: str

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        return self.revision == self.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """What :func:`upgrade` did: the catalog and the nodes as they were, and the run over the shards."""

    targets: tuple[Target, ...]
    shards: Report


def targets(catalog: Catalog) -> list[Target]:
    """At which revisions the catalog and the nodes are, the catalog first.

    Raises:
        ConnectionFailed: one is down.
    """
    found = [_target(_catalog_engine(catalog), "catalog", "catalog")]
    for node in catalog.nodes().values():
        found.append(_target(migration_engine(node, catalog), "node", node.name))
    return found


def _target(engine: Engine, tree: Tree, name: str) -> Target:
    try:
        with engine.connect() as connection:
            there = trees.current(connection, tree)
        return Target(tree=tree, name=name, revision=there, newest=trees.head(tree))
    finally:
        engine.dispose()


def upgrade(
    catalog: Catalog,
    settings: Settings,
    observer: Observer,
    stop: Event,
    on_target: Callable[[Target], None] = lambda _target: None,
) -> Upgraded:
    """Brings the catalog, each node and then every shard to this version's newest revisions.

    Each in a transaction of its own, with the settings' lock timeout and retries; what is up to date costs
    nothing, and a repeated call does what is left. The caller holds
    :func:`shardids.migrate.locks.one_run`.

    Raises:
        ClusterConflict: something was made by a newer shardids.
        ConnectionFailed, StatementFailed: the catalog or a node failed; no shard was touched.
    """
    description = catalog.describe()
    before = targets(catalog)
    nodes = catalog.nodes()
    for target in before:
        if target.is_current:
            continue
        with _engine_of(catalog, nodes, target) as engine:
            _retrying(settings)(_upgrade_target, engine, target, description, settings)
        on_target(target)
    migration = Migration(catalog, own_shards())
    if not migration.placement.node_of:
        return Upgraded(targets=tuple(before), shards=Report(outcomes=(), seconds=0.0))
    prepared = prepare_shards(migration)
    return Upgraded(targets=tuple(before), shards=migration.run(prepared, settings, observer, stop))


def own_shards() -> Environment:
    """The tree of the shards' own objects, as an environment that runs like an application's."""
    return Environment(trees.tree_config("shard"), OWN_VERSION_TABLE, body=run_environment)


def prepare_shards(migration: Migration) -> Prepared:
    """The run over the shards. Its nodes are to be up to date."""
    return migration.prepare("head", "up", migration.choose(), contract=True)


def _upgrade_target(engine: Engine, target: Target, description: Description, settings: Settings) -> None:
    values = trees.layout_settings(description.layout, description.schema_prefix)
    values |= {
        "cluster": str(description.cluster),
        "node": target.name,
        "shard_count": str(description.shard_count),
    }
    with engine.connect() as connection, connection.begin():
        _set_lock_timeout(connection, settings.limits.lock_timeout_ms)
        trees.upgrade(connection, target.tree, values)


def _set_lock_timeout(connection: Connection, milliseconds: int) -> None:
    connection.exec_driver_sql(f"set local lock_timeout = {int(milliseconds)}")


def _retrying(settings: Settings) -> Retrying:
    return Retrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, ShardidsError) and error.sqlstate in TRANSIENT
        ),
        stop=stop_after_attempt(settings.retries + 1),
        wait=wait_random_exponential(multiplier=settings.first_pause_s, max=settings.longest_pause_s),
        reraise=True,
    )


def _catalog_engine(catalog: Catalog) -> Engine:
    return open_engine(catalog.url, what="the catalog", administrative=True, pool_size=1)


@contextmanager
def _engine_of(catalog: Catalog, nodes: dict[str, Node], target: Target) -> Iterator[Engine]:
    if target.tree == "catalog":
        engine = _catalog_engine(catalog)
    else:
        engine = migration_engine(nodes[target.name], catalog).execution_options(
            isolation_level="READ COMMITTED"
        )
    try:
        yield engine
    finally:
        engine.dispose()
