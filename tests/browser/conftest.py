"""One browser for all pages, and a cluster of two servers for the console's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from shardids.pg.embedded import temporary_servers
from tests.support.browsers import chromium
from tests.support.moves import TwoNodes, two_nodes


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """64 shards: those below 32 on node a, which has the catalog, too, the others on node b."""
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 64)
        yield nodes
        nodes.catalog.close()
