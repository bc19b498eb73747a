"""A clock that went months ahead: confirmed if it is right; if it was wrong, its shards are brought back."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import psycopg
import pytest

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClockUnconfirmed, ClusterConflict, ConnectionFailed
from shardids.migrate.install import provision
from shardids.mover import activate, clocks, failover
from shardids.mover.clocks import Plan, Work
from shardids.pg.embedded import EmbeddedServer, temporary_server
from shardids.watch import doctor
from shardids.watch.doctor.findings import Severity
from tests.conftest import dsn
from tests.support.clusters import command_here
from tests.support.faults import LAYOUT, Ids, connect, draw, scalar
from tests.support.server_clock import Clock
from tests.support.waiting import wait_for

Db = psycopg.Connection[Any]

MONTHS_S = 330 * 86_400.0
DRAWN = 2_000
KINDS = ("one", "many", "block", "reserve")


def set_clock(clock: Clock, db: Db, ahead_s: float) -> None:
    clock.set(ahead_s)

    def is_set() -> bool:
        there = scalar(db, "select extract(epoch from clock_timestamp())::double precision")
        return bool(abs(there - time.time() - ahead_s) < 5)

    wait_for(is_set, f"the server's clock is stepped by {ahead_s} s")


def own_database(server: EmbeddedServer, name: str) -> str:
    """A database whose URL the catalog can keep for libpq."""
    with connect(server.url()) as admin:
        admin.execute(f"create database {name} template template0")
    return server.url(name)


@pytest.fixture
def nodes(faked_server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Catalog]:
    """A cluster of two nodes on the server with the faked clock, shards 0 and 1 on node a; 2 by ``param``."""
    catalog = Catalog(own_database(faked_server, "catalog"))
    provision.init(catalog, LAYOUT, getattr(request, "param", 2))
    for name in "ab":
        provision.add_node(catalog, name, own_database(faked_server, f"node_{name}"))
    provision.create_shards(catalog, [0, 1], node="a")
    with connect(catalog.nodes()["a"].url) as db:
        for shard in (0, 1):
            db.execute(
                f"create table shard_{shard:04}.t (id bigint primary key default shard_{shard:04}.next_id())"
            )
    yield catalog
    catalog.close()


def draw_all(db: Db, shard: int = 0, count: int = DRAWN) -> list[Ids]:
    cursor = db.cursor(binary=True)
    return [draw(cursor, kind, 1 if kind == "one" else count, shard) for kind in KINDS]


def assert_distinct(parts: list[Ids]) -> None:
    ids = np.concatenate(parts)
    assert len(np.unique(ids)) == len(ids)


def small_lead(db: Db) -> None:
    db.execute("update shardids.node set max_ahead = '1 minute', max_past = '1 minute'")


def jump(clock: Clock, db: Db, shard: int = 0) -> list[Ids]:
    """The clock is months ahead for some draws, and comes back."""
    set_clock(clock, db, MONTHS_S)
    parts = draw_all(db, shard)
    set_clock(clock, db, 0)
    with pytest.raises(psycopg.Error) as refused:
        draw(db.cursor(binary=True), "one", 1, shard)
    assert refused.value.sqlstate == "SI005"
    return parts


@contextmanager
def machine_at(ahead_s: float) -> Iterator[None]:
    """This machine's clock, which nodes' are compared with, shows another time."""
    with pytest.MonkeyPatch.context() as patch:
        shown = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
        patch.setattr("shardids.pg.clock.time", shown)
        yield


def reset(catalog: Catalog, shard: int = 0) -> Plan:
    done = clocks.reset_clock(catalog, shard)
    assert (done.work, dict(done.unreachable)) == (Work.RESET, {})
    assert done.plan is not None
    return done.plan


def pass_over(clock: Clock, db: Db, plan: Plan) -> list[Ids]:
    """Draws up to the range, over it and past it."""
    parts = []
    begins_s = plan.first.timestamp() - time.time()
    for at_s in (begins_s - 65, begins_s - 30, begins_s - 3):
        set_clock(clock, db, at_s)
        parts += draw_all(db)
    end = time.monotonic() + 6
    while time.monotonic() < end:
        parts += draw_all(db, count=200)
    set_clock(clock, db, begins_s + 120)
    return parts + draw_all(db)


def body(db: Db, shard: int = 0) -> str:
    return str(scalar(db, f"select pg_get_function_sqlbody('shard_{shard:04}.next_id()'::regprocedure)"))


def in_range(parts: list[Ids], plan: Plan) -> int:
    """How many IDs have ticks of the range."""
    first, last = plan.skipped.ids(LAYOUT)
    ids = np.concatenate(parts)
    return int(np.count_nonzero((ids >= first) & (ids <= last)))


def test_a_shard_comes_back_and_passes_over_the_range(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        parts = draw_all(db)
        parts += jump(clock, db)
        (finding,) = doctor.examine(nodes, ["ticks-ahead"]).findings
        assert [command.text for command in finding.commands] == ["shardids shard reset-clock 0"]
        before = clocks.reset_clock(nodes, 0, dry_run=True)
        assert before.work is Work.RESET
        assert before.plan is not None
        with pytest.raises(psycopg.Error):
            draw(db.cursor(binary=True), "one", 1)
        plan = reset(nodes)
        assert plan.lead.days == 329
        assert plan.outage is None
        assert (plan.first, plan.skipped.first_tick) == (before.plan.first, before.plan.skipped.first_tick)
        back = draw_all(db)
        assert LAYOUT.decode(int(back[-1][-1])).time.timestamp() < time.time() + 70
        assert clocks.reset_clock(nodes, 0).work is Work.NOTHING
        assert not [f for f in doctor.examine(nodes).findings if f.shards and f.check != "schema-unrecorded"]
        assert "NULLIF" in body(db)
        later = pass_over(clock, db, plan)
        assert_distinct(parts + back + later)
        assert in_range(parts, plan) > DRAWN
        assert in_range(back + later, plan) == 0
        (slow,) = doctor.examine(nodes, ["slow-draws", "generator-changed"]).findings
        assert slow.check == "slow-draws"
        with machine_at(plan.last.timestamp() - time.time() + 120):
            set_clock(clock, db, plan.last.timestamp() - time.time() + 120)
            assert clocks.reset_clock(nodes, 0).work is Work.RELEASE
        assert "NULLIF" not in body(db)
        assert_distinct([*parts, *back, *later, *draw_all(db)])


def test_a_shard_passes_over_the_range_after_a_move(clock: Clock, nodes: Catalog) -> None:
    there = nodes.nodes()
    with connect(there["a"].url) as a, connect(there["b"].url) as b:
        for db in (a, b):
            small_lead(db)
        parts = draw_all(a)
        parts += jump(clock, a)
        plan = reset(nodes)
        mover.move(nodes, 0, "b", options=mover.Options(offline=True))
        assert "NULLIF" in body(b)
        parts += draw_all(b)
        assert not doctor.examine(nodes, ["generator-changed", "skipped-ticks"]).findings
        assert_distinct(parts + pass_over(clock, b, plan))


def test_a_range_longer_than_max_ahead_is_an_outage(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        parts = draw_all(db)
        set_clock(clock, db, MONTHS_S)
        parts += draw_all(db)
        set_clock(clock, db, MONTHS_S + 300)
        parts += draw_all(db)
        set_clock(clock, db, 0)
        plan = reset(nodes)
        assert plan.outage is not None
        begins, ends = plan.outage
        assert 200 < (ends - begins).total_seconds() < 260
        parts += draw_all(db)
        for at in (begins.timestamp() + 5, ends.timestamp() - 10):
            set_clock(clock, db, at - time.time())
            for kind in KINDS:
                with pytest.raises(psycopg.Error) as refused:
                    draw(db.cursor(binary=True), kind, 10)
                assert refused.value.sqlstate == "SI005"
        set_clock(clock, db, ends.timestamp() - time.time() + 2)
        parts += draw_all(db)
        set_clock(clock, db, ends.timestamp() - time.time() + 90)
        assert_distinct(parts + draw_all(db))


def test_a_stored_id_outside_of_the_range_refuses_it(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        set_clock(clock, db, MONTHS_S)
        stored = scalar(db, "insert into shard_0000.t default values returning id")
        set_clock(clock, db, MONTHS_S + 300)
        draw_all(db)
        set_clock(clock, db, 0)
        wrong = LAYOUT.decode(stored).time + timedelta(seconds=60)
        with pytest.raises(ClusterConflict, match=rf"shard_0000\.t\.id on node \"a\" has ID {stored}"):
            clocks.reset_clock(nodes, 0, since=wrong)
        assert scalar(db, "select state from shardids.shard where id = 0") == "active"
        assert scalar(db, "select count(*) from shardids.skipped") == 0
        # In another shard, as a reference to the row.
        db.execute(
            "alter table shard_0001.t add other bigint references shard_0001.t;"
            " create index on shard_0001.t (other);"
            f" insert into shard_0001.t (id) values ({stored}); delete from shard_0000.t"
        )
        with pytest.raises(ClusterConflict, match=r"shard_0001\.t\.id on node \"a\""):
            clocks.reset_clock(nodes, 0, since=wrong)
        reset(nodes)


def test_an_interrupted_reset_continues(clock: Clock, nodes: Catalog) -> None:
    there = nodes.nodes()
    catalog_url = there["a"].url.replace("node_a", "catalog")
    with connect(there["a"].url) as a, connect(there["b"].url) as b:
        small_lead(a)
        parts = draw_all(a)
        parts += jump(clock, a)
        # After the fence.
        a.execute("select shardids.fence(0)")
        # Before the activation, and with node b not reached.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardids.mover.clocks.resetting._activate", _killed)
            with pytest.raises(KeyboardInterrupt):
                clocks.reset_clock(nodes, 0)
        assert scalar(a, "select state from shardids.shard where id = 0") == "fenced"
        b.execute("delete from shardids.skipped")
        assert clocks.reset_clock(nodes, 0, dry_run=True).work is Work.ACTIVATE
        assert clocks.reset_clock(nodes, 0).work is Work.ACTIVATE
        assert scalar(b, "select count(*) from shardids.skipped where shard = 0") == 1
        parts += draw_all(a)
        assert_distinct(parts)
        # A node that lacks the range, and a catalog that does.
        for db, table in ((b, "shardids.skipped"), (connect(catalog_url), "shardids_catalog.skipped")):
            with db if db is not b else nullcontext():
                db.execute(f"delete from {table}")
                (finding, *_) = doctor.examine(nodes, ["skipped-ticks"]).findings
                assert [c.text for c in finding.commands] == ["shardids shard reset-clock 0 --yes"]
                assert clocks.reset_clock(nodes, 0).work is Work.NOTHING
        assert not doctor.examine(nodes, ["skipped-ticks"]).findings


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_transactions_that_may_have_the_old_function_are_waited_for(clock: Clock, nodes: Catalog) -> None:
    url = nodes.nodes()["a"].url
    with connect(url) as db, connect(url) as other, pytest.MonkeyPatch.context() as patch:
        small_lead(db)
        jump(clock, db)
        patch.setattr("shardids.mover.clocks.resetting._PATIENCE_S", 1.0)
        other.execute("begin; select 1")
        pid = other.info.backend_pid
        with pytest.raises(ClusterConflict, match=f"process {pid} of role") as refused:
            clocks.reset_clock(nodes, 0)
        assert "run it again" in refused.value.hint
        with pytest.raises(psycopg.Error, match="fenced"):
            draw(db.cursor(binary=True), "one", 1)
        other.execute("commit")
        assert clocks.reset_clock(nodes, 0).work is Work.ACTIVATE
        draw_all(db)


def test_a_transaction_that_drew_is_named(clock: Clock, nodes: Catalog) -> None:
    url = nodes.nodes()["a"].url
    with connect(url) as db, connect(url) as other:
        small_lead(db)
        other.execute("begin; select shard_0000.next_id()")
        jump(clock, db)
        with pytest.raises(ClusterConflict, match=f"have not ended: process {other.info.backend_pid}"):
            clocks.reset_clock(nodes, 0)
        other.execute("rollback")
        reset(nodes)


def test_what_is_refused(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        draw_all(db)
        with pytest.raises(BadArgument, match="there is nothing to reset"):
            clocks.reset_clock(nodes, 0)
        set_clock(clock, db, MONTHS_S)
        draw_all(db)
        with pytest.raises(
            ClusterConflict, match=r"clock of node \"a\" is .* s ± .* ms ahead of this machine"
        ):
            clocks.reset_clock(nodes, 0)
        with pytest.raises(ClusterConflict, match="ahead of this machine"):
            clocks.confirm_clock(nodes, "a")
        assert scalar(db, "select clock_confirmed_at from shardids.node") is None
        set_clock(clock, db, 0)
        for step in range(1, 5):
            db.execute(f"alter sequence shardids.step_{step} restart")
        with pytest.raises(BadArgument, match="is not recorded"):
            clocks.reset_clock(nodes, 0)
        since = datetime.fromtimestamp(time.time() + MONTHS_S - 600, UTC)
        done = clocks.reset_clock(nodes, 0, since=since)
        assert done.plan is not None
        assert abs(done.plan.first - since) < timedelta(seconds=1)
        draw_all(db)


def test_what_comes_later_gets_the_range(clock: Clock, nodes: Catalog, faked_server: EmbeddedServer) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        parts = jump(clock, db)
        plan = reset(nodes)
        provision.add_node(nodes, "c", own_database(faked_server, "node_c"))
        with connect(nodes.nodes()["c"].url) as c:
            assert scalar(c, "select first_tick from shardids.skipped") == plan.skipped.first_tick
        # IDs of the wrong clock raise no other shard.
        wrong = int(parts[0][0])
        assert scalar(db, f"select shardids.advance_past(1, {wrong})") is False
        # A copy from before the range: the activation gives its next_id() the limit.
        db.execute("select shardids.fence(0)")
        db.execute("delete from shardids.skipped")
        db.execute("select shardids.define_next_id(0, 'shard_0000')")
        assert "NULLIF" not in body(db)
        activate(nodes, 0)
        assert "NULLIF" in body(db)
        assert_distinct(parts + draw_all(db) + pass_over(clock, db, plan))


def test_a_node_that_slept_for_more_than_a_year(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        # The shards were made by the right clock: each gets one that is behind.
        set_clock(clock, db, 0)
        for shard in (0, 1):
            name = f"'shard_{shard:04}.id_offset'"
            db.execute(f"select setval({name}, pg_sequence_last_value({name}) - 400::bigint * 86400000)")
        for shard in (0, 1):
            with pytest.raises(psycopg.Error) as refused:
                draw(db.cursor(binary=True), "one", 1, shard)
            assert refused.value.sqlstate == "SI012"
        (finding,) = doctor.examine(nodes, ["clock-unconfirmed"]).findings
        assert [command.text for command in finding.commands] == ["shardids node confirm-clock a"]
        compared = clocks.confirm_clock(nodes, "a", dry_run=True)
        assert compared.is_with_this_machine_only
        assert set(compared.same_server) == {"the catalog", 'node "b"'}
        with pytest.raises(psycopg.Error):
            draw(db.cursor(binary=True), "one", 1)
        clocks.confirm_clock(nodes, "a")
        for shard in (0, 1):
            draw_all(db, shard)
        assert not doctor.examine(nodes, ["clock-unconfirmed"]).findings


def test_other_clocks_are_compared(clock: Clock, nodes: Catalog) -> None:
    with temporary_server() as other:
        provision.add_node(nodes, "right", other.url())
        compared = clocks.confirm_clock(nodes, "a")
        assert [one.name for one in compared.others] == ['node "right"', "this machine"]
        clock.set(-3600)
        with pytest.raises(ClusterConflict, match=r'behind node "right"; .* behind this machine'):
            clocks.confirm_clock(nodes, "a")
        clock.set(0)
        other.stop()
        compared = clocks.confirm_clock(nodes, "a")
        assert list(compared.unreachable) == ['node "right"']
        with pytest.raises(ConnectionFailed):
            clocks.confirm_clock(nodes, "right")


def test_the_commands(clock: Clock, nodes: Catalog) -> None:
    url = nodes.url.render_as_string(hide_password=False)

    def shardids(*words: str, code: int) -> str:
        ran = command_here(*words, SHARDIDS_CATALOG=url)
        assert ran.returncode == code, ran
        return ran.stdout + ran.stderr

    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        said = shardids("node", "confirm-clock", "a", "--dry-run", code=0)
        assert 'No other server was compared: node "a", the catalog, node "b" are one server' in said
        assert 'Would confirm the clock of node "a"' in said
        assert 'Confirmed the clock of node "a"' in shardids("node", "confirm-clock", "a", code=0)
        assert 'there is no node "z"' in shardids("node", "confirm-clock", "z", code=1)
        assert "nothing to reset" in shardids("shard", "reset-clock", "0", "--yes", code=2)
        clock.set(MONTHS_S)
        assert "ahead of this machine" in shardids("node", "confirm-clock", "a", code=1)
        jump(clock, db)
        said = shardids("shard", "reset-clock", "0", "--dry-run", code=0)
        assert 'Would reset shard 0 on node "a"' in said
        assert "begins again" in said
        assert "no IDs" not in said
        assert "no terminal" in shardids("shard", "reset-clock", "0", code=2)
        assert 'Reset shard 0 on node "a"' in shardids("shard", "reset-clock", "0", "--yes", code=0)
        said = shardids("shard", "reset-clock", "0", "--yes", code=0)
        assert 'Nothing to do for shard 0 on node "a": its clock was reset' in said
        draw_all(db)


def test_the_home_of_a_lost_shard_passes_over_the_range(clock: Clock, nodes: Catalog) -> None:
    there = nodes.nodes()["a"].url
    with connect(there) as db:
        small_lead(db)
        parts = draw_all(db)
        parts += jump(clock, db)
        plan = reset(nodes)
        parts += draw_all(db)
        # As on a server that was restored from before the shard and the range.
        db.execute("drop schema shard_0000 cascade; delete from shardids.shard where id = 0")
        db.execute("delete from shardids.skipped")
        failover.replace_node(nodes, "a", there)
        assert scalar(db, "select first_tick from shardids.skipped") == plan.skipped.first_tick
        failover.replace_node(nodes, "a", there, accept_loss=[0])
        assert "NULLIF" in body(db)
        draw_all(db)
        assert_distinct(parts + pass_over(clock, db, plan))


def test_a_standby_that_lacks_the_range_gets_it_with_the_limit(clock: Clock, nodes: Catalog) -> None:
    there = nodes.nodes()["a"].url
    with connect(there) as db:
        small_lead(db)
        jump(clock, db)
        plan = reset(nodes)
        draw_all(db)
        db.execute("delete from shardids.skipped")
        db.execute("select shardids.define_next_id(0, 'shard_0000')")
        assert "NULLIF" not in body(db)
        failover.replace_node(nodes, "a", there)
        assert "NULLIF" in body(db)
        assert in_range(pass_over(clock, db, plan), plan) == 0


@pytest.mark.parametrize(
    "damage",
    [
        "select setval('shard_0000.id_counter', 1)",
        "select setval('shard_0000.id_counter', pg_sequence_last_value('shard_0000.id_counter') - 100000)",
        "select setval('shard_0000.id_offset', pg_sequence_last_value('shard_0000.id_offset') - 30000)",
    ],
)
def test_sequences_that_were_set_back_are_found(damage: str, clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        db.execute("select count(shard_0000.next_id()) from generate_series(1, 120000)")
        db.execute("select shardids.reserve(0, 2000000) from generate_series(1, 10)")
        db.execute("insert into shard_0000.t select shard_0000.next_id() from generate_series(1, 10)")
        newest = scalar(db, "select max(id) from shard_0000.t")
        assert not doctor.examine(nodes, ["generator-behind"]).findings
        db.execute(damage)
        (finding,) = doctor.examine(nodes, ["generator-behind"]).findings
        assert (finding.severity, finding.shards) == (Severity.ERROR, (0,))
        pasted(nodes, finding)
        assert not doctor.examine(nodes, ["generator-behind"]).findings
        assert int(min(map(np.min, draw_all(db)))) > newest
        # Below what a fence has stored, though no row is above it.
        db.execute("truncate shard_0000.t")
        db.execute(
            "select setval('shard_0000.id_offset', pg_sequence_last_value('shard_0000.id_offset') - 30000)"
        )
        (finding,) = doctor.examine(nodes, ["generator-behind"]).findings
        assert "below its high-water tick" in finding.what
        pasted(nodes, finding)
        assert not doctor.examine(nodes, ["generator-behind"]).findings


def pasted(nodes: Catalog, finding: doctor.Finding) -> None:
    """Runs the commands of a finding in a shell."""
    for remedy in finding.commands:
        _, *words = shlex.split(remedy.text)
        done = command_here(*words, "--yes", SHARDIDS_CATALOG=dsn(nodes.url))
        assert done.returncode == 0, done.stderr


def test_a_clock_that_ran_fast_before_it_jumped(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        parts = draw_all(db)
        # Steps of less than an hour are not recorded. Shard 1 makes the one that is.
        for ahead_s in (50 * 60, 100 * 60):
            set_clock(clock, db, ahead_s)
            parts += draw_all(db)
        set_clock(clock, db, 1e5)
        draw_all(db, shard=1)
        parts += draw_all(db)
        set_clock(clock, db, 0)
        for shard in (0, 1):
            with pytest.raises(BadArgument, match="since when it was wrong is not recorded"):
                clocks.reset_clock(nodes, shard)
        since = datetime.fromtimestamp(time.time() + 49 * 60, UTC)
        done = clocks.reset_clock(nodes, 0, since=since)
        assert done.plan is not None
        parts += draw_all(db)
        for at in (done.plan.first - timedelta(seconds=30), done.plan.last + timedelta(seconds=90)):
            set_clock(clock, db, at.timestamp() - time.time())
            parts += draw_all(db)
        assert_distinct(parts)


def test_ticks_set_aside_by_the_first_draw_of_a_wrong_clock(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        draw_all(db)
        set_clock(clock, db, MONTHS_S)
        block = draw(db.cursor(binary=True), "reserve", 1_000_000)
        set_clock(clock, db, 0)
        plan = reset(nodes)
        assert in_range([block], plan) == len(block)


def test_an_activation_by_a_wrong_clock_keeps_the_limit(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        parts = draw_all(db) + jump(clock, db)
        plan = reset(nodes)
        set_clock(clock, db, plan.last.timestamp() - time.time() + 3600)
        db.execute("select shardids.fence(0)")
        db.execute("select shardids.activate(0)")
        assert "NULLIF" in body(db)
        set_clock(clock, db, 0)
        parts += draw_all(db)
        assert_distinct(parts + pass_over(clock, db, plan))


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_shard_made_by_a_wrong_clock(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        set_clock(clock, db, MONTHS_S)
        with machine_at(MONTHS_S):
            provision.create_shards(nodes, [2], node="a")
        parts = draw_all(db, 2)
        set_clock(clock, db, 0)
        plan = reset(nodes, 2)
        assert in_range(parts, plan) == sum(map(len, parts))
        assert_distinct(parts + draw_all(db, 2))


def test_a_fence_after_a_restart_by_a_wrong_clock(
    clock: Clock, nodes: Catalog, faked_server: EmbeddedServer
) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        parts = draw_all(db)
    nodes.engine.dispose()
    faked_server.restart("immediate")
    with connect(nodes.nodes()["a"].url) as db:
        set_clock(clock, db, MONTHS_S)
        # Another incarnation's shard: the fence goes past all that its clock may have issued.
        db.execute("select shardids.fence(0)")
        set_clock(clock, db, 0)
        reset(nodes)
        assert_distinct(parts + draw_all(db))


@pytest.mark.parametrize("nodes", [3], indirect=True)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_clock_over_a_year_ahead_is_not_believed_by_a_way_around(
    clock: Clock, nodes: Catalog, is_fenced: bool
) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        draw_all(db)
        if is_fenced:
            for shard in (0, 1):
                db.execute(f"select shardids.fence({shard})")
        set_clock(clock, db, 400 * 86_400.0)
        # Neither a shard made by it, nor one that is released by it, is evidence for it.
        with machine_at(400 * 86_400.0), pytest.raises(ClockUnconfirmed, match="more than max_step"):
            provision.create_shards(nodes, [2], node="a")
        if is_fenced:
            db.execute("select shardids.activate(0)")
        with pytest.raises(psycopg.Error) as unbelieved:
            draw(db.cursor(binary=True), "one", 1)
        assert unbelieved.value.sqlstate == "SI012"
        set_clock(clock, db, 0)
        draw_all(db)


def test_a_transaction_older_than_a_reset_issues_nothing(clock: Clock, nodes: Catalog) -> None:
    url = nodes.nodes()["a"].url
    with connect(url) as db, connect(url) as old, pytest.MonkeyPatch.context() as patch:
        small_lead(db)
        jump(clock, db)
        old.execute("begin isolation level repeatable read; select 1")
        patch.setattr("shardids.mover.clocks.resetting._await_transactions", lambda *_: None)
        plan = reset(nodes)
        draw_all(db)
        set_clock(clock, db, plan.first.timestamp() - time.time() + 1)
        with pytest.raises(psycopg.errors.SerializationFailure, match="too old to see"):
            old.execute("select shard_0000.next_id()")


def reset_refused(catalog: Catalog, shard: int = 0) -> None:
    with pytest.raises(BadArgument, match="since when it was wrong is not recorded"):
        clocks.reset_clock(catalog, shard)


def test_a_clock_that_is_wrong_by_less_between_two_jumps(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        for shard in (0, 1):
            draw_all(db, shard)
        set_clock(clock, db, MONTHS_S)
        draw_all(db, 1)
        set_clock(clock, db, 50 * 60)
        draw_all(db, 0)
        set_clock(clock, db, MONTHS_S + 300)
        draw_all(db, 0)
        set_clock(clock, db, 0)
        reset_refused(nodes)


def test_a_clock_that_is_wrong_again_after_a_reset(clock: Clock, nodes: Catalog) -> None:
    with connect(nodes.nodes()["a"].url) as db:
        small_lead(db)
        draw_all(db)
        jump(clock, db)
        reset(nodes)
        draw_all(db)
        set_clock(clock, db, 50 * 60)
        draw_all(db)
        set_clock(clock, db, MONTHS_S + 3 * 86_400)
        draw_all(db)
        set_clock(clock, db, 0)
        reset_refused(nodes)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_lead_that_was_allowed_before_the_jump(clock: Clock, nodes: Catalog, is_drawn: bool) -> None:
    """Its shard's own ticks, or, as after a move, those of its high-water tick."""
    with connect(nodes.nodes()["a"].url) as db:
        draw_all(db)
        jump(clock, db, 1)
        db.execute("select shardids.fence(0)")
        db.execute(
            "select shardids.activate(0, (shardids.ms_of(clock_timestamp()) + 3000000)"
            " << shardids.sequence_bits())"
        )
        if is_drawn:
            draw(db.cursor(binary=True), "reserve", 2_000)
        set_clock(clock, db, MONTHS_S + 300)
        draw_all(db)
        set_clock(clock, db, 0)
        small_lead(db)
        reset_refused(nodes)
