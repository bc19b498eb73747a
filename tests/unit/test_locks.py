"""One registry of advisory locks, which the SQL files and the modules agree with."""

import re
from pathlib import Path

import shardids
from shardids.pg.locks import AdvisoryLock
from shardids.pg.sqlfiles import read_sql, sql_names

NUMBER = re.compile(r"\b(19362205\d\d)\b")
PACKAGE = Path(shardids.__file__).parent
REGISTRY = PACKAGE / "pg" / "locks.py"
MODULES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != REGISTRY}


def taken_in_sql() -> set[int]:
    return {int(number) for name in sql_names() for number in NUMBER.findall(read_sql(name))}


def test_every_advisory_lock_of_the_sql_files_is_registered() -> None:
    assert taken_in_sql()
    assert taken_in_sql() <= set(AdvisoryLock)


def test_modules_name_their_advisory_locks() -> None:
    assert not [path for path, code in MODULES.items() if NUMBER.search(code)]


def test_every_registered_lock_is_taken_somewhere() -> None:
    named = {
        lock for lock in AdvisoryLock for code in MODULES.values() if f"AdvisoryLock.{lock.name}" in code
    }
    assert named | taken_in_sql() == set(AdvisoryLock)
