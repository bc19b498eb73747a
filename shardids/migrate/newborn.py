"""New shards get the application's tables, at the revision of the others, before anybody is sent there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shardids.catalog.rows import Catalog
from shardids.migrate.compiled import Compiler
from shardids.migrate.environment import Environment
from shardids.migrate.plan import Heads
from shardids.migrate.player import Player
from shardids.migrate.state import migration_engine, read_node, read_state
from shardids.migrate.statements import Limits

Furnish = Callable[[str, Sequence[int]], None]
"""Takes shards of a node to the cluster's revision."""


@contextmanager
def furnisher(catalog: Catalog, environment: Environment) -> Iterator[Furnish]:
    """Gives what :func:`shardids.install.provision.create_shards` takes as ``furnish``.

    The cluster's revision is the one that most of its shards are at; the newest of the code, if it has none.

    Raises:
        BadArgument: that revision is not in the code, or the code has several heads.
        ConnectionFailed: a node that holds shards is down.
    """
    target = cluster_revision(catalog, environment)
    nodes = catalog.nodes()
    compiler = Compiler(environment, "up")

    def furnish(name: str, shards: Sequence[int]) -> None:
        if target == "base":
            return
        with ExitStack() as stack:
            engine = migration_engine(nodes[name], catalog)
            stack.callback(engine.dispose)
            positions = read_node(catalog, nodes[name], environment.version_table)
            player = Player(engine, environment, Limits())
            stack.callback(player.close)
            for shard in shards:
                route = environment.route(positions[shard].heads, target, "up")
                if not route.is_empty:
                    player.play(positions[shard], compiler.compile(route))

    yield furnish


def cluster_revision(catalog: Catalog, environment: Environment) -> str:
    """The revision that new shards are to be at. Raises as :func:`furnisher` does."""
    placement = catalog.placement()
    state = read_state(catalog, placement, list(placement.node_of), environment.version_table)
    for error in state.down.values():
        raise error
    counts: Counter[Heads] = Counter(position.heads or () for position in state.positions.values())
    if not counts:
        return environment.head()
    heads = max(counts, key=lambda found: (counts[found], len(environment.ancestors(found))))
    if not heads:
        return "base"
    return environment.revision(heads[0]).revision if len(heads) == 1 else environment.head()
