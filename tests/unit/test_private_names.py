"""SQLAlchemy's private names that sessions over shards use: each may be gone in its next version."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from sqlalchemy.dialects.postgresql.base import PGCompiler
from sqlalchemy.orm import Session

from shardids.client import routing

KNOWN = {
    "_add_event": "a listener of statements that comes after all others",
    "_begin": "a part of a transaction that fails as a flush does",
    "_compiler_dispatcher": "whether an application writes an element's SQL, which nothing public tells",
    "_connections": "a connection for the rows of association tables",
    "_execute_internal": "where all ways to execute meet",
    "_generate_cache_key": "what a statement's structure says is kept by it",
    "_parent_execute_state": "a statement that a listener executes is routed already",
    "_setup_select_stack": "which tables a SELECT reads besides those of the statement around it",
    "_traverse_internals": "the clauses of a statement, which can be set by public methods, not read",
}
PRIVATE = re.compile(r"_[a-z][a-z_]+")


def test_no_other_private_name_is_used() -> None:
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(routing.__path__[0]).glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    theirs = {name for name in functions if hasattr(Session, name) or hasattr(PGCompiler, name)}
    own = (functions - theirs) | {
        name
        for node in nodes
        for name in (
            getattr(node, "attr", None) if isinstance(getattr(node, "ctx", None), ast.Store) else None,
            getattr(getattr(node, "target", None), "id", None),
        )
        if name is not None
    }
    used = theirs | {
        name
        for node in nodes
        for name in (getattr(node, "attr", None), node.value if isinstance(node, ast.Constant) else None)
        if isinstance(name, str)
    }
    assert {name for name in used - own if PRIVATE.fullmatch(name)} == set(KNOWN)
