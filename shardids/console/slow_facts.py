"""What is dear to read, so read seldom: sizes, replication lag and revisions of shards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Final

from sqlalchemy import Connection, text

from shardids.console.databases import Databases
from shardids.console.watching import Seen
from shardids.errors import ShardidsError
from shardids.logs import logger
from shardids.migrate.environment import VERSION_TABLE

EVERY_S: Final = 600.0
"""How old they may be before they are read again, unless somebody asks for it."""
_SOONEST_S: Final = 5.0
_PATIENCE_S: Final = 30.0

log = logger("console")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFacts:
    """Of each shard, by number: bytes of tables and indexes, and revisions of the application's migrations,
    of which one that is half way has a ``+`` after it.

    Attributes:
        at: when they were read, in seconds since 1970; ``None`` if never.
    """

    at: float | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    revisions: Mapping[int, str] = field(default_factory=dict)


class SlowReader:
    """Reads slow facts in a thread when somebody asks for them and they are old.

    Args:
        databases: where they are asked for.
        version_table: the table of Alembic in each shard.
    """

    def __init__(self, databases: Databases, version_table: str = VERSION_TABLE) -> None:
        self._databases = databases
        self._version_table = version_table
        self._facts = SlowFacts()
        self._begun = float("-inf")
        self._lock = Lock()

    @property
    def known(self) -> SlowFacts:
        """Returns what is known now, and reads nothing."""
        return self._facts

    def facts(self, seen: Seen, *, again: bool = False) -> SlowFacts:
        """Returns what is known now. If it is old, or ``again`` says so, it is read for who asks later."""
        is_old = time.monotonic() - self._begun > (_SOONEST_S if again else EVERY_S)
        if is_old and self._lock.acquire(blocking=False):
            self._begun = time.monotonic()
            Thread(target=self._run, args=(seen,), name="shardids console", daemon=True).start()
        return self._facts

    def _run(self, seen: Seen) -> None:
        try:
            self._facts = self._read(seen)
        except Exception:
            log.exception("sizes and revisions could not be read")
        finally:
            self._lock.release()

    def _read(self, seen: Seen) -> SlowFacts:
        sizes, revisions = dict(self._facts.sizes), dict(self._facts.revisions)
        answers = self._databases.of_nodes(dict.fromkeys(seen.nodes, self._ask), seconds=_PATIENCE_S)
        # Where a node does not answer, what was known of its shards stays.
        for name, answer in answers.items():
            if isinstance(answer, ShardidsError):
                continue
            for shard in _owned(seen, name) & answer.keys():
                sizes[shard], revision = answer[shard]
                revisions.pop(shard, None)
                if revision is not None:
                    revisions[shard] = revision
        return SlowFacts(at=time.time(), sizes=sizes, revisions=revisions)

    def _ask(self, connection: Connection) -> dict[int, tuple[int, str | None]]:
        connection.exec_driver_sql("set local statement_timeout = '25s'")
        found: dict[int, tuple[int, str | None]] = {}
        revisions = {
            row.shard: _shown(row.revisions, row.unfinished)
            for row in connection.execute(_REVISIONS, {"table": self._version_table})
        }
        for row in connection.execute(_SIZES):
            found[row.id] = (row.size_bytes, revisions.get(row.id))
        return found


def _shown(revisions: list[str] | None, unfinished: str | None) -> str | None:
    if not revisions and unfinished is None:
        return None
    return ", ".join(sorted(revisions or [])) + (f" +{unfinished}" if unfinished else "")


def _owned(seen: Seen, node: str) -> frozenset[int]:
    return seen.known.placed.get((node, "active"), frozenset()) if seen.known else frozenset()


_REVISIONS: Final = text("select shard, revisions, unfinished from shardids.revisions(:table)")
_SIZES: Final = text("""
    select s.id, coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as size_bytes
    from shardids.shard s
    left join pg_namespace n on n.nspname = s.schema
    left join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'm')
    where s.state <> 'moved' group by s.id""")
