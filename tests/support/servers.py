"""The server that tests use: one that is named, else a container's, else an embedded one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.engine import URL

from shardids.pg.embedded import temporary_server
from shardids.pg.urls import parse_url
from tests.matrix import SUPPORTED


@contextmanager
def server_for_tests() -> Iterator[URL]:
    """Yields a server on which databases can be made: ``SHARDIDS_TEST_DSN`` if that is set, else a container
    of ``SHARDIDS_TEST_IMAGE`` if a Docker daemon answers, else an embedded server."""
    if dsn := os.environ.get("SHARDIDS_TEST_DSN"):
        yield parse_url(dsn)
    elif docker_answers():
        with container_server(os.environ.get("SHARDIDS_TEST_IMAGE") or f"postgres:{SUPPORTED[-1]}") as url:
            yield url
    else:
        with temporary_server() as server:
            yield parse_url(server.url())


@contextmanager
def container_server(image: str) -> Iterator[URL]:
    """Yields the server of a container, which ends with the block."""
    with warnings.catch_warnings():
        # testcontainers 4.13 itself uses what it declares deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            from testcontainers.community.postgres import PostgresContainer
        except ModuleNotFoundError:  # before 4.15
            from testcontainers.postgres import PostgresContainer
    container = PostgresContainer(image, driver="psycopg")
    with container.with_command("postgres -c max_prepared_transactions=200") as container:
        yield parse_url(container.get_connection_url())


def docker_answers() -> bool:
    """Returns whether a Docker daemon answers."""
    import docker

    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    # docker-py leaks a socket when it asks a daemon that is not there: a ResourceWarning.
    if host.startswith("unix://") and not Path(host.removeprefix("unix://")).is_socket():
        return False
    client = docker.from_env(timeout=5, version="1.44")
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()
