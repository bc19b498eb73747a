"""What the console says is to be done: by its quick checks, without an examination."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from shardids.catalog.rows import Catalog
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.testing import devcluster
from shardids.watch import doctor
from shardids.watch.facts.glance import at_a_glance
from shardids.watch.facts.reading import Asker
from tests.support.consoles import browsing, told
from tests.support.waiting import wait_for

SHARDS = 8


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EmbeddedServer]]:
    """Shards 0 to 3 on node a, with the catalog; 4 to 7 on node b."""
    with temporary_servers(2) as servers:
        devcluster.create_cluster(servers, SHARDS)
        yield servers


def run(server: EmbeddedServer, *statements: str) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def entries(client: TestClient) -> list[Any]:
    return list(told(client, "/api/cluster")["todo"]["entries"])


def checks(client: TestClient) -> list[str]:
    return [one["check"] for one in entries(client)]


def test_a_dead_node_gets_its_remedy_in_order(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client:
        wait_for(lambda: told(client, "/api/cluster")["todo"]["checked_at"], "a reading that was judged")
        assert entries(client) == []
        servers[1].stop("immediate")
        begun = time.monotonic()
        try:
            wait_for(lambda: entries(client), "an entry")
            assert time.monotonic() - begun < 5
            (entry,) = entries(client)
            assert (entry["check"], entry["severity"]) == ("node-unreachable", "error")
            assert (entry["nodes"], entry["shards"]) == (["b"], [4, 5, 6, 7])
            assert "password" not in entry["to_do"]
            assert [one["text"] for one in entry["do"]] == [
                'psql "$STANDBY" -Atc "select pg_is_in_recovery()"',
                'shardids node replace b --url "$STANDBY" --dry-run',
                'shardids node replace b --url "$STANDBY"',
                "shardids doctor",
            ]
            assert all(one["step"] for one in entry["do"])
        finally:
            servers[1].start(attached=True)
        wait_for(lambda: not entries(client), "that nothing is to be done")


def test_a_login_that_is_refused_is_no_dead_node(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client:
        wait_for(lambda: told(client, "/api/cluster")["todo"]["checked_at"], "a reading that was judged")
        assert entries(client) == []
        rename = "update shardids_catalog.node set url = replace(url, '{}', '{}') where name = 'b'"
        run(servers[0], rename.format("/postgres?", "/nowhere?"))
        try:
            wait_for(lambda: entries(client), "an entry")
            (entry,) = entries(client)
            assert entry["check"] == "node-unreachable"
            assert "database and user" in entry["to_do"]
            assert entry["do"] == []
        finally:
            run(servers[0], rename.format("/nowhere?", "/postgres?"))
        wait_for(lambda: not entries(client), "that nothing is to be done")


def test_a_dead_catalog_gets_its_remedy(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client:
        wait_for(lambda: told(client, "/api/cluster")["todo"]["checked_at"], "a reading that was judged")
        servers[0].stop("immediate")
        try:
            wait_for(lambda: "catalog-unreachable" in checks(client), "the catalog")
            (entry, node) = entries(client)
            assert node["check"] == "node-unreachable"
            assert [one["text"] for one in entry["do"]][-1] == 'shardids doctor --catalog "$STANDBY"'
        finally:
            servers[0].start(attached=True)
        wait_for(lambda: not entries(client), "that nothing is to be done")


def test_what_each_reading_finds_is_what_an_examination_finds(servers: list[EmbeddedServer]) -> None:
    """The same checks, on the facts of a reading: the same words."""
    a, b = servers
    faults = [
        (b, "select shardids.fence(4)"),
        (b, "drop schema shard_0005 cascade"),
        (b, "drop sequence shard_0006.id_counter cascade"),
        (b, "update shardids.shard set server = 'another' where id = 7"),
        (a, "update shardids.shard set state = 'moved', moved_to = 'b' where id = 2"),
        (a, "update shardids_catalog.placement set node = 'b' where shard = 3"),
        (a, "update shardids_catalog.placement set state = 'creating' where shard = 1"),
    ]
    for server, statement in faults:
        run(server, statement)
    with closing(Asker(a.url())) as asker:
        reading = asker.read()
    assert reading.known is not None
    glanced = doctor.glance(at_a_glance(reading.known, reading.nodes, time.time()))
    with closing(Catalog(a.url(), read_only=True)) as catalog:
        report = doctor.examine(catalog, [check.name for check in doctor.AT_A_GLANCE])
    assert len({one.check for one in report.findings}) > 5
    assert glanced == list(report.findings)
