"""The doctor measures how far the clocks of servers are apart, and sees ticks that a clock has left ahead."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from shardids import Cluster, mover
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, MoveFailed
from shardids.migrate.environment import Environment
from shardids.migrate.migration import Migration
from shardids.migrate.runner import Observer, RunSettings, one_run
from shardids.pg.embedded import EmbeddedServer, temporary_server, temporary_servers
from shardids.tables.views import drop_query_node, refresh_query_node
from shardids.testing.devcluster import create_cluster
from shardids.watch import doctor
from shardids.watch.doctor.findings import Severity
from tests.faults.conftest import Report
from tests.support.application import TABLES, Application
from tests.support.faults import connect, scalar, scaled
from tests.support.moves import TwoNodes, two_nodes
from tests.support.server_clock import Clock
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for


def test_clocks_that_are_apart(clock: Clock) -> None:
    with temporary_server() as server, temporary_server(env=clock.env) as faked:
        catalog = Catalog(create_cluster([server, faked], 2))
        try:
            assert doctor.examine(catalog).findings == ()
            for seconds, ahead, behind in ((5.5, "b", "a"), (-1.5, "a", "b"), (-3600.25, "a", "b")):
                clock.set(seconds)
                (finding,) = doctor.examine(catalog, ["clocks-apart"]).findings
                assert finding.nodes == (ahead, behind)
                measured = re.search(r"is ([\d.]+) s ± ([\d.]+) ms ahead", finding.what)
                assert measured is not None
                apart_s, error_ms = map(float, measured.groups())
                # The clock that is faked is read once a millisecond or so.
                assert abs(apart_s - abs(seconds)) < error_ms / 1000 + 0.01
                assert error_ms < 100
            clock.set(300)
            with connect(faked.url()) as connection:
                connection.execute("select shard_0001.next_id()")
            clock.set(0)
            (finding,) = doctor.examine(catalog).findings
            assert (finding.check, finding.nodes, finding.shards) == ("ticks-ahead", ("b",), (1,))
        finally:
            catalog.close()


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server of the test's own, with shard 0."""
    with temporary_server() as server:
        create_cluster([server], 1)
        yield server


def test_a_standby_in_place_of_its_primary(own_server: EmbeddedServer) -> None:
    catalog = Catalog(own_server.url())
    try:
        # It would read the primary still, until it is refreshed.
        drop_query_node(catalog)
        with (
            standby_of(own_server) as copy,
            connect(own_server.url()) as primary,
            connect(copy.url()) as standby,
        ):
            url = copy.url()
            primary.execute("update shardids_catalog.node set url = %s", [url])
            there = "select count(*) from shardids_catalog.node where url = %s"
            wait_for(lambda: scalar(standby, there, url), "the standby has it")
            (finding,) = doctor.examine(catalog).findings
            assert (finding.check, finding.nodes) == ("node-read-only", ("a",))
            standby.execute("select pg_promote()")
            primary.execute("select shardids.fence(0)")
            assert doctor.examine(catalog).findings == ()
            standby.execute("select shard_0000.next_id()")
            assert doctor.examine(catalog).findings == ()
    finally:
        catalog.close()


