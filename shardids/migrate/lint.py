"""What squawk, a linter of PostgreSQL migrations, says of a route's SQL."""

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
        "prefer-robust-stmts",  # what was killed half way is known, see shardids.migrate.player
        "prefer-text-field",  # matters of taste, which hold nobody up
        "prefer-bigint-over-int",
        "prefer-bigint-over-smallint",
        "prefer-big-int",
        "prefer-identity",
        "prefer-timestamp-tz",
        "ban-char-field",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that squawk warns of: in which revision, by which rule, why, and what to do instead."""

    revision: str
    statement: str
    rule: str
    message: str
    instead: str

    def row(self) -> dict[str, object]:
        """The warning as it is shown."""
        return {
            "revision": self.revision,
            "rule": self.rule,
            "message": self.message,
            "instead": self.instead,
            "statement": self.statement,
        }


def squawk_path() -> str | None:
    """Where squawk is: beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / "squawk"
    return str(beside) if beside.is_file() else shutil.which("squawk")


def lint(compiled: Compiled) -> list[Finding]:
    """What squawk says of the SQL of a route. A route that runs through Alembic has none, so nothing.

    Raises:
        BadArgument: squawk is not installed.
        ShardidsError: it can't be run, or does not understand the SQL.
    """
    squawk = squawk_path()
    if squawk is None:
        raise BadArgument(
            "squawk is not installed, which looks through the SQL", hint="pip install 'shardids[lint]'"
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
    ran = subprocess.run(  # noqa: S603 -- the words are ours
        words, input="\n".join(lines), capture_output=True, text=True, check=False, timeout=60
    )
    try:
        found = json.loads(ran.stdout)
    except ValueError:
        raise ShardidsError(f"squawk failed: {(ran.stderr or ran.stdout).strip()}") from None
    return list(_warnings(found, lines, revisions, first_lines))


def _warnings(
    found: list[dict[str, object]], lines: list[str], revisions: list[str], first_lines: list[int]
) -> Iterator[Finding]:
    for one in found:
        # Not by --exclude, which refuses a rule that this version of squawk does not have.
        if one["rule_name"] in _NOT_OURS:
            continue
        line = int(str(one["line"]))
        yield Finding(
            revision=revisions[bisect_right(first_lines, line) - 1],
            statement=lines[line].strip(),
            rule=str(one["rule_name"]),
            message=str(one["message"]),
            instead=str(one["help"] or ""),
        )
