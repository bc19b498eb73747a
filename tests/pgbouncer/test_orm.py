"""The ORM's tests again, through PgBouncer, which also makes the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.engine import URL

from tests.conftest import BlankDatabases
from tests.integration.test_orm import *  # noqa: F403 -- pytest collects here what it finds there
from tests.integration.test_orm import make_home
from tests.support.pgbouncer import PgBouncer


@pytest.fixture(scope="module")
def home(databases: BlankDatabases, pgbouncer: PgBouncer) -> Iterator[URL]:
    """The catalog of a cluster whose only node is behind PgBouncer, as is the catalog."""
    direct = databases.take()
    url = pgbouncer.url(direct.database)
    make_home(url)
    yield url
    databases.give_back(direct)
