"""Whose code may run when rows are written, or tables are made: refused, unless the role is trusted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection

from shardids.catalog.queries import prepare, rows
from shardids.catalog.sqlfiles import read_sql


@dataclass(frozen=True, slots=True, kw_only=True)
class Untrusted:
    """A role whose code may run as the session's: a row of ``reading/owners.v1.sql``.

    Attributes:
        role: the role.
        object: something that it owns, and that writes to the tables use.
        as_role: the session's user.
    """

    role: str
    object: str
    as_role: str

    @property
    def reason(self) -> str:
        """Returns the reason to refuse."""
        return (
            f'role "{self.role}" can change what {self.object} runs, and that would run as role'
            f' "{self.as_role}", which may do more'
        )

    @property
    def remedy(self) -> str:
        """Returns what to do."""
        return f'If "{self.role}" may do all that "{self.as_role}" may: --trust {self.role}'


_ADMINISTERS: Final = """
    select exists (
      select from pg_catalog.pg_roles r
      where pg_catalog.pg_has_role(session_user, r.oid, 'member')
        and (r.rolsuper or r.rolcreaterole
             or r.oid operator(pg_catalog.=) (select e.nspowner from pg_catalog.pg_namespace e
                                              where e.nspname operator(pg_catalog.=) 'shardids')))"""


def administers(connection: Connection) -> bool:
    """Returns whether the session's user may act as a superuser, with CREATEROLE, or as the engine's owner.

    Code of a table's owner runs with the rights of any other role, too, but those are an application's.
    Which role is set decides nothing: such code resets it, and the database's owner sets it for all sessions.
    The session may have any ``search_path``.
    """
    return bool(connection.exec_driver_sql(_ADMINISTERS).scalar())


def untrusted(
    connection: Connection, tables: Iterable[str], *, trusted: Iterable[str] = (), is_node: bool = True
) -> list[Untrusted]:
    """Returns the roles whose code may run as the session's role when rows of tables are written.

    In the open transaction: the answer holds for as long as that locks the tables against ALTER TABLE and
    CREATE TRIGGER. ``trusted`` names roles that the caller trusts beside superusers, the session's user, the
    role that is set if that user administers nothing, and on a node members of the engine's owner.
    """
    prepare(
        connection,
        tables=json.dumps(list(tables)),
        trusted=json.dumps(list(trusted)),
        is_node=is_node,
        administers=administers(connection),
    )
    # The server fills as much with zeros, as it expects many more objects: 30 ms.
    connection.exec_driver_sql("set local work_mem = '1MB'")
    return rows(connection, read_sql("reading/owners.v1"), Untrusted)
