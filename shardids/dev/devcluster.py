"""A development cluster of embedded servers: one server per node, the catalog on the first."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shardids.catalog.rows import Catalog
from shardids.dev.embedded import EmbeddedServer
from shardids.errors import BadArgument, ClusterConflict, ServerStartFailed
from shardids.ids.layout import DEFAULT, Layout
from shardids.install import provision

MOST_NODES = len(string.ascii_lowercase)


def found(
    servers: Sequence[EmbeddedServer],
    shard_count: int,
    *,
    layout: Layout = DEFAULT,
    on_progress: Callable[[str, int], None] = lambda _node, _count: None,
) -> str:
    """Creates a cluster on running servers and returns the catalog's URL.

    The nodes are named ``a``, ``b`` … in the order of the servers. Idempotent. Raises what ``init``,
    ``node add`` and ``shard create`` raise.
    """
    catalog = Catalog(servers[0].url())
    try:
        provision.init(catalog, layout, shard_count)
        for name, server in zip(string.ascii_lowercase, servers, strict=False):
            provision.add_node(catalog, name, server.url())
        provision.create_shards(catalog, range(shard_count), on_progress=on_progress)
    finally:
        catalog.close()
    return servers[0].url()


def up(folder: Path, node_count: int, shard_count: int) -> dict[str, EmbeddedServer]:
    """Creates the cluster of a folder, or starts the one there; its servers outlive this process.

    Raises:
        BadArgument: ``node_count`` is not in 1 … 26.
        ClusterConflict: the folder holds a cluster with another number of nodes or shards.
        ServerStartFailed: a server cannot be started.
    """
    if not 1 <= node_count <= MOST_NODES:
        raise BadArgument(f"a cluster of {node_count} nodes can't be made here", hint="1 to 26 can.")
    there = servers_in(folder)
    if there and len(there) != node_count:
        raise ClusterConflict(
            f"{folder} holds a cluster of {len(there)} nodes, not {node_count}",
            hint="Take it down first with: shardids dev down --remove",
        )
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)

    def start(name: str) -> EmbeddedServer:
        server = EmbeddedServer.create(folder / name)
        server.start(attached=False)
        return server

    names = string.ascii_lowercase[:node_count]
    try:
        with ThreadPoolExecutor(node_count) as pool:
            servers = list(pool.map(start, names))
        found(servers, shard_count)
    except BaseException:
        if is_new:
            down(folder, remove=True)
        raise
    return dict(zip(names, servers, strict=True))


def servers_in(folder: Path) -> dict[str, EmbeddedServer]:
    """Returns the servers of a folder by node name, running or not, without those never set up completely."""
    found_here = {}
    for name in string.ascii_lowercase:
        with suppress(ServerStartFailed):
            found_here[name] = EmbeddedServer.open(folder / name)
    return found_here


def down(folder: Path, *, remove: bool) -> list[str]:
    """Stops the servers of a folder and, with ``remove``, deletes their data; returns the nodes' names."""
    servers = servers_in(folder)
    for server in servers.values():
        if remove:
            server.remove()
        else:
            server.stop()
    if remove and folder.is_dir():
        for name in string.ascii_lowercase:
            # A start that was killed early leaves an empty folder. One with files belongs to somebody else.
            with suppress(OSError):
                (folder / name).rmdir()
        with suppress(OSError):
            folder.rmdir()
    return list(servers)
