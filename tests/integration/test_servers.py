"""Which server the tests run on."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from tests.support.clusters import environment
from tests.support.docker_daemon import CONTAINER, docker_daemon

SHOW = """
from tests.support.servers import docker_answers, server_for_tests
print(docker_answers())
with server_for_tests() as url:
    print(url)
"""


def test_a_container_is_used_where_a_docker_daemon_answers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "docker.sock"
        with docker_daemon(socket, port=6543) as asked:
            ran = subprocess.run(
                [sys.executable, "-W", "error", "-c", SHOW],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
                env=environment(
                    DOCKER_HOST=f"unix://{socket}",
                    SHARDIDS_TEST_DSN="",
                    TESTCONTAINERS_RYUK_DISABLED="true",
                    TESTCONTAINERS_CONNECTION_MODE="docker_host",
                    TESTCONTAINERS_HOST_OVERRIDE="127.0.0.1",
                ),
            )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "True\npostgresql+psycopg://test:***@127.0.0.1:6543/test\n"
    assert f"DELETE /containers/{CONTAINER}" in asked


def test_no_container_is_asked_for_where_no_daemon_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.support.servers import docker_answers

    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    assert not docker_answers()


def test_a_server_that_is_named_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.servers import server_for_tests

    monkeypatch.setenv("SHARDIDS_TEST_DSN", "postgresql://ann@db.example:6000/tests")
    with server_for_tests() as url:
        assert url == URL.create("postgresql+psycopg", "ann", host="db.example", port=6000, database="tests")
