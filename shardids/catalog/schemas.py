"""The schemas of shardids' own objects, its publications and subscriptions: of trusted roles, or refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.queries import rows
from shardids.catalog.sqlfiles import read_sql
from shardids.errors import ClusterConflict, MissingPrivilege

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
    """Refuses a publication or subscription of a move, an adoption or of reference tables that others made.

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
    """Refuses a replication slot that exists before the publication that is to use it.

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
