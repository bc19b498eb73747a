"""Brings shardids' own objects to the installed version: the catalog, then the nodes, then the shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from sqlalchemy import Engine
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from shardids.catalog.leases import Leases
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, Description
from shardids.errors import ShardidsError
from shardids.logs import logger
from shardids.migrate.environment import Environment
from shardids.migrate.install import trees
from shardids.migrate.install.trees import Tree
from shardids.migrate.migration import APPLICATION_NAME, Migration, PreparedRun
from shardids.migrate.models import OWN_VERSION_TABLE, run_environment
from shardids.migrate.plan import RunReport
from shardids.migrate.runner import TRANSIENT, Observer, RunSettings
from shardids.pg.reader import HINT, has_reader, install_reader

log = logger("install")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The catalog or a node, with the revision it is at and the newest of its tree."""

    tree: Tree
    name: str
    revision: str
    newest: str

    @property
    def is_current(self) -> bool:
        """Returns whether it is at the newest revision."""
        return self.revision == self.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """What :func:`upgrade` did: the catalog and the nodes as they were, and the run over the shards."""

    targets: tuple[Target, ...]
    shards: RunReport


def targets(catalog: Catalog, nodes: Nodes) -> list[Target]:
    """Return the revisions of the catalog and the nodes, the catalog first.

    Raises:
        ClusterConflict: one was installed by a newer shardids.
        ConnectionFailed: the catalog or a node is down.
    """
    found = nodes.each(lambda name, engine: _target(engine, "node", name)).all()
    return [_target(catalog.engine, "catalog", "catalog"), *(found[name] for name in sorted(found))]


def _target(engine: Engine, tree: Tree, name: str) -> Target:
    with engine.connect() as connection:
        revision = trees.current(connection, tree)
    trees.require_known(tree, "the catalog" if tree == "catalog" else f'node "{name}"', revision)
    return Target(tree=tree, name=name, revision=revision, newest=trees.head(tree))


def upgrade(
    catalog: Catalog,
    settings: RunSettings,
    observer: Observer,
    stop: Event,
    on_target: Callable[[Target], None] = lambda _target: None,
    *,
    leases: Leases,
) -> Upgraded:
    """Bring the catalog, each node and then every shard to this version's newest revisions.

    Each runs in a separate transaction, with the lock timeout and retries of ``settings``. Idempotent:
    objects that are up to date are skipped. ``leases`` are those of :func:`shardids.migrate.runner.one_run`.

    Raises:
        ClusterConflict: an object was installed by a newer shardids.
        ConnectionFailed, StatementFailed: the catalog or a node failed; no shard was changed.
    """
    description = catalog.describe()
    with Nodes(catalog.nodes(), catalog.url, application_name=APPLICATION_NAME) as nodes:
        before = targets(catalog, nodes)
        for target in before:
            if target.is_current:
                continue
            engine = catalog.engine if target.tree == "catalog" else nodes[target.name]
            _retrying(settings)(_upgrade_target, engine, target, description, settings)
            on_target(target)
        nodes.each(_give_reader).all()
    with Migration(catalog, own_shards()) as migration:
        if not migration.placement.node_of:
            return Upgraded(targets=tuple(before), shards=RunReport(outcomes=(), seconds=0.0))
        prepared = prepare_shards(migration)
        # The revisions of shardids' own tables decide themselves which rows they keep.
        report = migration.run(prepared, settings, observer, stop, leases, allowed=None)
        return Upgraded(targets=tuple(before), shards=report)


def own_shards() -> Environment:
    """Return the tree of the shards' own objects, as an environment that runs like an application's."""
    return Environment(trees.tree_config("shard"), OWN_VERSION_TABLE, body=run_environment)


def prepare_shards(migration: Migration) -> PreparedRun:
    """Plan the run over the shards. Their nodes must be up to date."""
    return migration.prepare("head", "up", migration.choose(), contract=True)


def shards_behind(catalog: Catalog) -> list[int]:
    """Return the shards whose own objects are not of this version. Their nodes must be up to date.

    Raises:
        UnknownShard: a node lacks a shard that the catalog places there.
        ConnectionFailed: a node is down.
    """
    with Migration(catalog, own_shards()) as migration:
        pending = prepare_shards(migration).plan.pending if migration.placement.node_of else ()
    return sorted(one.shard for one in pending)


def _upgrade_target(engine: Engine, target: Target, description: Description, settings: RunSettings) -> None:
    values = trees.layout_settings(description.layout, description.schema_prefix)
    values |= {
        "cluster": str(description.cluster),
        "node": target.name,
        "shard_count": str(description.shard_count),
    }
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql(f"set local lock_timeout = {int(settings.limits.lock_timeout_ms)}")
        trees.upgrade(connection, target.tree, values)


def _give_reader(name: str, engine: Engine) -> None:
    with engine.connect() as connection, connection.begin():
        if has_reader(connection):
            return
        if fault := install_reader(connection):
            log.warning('node "%s" has no reader: %s. %s', name, fault, HINT)


def _retrying(settings: RunSettings) -> Retrying:
    return Retrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, ShardidsError) and error.sqlstate in TRANSIENT
        ),
        stop=stop_after_attempt(settings.retries + 1),
        wait=wait_random_exponential(multiplier=settings.first_pause_s, max=settings.longest_pause_s),
        reraise=True,
    )
