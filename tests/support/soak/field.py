"""The cluster of a soak: three nodes, each behind a proxy, the catalog behind another, and standbys."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psycopg
from sqlalchemy.engine import make_url

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.errors import ClusterConflict, ConnectionFailed
from shardids.pg.embedded import temporary_servers
from shardids.testing.devcluster import create_cluster
from tests.support.faults import connect, scalar
from tests.support.moves import schema
from tests.support.proxy import Proxy
from tests.support.standbys import Server, Standby, standby_of
from tests.support.waiting import PATIENCE_S, wait_for

T = TypeVar("T")

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_prepared_transactions": "20",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_worker_processes": "24",
    "max_logical_replication_workers": "12",
}
READER = "soak_reader"
"""A role on all nodes, which a DBA grants things to."""


class Field:
    """Nodes a, b and c. The catalog names their proxies: so movers and subscriptions use them, too."""

    def __init__(self, servers: dict[str, Server], catalog_url: str, shards: int, kept: ExitStack) -> None:
        self.servers = servers
        self.shards = range(shards)
        self.catalog = Catalog(catalog_url)
        self._kept = kept
        self._standbys: dict[str, tuple[Standby, ExitStack]] = {}
        self._stacks: dict[str, ExitStack] = {}
        self.proxies = {name: self._proxy(server.url()) for name, server in servers.items()}
        self.proxies["catalog"] = self._proxy(catalog_url)
        self.catalog_url = through(self.proxies["catalog"], catalog_url)
        for name, server in servers.items():
            with self.connected(name) as connection:
                connection.execute(f"create role {READER}")
            self.catalog.point_node(Node(name=name, url=through(self.proxies[name], server.url())))

    @classmethod
    @contextmanager
    def opened(cls, shards: int) -> Iterator[Field]:
        with ExitStack() as kept:
            servers = kept.enter_context(temporary_servers(3, settings=SETTINGS))
            url = create_cluster(servers, shards)
            field = cls(dict(zip("abc", servers, strict=True)), url, shards, kept)
            kept.callback(field.catalog.close)
            yield field

    def _proxy(self, url: str) -> Proxy:
        return self._kept.enter_context(Proxy(make_url(url).port or 5432))

    @contextmanager
    def connected(self, node: str) -> Iterator[psycopg.Connection]:
        """A connection that no proxy disturbs, for tests only."""
        with patiently(lambda: connect(self.servers[node].url())) as connection:
            yield connection

    def url(self, node: str) -> str:
        """The node's address as the catalog names it."""
        return through(self.proxies[node], self.servers[node].url())

    def owner(self, shard: int) -> str:
        return patiently(lambda: self.catalog.node_of(shard).name)

    def open_moves(self, shards: Iterable[int] | None = None) -> list[mover.Move]:
        return patiently(lambda: mover.open_moves(self.catalog, shards))

    def former_node(self, shard: int) -> str | None:
        """The node that a shard was last moved away from."""
        try:
            return patiently(lambda: mover.former_node(self.catalog, shard))
        except ClusterConflict:
            return None

    def protect(self, node: str) -> None:
        """Gives a node a standby that has every transaction before it is acknowledged."""
        stack = self._kept.enter_context(ExitStack())
        standby = stack.enter_context(standby_of(self.servers[node]))
        with self.connected(node) as primary:
            primary.execute("alter system set synchronous_standby_names = 'walreceiver'")
            primary.execute("select pg_reload_conf()")
            is_there = "select count(*) from pg_stat_replication where sync_state = 'sync'"
            wait_for(lambda: scalar(primary, is_there), "the standby is synchronous")
        self._standbys[node] = (standby, stack)

    def is_protected(self, node: str) -> bool:
        return node in self._standbys

    def lose(self, node: str) -> str:
        """Kills a node's server and promotes its standby; the address to be put in its place."""
        standby, stack = self._standbys.pop(node)
        self.servers[node].kill()
        with connect(standby.url()) as promoting:
            assert scalar(promoting, "select pg_promote()")
        if node in self._stacks:  # The lost server was itself a standby once.
            self._stacks.pop(node).close()
        self._stacks[node] = stack
        self.servers[node] = standby
        self.proxies[node] = self._proxy(standby.url())
        return self.url(node)

    def leftovers(self) -> list[str]:
        """Slots, publications, subscriptions and prepared transactions on all nodes."""
        create_cluster = []
        for node in self.servers:
            with self.connected(node) as connection:
                rows = connection.execute(
                    """select slot_name::text from pg_replication_slots
                       union all select pubname from pg_publication
                       union all select subname from pg_subscription
                       union all select roname from pg_replication_origin
                       union all select gid from pg_prepared_xacts"""
                )
                create_cluster += [f"{name} on {node}" for (name,) in rows]
        return create_cluster

    def keep_evidence(self, folder: Path) -> None:
        """Writes down what each server is doing, and the end of its log, for who has to explain a failure."""
        for node, server in self.servers.items():
            lines = [f"node {node}", *server.log_file.read_text(errors="replace").splitlines()[-4000:]]
            with suppress(psycopg.Error), connect(server.url()) as connection:
                for query in EVIDENCE:
                    rows = connection.execute(query).fetchall()
                    lines += ["", query, *map(str, rows)]
            (folder / f"evidence-{node}").write_text("\n".join(lines), encoding="utf-8")


EVIDENCE = (
    "select pid, application_name, backend_type, state, wait_event_type, wait_event, xact_start::text,"
    " state_change::text, backend_xid, backend_xmin, left(query, 200) from pg_stat_activity",
    "select * from pg_prepared_xacts",
    "select slot_name, active, active_pid, xmin, catalog_xmin, restart_lsn::text, confirmed_flush_lsn::text,"
    " wal_status from pg_replication_slots",
    "select subname, pid, worker_type, relid::regclass::text, last_msg_receipt_time::text"
    " from pg_stat_subscription",
    "select srrelid::regclass::text, srsubstate, srsublsn::text from pg_subscription_rel",
    "select subname, apply_error_count, sync_error_count from pg_stat_subscription_stats",
    "select pid, locktype, relation::regclass::text, mode, granted, classid, objid from pg_locks",
    "select id, state, arrived, moved_to from shardids.shard",
    "select pid, application_name, state, sync_state from pg_stat_replication",
)


def patiently(ask: Callable[[], T]) -> T:
    """What it returns as soon as the server answers."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except (ConnectionFailed, psycopg.OperationalError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def through(proxy: Proxy, url: str) -> str:
    """The URL with a proxy's address."""
    there = make_url(url).set(host="127.0.0.1", port=proxy.port)
    return there.render_as_string(hide_password=False)


def table(shard: int, name: str) -> str:
    return f"{schema(shard)}.{name}"


def folder_in(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder
