"""The processor time of help texts, beside ``alembic --help``, and of imports, beside ``sqlalchemy.orm``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer.main

from benchmarks.report import Section, figure, interleaved, ratio
from shardids.cli import app

ALEMBIC, ORM = "alembic --help", "sqlalchemy.orm"
CLUSTER = "from shardids import Cluster, primary_key"
PSYCOPG = "sqlalchemy.orm, psycopg and its dialect"
SHOWN = ("", "migrate", "shard move", "compare")


def run(rounds: int) -> Section:
    """Measure all help texts and the imports of an application."""
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return _run(rounds, partial(_cpu_ms, environment | {"PYTHONPYCACHEPREFIX": bytecode}))


def _run(rounds: int, cpu_ms: Callable[..., float]) -> Section:
    folder = Path(sys.executable).parent
    helps = {
        f"shardids {path} --help".replace("  ", " "): partial(
            cpu_ms, str(folder / "shardids"), *path.split(), "--help"
        )
        for path in _paths(typer.main.get_command(app))
    }
    imports = {
        "python": partial(cpu_ms, sys.executable, "-c", "pass"),
        ORM: partial(cpu_ms, sys.executable, "-c", "import sqlalchemy.orm"),
        PSYCOPG: partial(
            cpu_ms,
            sys.executable,
            "-c",
            "import sqlalchemy.orm, psycopg, sqlalchemy.dialects.postgresql.psycopg",
        ),
        CLUSTER: partial(cpu_ms, sys.executable, "-c", CLUSTER),
    }
    measured = interleaved(
        {ALEMBIC: partial(cpu_ms, str(folder / "alembic"), "--help"), **imports, **helps},
        rounds=rounds,
        unit="ms",
    )
    slowest = max((measured[name] for name in helps), key=lambda one: one.median)
    shown = {f"shardids {path} --help".replace("  ", " ") for path in SHOWN} | {slowest.name}
    return Section(
        title="Start-up",
        conditions=f"Processor time of a process, {rounds} rounds, bytecode cached."
        f" Of {len(helps)} help texts, some and the slowest.",
        measures=tuple(one for name, one in measured.items() if name in shown or name not in helps),
        ratios=(
            figure(f"the slowest help / {ALEMBIC}", slowest.median / measured[ALEMBIC].median, at_most=1),
            ratio(measured[CLUSTER], measured[ORM]),
            ratio(measured[CLUSTER], measured[PSYCOPG], at_most=1.25),
        ),
    )


def _paths(command: Any, *path: str) -> Iterator[str]:
    yield " ".join(path)
    for name in getattr(command, "commands", ()):
        yield from _paths(command.get_command(None, name), *path, name)


def _cpu_ms(environment: Mapping[str, str], *arguments: str) -> float:
    """Run a process to its end; return the milliseconds of processor time that it took."""
    before = _children()
    subprocess.run(arguments, env=environment, stdout=subprocess.DEVNULL, check=True)
    return (_children() - before) * 1000


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
