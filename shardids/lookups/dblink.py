"""The extension by which triggers claim, in a schema that nobody else may use."""

from __future__ import annotations

from typing import Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.errors import ClusterConflict, MissingPrivilege
from shardids.views.database import run

SCHEMA: Final = "shardids_dblink"
"""Where dblink's functions are. Who may call them reaches the connections of the triggers."""
PREFIX: Final = "lookups_"
"""What the names of the servers begin with."""
_NEEDED: Final = (
    "dblink(text, text)",
    "dblink_connect(text, text)",
    "dblink_disconnect(text)",
    "dblink_get_connections()",
)
"""What ``shardids.ask_node`` calls. Above all, its owner needs no ``dblink_connect_u``."""


def engine_owner(connection: Connection) -> tuple[str, bool]:
    """Returns the role that owns a node's engine, and whether it is a superuser."""
    found = connection.execute(
        text("""
            select o.rolname, o.rolsuper from pg_namespace n join pg_roles o on o.oid = n.nspowner
            where n.nspname = 'shardids'""")
    ).one()
    return found.rolname, found.rolsuper


def make(connection: Connection, owner: str) -> None:
    """Creates dblink, or corrects its privileges, so that only the engine's owner and superusers can call it.

    Raises:
        ClusterConflict: the extension is in another schema, or others own or may use what belongs to it.
        MissingPrivilege: a superuser has to create it.
    """
    where = connection.scalar(
        text("""
            select n.nspname from pg_extension e join pg_namespace n on n.oid = e.extnamespace
            where e.extname = 'dblink'""")
    )
    if where not in (None, SCHEMA):
        raise ClusterConflict(
            f"extension dblink is in schema {where}, where others may call its functions: in a session whose"
            " statement has claimed, they would reach the trigger's connections",
            hint=f"If nothing else needs it: CREATE SCHEMA {SCHEMA};"
            f" ALTER EXTENSION dblink SET SCHEMA {SCHEMA}",
        )
    create, privileges = _statements(owner)
    if where is None:
        _refuse_strangers(connection, owner)
    try:
        if where is None:
            run(connection, create)
        if where is None or not _is_right(connection, owner):
            run(connection, privileges)
    except MissingPrivilege as error:
        raise MissingPrivilege(
            f"strict look-ups need extension dblink: {error.message}",
            hint="A superuser runs, in this database: "
            + "; ".join(one.as_string() for one in [*(create if where is None else ()), *privileges]),
        ) from error
    _refuse_strangers(connection, owner)


def _statements(owner: str) -> tuple[list[sql.Composable], list[sql.Composable]]:
    """Returns what creates the extension, and what gives its privileges."""
    names = {
        "schema": sql.Identifier(SCHEMA),
        "owner": sql.Identifier(owner),
        "functions": sql.SQL(", ").join(sql.SQL(f"{SCHEMA}.{one}") for one in _NEEDED),
    }
    create = ("create schema if not exists {schema}", "create extension dblink schema {schema}")
    privileges = (
        "revoke execute on all functions in schema {schema} from public",
        "grant usage on schema {schema} to {owner}",
        "grant execute on function {functions} to {owner}",
        "grant usage on foreign data wrapper dblink_fdw to {owner}",
    )
    return (
        [sql.SQL(one).format(**names) for one in create],
        [sql.SQL(one).format(**names) for one in privileges],
    )


def _is_right(connection: Connection, owner: str) -> bool:
    """Returns whether the engine's owner has what it needs, and the public nothing."""
    return bool(
        connection.scalar(
            text("""
                select has_schema_privilege(:owner, :schema, 'usage')
                   and has_foreign_data_wrapper_privilege(:owner, 'dblink_fdw', 'usage')
                   and (select bool_and(has_function_privilege(:owner, :schema || '.' || f, 'execute'))
                        from unnest(:needed ::text[]) f)
                   and not exists (
                     select from pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                     where p.pronamespace = (:schema) ::regnamespace and a.grantee = 0)"""),
            {"owner": owner, "schema": SCHEMA, "needed": list(_NEEDED)},
        )
    )


def strangers(connection: Connection, owner: str) -> list[str]:
    """Returns what roles but the engine's owner and superusers own, or may use, of dblink and its servers."""
    return list(
        connection.scalars(
            text("""
                with trusted as (select r.oid from pg_roles r where r.rolsuper or r.rolname = :owner),
                owned (what, owner) as (
                  select 'schema ' || quote_ident(n.nspname), n.nspowner
                  from pg_namespace n where n.nspname = :schema
                  union all
                  select 'a function in schema ' || quote_ident(n.nspname), p.proowner
                  from pg_proc p join pg_namespace n on n.oid = p.pronamespace where n.nspname = :schema
                  union all
                  select 'server ' || quote_ident(s.srvname), s.srvowner
                  from pg_foreign_server s where starts_with(s.srvname, :prefix)),
                granted (what, grantee) as (
                  select 'schema ' || quote_ident(n.nspname), a.grantee
                  from pg_namespace n, aclexplode(n.nspacl) a where n.nspname = :schema
                  union all
                  select 'a function in schema ' || quote_ident(n.nspname), a.grantee
                  from pg_proc p join pg_namespace n on n.oid = p.pronamespace,
                       aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                  where n.nspname = :schema)
                select format('%s is owned by role %s', o.what, pg_get_userbyid(o.owner))
                from owned o where o.owner not in (select t.oid from trusted t)
                union
                select format('%s was granted to %s', g.what,
                              case g.grantee when 0 then 'public' else pg_get_userbyid(g.grantee) ::text end)
                from granted g where g.grantee not in (select t.oid from trusted t)
                order by 1"""),
            {"owner": owner, "schema": SCHEMA, "prefix": PREFIX},
        )
    )


def _refuse_strangers(connection: Connection, owner: str) -> None:
    found = strangers(connection, owner)
    if found:
        raise ClusterConflict(
            f"{', '.join(found)}, who would reach the triggers' connections",
            hint=f"REVOKE ALL ON … FROM them; ALTER … OWNER TO {owner}, or DROP what somebody else made.",
        )
