"""Citus of SHARDIDS_CITUS_BIN. No package registry has it: without that variable these tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.citus import Citus, running_citus

REASON = "SHARDIDS_CITUS_BIN names no folder of server programs with Citus, which no package registry has"


@pytest.fixture(scope="session")
def bindir() -> Path:
    named = os.environ.get("SHARDIDS_CITUS_BIN")
    if not named:
        pytest.skip(REASON)
    return Path(named)


@pytest.fixture(scope="module")
def citus(bindir: Path) -> Iterator[Citus]:
    with running_citus(bindir) as servers:
        yield servers
