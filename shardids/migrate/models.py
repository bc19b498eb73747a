"""The body of ``env.py``, what Alembic compares with a shard, and how it renders shardids' columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import BigInteger, Column, Connection, MetaData, text
from sqlalchemy.schema import DefaultClause

from shardids.catalog.counters import COUNTER_TABLES
from shardids.catalog.lookups import PREFIX
from shardids.errors import BadArgument
from shardids.migrate.environment import recorder

OWN_VERSION_TABLE = "shardids_version"
"""The version table of shardids' own revisions; applications have another."""
OWN_NAMES = frozenset({OWN_VERSION_TABLE, "shardids_load", "id_counter", "id_offset", *COUNTER_TABLES})
"""The relations in a shard's schema that belong to shardids; Alembic does not look at functions."""
_OURS = frozenset(
    {"connection", "url", "dialect", "dialect_name", "dialect_opts"}
    | {"target_metadata", "version_table", "version_table_schema", "version_table_pk"}
)
"""Options of ``context.configure`` that say where a revision runs, and where that is recorded."""
# Each name is qualified: the shard's schema is first on the path.
_TABLES = text("""
    select c.relname
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace
    where n.nspname operator(pg_catalog.=) pg_catalog.current_schema()""")
_NEXT_ID = re.compile(r"""\s*("?\w+"?\.)?"?next_id"?\(\)\s*""")


def key_column(name: str = "id", **options: Any) -> Column[int]:
    """Return the primary key of a sharded table, for ``op.create_table`` in a revision.

    The key is a ``bigint`` whose default is ``next_id()``, unqualified, so that it binds to the function of
    the shard that the revision runs in. ``options`` go to :class:`sqlalchemy.Column`.
    """
    from shardids.models.columns import next_id  # noqa: PLC0415 -- a run has no models to load the ORM for

    return Column(
        name, BigInteger, primary_key=True, autoincrement=False, server_default=next_id(), **options
    )


def run_environment(metadata: MetaData | Sequence[MetaData] | None = None, **options: Any) -> None:
    """Run the application's revisions. This is the body of its ``env.py``.

    Args:
        metadata: the models' metadata, which ``revision --autogenerate`` and ``check`` compare with the
            shards.
        options: for Alembic's ``context.configure``, such as ``compare_type`` or ``include_object``.
            ``include_schemas`` adds nothing: other schemas are not the shard's.

    Raises:
        BadArgument: an option that shardids decides itself.
    """
    if ours := sorted(_OURS.intersection(options)):
        raise BadArgument(
            f"run_environment() decides {', '.join(ours)} itself", hint="Leave it out of the call in env.py."
        )
    given: dict[str, Any] | None = context.config.attributes.get("shardids")
    if given is None:
        raise CommandError("this environment is for all shards of a cluster; run it with: shardids migrate")
    given["reached"] = True
    connection: Connection | None = given["connection"]
    common: dict[str, Any] = comparison(_recording(options, given)) | {
        "target_metadata": metadata,
        "version_table": given["version_table"],
        "version_table_schema": given["version_table_schema"],
    }
    if connection is None:
        context.configure(dialect_name="postgresql", dialect_opts={"paramstyle": "named"}, **common)
    else:
        own = _names_of_shard(connection, options.get("include_name"))
        context.configure(connection=connection, **(common | {"include_name": own}))
    compare_defaults(context.get_context(), options.get("compare_server_default", True))
    configured: Callable[[MigrationContext], None] = given.get("configured", lambda _context: None)
    configured(context.get_context())
    if connection is None:
        context.run_migrations()
    else:
        with context.begin_transaction():
            given.get("opening", lambda: None)()
            context.run_migrations()


def _names_of_shard(connection: Connection, given: Callable[..., bool] | None) -> Callable[..., bool]:
    """Return Alembic's ``include_name``, which takes only the shard's tables and asks ``given`` about them.

    Alembic sees all tables that the search path shows, those in ``public`` too, which all shards share.
    """

    @cache
    def tables() -> frozenset[str]:
        return frozenset(connection.scalars(_TABLES))

    def include_name(name: str | None, type_: str, parents: Mapping[str, str | None]) -> bool:
        is_elsewhere = parents.get("schema_name") is None and name not in tables()
        if (type_ == "schema" and name is not None) or (type_ == "table" and is_elsewhere):
            return False
        return given is None or bool(given(name, type_, parents))

    return include_name


def _recording(options: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add to the application's options that each revision's hash is recorded; shardids' own have none."""
    table, schema = given["version_table"], given["version_table_schema"]
    if table == OWN_VERSION_TABLE:
        return options
    own = options.get("on_version_apply", ())
    record = recorder(f"{schema}.{table}" if schema else table, given["hash_of"])
    return {**options, "on_version_apply": (*(own if isinstance(own, Iterable) else (own,)), record)}


def comparison(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for ``context.configure`` that leave shardids' own objects out and render its columns.

    The application's own options are asked first, and decide about all other objects.
    """
    given = dict(options)
    include, render = given.get("include_object"), given.get("render_item")

    def include_object(item: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
        is_ours = name in OWN_NAMES or str(name).startswith(PREFIX)
        # A shard's tables have no schema in the models; others are shared, as reference tables are.
        if type_ == "table" and (is_ours or item.schema is not None):
            return False
        return include is None or bool(include(item, name, type_, reflected, compare_to))

    def render_item(type_: str, item: Any, autogen: AutogenContext) -> str | Literal[False]:
        if render is not None and (said := render(type_, item, autogen)) is not False:
            return str(said)
        if type_ == "server_default" and is_next_id(item):
            autogen.imports.add("import shardids")
            return "shardids.next_id()"
        from shardids.models.counters import RowNumber  # noqa: PLC0415 -- as in key_column()

        if type_ == "server_default" and isinstance(item, RowNumber):
            autogen.imports.add("import shardids.models")
            return f"shardids.models.{item!r}"
        return False

    return given | {
        "include_object": include_object,
        "render_item": render_item,
        "compare_server_default": True,
    }


def compare_defaults(migration: MigrationContext, given: Any) -> None:
    """Has Alembic compare ``next_id()`` by name, and other defaults as the application's option says.

    Alembic compares defaults by running both, which would draw two different IDs. Were this a function in
    its options, it would fail at columns that are computed or identities, which it compares by itself.
    """
    implementation: Any = migration.impl
    plain = implementation.compare_server_default

    def compare(
        inspected: Column[Any], in_metadata: Column[Any], rendered: str | None, inspected_default: str | None
    ) -> bool:
        default = in_metadata.server_default
        is_key, was_key = is_next_id(default), bool(_NEXT_ID.fullmatch(inspected_default or ""))
        if is_key or was_key:
            return is_key != was_key
        if callable(given):
            said = given(migration, inspected, in_metadata, inspected_default, default, rendered)
            if said is not None:
                return bool(said)
        return bool(given) and bool(plain(inspected, in_metadata, rendered, inspected_default))

    implementation.compare_server_default = compare


def is_next_id(default: object) -> bool:
    """Return whether a column's server default is the shard's ``next_id()``, as an expression or as text."""
    if not isinstance(default, DefaultClause):
        return False
    from shardids.models.columns import next_id  # noqa: PLC0415 -- as in key_column()

    argument = default.arg
    return isinstance(argument, next_id) or bool(_NEXT_ID.fullmatch(str(getattr(argument, "text", argument))))
