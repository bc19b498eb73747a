"""The pytest plugin: a cluster for the tests, and a session whose work is rolled back after each of them.

pytest loads this module wherever shardids is installed, so it imports modules only when a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import MetaData

    from shardids.client.cluster import Cluster
    from shardids.client.routing.sessions import RoutedSession

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
    """The options of ``shard_session``, such as ``class_``; override it. By default there are none."""
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
    Only what ``shard_session`` does is rolled back.
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
def shard_session(shard_cluster: Cluster, shard_session_options: dict[str, Any]) -> Iterator[RoutedSession]:
    """A session over all shards; after the test all its work is rolled back, commits included."""
    from shardids.testing.clusters import rolled_back

    with rolled_back(shard_cluster, shard_session_options) as session:
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
