"""The doctor measures how far the clocks of servers are apart, and sees ticks that a clock has left ahead."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from shardids import doctor
from shardids.catalog.rows import Catalog
from shardids.dev.devcluster import found
from shardids.dev.embedded import EmbeddedServer, temporary_server
from tests.support.faults import connect, scalar
from tests.support.server_clock import Clock
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for


def test_clocks_that_are_apart(clock: Clock) -> None:
    with temporary_server() as server, temporary_server(env=clock.env) as faked:
        catalog = Catalog(found([server, faked], 2))
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
        found([server], 1)
        yield server


def test_a_standby_in_place_of_its_primary(own_server: EmbeddedServer) -> None:
    catalog = Catalog(own_server.url())
    try:
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
