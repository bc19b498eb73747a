"""Django's own tests of what touches primary keys most, with a shard for a database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import environment

LEAST_PASSED = {"bulk_create": 39, "expressions": 200, "get_or_create": 42}


@pytest.mark.parametrize("label", sorted(LEAST_PASSED))
def test_django_s_own_tests(cluster_url: URL, django_tests: Path, label: str) -> None:
    words = [sys.executable, "runtests.py", "--settings", "tests.outside.django_settings", "--parallel", "1"]
    found = environment(SHARDIDS_CATALOG=dsn(cluster_url))
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(django_tests)])
    done = subprocess.run(
        [*words, "--verbosity", "2", label],
        cwd=django_tests,
        env=found,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    skipped = re.findall(r"skipped ['\"](.*)['\"]", done.stderr)
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert done.returncode == 0, done.stderr
    assert ran is not None
    reasons = {reason: skipped.count(reason) for reason in skipped}
    print(f"\n{label}: ran {ran[1]}, skipped {len(skipped)}: {reasons}")  # noqa: T201 -- the report
    assert int(ran[1]) - len(skipped) >= LEAST_PASSED[label]
