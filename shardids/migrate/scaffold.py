"""Writes an application's environment, its revisions, and the differences between its models and a shard."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from string import Template
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.autogenerate.api import RevisionContext
from alembic.config import Config
from alembic.operations import ops
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import Script
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.reader import require_no_code_of_others
from shardids.errors import BadArgument, ClusterConflict
from shardids.migrate.environment import NODE_BRANCH, Environment
from shardids.migrate.migration import APPLICATION_NAME, Migration
from shardids.migrate.plan import Position, shown_heads

_TEMPLATES = Path(__file__).parent / "template"


def load_metadata(models: str) -> tuple[MetaData, str, str]:
    """Loads the metadata that ``package.module:Base`` or ``package.module:metadata`` names.

    Returns it with the import line and the expression that name it in an ``env.py``.

    Raises:
        BadArgument: there is no such module or name, or it has no metadata.
    """
    module_name, _, attribute = models.partition(":")
    if not attribute:
        raise BadArgument(f"{models!r} names no models", hint="Write it as package.module:Base")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadArgument(
            f"the models {models!r} can't be loaded: {error}",
            hint="The module is looked for in the current folder and on Python's path.",
        ) from error
    import_line = f"from {module_name} import {attribute.split('.')[0]}"
    if isinstance(found, MetaData):
        return found, import_line, attribute
    metadata = getattr(found, "metadata", None)
    if not isinstance(metadata, MetaData):
        raise BadArgument(f"{models!r} is neither SQLAlchemy metadata nor a declarative base")
    return metadata, import_line, f"{attribute}.metadata"


def init(folder: Path, models: str, message: str = "the models") -> Path:
    """Writes ``env.py``, ``script.py.mako`` and a first revision that creates all tables of the models.

    Connects to no database. Returns the first revision's file.

    Raises:
        BadArgument: the folder is not empty, or the models can't be loaded or have no tables.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadArgument(f"{folder} is not empty", hint="Name a folder that does not exist yet.")
    metadata, import_line, expression = load_metadata(models)
    if not metadata.tables:
        raise BadArgument(f"{models!r} has no tables", hint="Name the module that defines all models.")
    if all(table.schema is not None for table in metadata.tables.values()):
        raise BadArgument(
            f"{models!r} has no table of a shard: all have a schema",
            hint="Tables of shards are in each shard's: leave schema= out of their metadata and models.",
        )
    (folder / "versions").mkdir(parents=True)
    env = Template((_TEMPLATES / "env.py.template").read_text(encoding="utf-8"))
    (folder / "env.py").write_text(
        env.substitute(import_line=import_line, metadata=expression), encoding="utf-8"
    )
    (folder / "script.py.mako").write_bytes((_TEMPLATES / "script.py.mako").read_bytes())

    def all_tables(_context: object, _revision: object, scripts: list[ops.MigrationScript]) -> None:
        made = list(_made_by(metadata))
        scripts[0].upgrade_ops_list[0].ops = made
        scripts[0].downgrade_ops_list[0].ops = [one.reverse() for one in reversed(made)]

    environment = Environment.at(folder)
    environment.config.set_main_option("revision_environment", "true")
    with environment.given(None) as config:
        # "sql" is Alembic's word for an environment without a database.
        return _path(command.revision(config, message, sql=True, process_revision_directives=all_tables))


