"""``shardids doctor`` in a thread, one at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any, Literal

from psycopg import sql
from sqlalchemy.engine import URL

from shardids.catalog.rows import Catalog
from shardids.errors import MissingPrivilege, ShardidsError
from shardids.logs import logger
from shardids.pg.urls import parse_url
from shardids.watch import doctor
from shardids.watch.console.todo import finding_values
from shardids.watch.doctor.findings import Finding

log = logger("console")

Values = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examined:
    state: Literal["never", "running", "done", "failed"] = "never"
    report: doctor.Report | None = None
    read_at: float | None = None
    error: str | None = None


class Examiner:
    """An examiner of the cluster, on request, which keeps the last report.

    Args:
        catalog_url: the catalog.
    """

    def __init__(self, catalog_url: str | URL) -> None:
        self._catalog_url = catalog_url
        self._examined = _Examined()
        self._lock = Lock()

    def begin(self) -> bool:
        """Begin an examination, unless one is running; return whether it did."""
        with self._lock:
            before = self._examined
            if before.state == "running":
                return False
            self._examined = _Examined(state="running", report=before.report, read_at=before.read_at)
        # Its transactions are read-only, so it may end with the process.
        Thread(target=self._run, name="shardids console doctor", daemon=True).start()
        return True

    @property
    def state(self) -> str:
        """Returns whether one is running, and how the last one ended."""
        return self._examined.state

    @property
    def findings(self) -> Sequence[Finding]:
        """Return the findings of the last one."""
        return self._examined.report.findings if self._examined.report else ()

    @property
    def read_at(self) -> float | None:
        """Return when the last one ended that has a report."""
        return self._examined.read_at

    def values(self) -> Values:
        """Return the last report, and whether a new one is being made."""
        now = self._examined
        return {
            "state": now.state,
            "read_at": now.read_at,
            "error": now.error,
            "seconds": now.report and round(now.report.seconds, 3),
            "checks": len(now.report.checks) if now.report else 0,
            "skipped": now.report.skipped if now.report else (),
            "well": now.report and now.report.is_well,
            "findings": [finding_values(one) for one in self.findings],
        }

    def _grants(self) -> str:
        """Return the privileges that an examination needs, beyond those of the page."""
        role = sql.Identifier(parse_url(self._catalog_url).username or "…").as_string()
        return f"An examination needs more than the page: GRANT pg_read_all_data TO {role}, on each server"

    def _run(self) -> None:
        before = self._examined
        try:
            with closing(Catalog(self._catalog_url, read_only=True)) as catalog:
                report = doctor.examine(catalog)
            self._examined = _Examined(state="done", report=report, read_at=time.time())
            return
        except MissingPrivilege as error:
            what = f"{error.in_a_line()}. {self._grants()}"
        except ShardidsError as error:
            what = error.in_a_line()
        except Exception as error:
            log.exception("the examination failed")
            what = f"the examination failed: {type(error).__name__}"
        self._examined = _Examined(state="failed", report=before.report, read_at=before.read_at, error=what)
