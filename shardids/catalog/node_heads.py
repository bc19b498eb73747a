"""Reads which of the application's revisions for the node a node has."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

SHARED_SCHEMA: Final = "public"
"""Where node revisions create what the shards of a node share."""
NODE_VERSION_TABLE: Final = "alembic_node_version"
"""The version table of the node's branch, in the shared schema."""


def node_heads_in(connection: Connection) -> tuple[str, ...]:
    """Returns the node revisions that a database is at, none before the first.

    Others may create objects in the schema: a view, or a table with policies, would run their functions.
    """
    table = f"{SHARED_SCHEMA}.{NODE_VERSION_TABLE}"
    is_table = text("""
        select exists (select from pg_class where oid = to_regclass(:table) and relkind = 'r'
                       and not relrowsecurity)""")
    if not connection.scalar(is_table, {"table": table}):
        return ()
    return tuple(sorted(connection.scalars(text(f"select version_num from only {table}"))))  # noqa: S608 -- constants
