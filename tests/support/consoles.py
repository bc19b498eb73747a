"""Consoles: in this process, asked without a network, or as processes that listen."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.engine import URL
from starlette.testclient import TestClient

from shardids.console.app import Console
from shardids.console.guard import Access
from shardids.console.settings import Settings
from tests.conftest import dsn
from tests.support.clusters import COMMAND, environment
from tests.support.waiting import PATIENCE_S

HERE = "http://127.0.0.1:8088"
TOKEN = "a-token-of-the-tests"


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


@contextmanager
def process(url: URL | str, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``shardids console`` as a process of its own, and its address."""
    catalog_url = url if isinstance(url, str) else dsn(url)
    words = [sys.executable, "-c", COMMAND, "console", "--listen", "127.0.0.1:0", *options]
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
