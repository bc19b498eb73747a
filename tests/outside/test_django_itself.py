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

LEAST_PASSED = {
    "aggregation": 140,
    "basic": 76,
    "bulk_create": 39,
    "delete": 55,
    "expressions": 200,
    "get_or_create": 42,
    "lookup": 98,
    "many_to_many": 38,
    "many_to_one": 29,
    "queries": 460,
    "select_for_update": 33,
    "transactions": 85,
    "update": 25,
}
_RAW_SQL = "its own SQL names the table without the schema"
_UNINSTALLED = "it runs without installed applications, which say what tables are in shards"
EXPLAINED = {
    "queries.test_db_returning.ReturningValuesTests.test_bulk_insert": "it brings keys of another shard",
    "queries.tests.Queries5Tests.test_ordering": "its extra(tables=…) names a table that is in no shard",
    "select_for_update.tests.SelectForUpdateTests.test_block": _RAW_SQL,
    "select_for_update.tests.SelectForUpdateTests.test_nowait_raises_error_on_block": _RAW_SQL,
    "select_for_update.tests.SelectForUpdateTests.test_raw_lock_not_available": _RAW_SQL,
    "select_for_update.tests.SelectForUpdateTests.test_skip_locked_skips_locked_rows": _RAW_SQL,
    "transactions.tests.NonAutocommitTests.test_orm_query_after_error_and_rollback": _UNINSTALLED,
    "transactions.tests.NonAutocommitTests.test_orm_query_without_autocommit": _UNINSTALLED,
}
"""Tests that fail on shards and not elsewhere, and why."""


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
    failed = set(re.findall(r"^(?:ERROR|FAIL): \S+ \((\S+?)\)", done.stderr, re.MULTILINE))
    assert ran is not None, done.stderr
    assert failed == {name for name in EXPLAINED if name.startswith(f"{label}.")}, done.stderr
    assert bool(failed) == (done.returncode != 0), done.stderr
    reasons = {reason: skipped.count(reason) for reason in skipped}
    print(f"\n{label}: ran {ran[1]}, skipped {len(skipped)}: {reasons}")  # noqa: T201 -- the report
    assert int(ran[1]) - len(skipped) >= LEAST_PASSED[label]
