"""Has squawk, a linter for PostgreSQL migrations, look through a route's SQL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardids.catalog.connections import OLDEST_SERVER
from shardids.errors import BadArgument, ShardidsError
from shardids.migrate.compiled import Compiled

_NOT_OURS = frozenset(
    {
        "require-lock-timeout",  # every transaction of a run has one
        "require-statement-timeout",
        "prefer-robust-stmts",  # the mark tells how far an interrupted revision got
        "prefer-text-field",  # matters of taste that block nobody
        "prefer-bigint-over-int",
        "prefer-bigint-over-smallint",
        "prefer-big-int",
        "prefer-identity",
        "prefer-timestamp-tz",
        "ban-char-field",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintWarning:
    """A warning of squawk's: in which revision, by which rule, why, and what to do instead."""

    revision: str
    statement: str
    rule: str
    message: str
    instead: str

    def row(self) -> dict[str, object]:
        """Returns the warning as commands show it."""
        return {
            "revision": self.revision,
            "rule": self.rule,
            "message": self.message,
            "instead": self.instead,
            "statement": self.statement,
        }


def squawk_path() -> str | None:
    """Returns where squawk is: beside this Python, or on the PATH; ``None`` if nowhere."""
    beside = Path(sys.executable).parent / "squawk"
    return str(beside) if beside.is_file() else shutil.which("squawk")


def lint(compiled: Compiled) -> list[LintWarning]:
    """Returns squawk's warnings about the SQL of a route. Stages that need Alembic have no SQL.

    Raises:
        BadArgument: squawk is not installed.
        ShardidsError: it failed.
    """
    squawk = squawk_path()
    if squawk is None:
        raise BadArgument(
            "squawk, which looks through the SQL, is not installed", hint="pip install 'shardids[lint]'"
        )
    lines, revisions, first_lines = list[str](), list[str](), list[int]()
    for stage in compiled.stages:
        revisions.append(stage.revision)
        first_lines.append(len(lines))
        for part in stage.parts:
            text = f"begin;\n{part.sql}\ncommit;" if part.in_transaction else part.sql
            lines.extend(text.split("\n"))
    if not lines:
        return []
    words = [
        squawk,
        "--reporter",
        "json",
        "--pg-version",
        f"{OLDEST_SERVER}.0",
        "--stdin-filepath",
        "revisions.sql",
    ]
    ran = subprocess.run(  # noqa: S603 -- the words are constants
        words, input="\n".join(lines), capture_output=True, encoding="utf-8", check=False, timeout=60
    )
    try:
        found = json.loads(ran.stdout)
    except ValueError:
        raise ShardidsError(f"squawk failed: {(ran.stderr or ran.stdout).strip()}") from None
    return list(_warnings(found, lines, revisions, first_lines))


def _warnings(
    found: list[dict[str, object]], lines: list[str], revisions: list[str], first_lines: list[int]
) -> Iterator[LintWarning]:
    for one in found:
        # Not with --exclude: squawk refuses to exclude a rule that its version does not have.
        if one["rule_name"] in _NOT_OURS:
            continue
        line = int(str(one["line"]))
        yield LintWarning(
            revision=revisions[bisect_right(first_lines, line) - 1],
            statement=lines[line].strip(),
            rule=str(one["rule_name"]),
            message=str(one["message"]),
            instead=str(one["help"] or ""),
        )