SHARDS = 8
EXAMINATIONS = scaled(12, 200)
REVISIONS = {
    "one": ("None", "op.create_table('albums', key_column())", "op.drop_table('albums')"),
    "two": (
        "'one'",
        "op.add_column('photos', sa.Column('likes', sa.Integer, server_default='0', nullable=False))",
        "op.drop_column('photos', 'likes')",
    ),
    # In parts: nothing may take the index that is being built for a broken one.
    "three": (
        "'two'",
        "with op.get_context().autocommit_block():\n"
        "        op.create_index('photos_likes', 'photos', ['likes'], postgresql_concurrently=True)",
        "with op.get_context().autocommit_block():\n"
        "        op.drop_index('photos_likes', postgresql_concurrently=True)",
    ),
}
REVISION = """
import sqlalchemy as sa
from alembic import op
from shardids.migrate import key_column

revision, down_revision = {name!r}, {after}


def upgrade():
    {up}


def downgrade():
    {down}
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text("from shardids.migrate import run_environment\n\nrun_environment()\n")
    for name, (after, up, down) in REVISIONS.items():
        text = REVISION.format(name=name, after=after, up=up, down=down)
        (tmp_path / "versions" / f"{name}.py").write_text(text)
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard, node in nodes.catalog.placement().node_of.items():
            with nodes.connected(node) as connection:
                connection.execute(TABLES.replace("{s}", f"shard_{shard:04}").encode())
        yield nodes
        nodes.catalog.close()


def migrate(nodes: TwoNodes, folder: Path, target: str, direction: Literal["up", "down"]) -> None:
    """Brings every shard there in one run, which catches up with shards whose move has ended."""
    with one_run(nodes.catalog, "up") as leases:
        while True:
            with Migration(nodes.catalog, Environment.at(folder)) as migration:
                prepared = migration.prepare(target, direction, migration.choose())
                settings, stop = RunSettings(retries=50), threading.Event()
                report = migration.run(prepared, settings, Observer(), stop, leases, allowed=None)
            if not report.of("not started"):
                break
    assert report.succeeded, [outcome.error for outcome in report.outcomes if outcome.error]


@contextmanager
def over_and_over(*works: Callable[[], None]) -> Iterator[Callable[[], tuple[int, ...]]]:
    """Repeats each work in a thread of its own; yields what tells how often each has ended."""
    stop, failures, rounds = threading.Event(), list[BaseException](), Counter[int]()

    def repeat(number: int, work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
                rounds[number] += 1
        except BaseException as failure:  # noqa: BLE001 -- raised again below
            failures.append(failure)

    def ended() -> tuple[int, ...]:
        for failure in failures:
            raise failure
        return tuple(rounds[number] for number in range(len(works)))

    threads = [threading.Thread(target=repeat, args=one, daemon=True) for one in enumerate(works)]
    for thread in threads:
        thread.start()
    try:
        yield ended
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    ended()


def test_a_cluster_at_work_gives_no_false_alarm(nodes: TwoNodes, tmp_path: Path, report: Report) -> None:
    """Writers, a move and a migration at once, all the time; the doctor comes over and over."""
    migrate(nodes, tmp_path, "one", "up")
    moved, interrupted = iter(range(10_000)), Counter[str]()

    def move() -> None:
        shard = next(moved) % SHARDS
        to = "b" if nodes.catalog.node_of(shard).name == "a" else "a"
        try:
            mover.move(nodes.catalog, shard, to, back=True)
        except (ClusterConflict, MoveFailed):
            # A revision had begun in the shard when the move was begun: somebody has to say what to do.
            interrupted["begun"] += 1
            mover.abort(nodes.catalog, shard)
            interrupted["ended"] += 1

    def up_and_down() -> None:
        migrate(nodes, tmp_path, "three", "up")
        migrate(nodes, tmp_path, "one", "down")

    examinations, seen, wrong = 0, Counter[str](), list[doctor.Finding]()
    with (
        Cluster.connect(nodes.catalog_url, pool_size=4) as cluster,
        Application(cluster, range(SHARDS), writers=4) as application,
        over_and_over(move, up_and_down) as ended,
    ):
        while examinations < EXAMINATIONS or min(ended()) < EXAMINATIONS // 4:
            ended_before = interrupted["ended"]
            findings = doctor.examine(nodes.catalog).findings
            expected = {"move-interrupted"} if interrupted["begun"] > ended_before else set[str]()
            wrong += [
                finding
                for finding in findings
                if finding.severity is not Severity.INFO and finding.check not in expected
            ]
            examinations += 1
            seen.update(finding.check for finding in findings)
            application.raise_failures()
        moves, migrations = ended()
    assert not wrong, "\n".join(f"{finding.check} {finding.shards}: {finding.what}" for finding in wrong)
    # The command that migrates does so itself.
    refresh_query_node(nodes.catalog)
    assert doctor.examine(nodes.catalog).is_well
    report(
        f"{examinations} examinations during {moves} moves and {2 * migrations} migrations under"
        f" {application.writes} writes: no false alarm; information: {dict(seen)}"
    )
