"""Look-ups whose node is lost, or whose servers are restored from backups: every row keeps its claim."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest
from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from shardids import Cluster
from shardids.catalog.lookups import shard_of_claim
from shardids.errors import ClusterConflict, ConnectionFailed
from shardids.mover.failover import replace_node
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.urls import parse_url
from shardids.tables import lookups
from shardids.tables.transactions import create_restore_point
from shardids.watch import doctor
from tests.support.backups import base_backup, finish_segment, is_archived, restored, start_archiving
from tests.support.clusters import catalog_at
from tests.support.faults import connect
from tests.support.replicas import has_all_of
from tests.support.signups import EMAIL, User, claims, named, open_signups, rows
from tests.support.standbys import public_folder, standby_of
from tests.support.waiting import wait_for

SHARDS = 4
ON_A, OF_A, ON_B = 0, 1, 3
"""Shards of the two nodes: two of "a", one of "b"."""


@pytest.fixture
def servers() -> Iterator[list[EmbeddedServer]]:
    with temporary_servers(2, settings={"max_prepared_transactions": "10"}) as both:
        urls = [parse_url(server.url()) for server in both]
        open_signups(urls[0], dict(zip("ab", urls, strict=True)), SHARDS)
        yield both


def email_of(keeper: int, prefix: str) -> str:
    """An address whose claim is in a shard."""
    return next(e for n in range(999) if shard_of_claim(e := f"{prefix}{n}@example.com", SHARDS) == keeper)


def inserted(shard: int, email: str) -> str:
    return f"insert into shard_{shard:04}.users (name, email) values ('x', '{email}')"


def add(cluster: Cluster, shard: int, email: str) -> None:
    with cluster.session(shard=shard) as session:
        session.add(User(name=named(cluster, shard), email=email))
        session.commit()


def test_a_promoted_standby_keeps_the_claims(servers: list[EmbeddedServer]) -> None:
    url = parse_url(servers[0].url())
    email, other = email_of(ON_B, "m"), email_of(ON_A, "m")
    with (
        catalog_at(url) as catalog,
        Cluster.connect(url, listen=False) as cluster,
        standby_of(servers[1]) as standby,
    ):
        # The claim is on the node that is lost, the row of one on the other, of one on both.
        add(cluster, ON_A, email)
        add(cluster, ON_B, other)
        with connect(servers[1].url()) as primary, connect(standby.url()) as there:
            wait_for(lambda: has_all_of(there, primary), "the standby has all")
        servers[1].kill()
        with connect(standby.url()) as there:
            there.execute("select pg_promote()")
        done = replace_node(catalog, "b", standby.url())
        assert not done.stale_views
        cluster.refresh()
        for shard, taken in ((ON_B, email), (ON_A, other)):
            with pytest.raises(IntegrityError, match="violates look-up"):
                add(cluster, shard, taken)
        add(cluster, ON_B, email_of(ON_A, "new"))
        assert claims(cluster) == rows(cluster)
        found = {finding.check for finding in doctor.examine(catalog).findings}
        assert not {one for one in found if "lookup" in one or "claim" in one}


def test_claims_that_a_standby_lacks_are_found_and_made_again(servers: list[EmbeddedServer]) -> None:
    url = parse_url(servers[0].url())
    email = email_of(ON_B, "m")
    with catalog_at(url) as catalog, Cluster.connect(url, listen=False) as cluster:
        add(cluster, ON_A, email)
        with connect(servers[1].url()) as node:
            # As a standby that had not got it, or a backup from before.
            node.execute(f"delete from shard_{ON_B:04}.shardids_lookup_users_email")
        findings = {finding.check: finding for finding in doctor.examine(catalog).findings}
        assert "1 of 1 rows read have no claim" in findings["row-without-claim"].what
        assert lookups.backfill(catalog, EMAIL).claimed == 1
        with pytest.raises(IntegrityError, match="violates look-up"):
            add(cluster, ON_B, email)
        assert "row-without-claim" not in {one.check for one in doctor.examine(catalog).findings}


def test_a_server_that_is_stopped_does_not_keep_sessions_that_claim_on_it(
    servers: list[EmbeddedServer],
) -> None:
    url = parse_url(servers[0].url())
    with Cluster.connect(url, listen=False) as cluster:
        for email in (email_of(ON_B, "first"), email_of(ON_A, "first")):
            add(cluster, ON_A, email)
        with connect(servers[1].url()) as node:
            pids = [row[0] for row in node.execute("select pid from pg_stat_activity")]
        assert servers[1].pid is not None
        pids.append(servers[1].pid)
        stopped = []
        try:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.append(pid)
            with pytest.raises(ConnectionFailed, match='node "b"'):
                add(cluster, ON_A, email_of(ON_B, "stopped"))
        finally:
            for pid in stopped:
                # A worker that was about to end may have ended nevertheless.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        # Its row was rolled back, and the claim, if it was made, is free for others.
        add(cluster, OF_A, email_of(ON_B, "stopped"))
        assert claims(cluster) == rows(cluster)


def remove(cluster: Cluster, shard: int, email: str) -> None:
    with cluster.session(shard=shard) as session:
        session.execute(delete(User).where(User.email == email))
        session.commit()


def found_at(cluster: Cluster, email: str) -> list[str]:
    with cluster.sharded_session() as session:
        return list(session.scalars(select(User.email).where(User.email == email)))


def test_a_node_that_is_restored_to_an_earlier_moment_is_put_right(
    servers: list[EmbeddedServer],
) -> None:
    """Rows lack claims, claims lack rows or are as they were, and a row is back whose value was taken."""
    url = parse_url(servers[0].url())
    late, changed, back, lost = (
        email_of(at, name) for at, name in zip((ON_B, ON_B, ON_A, ON_A), "lcbg", strict=True)
    )
    with (
        catalog_at(url) as catalog,
        Cluster.connect(url, listen=False) as cluster,
        public_folder() as folder,
    ):
        start_archiving(servers[1], folder / "archive")
        base_backup(servers[1], folder / "data")
        for email in (changed, back):
            add(cluster, ON_B, email)
        remove(cluster, ON_B, changed)
        create_restore_point(catalog, "midday")
        remove(cluster, ON_B, back)
        for email in (late, changed, back):
            add(cluster, OF_A, email)
        add(cluster, ON_B, lost)
        segment = finish_segment(servers[1])
        wait_for(lambda: is_archived(servers[1], folder / "archive", segment), "the log is archived")
        servers[1].kill()
        with restored(servers[1], folder, folder / "data", folder / "archive", "midday") as there:
            assert not replace_node(catalog, "b", there).stale_views
            cluster.refresh()
            # Claims on the restored node say where rows were, or nothing.
            assert found_at(cluster, late) == found_at(cluster, changed) == []
            assert (claims(cluster)[changed], claims(cluster)[lost]) == (ON_B, ON_B)
            findings = {one.check: one.what for one in doctor.examine(catalog, every_row=True).findings}
            assert "3 of 4 rows read have no claim" in findings["row-without-claim"]
            assert "claim-without-row" in findings
            with pytest.raises(
                ClusterConflict, match=f"rows of two shards have one {EMAIL}, for example '{back}'"
            ):
                lookups.backfill(catalog, EMAIL)
            remove(cluster, ON_B, back)
            lookups.backfill(catalog, EMAIL)
            for email in (late, changed, back):
                assert found_at(cluster, email) == [email]
                with pytest.raises(IntegrityError, match="violates look-up"):
                    add(cluster, ON_B, email)
            lookups.sweep(catalog, EMAIL)
            assert claims(cluster) == rows(cluster) == dict.fromkeys((late, changed, back), OF_A)
            findings = {one.check for one in doctor.examine(catalog, every_row=True).findings}
            assert not {one for one in findings if "lookup" in one or "claim" in one}


def test_transactions_on_both_nodes_claim_before_they_are_prepared(
    servers: list[EmbeddedServer],
) -> None:
    url = parse_url(servers[0].url())
    with Cluster.connect(url, listen=False) as cluster:
        with cluster.sharded_session(twophase=True) as session:
            session.add_all(
                User(name=named(cluster, shard), email=email_of(keeper, f"two-{shard}-"))
                for shard in (ON_A, ON_B)
                for keeper in (ON_A, ON_B)
            )
            session.commit()
        with cluster.sharded_session(twophase=True) as session:
            session.add(User(name=named(cluster, ON_A), email="new@example.com"))
            session.add(User(name=named(cluster, ON_B), email=email_of(ON_A, f"two-{ON_A}-")))
            with pytest.raises(IntegrityError, match="violates look-up"):
                session.commit()
        assert "new@example.com" not in rows(cluster)
        # A prepared row is waited for, also after its server has crashed.
        with connect(servers[1].url()) as node:
            node.execute("begin")
            node.execute("set local shardids.unclaimed_writes = 'allowed'")
            node.execute(inserted(ON_B, "prepared@example.com"))
            lookups_claim(cluster, "prepared@example.com", ON_B)
            node.execute("prepare transaction 'one'")
        servers[1].kill()
        servers[1].start(attached=True)
        with Cluster.connect(url, listen=False) as again:
            with pytest.raises(Exception, match="have not ended"):
                add(again, ON_A, "prepared@example.com")
            with connect(servers[1].url()) as node:
                node.execute("commit prepared 'one'")
            with pytest.raises(IntegrityError, match="violates look-up"):
                add(again, ON_A, "prepared@example.com")
            assert rows(again).items() <= claims(again).items()


def lookups_claim(cluster: Cluster, email: str, shard: int) -> None:
    """Claims an address as a session does that has written its row."""
    keeper = shard_of_claim(email, SHARDS)
    with cluster.at(shard=keeper).connection() as connection:
        connection.exec_driver_sql(
            f"insert into shard_{keeper:04}.shardids_lookup_users_email (value, shard) values (%s, %s)",
            (email, shard),
        )
        connection.commit()
