"""Gives new shards the application's tables, at the others' revision, before the catalog routes to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from shardids.catalog.rows import Catalog
from shardids.errors import ShardidsError
from shardids.migrate.compiled import Compiler
from shardids.migrate.environment import Environment
from shardids.migrate.lint import require_own_schema
from shardids.migrate.migration import Migration
from shardids.migrate.node_revisions import require_migrated
from shardids.migrate.plan import Heads
from shardids.migrate.player import Limits, Player
from shardids.migrate.status import read_node

MigrateNew = Callable[[str, Sequence[int]], None]
"""Brings new shards of a node to the cluster's revision."""


@contextmanager
def migrator_of_new_shards(catalog: Catalog, environment: Environment) -> Iterator[MigrateNew]:
    """Yields what :func:`shardids.install.provision.create_shards` takes as ``migrate``.

    The cluster's revision is the one that most of its shards are at or, without shards, the code's newest.

    Raises:
        BadArgument: the code lacks that revision, or has several heads.
        ConnectionFailed: a node that owns shards is down.
    """
    with Migration(catalog, environment) as migration:
        target = cluster_revision(migration)
        compiler = Compiler(environment, "up")

        def migrate(name: str, shards: Sequence[int]) -> None:
            if target == "base":
                return
            engine = migration.nodes[name]
            require_migrated(environment, name, engine)
            positions = read_node(name, engine, environment.version_table)
            player_of_node = Player(engine, environment.version_table, Limits(), environment)
            with closing(player_of_node) as player:
                for shard in shards:
                    position = positions[shard]
                    if isinstance(position, ShardidsError):
                        raise position
                    route = environment.route(position.heads, target, "up")
                    if not route.is_empty:
                        compiled = compiler.compile(route)
                        require_own_schema(environment, [compiled])
                        player.play(position, compiled)

        yield migrate


def cluster_revision(migration: Migration) -> str:
    """Returns the revision that new shards should be at. Raises as :func:`migrator_of_new_shards` does."""
    environment = migration.environment
    state = migration.state(list(migration.placement.node_of))
    for error in state.down.values():
        raise error
    counts: Counter[Heads] = Counter(position.heads or () for position in state.positions.values())
    if not counts:
        return environment.head()
    heads = max(counts, key=lambda found: (counts[found], len(environment.ancestors(found))))
    if not heads:
        return "base"
    return environment.revision(heads[0]).revision if len(heads) == 1 else environment.head()
