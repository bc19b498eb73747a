"""Django's tests again, with both nodes behind PgBouncer and the catalog reached directly."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn, found_cluster
from tests.integration.test_django import run
from tests.support.pgbouncer import PgBouncer


@pytest.fixture
def catalog(blank_database: Callable[[], URL], pgbouncer: PgBouncer) -> URL:
    """The catalog of a cluster of 8 shards on two nodes."""
    nodes = [blank_database(), blank_database()]
    url = nodes[0].set(username=pgbouncer.user, password=pgbouncer.password or None)
    behind = {name: pgbouncer.url(node.database) for name, node in zip("ab", nodes, strict=True)}
    found_cluster(url, behind, 8)
    return url


@pytest.mark.parametrize(
    "scene",
    [
        "keys_come_from_the_shard",
        "statements_name_the_shards_schema_and_set_nothing",
        "the_router_finds_the_shard_or_refuses",
        "aliases_of_a_node_share_its_pool",
    ],
)
def test_polls_in_shards(catalog: URL, scene: str) -> None:
    run(catalog, scene, before="scenes.make_tables()")


def test_migrations_that_need_a_session_wait_for_the_server_s_own_address(catalog: URL) -> None:
    run(catalog, "sessions_are_refused_behind_a_pooler", module="migration_scenes")
    with psycopg.connect(dsn(catalog)) as connection:
        server = connection.info
        move = "update shardids_catalog.node set url = regexp_replace(url, '@[^/]+/', %s)"
        connection.execute(move, [f"@{server.host}:{server.port}/"])
    run(catalog, "what_was_refused_behind_a_pooler", module="migration_scenes")
