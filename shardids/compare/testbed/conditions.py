"""The conditions of a comparison: the machine, its disk, and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import shardids

_LIBRARIES: Final = ("psycopg", "PyMySQL", "redis", "uuid-utils", "python-ulid")
_FLUSHES: Final = 30


def machine(folder: Path) -> str:
    """Returns processor, memory, system, load, and how long the folder's disk takes to flush a page."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    facts = (
        f"{os.cpu_count()} cores{_model()}, {memory_gb:.0f} GB of memory",
        f"{platform.system()} {platform.machine()}",
        f"a flush of 8 kB to the servers' disk takes {flush_us(folder):,.0f} µs",
        f"load at the start {os.getloadavg()[0]:.1f}",
    )
    return "; ".join(facts)


def flush_us(folder: Path) -> float:
    """Returns the median time of a write and fsync of 8 kB, in µs; a few µs mean a disk in memory."""
    times_ns = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_FLUSHES):
            before = time.perf_counter_ns()
            os.write(file.fileno(), bytes(8192))
            os.fsync(file.fileno())
            times_ns.append(time.perf_counter_ns() - before)
    return statistics.median(times_ns) / 1000


def versions() -> dict[str, str]:
    """Returns the versions of shardids, Python, and the installed drivers and libraries."""
    found = {"shardids": shardids.__version__, "Python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f" ({value.strip()})"
    return ""
