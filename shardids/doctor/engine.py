"""Compares the engine that is installed with the one that this shardids would install."""

from __future__ import annotations

import re

from sqlalchemy import Connection

from shardids.catalog.queries import prepare, rows
from shardids.catalog.sqlfiles import read_sql
from shardids.doctor.facts import ChangedFunction, Installation
from shardids.install import trees

_STATEMENT = re.compile(
    r"^(?:create (?:or replace )?function shardids\..*?"
    r"(?:as (?P<quote>\$\w*\$)$.*?^(?P=quote);$|^return\b.*?;$|^begin atomic\b.*?\bend;$)"
    r"|drop function (?:if exists )?shardids\.[^;]*;)",
    re.MULTILINE | re.DOTALL,
)
"""A statement of the node tree that creates or drops a function, outside of DO blocks."""
_NAME = re.compile(r"\bfunction (?:if exists )?shardids\.")


def reference_sql() -> str:
    """Returns SQL that creates the engine's functions in ``pg_temp``; they call the installed engine."""
    statements = (found[0] for found in _STATEMENT.finditer(trees.tree_sql("node")))
    return "\n".join(
        _NAME.sub(lambda name: name[0].replace("shardids.", "pg_temp."), statement, count=1)
        for statement in statements
    )


def changed_functions(connection: Connection, installed: Installation) -> list[ChangedFunction]:
    """Returns the engine's functions that are missing, unknown, or differ from the files.

    Empty for an engine of another revision, and where nothing can be created to compare it with.
    """
    if installed.revisions != [trees.head("node")] or installed.is_standby or installed.is_read_only:
        return []
    with connection.begin() as transaction:
        prepare(connection)
        connection.execution_options(no_parameters=True).exec_driver_sql(reference_sql())
        changed = rows(connection, read_sql("doctor/engine.v1"), ChangedFunction)
        transaction.rollback()
    return changed
