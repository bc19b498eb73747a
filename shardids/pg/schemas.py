"""Owners: schemas, publications and subscriptions of shardids belong to trusted roles, or are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.errors import ClusterConflict, MissingPrivilege
from shardids.pg.queries import prepare, rows
from shardids.pg.sqlfiles import read_sql

ON_NODES: Final = (
    "shardids",
    "shardids_ref",
    "shardids_local",
    "shardids_query",
    "shardids_nodes",
    "shardids_foreign",
    "shardids_inplace",
)
"""Schemas that a node may have beside those of its shards; their owner is the engine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A schema or an object of another role: a row of ``engine/schemas.v1.sql``.

    ``kind``: ``schema``, ``create`` (a role may create objects in the schema), ``object``, ``code`` (a
    function that an object would run) or ``server``.
    """

    schema: str
    kind: str
    object: str
    role: str
    message: str
    fix: str


@cache
def _check() -> str:
    return read_sql("engine/schemas.v1").split("$check$")[1]


def _checked(schemas: str, owner: str) -> str:
    """Return the query, with SQL expressions for its parameters."""
    columns = "schema, kind, object, role, message, fix"
    query = _check().replace("$1", schemas).replace("$2", owner)
    return f"select * from ({query}) stranger ({columns})"  # noqa: S608 -- a file of this installation


def owning_statements(schema: str, owner: str = "") -> list[str]:
    """Return the statements that make or check a schema: ``install/schema.v1.sql``, after its settings."""
    settings = sql.SQL(
        "select set_config('shardids.own_schema', {}, true), set_config('shardids.own_owner', {}, true);"
    ).format(sql.Literal(schema), sql.Literal(owner))
    query = _checked("array[schema]::name[]", "owner")
    return [settings.as_string(), read_sql("install/schema.v1").replace("{strangers}", query)]


def own_schema(connection: Connection, schema: str, *, owner: str = "") -> None:
    """Make a schema, or check it; then act as its owner until the end of the transaction.

    ``owner`` is the role that it must belong to: on a node the engine's (:func:`engine_owner`). Without one
    the schema begins an installation: it belongs to the session's role, or to one that this may act as.

    Raises:
        MissingPrivilege: the schema or an object in it belongs to another role, or others may create there.
    """
    for statement in owning_statements(schema, owner):
        connection.execution_options(no_parameters=True).exec_driver_sql(statement)


def engine_owner(connection: Connection) -> str:
    """Return the role that owns a node's engine."""
    return owner_of(connection, "shardids.node")


def owner_of(connection: Connection, table: str) -> str:
    """Return the role that owns a table."""
    owner = text("select pg_get_userbyid(c.relowner) from pg_class c where c.oid = to_regclass(:table)")
    return str(connection.scalar(owner, {"table": table}))


def strangers_in(connection: Connection, schemas: Iterable[str], owner: str) -> list[Stranger]:
    """Return all that other roles own, or could create, in those of the schemas that exist."""
    names = sql.Literal(list(schemas)).as_string() + "::name[]"
    return rows(connection, _checked(names, sql.Literal(owner).as_string() + "::name"), Stranger)


def is_ours(connection: Connection, schema: str) -> bool:
    """Return whether a schema exists, and belongs to the session's role with all that is in it."""
    there, role = connection.execute(
        text("select to_regnamespace(:schema) is not null, current_user"), {"schema": schema}
    ).one()
    return bool(there) and not strangers_in(connection, (schema,), role)


def require_own(connection: Connection, schemas: Iterable[str], owner: str) -> None:
    """Refuse schemas that other roles can change; those that are missing are fine.

    Raises:
        MissingPrivilege: as :func:`own_schema` says.
    """
    for stranger in strangers_in(connection, schemas, owner):
        raise MissingPrivilege(stranger.message, hint=stranger.fix)


_REPLICATION: Final = {
    "publication": "select p.pubowner from pg_publication p where p.pubname = :name",
    "subscription": "select s.subowner from pg_subscription s join pg_database d on d.oid = s.subdbid"
    " where s.subname = :name and d.datname = current_database()",
}


def require_own_replication(
    connection: Connection, kind: Literal["publication", "subscription"], name: str, *, is_node: bool = True
) -> None:
    """Refuse a publication or subscription of a move, an adoption or of reference tables that others made.

    It would leave rows out, or bring others. Call it after it was made where it was missing. Superusers are
    trusted, the session's role, and on a node members of the engine's owner.

    Raises:
        MissingPrivilege: it belongs to another role.
    """
    role = connection.scalar(
        text(f"""
            select r.rolname from pg_roles r
            where r.oid = ({_REPLICATION[kind]}) and not r.rolsuper and r.rolname <> current_user
              and (:is_node and pg_has_role(r.oid, (select c.relowner from pg_class c
                                                    where c.oid = to_regclass('shardids.node')), 'member'))
                  is not true"""),  # noqa: S608 -- constants
        {"name": name, "is_node": is_node},
    )
    if role is not None:
        raise MissingPrivilege(
            f'{kind} {name} exists and belongs to role "{role}", which shardids does not trust with it',
            hint=f'DROP {kind.upper()} "{name}", and run the command again, or resume it.',
        )


def require_no_slot(connection: Connection, name: str) -> None:
    """Refuse a replication slot that exists before the publication that is to use it.

    Raises:
        ClusterConflict: there is one.
    """
    if connection.scalar(
        text("select exists (select from pg_replication_slots where slot_name = :name)"), {"name": name}
    ):
        raise ClusterConflict(
            f"replication slot {name} exists, and shardids did not make it: it may lack changes",
            hint=f"select pg_drop_replication_slot('{name}'), and run the command again, or resume it.",
        )


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
    """Return whether the session's user may act as a superuser, with CREATEROLE, or as the engine's owner.

    Code of a table's owner also runs with the rights of any other role, but those are an application's.
    Which role is set decides nothing: such code resets it, and the database's owner sets it for all sessions.
    The session may have any ``search_path``.
    """
    return bool(connection.exec_driver_sql(_ADMINISTERS).scalar())


def untrusted(
    connection: Connection, tables: Iterable[str], *, trusted: Iterable[str] = (), is_node: bool = True
) -> list[Untrusted]:
    """Return the roles whose code may run as the session's role when rows of tables are written.

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
