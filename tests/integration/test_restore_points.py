"""Restore points: two servers that are restored to one hold no half of a transaction on both."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread

import pytest

from shardids import Cluster
from shardids.catalog.topology import Node
from shardids.errors import BadArgument, ClusterConflict, MissingPrivilege
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.urls import parse_url
from shardids.tables.transactions import create_restore_point, listed, resolve
from shardids.testing import devcluster
from tests.support.backups import base_backup, finish_segment, is_archived, restored, start_archiving
from tests.support.clusters import catalog_at
from tests.support.faults import connect
from tests.support.standbys import public_folder
from tests.support.transfers import Entry, open_bank, require_whole, transfer
from tests.support.waiting import wait_for


class Payer:
    """A client that moves money between two nodes, again and again."""

    def __init__(self, url: str, names: dict[str, list[str]], number: int) -> None:
        self._url, self._names, self._number = url, names, number
        self._stop = Event()
        self.begun: list[str] = []
        self.acknowledged: list[str] = []
        self.errors: list[BaseException] = []
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        try:
            with Cluster.connect(self._url, listen=False) as cluster:
                while not self._stop.is_set():
                    token = f"{self._number}/{len(self.begun)}"
                    self.begun.append(token)
                    source, target = (self._names[node][self._number] for node in random.sample("ab", 2))
                    with cluster.sharded_session(twophase=True) as session, session.begin():
                        transfer(session, source, target, token)
                    self.acknowledged.append(token)
        except BaseException as error:
            self.errors.append(error)
            raise

    def __enter__(self) -> Payer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.errors == []


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, EmbeddedServer]]:
    with temporary_servers(2) as both:
        found = dict(zip("ab", both, strict=True))
        for name, server in found.items():
            start_archiving(server, folder / f"archive-{name}")
        yield found


def tokens(cluster: Cluster) -> set[str]:
    with cluster.sharded_session() as session:
        return {entry.transfer for entry in session.query(Entry)}


@pytest.mark.long
def test_two_nodes_restored_to_a_point_hold_no_half_transaction(
    servers: dict[str, EmbeddedServer], folder: Path
) -> None:
    url = devcluster.create_cluster(list(servers.values()), 8)
    with Cluster.connect(url) as cluster, ExitStack() as stack:
        names = open_bank(cluster)
        for name, server in servers.items():
            base_backup(server, folder / f"data-{name}")
        doubtful = cluster.sharded_session(twophase=True)
        transfer(doubtful, names["a"][3], names["b"][3], "in doubt")
        doubtful.prepare()
        payers = [stack.enter_context(Payer(url, names, number)) for number in range(3)]
        wait_for(lambda: all(len(payer.acknowledged) > 5 for payer in payers), "money moves")
        before = {token for payer in payers for token in payer.acknowledged}
        with catalog_at(url) as catalog:
            point = create_restore_point(catalog, "midday")
        after = {f"{payer._number}/{number}" for payer in payers for number in range(len(payer.begun), 9999)}
        assert set(point.positions) == {"a", "b"}
        counts = [len(payer.acknowledged) for payer in payers]
        wait_for(
            lambda: all(len(p.acknowledged) > count + 5 for p, count in zip(payers, counts, strict=True)),
            "more money moves",
        )
        doubtful.rollback()
        stack.close()
    for name, server in servers.items():
        segment = finish_segment(server)
        wait_for(lambda: is_archived(server, folder / f"archive-{name}", segment), "the log is archived")  # noqa: B023 -- called at once
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(
                restored(server, folder, folder / f"data-{name}", folder / f"archive-{name}", "midday")
            )
            for name, server in servers.items()
        }
        with catalog_at(urls["a"]) as catalog:
            for name, there in urls.items():
                catalog.point_node(Node(name=name, url=there))
            # The point is between decisions: what is prepared is of transactions that were not decided yet.
            assert {str(one.decision) for one in listed(catalog).doubts} == {"none yet"}
            assert {one.result for one in resolve(catalog, older_than_s=0).outcomes} == {"rolled back"}
        with Cluster.connect(urls["a"]) as cluster:
            assert require_whole(cluster) > 0
            found = tokens(cluster)
            assert before <= found
            assert not after & found
            assert "in doubt" not in found
            with cluster.sharded_session(twophase=True) as session, session.begin():
                transfer(session, names["a"][0], names["b"][0], "after the restore")
            require_whole(cluster)


def test_a_role_without_the_right_is_told_which(servers: dict[str, EmbeddedServer]) -> None:
    url = devcluster.create_cluster(list(servers.values()), 8)
    with connect(url) as admin:
        admin.execute("create role plain login password 'plain'")
        admin.execute("select shardids_catalog.grant_usage('plain')")
        admin.execute("grant select on shardids_catalog.move, shardids_catalog.loss to plain")
    with (
        catalog_at(parse_url(url).set(username="plain", password="plain")) as catalog,
        pytest.raises(MissingPrivilege, match='role "plain" may not create restore points') as refused,
    ):
        create_restore_point(catalog, "never")
    assert "GRANT EXECUTE ON FUNCTION pg_create_restore_point(text)" in refused.value.hint


def test_a_restore_point_is_refused_while_a_decision_hangs(
    servers: dict[str, EmbeddedServer], folder: Path
) -> None:
    url = devcluster.create_cluster(list(servers.values()), 8)
    with catalog_at(url) as catalog:
        for name in ("", "a b", "x" * 64):
            with pytest.raises(BadArgument):
                create_restore_point(catalog, name)
        with connect(servers["b"].url()) as client:
            client.execute("begin")
            client.execute("select shardids.decide(%s)", [b"x" * 32])
            with pytest.raises(ClusterConflict, match=r'node "b".*no restore point was created'):
                create_restore_point(catalog, "never", within_s=0.2)
            client.execute("rollback")
        assert set(create_restore_point(catalog, "trial", dry_run=True).positions) == {"a", "b"}
        with Cluster.connect(url) as cluster:
            # Decisions go on.
            assert len(cluster.placement.nodes) == 2
        with connect(servers["b"].url()) as client:
            client.execute("select shardids.decide(%s)", [b"y" * 32])
