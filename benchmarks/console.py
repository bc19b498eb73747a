"""The console of 4,096 shards on four nodes: how long its page takes, and what reading costs the nodes."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from benchmarks.report import Measure, Section, figure
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.testing import devcluster

SHARDS = 4096
NODES = 4
MOST_MS = 300.0
MOST_CPU_MS = 5.0
_VALUES = ("cluster", "nodes", "rates", "map", "doctor", "job", "moves", "migrations")
_COMMAND = "from shardids.cli import app; app()"
_WATCHED_S = 60.0
_PARTS = re.compile(r"""(?:src|href)="([\w./-]+)"|from "\./([\w./-]+)"|import "\./([\w./-]+)\"""")
_BACKENDS = """
    select pid from pg_stat_activity
    where application_name in ('shardids metrics', 'shardids console')"""


def run(rounds: int) -> Section:
    """Measure the first view with all that it asks for, and the CPU of the servers' processes that read."""
    with temporary_servers(NODES, settings={"max_locks_per_transaction": "1024"}) as servers:
        url = devcluster.create_cluster(servers, SHARDS)
        with _console(url) as (address, process):
            files = sorted(_files(address))
            for _ in range(5):
                _load(address, files)
            before_ms = _own_cpu_ms(process)
            loads = [_load(address, files) for _ in range(max(20, rounds))]
            own_ms = (_own_cpu_ms(process) - before_ms) / len(loads)
            cpu_ms = _cpu_a_second(servers)
    p95 = statistics.quantiles(loads, n=20)[-1]
    return Section(
        title=f"The console of {SHARDS:,} shards on {NODES} nodes",
        conditions=f"{NODES} servers, the console and who asks on one machine, fsync off, idle shards;"
        f" {len(files)} files and {len(_VALUES)} answers of JSON, one after another, {len(loads)} times;"
        f" CPU of all servers' processes that read, over {_WATCHED_S:.0f} s.",
        measures=(
            Measure(
                name="a page load",
                unit="ms",
                median=statistics.median(loads),
                lowest=min(loads),
                highest=max(loads),
            ),
        ),
        ratios=(
            figure("CPU of the console for a page load, ms", own_ms),
            figure("a page load, 95th percentile, ms", p95, at_most=MOST_MS),
            figure("CPU of all nodes a second, ms", cpu_ms, at_most=MOST_CPU_MS),
        ),
    )


@contextmanager
def _console(url: str) -> Iterator[tuple[str, int]]:
    words = [sys.executable, "-c", _COMMAND, "console", "--catalog", url, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            yield urlsplit(running.stderr.readline().split()[1]).netloc, running.pid
        finally:
            running.send_signal(signal.SIGINT)


def _files(address: str) -> set[str]:
    """The page, and all that it and its modules name; the view that it begins with is imported later."""
    found, left = set[str](), ["index.html", "health.js"]
    with closing(HTTPConnection(address)) as connection:
        while left:
            name = left.pop()
            if name in found or name.startswith("api/"):
                continue
            text = _get(connection, f"/{name}").decode("utf-8", "replace")
            found.add(name)
            here = Path(name).parent
            left += [str(here / next(filter(None, groups))) for groups in _PARTS.findall(text)]
    return found


def _load(address: str, files: Sequence[str]) -> float:
    """How long all requests of the first view take over one connection, in ms."""
    begun = time.perf_counter()
    with closing(HTTPConnection(address)) as connection:
        for name in files:
            _get(connection, f"/{name}")
        for name in _VALUES:
            _get(connection, f"/api/{name}")
    return (time.perf_counter() - begun) * 1000


def _get(connection: HTTPConnection, page: str) -> bytes:
    connection.request("GET", page)
    with connection.getresponse() as answer:
        if answer.status != 200:
            raise RuntimeError(f"{page}: {answer.status}")
        return answer.read()


def _cpu_a_second(servers: Sequence[EmbeddedServer]) -> float:
    """The CPU that the readers' processes on all servers take, in ms a second."""
    processes: list[int] = []
    for server in servers:
        with psycopg.connect(server.url()) as connection:
            processes += [pid for (pid,) in connection.execute(_BACKENDS)]
    begun, before = time.monotonic(), sum(map(_cpu_ms, processes))
    time.sleep(_WATCHED_S)
    return (sum(map(_cpu_ms, processes)) - before) / (time.monotonic() - begun)


def _own_cpu_ms(process: int) -> float:
    """The CPU of all threads of a process, in ms; readings of the cluster in between are part of it."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def _cpu_ms(process: int) -> float:
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e6
