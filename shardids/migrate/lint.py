"""Checks revisions before they run for what changes a whole node and, with squawk, for what blocks.

The objects that a shard's revision creates belong to the shard, and are moved or dropped with it: an
extension in a shard's schema would be dropped with the shard, and so would the columns and constraints of
all other shards that use it.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardids.errors import BadArgument, ShardidsError
from shardids.logs import log_program
from shardids.migrate.compiled import Compiled
from shardids.migrate.drops import NAME, dropped_by, statements
from shardids.migrate.environment import Environment
from shardids.pg.connections import OLDEST_SERVER

_NOT_OURS = frozenset(
    {
        "ban-drop-table",  # drops are named by shardids, which counts their rows
        "ban-drop-column",
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


_OBJECT: Final = (
    r"(?:global\s+|local\s+|temp(?:orary)?\s+|unlogged\s+|recursive\s+|foreign\s+|materialized\s+|constraint\s+)*"
    r"(?:table|view|index|sequence|function|procedure|routine|aggregate|type|domain|collation|conversion|operator"
    r"|statistics|text\s+search\s+\w+)"
)
_NODE_WIDE: Final = {
    kind: re.compile(pattern, re.IGNORECASE)
    for kind, pattern in {
        "an extension": r"(create|alter|drop|comment\s+on)\s+extension\b",
        "a role": r"(create|alter|drop|comment\s+on)\s+(role|user|group)\b|(drop|reassign)\s+owned\b"
        r"|(grant|revoke)\s+(?!.*\bon\b)",
        "a database": r"(create|alter|drop|comment\s+on)\s+(database|tablespace)\b|alter\s+system\b"
        r"|(grant|revoke)\b.*\bon\s+(database|tablespace)\b",
        "a publication or subscription": r"(create|alter|drop|comment\s+on)\s+(publication|subscription)\b",
        "an event trigger": r"(create|alter|drop|comment\s+on)\s+event\s+trigger\b",
        "a foreign server": r"(create|alter|drop|comment\s+on)\s+(server|user\s+mapping|foreign\s+data)\b",
        "a schema": r"(create|alter|drop|comment\s+on)\s+schema\b|(grant|revoke)\b.*\bon\s+schema\b",
        "a cast, a language or an access method": r"(create|alter|drop)\s+"
        r"(cast|(trusted\s+)?(procedural\s+)?language|access\s+method|transform)\b",
        "default privileges": r"alter\s+default\s+privileges\b",
        "an object of another schema": r"(create(\s+or\s+replace)?(\s+unique)?|alter|drop|truncate"
        rf"|comment\s+on)\s+(?:{_OBJECT}\s+)(?:(?:concurrently|only|if\s+(?:not\s+)?exists)\s+)*{NAME}\s*\.(?!\s*\*)"
        r"|create\s+(or\s+replace\s+)?(unique\s+|constraint\s+)?(index|trigger|policy|rule)\b.*?\bon\s+"
        rf"(only\s+)?{NAME}\s*\.\s*{NAME}"
        r"|alter\b.*\bset\s+schema\b",
    }.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWide:
    """A statement in a shard's revision that changes ``what`` for all shards of a node."""

    revision: str
    what: str
    statement: str

    def __str__(self) -> str:
        return f"revision {self.revision} changes {self.what}, which is not a shard's: {self.statement}"


def require_own_schema(environment: Environment, compiled: Iterable[Compiled]) -> None:
    """Refuse revisions that change what all shards of a node share.

    Raises:
        BadArgument: a revision does; the message names the statement.
    """
    for found in node_wide(environment, compiled):
        raise BadArgument(
            str(found), hint="Move it to a revision for the node: shardids migrate revision --node -m …"
        )


def node_wide(environment: Environment | None, compiled: Iterable[Compiled]) -> list[NodeWide]:
    """Return what revisions change for a whole node, as far as their SQL tells.

    It reads the SQL that they compile to or, if a revision of ``environment`` needs Alembic, the literals
    that it executes.
    """
    found: dict[tuple[str, str], NodeWide] = {}
    for stage in (stage for one in compiled for stage in one.stages):
        literals = _executed_literals(environment, stage.revision) if environment and stage.reason else ()
        for text in (*(part.sql for part in stage.parts), *literals):
            for statement in statements(text):
                for what, pattern in _NODE_WIDE.items():
                    if pattern.match(statement):
                        shown = statement if len(statement) <= 100 else statement[:99] + "…"
                        one = NodeWide(revision=stage.revision, what=what, statement=shown)
                        found.setdefault((stage.revision, what), one)
    return list(found.values())


def _executed_literals(environment: Environment, revision: str) -> Iterator[str]:
    tree = ast.parse(Path(str(environment.revision(revision).module.__file__)).read_text(encoding="utf-8"))
    for call in ast.walk(tree):
        name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
        if name in {"execute", "exec_driver_sql", "scalar", "scalars", "text"}:
            for node in ast.walk(call):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


@dataclass(frozen=True, slots=True, kw_only=True)
class LintWarning:
    """A warning: the revision, the rule (squawk's, or ``drops-rows``), the reason, and a remedy."""

    revision: str
    statement: str
    rule: str
    message: str
    instead: str

    def row(self) -> dict[str, object]:
        """Return the warning as commands show it."""
        return {
            "revision": self.revision,
            "rule": self.rule,
            "message": self.message,
            "instead": self.instead,
            "statement": self.statement,
        }


def squawk_path() -> str | None:
    """Return where squawk is, beside this Python or on the PATH; ``None`` if it is not installed."""
    beside = Path(sys.executable).parent / "squawk"
    return str(beside) if beside.is_file() else shutil.which("squawk")


def lint(compiled: Compiled) -> list[LintWarning]:
    """Return warnings about the SQL of a route: drops, and squawk's. Stages that need Alembic have no SQL.

    Raises:
        BadArgument: squawk is not installed.
        ShardidsError: squawk failed.
    """
    squawk = squawk_path()
    if squawk is None:
        raise BadArgument(
            "squawk, which looks through the SQL, is not installed", hint="pip install 'shardids[ops]'"
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
    began = time.perf_counter()
    ran = subprocess.run(  # noqa: S603 -- the words are constants
        words, input="\n".join(lines), capture_output=True, encoding="utf-8", check=False, timeout=60
    )
    log_program("migrate", words, began, ran.returncode)
    try:
        found = json.loads(ran.stdout)
    except ValueError:
        raise ShardidsError(f"squawk failed: {(ran.stderr or ran.stdout).strip()}") from None
    return [*_drops(compiled), *_warnings(found, lines, revisions, first_lines)]


def _drops(compiled: Compiled) -> Iterator[LintWarning]:
    for stage in compiled.stages:
        for statement in (one for part in stage.parts for one in statements(part.sql)):
            for dropped in dropped_by(statement):
                yield LintWarning(
                    revision=stage.revision,
                    statement=statement,
                    rule="drops-rows",
                    message=f"It drops {dropped}, with all rows.",
                    instead="Applications that use it fail: run this once none does, as a contract.",
                )


def _warnings(
    found: list[dict[str, object]], lines: list[str], revisions: list[str], first_lines: list[int]
) -> Iterator[LintWarning]:
    for one in found:
        # Filters here instead of with --exclude: squawk refuses to exclude a rule that its version lacks.
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
