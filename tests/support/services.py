"""An application of ``examples/`` as a process of its own, which answers HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def serving(app: str, catalog: URL) -> Iterator[str]:
    """Its address: it listens on a free port, and shuts down without a word of errors."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "uvicorn", app, "--port", "0", "--no-access-log"],
        cwd=EXAMPLES,
        env=environment(SHARDIDS_CATALOG=dsn(catalog)),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            yield _address(process.stderr)
        finally:
            process.terminate()
            last_words = process.stderr.read()
    assert "Application shutdown complete" in last_words
    assert "rror" not in last_words


def _address(said: IO[str]) -> str:
    """Where uvicorn says that it runs."""
    lines = []
    for line in said:
        lines.append(line)
        if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
            return found[1]
    raise AssertionError("".join(lines))
