"""One registry of advisory locks, which the SQL files agree with."""

import re

from shardids.catalog.locks import AdvisoryLock
from shardids.catalog.sqlfiles import read_sql, sql_names


def test_every_advisory_lock_of_the_sql_files_is_registered() -> None:
    taken = {
        int(number) for name in sql_names() for number in re.findall(r"\b(19362205\d\d)\b", read_sql(name))
    }
    assert taken
    assert taken <= set(AdvisoryLock)
