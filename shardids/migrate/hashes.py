"""Records beside a version table what each revision was when it ran.

A revision's hash is that of its source, without comments, docstrings, layout and ``downgrade()``. It is kept
in the comment of the version table's column, so that it is moved, dumped and restored with the shard, and
plain Alembic works beside it. A revision that plain Alembic has run has none.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from alembic.runtime.migration import MigrationContext, MigrationInfo
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.queries import read

_DIGITS: Final = 12
_WITHOUT_MEANING: Final = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of Python's syntax tree that say nothing, or nothing that its other fields don't."""
_RECORD = sql.SQL("select shardids.record_hashes({table}::regclass, {undone}::text[], {done}::jsonb)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Hashes by revision, and the shards of a node that recorded just these; none if the node itself did."""

    hashes: Mapping[str, str]
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of ``migrate/hashes.v1.sql``."""

    hashes: str
    shards: list[int] | None


def hash_of_file(path: Path) -> str | None:
    """Returns the hash of a revision's file; ``None`` if there is no source."""
    return hash_of_source(path.read_text(encoding="utf-8")) if path.suffix == ".py" else None


def hash_of_source(source: str) -> str:
    """Returns the hash of a revision's source: the same after reformatting, with any version of Python."""
    module = ast.parse(source)
    imports = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in module.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    kept = [node for node in others if getattr(node, "name", "") != "downgrade"]
    used = {node.id for one in kept for node in ast.walk(one) if isinstance(node, ast.Name)}
    words = [*sorted(_imported(imports, used)), *_words(_without_docstring(kept))]
    return sha256("\0".join(words).encode()).hexdigest()[:_DIGITS]


def _imported(imports: Iterable[ast.Import | ast.ImportFrom], used: Collection[str]) -> Iterator[str]:
    """Yields the imports that are used, in a form that does not depend on how they are grouped."""
    for node in imports:
        module = f"{'.' * node.level}{node.module or ''}:" if isinstance(node, ast.ImportFrom) else ""
        for name in node.names:
            if name.name == "*" or (name.asname or name.name).split(".")[0] in used:
                yield f"import {module}{name.name} {name.asname or ''}"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_docstring and isinstance(first.value.value, str) else body  # type: ignore[union-attr] # is_docstring says that it is an Expr


def _words(node: object) -> Iterator[str]:
    """Yields what a part of a syntax tree consists of; ``ast.dump`` differs between versions of Python."""
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _words(item)
        yield "]"
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            # A field that a later version of Python added is empty in what an earlier one can read.
            if name in _WITHOUT_MEANING or value is None or value == []:
                continue
            is_documented = name == "body" and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            )
            yield name
            yield from _words(_without_docstring(value) if is_documented else value)
    else:
        yield f"{type(node).__name__} {node!r}"


def record(version_table: str, undone: Collection[str] | None, done: Mapping[str, str | None]) -> str:
    """Returns the statement that records hashes, without its semicolon.

    Takes away those of ``undone``, or with ``None`` all.
    """
    known = {revision: value for revision, value in done.items() if value is not None}
    gone = None if undone is None else sorted(undone)
    return _RECORD.format(table=version_table, undone=gone, done=json.dumps(known, sort_keys=True)).as_string(
        None
    )


def recorder(version_table: str, hash_of: Callable[[str], str | None]) -> Callable[..., None]:
    """Returns what Alembic calls after each revision that it runs: it records the revision's hash."""

    def record_step(*, ctx: MigrationContext, step: MigrationInfo, **_rest: Any) -> None:
        if ctx.connection is None or step.up_revision_id is None:
            return
        revision = step.up_revision_id
        known = hash_of(revision) if step.is_upgrade else None
        ctx.connection.execute(
            text(
                "select shardids.record_hashes(cast(cast(:table as text) as regclass),"
                " cast(:undone as text[]), cast(:done as jsonb))"
            ),
            {
                "table": version_table,
                "undone": [revision],
                "done": json.dumps({} if known is None else {revision: known}),
            },
        )

    return record_step


def read_recorded(connection: Connection) -> list[Recorded]:
    """Reads what a node and its shards have recorded; the connection is as for ``catalog.queries.read``."""
    return [
        Recorded(hashes=_parsed(row.hashes), shards=tuple(row.shards or ()))
        for row in read(connection, "migrate/hashes.v1", _Row)
    ]


def _parsed(text: str) -> dict[str, str]:
    """Parses the comment, which anybody who owns the version table can write."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {revision: value for revision, value in pairs if isinstance(value, str)}
