"""The pytest plugin: a cluster for the tests, and the rollback of all that a test did in its shards.

pytest loads this module wherever shardids is installed, so it imports modules only when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import MetaData
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from shardids.client.async_cluster import AsyncCluster
    from shardids.client.cluster import Cluster

_SETTINGS = (
    ("layout", "Layout of the tests' cluster.", "default"),
    ("shards", "Number of logical shards of the tests' cluster.", "4"),
    ("nodes", "Number of nodes of the tests' cluster.", "2"),
    ("server", "As --shardids-server.", ""),
    ("catalog", "As --shardids-catalog.", ""),
)
_NAMED = ("server", "catalog")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and the ini settings."""
    group = parser.getgroup("shardids", "shardids: the cluster of the tests")
    group.addoption(
        "--shardids-server",
        metavar="URL",
        help="Make the cluster's databases on this server, as a role that may create databases; drop them at"
        " the end. By default an embedded server is started.",
    )
    group.addoption(
        "--shardids-catalog",
        metavar="URL",
        help="Use the cluster of this catalog as it is, with its tables; nothing is made or dropped.",
    )
    for name, help_, default in _SETTINGS:
        parser.addini(f"shardids_{name}", help_, default=default)


@pytest.fixture(scope="session")
def shard_metadata() -> MetaData | None:
    """The models' metadata, whose tables each shard gets; override it. By default there are none."""
    return None


@pytest.fixture(scope="session")
def shard_session_options() -> dict[str, Any]:
    """The options of ``shard_session`` and ``shard_async_session``, such as ``class_``; override it.

    By default there are none.
    """
    return {}


@pytest.fixture(scope="session")
def shard_catalog_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of the catalog of the tests' cluster. Each worker of pytest-xdist has another cluster."""
    from shardids.testing.clusters import ClusterWishes, catalog_for_tests

    config = request.config
    settings = {name: config.getini(f"shardids_{name}") for name, _, _ in _SETTINGS}
    settings |= {name: given for name in _NAMED if (given := config.getoption(f"shardids_{name}"))}
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    with ExitStack() as stack:
        with _errors_as_failures():
            url = stack.enter_context(catalog_for_tests(ClusterWishes.parse(settings, workers=workers)))
        yield url


@pytest.fixture(scope="session")
def shard_cluster(
    request: pytest.FixtureRequest, shard_catalog_url: str, shard_metadata: MetaData | None
) -> Iterator[Cluster]:
    """A cluster that has all of ``shard_metadata``, for the whole run.

    Its tables are in every shard, with their look-ups and counters, and its reference tables on every node.
    The work of a test is rolled back only with ``shard_rollback``.
    """
    from shardids.client.cluster import Cluster
    from shardids.testing.clusters import tables_of

    with ExitStack() as stack:
        with _errors_as_failures():
            cluster = stack.enter_context(Cluster.connect(shard_catalog_url))
            if shard_metadata is not None and not _is_there_already(request.config):
                stack.enter_context(tables_of(shard_metadata, cluster, shard_catalog_url))
        yield cluster


@pytest.fixture
def shard_rollback() -> Iterator[None]:
    """Undo, after the test, all its work in shards, committed or not.

    That is every cluster of the process, those that the application opens itself too, sync or async, with
    all their sessions, connections and copies; and Django's ORM.
    """
    from shardids.testing.held import held_nodes

    with held_nodes.rolled_back():
        yield


@pytest.fixture
def shard_session(
    shard_cluster: Cluster, shard_session_options: dict[str, Any], shard_rollback: None
) -> Iterator[Session]:
    """A session over all shards. After the test all work in shards is rolled back: see ``shard_rollback``."""
    from shardids.testing.clusters import rolled_back_session

    with rolled_back_session(shard_cluster, shard_session_options) as session:
        yield session


@pytest.fixture(scope="session")
def _shard_async_cluster(shard_cluster: Cluster, shard_catalog_url: str) -> Iterator[AsyncCluster]:
    from shardids.testing.clusters import async_cluster

    with async_cluster(shard_catalog_url) as cluster:
        yield cluster


@pytest.fixture
def shard_async_cluster(_shard_async_cluster: AsyncCluster, shard_rollback: None) -> AsyncCluster:
    """The cluster for asyncio, in any event loop: of anyio, of pytest-asyncio or of the test's own.

    Its work is rolled back: see ``shard_rollback``.
    """
    return _shard_async_cluster


@pytest.fixture
def shard_async_session(
    shard_async_cluster: AsyncCluster, shard_session_options: dict[str, Any]
) -> Iterator[AsyncSession]:
    """An ``AsyncSession`` over all shards; all work is rolled back: see ``shard_rollback``."""
    from shardids.testing.clusters import async_rolled_back_session

    with async_rolled_back_session(shard_async_cluster, shard_session_options) as session:
        yield session


def _is_there_already(config: pytest.Config) -> bool:
    return bool(config.getoption("shardids_catalog") or config.getini("shardids_catalog"))


@contextmanager
def _errors_as_failures() -> Iterator[None]:
    from shardids.errors import ShardidsError

    try:
        yield
    except ShardidsError as error:
        pytest.fail(error.in_a_line(), pytrace=False)
