"""Runs the three Alembic trees of shardids' own objects: ``catalog``, ``node`` and ``shard``.

Each tree's ``env.py`` calls :func:`run_environment`, so plain ``alembic`` and this module do the same. Values
that vary reach the SQL files as the transaction's settings ``shardids.*``: from ``-x name=value`` with plain
Alembic, from ``settings`` here.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal
from uuid import UUID

from alembic import command, context, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import Connection, column, func, select, table

from shardids.catalog.topology import validate_node_name, validate_schema_prefix
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.ids.layout import Layout
from shardids.migrate.environment import ONE_AT_A_TIME
from shardids.migrate.models import OWN_VERSION_TABLE
from shardids.pg.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.pg.schemas import owning_statements
from shardids.pg.sqlfiles import data_folder, read_sql
from shardids.pg.urls import parse_url

Tree = Literal["catalog", "node", "shard"]

_SCHEMAS: Mapping[str, str] = {"catalog": "shardids_catalog", "node": "shardids"}


def upgrade(connection: Connection, tree: Tree, settings: Mapping[str, str]) -> None:
    """Bring one target to the newest revision, in the connection's open transaction.

    ``settings`` holds what ``-x`` passes with plain Alembic (see migrations/README.md).
    """
    config = tree_config(tree)
    config.attributes.update(connection=connection, settings=dict(settings))
    with ONE_AT_A_TIME:
        try:
            command.upgrade(config, "head")
        except (CommandError, RevisionError) as error:
            raise _newer(f"the {tree}", str(error)) from error


def _newer(what: str, revision: str) -> ClusterConflict:
    return ClusterConflict(
        f"the version table of {what} names a revision that this shardids does not have: {revision}",
        hint="A newer shardids installed it. Upgrade this one.",
    )


def require_known(tree: Tree, what: str, revision: str) -> None:
    """Raise ClusterConflict unless this version has the revision that ``what`` is at."""
    known = {script.revision for script in ScriptDirectory.from_config(tree_config(tree)).walk_revisions()}
    if revision not in known | {"base"}:
        raise _newer(what, revision)


def downgrade(connection: Connection, tree: Tree, settings: Mapping[str, str]) -> None:
    """Drop the tree's objects, in the connection's open transaction."""
    config = tree_config(tree)
    config.attributes.update(connection=connection, settings=dict(settings))
    with ONE_AT_A_TIME:
        command.downgrade(config, "base")


def current(connection: Connection, tree: Tree) -> str:
    """Return the revision that the catalog or a node is at, or ``base`` before the first."""
    versions = table(OWN_VERSION_TABLE, column("version_num"), schema=_SCHEMAS[tree])
    revision: str | None = connection.scalar(select(func.max(versions.c.version_num)))
    return revision or "base"


@cache
def head(tree: Tree) -> str:
    """Return the newest revision of a tree."""
    revision = ScriptDirectory.from_config(tree_config(tree)).get_current_head()
    if revision is None:
        raise BadArgument(f"the {tree} tree has no revisions")
    return revision


def shard_sql() -> str:
    """Return the whole shard tree as SQL, the same for every shard.

    Run it in a transaction that called ``shardids.enter_shard`` and set ``search_path`` to the shard's
    schema.
    """
    return tree_sql("shard")


@cache
def tree_sql(tree: Tree) -> str:
    """Return a whole tree as SQL, without the settings that its files read."""
    buffer = io.StringIO()
    config = tree_config(tree, output=buffer)
    config.attributes.update(settings={}, bare=True)
    with ONE_AT_A_TIME:
        command.upgrade(config, "head", sql=True)
    return buffer.getvalue()


def layout_settings(layout: Layout, schema_prefix: str) -> dict[str, str]:
    """Return the settings that ``engine/layout.v1.sql`` and ``catalog/catalog.v1.sql`` read."""
    return {
        "layout_name": layout.name,
        "epoch_ms": str(layout.epoch_ms),
        "time_bits": str(layout.time_bits),
        "shard_bits": str(layout.shard_bits),
        "sequence_bits": str(layout.sequence_bits),
        "schema_prefix": schema_prefix,
    }


def run_sql(*names: str) -> None:
    """Run SQL files, unchanged, in the current migration, online or into the ``--sql`` output."""
    for name in names:
        _send(op.get_context(), read_sql(name))


def _send(migration: MigrationContext, sql: str) -> None:
    if migration.as_sql:
        migration.impl.static_output(sql)
    elif migration.connection is not None:
        # With no_parameters, % in the text is not a placeholder.
        migration.connection.execution_options(no_parameters=True).exec_driver_sql(sql)


def run_environment(tree: Tree) -> None:
    """Run a tree's revisions. This is the body of the tree's ``env.py``."""
    settings: dict[str, str] | None = context.config.attributes.get("settings")
    if settings is not None:
        _run(tree, settings)
        return
    try:
        _run(tree, _settings_from_x(tree))
    except ShardidsError as error:
        # Alembic's own command prints a CommandError without a traceback.
        raise CommandError(str(error)) from error


def _run(tree: Tree, settings: Mapping[str, str]) -> None:
    attributes = context.config.attributes
    schema = _SCHEMAS.get(tree)
    options: dict[str, Any] = {"version_table": OWN_VERSION_TABLE, "version_table_schema": schema}
    preamble = [] if attributes.get("bare") else _preamble(schema, settings)
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", transactional_ddl=not attributes.get("bare"), **options)
        _migrate(preamble)
        return
    connection: Connection | None = attributes.get("connection")
    if connection is not None:
        context.configure(connection=connection, **options)
        _migrate(preamble)
        return
    arguments = context.get_x_argument(as_dictionary=True)
    if "url" not in arguments:
        raise BadArgument("which database? -x url=postgresql://…", hint="See migrations/README.md.")
    engine = open_engine(
        parse_url(arguments["url"]),
        what=f"the {tree}",
        administrative=True,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )
    try:
        with engine.connect() as own, own.begin():
            context.configure(connection=own, **options)
            _migrate(preamble)
    finally:
        engine.dispose()


def _migrate(preamble: list[str]) -> None:
    with context.begin_transaction():
        for statement in preamble:
            _send(context.get_context(), statement)
        context.run_migrations()


def _preamble(schema: str | None, settings: Mapping[str, str]) -> list[str]:
    """Return the first statements of a transaction: the installers' lock, settings, the tree's schema."""
    statements = [read_sql("install/lock.v1")] if schema else []
    for name, value in settings.items():
        if name != "shard":
            quoted = value.replace("'", "''")
            statements.append(f"select set_config('shardids.{name}', '{quoted}', true);")
    if schema:
        statements += owning_statements(schema)
    else:
        shard = int(settings["shard"])
        statements.append(f"select shardids.enter_shard({shard});")
        statements.append(f"select set_config('search_path', shardids.schema_of({shard}), true);")
    return statements


_X_ARGUMENTS: Mapping[Tree, tuple[str, ...]] = {
    "catalog": ("cluster", "shard_count"),
    "node": ("cluster", "node"),
    "shard": ("shard",),
}


def _settings_from_x(tree: Tree) -> dict[str, str]:
    arguments = context.get_x_argument(as_dictionary=True)
    required = _X_ARGUMENTS[tree]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise BadArgument(
            "missing: " + ", ".join(f"-x {name}=…" for name in missing),
            hint="See migrations/README.md.",
        )
    settings = {name: arguments[name] for name in required}
    if tree == "shard":
        settings["shard"] = str(_number("shard", settings["shard"]))
        return settings
    layout = Layout.parse(arguments.get("layout", "default"))
    prefix = validate_schema_prefix(arguments.get("schema_prefix", "shard_"))
    try:
        UUID(settings["cluster"])
    except ValueError:
        raise BadArgument(f"-x cluster={settings['cluster']} is not a UUID") from None
    if tree == "node":
        validate_node_name(settings["node"])
    else:
        check_shard_count(layout, _number("shard_count", settings["shard_count"]))
    return settings | layout_settings(layout, prefix)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadArgument(f"-x {name}={text} is not a number of that kind")
    return int(text)


def check_shard_count(layout: Layout, shard_count: int) -> None:
    """Refuse a number of shards that does not fit the layout.

    Raises:
        BadArgument: it is below 1 or above the layout's ``shard_limit``.
    """
    if not 1 <= shard_count <= layout.shard_limit:
        raise BadArgument(
            f"{shard_count} shards do not fit layout {layout}", hint=f"It takes 1 to {layout.shard_limit}."
        )


def tree_config(tree: Tree, output: io.StringIO | None = None) -> Config:
    """Return Alembic's configuration for a tree; what Alembic prints goes to ``output``."""
    return Config(
        str(data_folder("migrations") / "alembic.ini"),
        ini_section=tree,
        output_buffer=output if output is not None else io.StringIO(),
        stdout=io.StringIO(),
    )
