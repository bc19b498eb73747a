"""A development cluster of embedded servers: one server per node, the catalog on the first."""

from __future__ import annotations

import shlex
import string
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shardids.catalog.query_node import query_node_of
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, ServerStartFailed
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import EmbeddedServer
from shardids.pg.notation import counted
from shardids.tables import views

MOST_NODES = len(string.ascii_lowercase)
FIRST = string.ascii_lowercase[0]
"""The first node, which has the catalog and is the query node."""
NODES = 2
"""How many servers a new cluster gets, unless the caller says otherwise."""
SHARDS = 64
"""How many logical shards a new cluster gets, unless the caller says otherwise."""


def create_cluster(
    servers: Sequence[EmbeddedServer],
    shard_count: int | None,
    *,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> str:
    """Create a cluster on running servers and return the catalog's URL.

    The nodes are named ``a``, ``b`` … in the order of the servers. ``shard_count`` defaults to that of the
    cluster which is there, or to :data:`SHARDS`. ``on_progress`` is called with the number of shards that
    were created and of those to create, from several threads. Idempotent. Raises what ``init``, ``node add``
    and ``shard create`` raise.
    """
    catalog = Catalog(servers[0].url())
    totals: list[int] = []
    created: list[int] = []

    def note(_node: str, count: int) -> None:
        created.append(count)
        on_progress(sum(created), sum(totals))

    try:
        if shard_count is None:
            shard_count = _shard_count(catalog)
        provision.init(catalog, DEFAULT, shard_count)
        for name, server in zip(string.ascii_lowercase, servers, strict=False):
            provision.add_node(catalog, name, server.url())
        provision.create_shards(
            catalog,
            range(shard_count),
            on_plan=lambda counts: totals.extend(counts.values()),
            on_progress=note,
        )
        # Their passwords are random, and in files beside the servers.
        if query_node_of(catalog) is None:
            views.create_query_node(catalog, node=FIRST, store_password=True)
        else:
            views.refresh_query_node(catalog)
    finally:
        catalog.close()
    return servers[0].url()


def _shard_count(catalog: Catalog) -> int:
    try:
        return catalog.describe().shard_count
    except ClusterConflict:  # No catalog yet.
        return SHARDS


def up(
    folder: Path,
    node_count: int | None = None,
    shard_count: int | None = None,
    *,
    port: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, EmbeddedServer]:
    """Create the cluster of a folder, or start the one there; its servers outlive this process.

    Args:
        folder: the cluster's folder.
        node_count: number of servers; by default as many as there are, or :data:`NODES`.
        shard_count: number of logical shards; by default as many as there are, or :data:`SHARDS`.
        port: the first server's port, which the others' follow; by default each keeps its own, a free one.
        on_progress: see :func:`create_cluster`.

    Raises:
        BadArgument: ``node_count`` is not in 1 … 26, or a port not in 1 … 65535.
        ClusterConflict: the folder holds a cluster with another number of nodes or shards.
        ServerStartFailed: a server cannot be started.
    """
    node_count = checked_count(folder, node_count, shard_count, port=port)
    running = {name for name, server in servers_in(folder).items() if server.is_running}
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)

    def start(number: int) -> EmbeddedServer:
        wanted = None if port is None else port + number
        server = EmbeddedServer.create(folder / names[number], port=wanted)
        server.start(attached=False)
        return server

    names = string.ascii_lowercase[:node_count]
    try:
        with ThreadPoolExecutor(node_count) as pool:
            servers = list(pool.map(start, range(node_count)))
        if shard_count is not None:
            _require_shards(folder, servers[0], shard_count)
        create_cluster(servers, shard_count, on_progress=on_progress)
    except BaseException:
        if is_new:
            down(folder, remove=True)
        else:
            for name, one in servers_in(folder).items():
                if name not in running:
                    one.stop()
        raise
    return dict(zip(names, servers, strict=True))


def checked_count(
    folder: Path, node_count: int | None = None, shard_count: int | None = None, *, port: int | None = None
) -> int:
    """Return the number of servers that :func:`up` starts. Nothing is changed.

    The number of shards of a cluster whose servers are stopped is not looked at.

    Raises:
        BadArgument, ClusterConflict: as :func:`up` does.
    """
    there = servers_in(folder)
    node_count = node_count if node_count is not None else len(there) or NODES
    if not 1 <= node_count <= MOST_NODES:
        raise BadArgument(f"a cluster of {node_count} nodes can't be made here", hint="1 to 26 can.")
    if port is not None and not 1 <= port <= 65536 - node_count:
        raise BadArgument(f"ports from {port} on can't be used", hint=f"1 to {65536 - node_count} can.")
    if there and len(there) != node_count:
        raise _other_size(folder, counted(len(there), "node"), node_count)
    if shard_count is not None and (first := there.get(FIRST)) is not None and first.is_running:
        _require_shards(folder, first, shard_count)
    return node_count


def _require_shards(folder: Path, first: EmbeddedServer, wanted: int) -> None:
    """Require that the cluster on a running server, if any, has so many shards."""
    catalog = Catalog(first.url())
    try:
        found = catalog.describe().shard_count
    except ClusterConflict:  # No catalog yet.
        return
    finally:
        catalog.close()
    if found != wanted:
        raise _other_size(folder, counted(found, "shard"), wanted)


def _other_size(folder: Path, has: str, wanted: int) -> ClusterConflict:
    return ClusterConflict(
        f"{folder} holds a cluster of {has}, not {wanted}",
        hint="To make another beside it: shardids dev up --dir OTHER. To remove this one and its data:"
        f" shardids dev down --dir {shlex.quote(str(folder))} --remove",
    )


def servers_in(folder: Path) -> dict[str, EmbeddedServer]:
    """Return the servers of a folder by node name, running or not, without those never set up completely."""
    found_here = {}
    for name in string.ascii_lowercase:
        with suppress(ServerStartFailed):
            found_here[name] = EmbeddedServer.open(folder / name)
    return found_here


def down(folder: Path, *, remove: bool) -> list[str]:
    """Stop the servers of a folder and, with ``remove``, delete their data; return the nodes' names."""
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