def write_environment(folder: Path) -> None:
    """Writes ``env.py`` and ``script.py.mako`` for revisions without models; connects to no database.

    Raises:
        BadArgument: the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise BadArgument(f"{folder} is not empty", hint="Name a folder that does not exist yet.")
    (folder / "versions").mkdir(parents=True)
    (folder / "env.py").write_bytes((_TEMPLATES / "env_without_models.py.template").read_bytes())
    (folder / "script.py.mako").write_bytes((_TEMPLATES / "script.py.mako").read_bytes())


def write_revision(
    environment: Environment, message: str, up: Iterable[str], down: Iterable[str], *, for_nodes: bool
) -> Path:
    """Writes a revision of SQL statements after the shards' newest, or with ``for_nodes`` after the node's.

    Raises:
        BadArgument: there are several heads.
    """

    def statements(_context: object, _revision: object, scripts: list[ops.MigrationScript]) -> None:
        scripts[0].upgrade_ops_list[0].ops = [ops.ExecuteSQLOp(_Block(one)) for one in up]
        scripts[0].downgrade_ops_list[0].ops = [ops.ExecuteSQLOp(_Block(one)) for one in down]

    branch = environment.of_nodes() if for_nodes else environment
    environment.config.set_main_option("revision_environment", "true")
    with environment.given(None) as config:
        return _path(
            command.revision(
                config,
                message,
                sql=True,
                head=branch.head() if branch is not None and branch.heads else "base",
                branch_label=NODE_BRANCH if branch is None else None,
                process_revision_directives=statements,
            )
        )


_TAKEN = re.compile(r"(?<![:\w\\]):(?=\w+(?![:\w]))|\\(?=:\w*(?![:\w]))")
"""What SQLAlchemy takes for a parameter, or for one that is none: each needs a backslash before it."""


class _Block(str):
    """A statement, which Alembic writes into a revision line by line."""

    __slots__ = ()

    def __repr__(self) -> str:
        lines = _TAKEN.sub(r"\\\g<0>", str(self)).splitlines(keepends=True)
        if len(lines) == 1:
            return repr(lines[0])
        # Alembic indents the lines again: only what is between quotes stays as it is.
        return "\n    " + "\n    ".join(map(repr, lines)) + "\n"


def _made_by(metadata: MetaData) -> Iterator[ops.MigrateOperation]:
    # Tables with a schema are shared by shards, and none of theirs.
    for table in (table for table in metadata.sorted_tables if table.schema is None):
        yield ops.CreateTableOp.from_table(table)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            yield ops.CreateIndexOp.from_index(index)


def _path(script: Script | list[Script | None] | None) -> Path:
    scripts = script if isinstance(script, list) else [script]
    return next(Path(made.path) for made in scripts if made is not None)


def revision(environment: Environment, message: str, *, for_nodes: bool = False) -> Path:
    """Writes an empty revision after the shards' newest, or with ``for_nodes`` after the node's.

    Raises:
        BadArgument: there are several heads.
    """
    branch = environment.of_nodes() if for_nodes else environment
    label = NODE_BRANCH if branch is None else None
    head = branch.head() if branch is not None and branch.heads else "base"
    with environment.given(None) as config:
        return _path(command.revision(config, message, head=head, branch_label=label))


def merge(environment: Environment, message: str) -> Path:
    """Writes a revision that merges all heads.

    Raises:
        BadArgument: there is only one head.
    """
    if len(environment.heads) < 2:
        raise BadArgument("there is only one head: nothing to merge")
    with environment.given(None) as config:
        return _path(command.merge(config, list(environment.heads), message))


def autogenerate(migration: Migration, message: str, reference: int) -> Path:
    """Writes a revision that brings a reference shard's tables to the models.

    Raises:
        ClusterConflict: the shard is not at the newest revision.
        MissingPrivilege: code of other roles would run.
        BadArgument: there are several heads.
    """
    environment = migration.environment
    if environment.heads:
        environment.head()
    with _reference(migration, reference) as connection, environment.given(connection) as config:
        try:
            return _autogenerated(environment, config, message)
        except CommandError as error:
            raise BadArgument(str(error)) from error


def _autogenerated(environment: Environment, config: Config, message: str) -> Path:
    """Does what Alembic's command does, but for the shards' revisions alone, without the node's."""
    head = environment.heads[0] if environment.heads else "base"
    arguments = {"message": message, "autogenerate": True, "sql": False, "head": head}
    rest = dict.fromkeys(("splice", "branch_label", "version_path", "rev_id", "depends_on"))
    context = RevisionContext(config, environment.script, arguments | rest)

    def compare(heads: Any, migration: MigrationContext) -> Sequence[RevisionStep]:
        context.run_autogenerate(heads, migration)
        return ()

    with EnvironmentContext(config, environment.script, fn=compare, template_args=context.template_args):
        environment.run_body()
    return _path(list(context.generate_scripts()))


def drift(migration: Migration, reference: int) -> list[str]:
    """Returns the differences between a shard at the newest revision and the models, a line each.

    Raises:
        ClusterConflict: the shard is not at the newest revision.
        MissingPrivilege: code of other roles would run.
    """
    found: list[Any] = []

    def work(_heads: object, context: MigrationContext) -> Sequence[RevisionStep]:
        found.extend(compare_metadata(context, context.opts["target_metadata"]))
        return ()

    with _reference(migration, reference) as connection:
        migration.environment.run(work, connection=connection)
    return [_shown(difference) for difference in found]


def _shown(difference: Any) -> str:
    parts = difference[0] if isinstance(difference, list) else difference
    what, *rest = parts
    names = [
        str(getattr(part, "name", part)) for part in rest if part is not None and not isinstance(part, dict)
    ]
    return f"{str(what).replace('_', ' ')}: {' '.join(names)}"


@contextmanager
def _reference(migration: Migration, shard: int) -> Iterator[Connection]:
    """Yields a connection to a shard at the newest revision, as Alembic should see it, and rolls back."""
    state = migration.state([shard])
    state.check()
    position: Position = state.positions[shard]
    if (position.heads or ()) != migration.environment.heads:
        raise ClusterConflict(
            f"shard {shard} is at {shown_heads(position.heads)}, the newest revision is"
            f' {shown_heads(migration.environment.heads)} [node "{position.node}"]',
            hint="Bring it there first (shardids migrate up), or choose another: --shard",
        )
    # Opens nodes of its own: the default schema is the dialect's, which all connections of an engine share.
    with (
        Nodes(migration.placement.nodes, migration.catalog.url, application_name=APPLICATION_NAME) as nodes,
        nodes[position.node].connect() as connection,
    ):
        require_no_code_of_others(connection, f"comparing shard {shard} with the models")
        schema = connection.scalar(
            text("""select shardids.schema_of(:shard)
                    from set_config('search_path', shardids.revision_path(:shard), false)"""),
            {"shard": shard},
        )
        connection.commit()
        # The models' names without a schema are the shard's.
        connection.dialect.default_schema_name = schema
        with connection.begin() as transaction:
            yield connection
            transaction.rollback()
