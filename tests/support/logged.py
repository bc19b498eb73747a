"""What commands and the library have logged, for tests to look at."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

from sqlalchemy.engine import URL, make_url

from tests.support.clusters import COMMAND, environment

Records = list[dict[str, Any]]


def run(url: str | URL, *words: str, code: int = 0) -> tuple[Any, str]:
    """What a command says: its JSON, and stderr."""
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment(SHARDIDS_CATALOG=make_url(url).render_as_string(hide_password=False)),
    )
    assert ran.returncode == code, ran.stderr
    return json.loads(ran.stdout or "null"), ran.stderr


def of(stderr: str, package: str) -> Records:
    """The records of a package: what is no JSON is of the command itself."""
    records = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    return [one for one in records if one["logger"] == f"shardids.{package}"]


def told(records: list[logging.LogRecord], package: str) -> list[str]:
    return [f"{one.levelname} {one.getMessage()}" for one in records if one.name == f"shardids.{package}"]


def with_times_as(words: list[str]) -> list[str]:
    return [re.sub(r"\d+(\.\d+)? (s|ms)\b", r"N \2", line) for line in words]
