"""Consoles: in this process, asked without a network, or as processes that listen."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy.engine import URL
from starlette.testclient import TestClient

from shardids.watch.console.app import Console, Settings
from shardids.watch.console.guard import Access
from tests.conftest import dsn
from tests.support.clusters import COMMAND, environment
from tests.support.moves import TwoNodes, schema
from tests.support.waiting import PATIENCE_S, wait_for

HERE = "http://127.0.0.1:8088"
TOKEN = "a-token-of-the-tests"
ACTION = {"X-Shardids-Action": "1"}


@contextmanager
def browsing(url: URL | str, **settings: Any) -> Iterator[TestClient]:
    """A client of a console; refusals are answers, not errors."""
    settings = {"access": Access(), "interval_s": 0.2} | settings
    catalog_url = url if isinstance(url, str) else dsn(url)
    console = Console(Settings(catalog_url=catalog_url, **settings))
    with TestClient(
        console.app(), base_url=HERE, follow_redirects=False, raise_server_exceptions=False
    ) as client:
        yield client
        console.actions.stop()


def told(client: TestClient, page: str) -> Any:
    """What a page of JSON says."""
    answer = client.get(page)
    assert answer.status_code == 200, answer.text
    return answer.json()


def asked(client: TestClient, action: str, status: int = 200, **given: Any) -> Any:
    """What an action answers, planned or confirmed."""
    answer = client.post(f"/api/actions/{action}", json=given, headers=ACTION)
    assert answer.status_code == status, answer.text
    return answer.json()


def ended_job(client: TestClient) -> Any:
    """The job of an action, once it is over."""
    wait_for(lambda: told(client, "/api/job")["state"] != "running", "the end of the job")
    return told(client, "/api/job")


@contextmanager
def process(
    url: URL | str, *options: str, before: str = "pass"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``shardids console`` as a process of its own, which runs a statement first, and its address."""
    catalog_url = url if isinstance(url, str) else dsn(url)
    words = [sys.executable, "-c", f"{before}; {COMMAND}", "console", "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(SHARDIDS_CATALOG=catalog_url),
    ) as running:
        try:
            assert running.stderr is not None
            line = running.stderr.readline()
            assert line.startswith("Serving http://"), line + running.stderr.read()
            yield running, line.removeprefix("Serving ").strip()
        finally:
            if running.poll() is None:
                running.kill()


def ended(running: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[float, str]:
    """Ends a console by a signal; how long it took, and what it said."""
    begun = time.monotonic()
    running.send_signal(number)
    _, said = running.communicate(timeout=PATIENCE_S)
    return time.monotonic() - begun, said


def post(address: str, page: str, **given: Any) -> Any:
    """What a console that listens answers to a page that may act."""
    request = urllib.request.Request(
        f"{address}{page}",
        json.dumps(given).encode(),
        {"Content-Type": "application/json"} | ACTION,
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(address: str, page: str) -> Any:
    """What a page of a console that listens says."""
    with urllib.request.urlopen(f"{address}{page}", timeout=60) as answer:
        return json.load(answer)


def takes_writes(nodes: TwoNodes, shard: int) -> bool:
    """Whether the shard's copy on node a takes a row now, of a user bob."""
    with nodes.connected("a") as connection:
        try:
            connection.execute("set statement_timeout = '1s'")
            connection.execute(f"insert into {schema(shard)}.users (name) values ('bob')".encode())
        except psycopg.Error:
            return False
        return True
