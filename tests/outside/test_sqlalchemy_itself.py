"""SQLAlchemy's own tests of its ORM, on sessions on one shard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import ROOT, environment

EXPLAINED: dict[str, str] = {}
"""Tests that fail on shards and not in plain sessions, and why."""

FILES = {
    "unit of work": ["test_unitofwork.py", "test_unitofworkv2.py"],
    "cascades": ["test_cascade.py"],
    "eager loading": ["test_eager_relations.py", "test_subquery_relations.py", "test_selectin_relations.py"],
    "versioning": ["test_versioning.py"],
    "inheritance": ["inheritance"],
}


@pytest.mark.parametrize("kind", sorted(FILES))
def test_sqlalchemy_s_own_tests(cluster_url: URL, sqlalchemy_tests: Path, kind: str) -> None:
    passed, failed = run(cluster_url, sqlalchemy_tests, kind)
    _, failed_plainly = run(cluster_url, sqlalchemy_tests, kind, SHARDIDS_PLAIN="1")
    of_ours = sorted(failed - failed_plainly)
    said = f"{kind}: {passed} passed, {len(failed)} failed, {len(of_ours)} of them on shards only"
    print(f"\n{said}")  # noqa: T201 -- the report
    assert passed > 40
    assert [name for name in of_ours if name not in EXPLAINED] == []


def run(cluster_url: URL, folder: Path, kind: str, **settings: str) -> tuple[int, set[str]]:
    """Returns how many tests passed, and which failed."""
    url = cluster_url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    words = [sys.executable, "-m", "pytest", "-p", "tests.outside.sqlalchemy_plugin", "--dburi", url]
    words += ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:shardids"]
    found = environment(SHARDIDS_CATALOG=dsn(cluster_url), **settings)
    found["PYTHONPATH"] = os.pathsep.join([found.get("PYTHONPATH", ""), str(ROOT)])
    done = subprocess.run(
        [*words, *(f"test/orm/{name}" for name in FILES[kind])],
        cwd=folder,
        env=found,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    ran = re.search(r"(\d+) passed", done.stdout)
    assert ran is not None, done.stdout[-5000:] + done.stderr[-5000:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return int(ran[1]), set(failed)
