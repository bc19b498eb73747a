"""Writes an application's environment, its revisions, and the differences between its models and a shard."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from shardids.errors import BadArgument, ClusterConflict
from shardids.migrate.environment import NODE_BRANCH, Environment
from shardids.migrate.migration import APPLICATION_NAME, Migration
from shardids.migrate.plan import Position, shown_heads
from shardids.pg.reader import require_no_code_of_others

_TEMPLATES = Path(__file__).parent / "template"


def load_metadata(models: str) -> tuple[MetaData, str, str]:
    """Load the metadata that ``package.module:Base`` or ``package.module:metadata`` names.

    Returns it with the import line and the expression that name it in an ``env.py``.

    Raises:
        BadArgument: the module or name is unknown, or has no metadata.
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
    """Write ``env.py``, ``script.py.mako`` and a first revision that creates all tables of the models.

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
    """Write ``env.py`` and ``script.py.mako`` for revisions without models; connect to no database.

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
    """Write a revision of SQL statements after the shards' newest, or with ``for_nodes`` after the node's.

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
"""Text that SQLAlchemy takes for a parameter or an escaped one: each needs a backslash before it."""


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
    """Write an empty revision after the shards' newest, or with ``for_nodes`` after the node's.

    Raises:
        BadArgument: there are several heads.
    """
    branch = environment.of_nodes() if for_nodes else environment
    label = NODE_BRANCH if branch is None else None
    head = branch.head() if branch is not None and branch.heads else "base"
    with environment.given(None) as config:
        return _path(command.revision(config, message, head=head, branch_label=label))


def merge(environment: Environment, message: str) -> Path:
    """Write a revision that merges all heads.

    Raises:
        BadArgument: there is only one head.
    """
    if len(environment.heads) < 2:
        raise BadArgument("there is only one head: nothing to merge")
    with environment.given(None) as config:
        return _path(command.merge(config, list(environment.heads), message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Autogenerated:
    """A revision that was written from differences; ``drops`` are the tables and columns that it drops."""

    path: Path
    drops: tuple[str, ...]


def autogenerate(
    migration: Migration, message: str, reference: int, tell: Callable[[str], None] = lambda _line: None
) -> Autogenerated:
    """Write a revision that brings a reference shard's tables to the models.

    ``tell`` receives Alembic's line about each difference, such as "Detected removed table". A revision that
    drops tables or columns is marked as destructive.

    Raises:
        ClusterConflict: the shard is not at the newest revision.
        MissingPrivilege: code of other roles would run.
        BadArgument: there are several heads.
    """
    environment = migration.environment
    if environment.heads:
        environment.head()
    with (
        _reference(migration, reference) as connection,
        environment.given(connection) as config,
        _listening(tell),
    ):
        try:
            return _autogenerated(environment, config, message)
        except CommandError as error:
            raise BadArgument(str(error)) from error


class _Teller(logging.Handler):
    """Passes the messages of records on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def _listening(tell: Callable[[str], None]) -> Iterator[None]:
    logger, teller = logging.getLogger("alembic.autogenerate"), _Teller(tell)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(teller)
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.setLevel(before)


def _autogenerated(environment: Environment, config: Config, message: str) -> Autogenerated:
    """Run Alembic's command for the shards' revisions only, without the node's."""
    head = environment.heads[0] if environment.heads else "base"
    arguments = {"message": message, "autogenerate": True, "sql": False, "head": head}
    rest = dict.fromkeys(("splice", "branch_label", "version_path", "rev_id", "depends_on"))
    context = RevisionContext(config, environment.script, arguments | rest)

    def compare(heads: Any, migration: MigrationContext) -> Sequence[RevisionStep]:
        context.run_autogenerate(heads, migration)
        return ()

    with EnvironmentContext(config, environment.script, fn=compare, template_args=context.template_args):
        environment.run_body()
    drops = tuple(
        one
        for script in context.generated_revisions
        for upgrade in script.upgrade_ops_list
        for one in _dropped_by(upgrade.ops)
    )
    path = _path(list(context.generate_scripts()))
    if drops:
        path.write_text(_marked(path.read_text(encoding="utf-8"), drops), encoding="utf-8")
    return Autogenerated(path=path, drops=drops)


def _dropped_by(operations: Iterable[object]) -> Iterator[str]:
    for one in operations:
        if isinstance(one, ops.DropTableOp):
            yield f"table {one.table_name}"
        elif isinstance(one, ops.DropColumnOp):
            yield f"column {one.table_name}.{one.column_name}"
        elif isinstance(one, ops.OpContainer):
            yield from _dropped_by(one.ops)


def _marked(source: str, drops: Sequence[str]) -> str:
    """Return a revision's source with the mark above its first function."""
    lines = source.splitlines(keepends=True)
    first = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    mark = [f"# It drops {one}.\n" for one in drops] + ["destructive = True\n", "\n", "\n"]
    return "".join([*lines[: first.lineno - 1], *mark, *lines[first.lineno - 1 :]])


def drift(migration: Migration, reference: int) -> list[str]:
    """Return the differences between a shard at the newest revision and the models, a line each.

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
    """Yield a connection to a shard at the newest revision, as Alembic should see it, and roll back."""
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
