"""The application's Alembic environment: its folder, revisions and their hashes, the body of ``env.py``.

A revision's hash is that of its source, without comments, docstrings, layout, ``downgrade()`` and
``destructive``. It is kept
in the comment of the version table's column, so that it is moved, dumped and restored with the shard, and
plain Alembic works beside it. A revision that plain Alembic has run has none.
"""

from __future__ import annotations

import ast
import io
import json
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, MigrationInfo, RevisionStep
from alembic.script import Script, ScriptDirectory
from alembic.script.revision import RevisionError, RevisionMap
from alembic.util import CommandError, to_tuple
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.revisions import NODE_VERSION_TABLE, SHARED_SCHEMA
from shardids.errors import BadArgument, ShardidsError
from shardids.migrate.plan import Heads, Route, Start, shown_heads
from shardids.pg.queries import read

_DIGITS: Final = 12
_WITHOUT_MEANING: Final = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of Python's syntax tree that say nothing, or nothing that its other fields don't."""
_MARK: Final = "destructive"
_RECORD = sql.SQL("select shardids.record_hashes({table}::regclass, {undone}::text[], {done}::jsonb)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Hashes by revision, and the shards of a node that recorded just these; none if the node itself did."""

    hashes: Mapping[str, str]
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of ``migrate/hashes.v1.sql``."""

    hashes: str
    shards: list[int] | None


def hash_of_file(path: Path) -> str | None:
    """Return the hash of a revision's file; ``None`` without a source file."""
    return hash_of_source(path.read_text(encoding="utf-8")) if path.suffix == ".py" else None


def hash_of_source(source: str) -> str:
    """Return the hash of a revision's source: the same after reformatting, with any version of Python."""
    module = ast.parse(source)
    imports = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = [node for node in module.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    kept = [node for node in others if getattr(node, "name", "") != "downgrade" and not _is_mark(node)]
    used = {node.id for one in kept for node in ast.walk(one) if isinstance(node, ast.Name)}
    words = [*sorted(_imported(imports, used)), *_words(_without_docstring(kept))]
    return sha256("\0".join(words).encode()).hexdigest()[:_DIGITS]


def _is_mark(node: ast.stmt) -> bool:
    """Return whether a statement is the mark of a destructive revision, which may be removed at any time."""
    return isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == [_MARK]


def _imported(imports: Iterable[ast.Import | ast.ImportFrom], used: Collection[str]) -> Iterator[str]:
    """Yield the imports that are used, in a form that does not depend on how they are grouped."""
    for node in imports:
        module = f"{'.' * node.level}{node.module or ''}:" if isinstance(node, ast.ImportFrom) else ""
        for name in node.names:
            if name.name == "*" or (name.asname or name.name).split(".")[0] in used:
                yield f"import {module}{name.name} {name.asname or ''}"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_docstring and isinstance(first.value.value, str) else body  # type: ignore[union-attr] # is_docstring says that it is an Expr


def _words(node: object) -> Iterator[str]:
    """Yield the parts of a syntax tree's node; ``ast.dump`` differs between versions of Python."""
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _words(item)
        yield "]"
    elif isinstance(node, ast.AST):
        yield type(node).__name__
        for name, value in ast.iter_fields(node):
            # A field that a later version of Python added is empty in what an earlier one can read.
            if name in _WITHOUT_MEANING or value is None or value == []:
                continue
            is_documented = name == "body" and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            )
            yield name
            yield from _words(_without_docstring(value) if is_documented else value)
    else:
        yield f"{type(node).__name__} {node!r}"


def record(version_table: str, undone: Collection[str] | None, done: Mapping[str, str | None]) -> str:
    """Return the statement that records hashes, without its semicolon.

    Takes away those of ``undone``, or with ``None`` all.
    """
    known = {revision: value for revision, value in done.items() if value is not None}
    gone = None if undone is None else sorted(undone)
    return _RECORD.format(table=version_table, undone=gone, done=json.dumps(known, sort_keys=True)).as_string(
        None
    )


def recorder(version_table: str, hash_of: Callable[[str], str | None]) -> Callable[..., None]:
    """Return what Alembic calls after each revision that it runs: it records the revision's hash."""

    def record_step(*, ctx: MigrationContext, step: MigrationInfo, **_rest: Any) -> None:
        if ctx.connection is None or step.up_revision_id is None:
            return
        revision = step.up_revision_id
        known = hash_of(revision) if step.is_upgrade else None
        ctx.connection.execute(
            text(
                "select shardids.record_hashes(cast(cast(:table as text) as regclass),"
                " cast(:undone as text[]), cast(:done as jsonb))"
            ),
            {
                "table": version_table,
                "undone": [revision],
                "done": json.dumps({} if known is None else {revision: known}),
            },
        )

    return record_step


def read_recorded(connection: Connection) -> list[Recorded]:
    """Read the records of a node and its shards; the connection is as for ``catalog.queries.read``."""
    return [
        Recorded(hashes=_parsed(row.hashes), shards=tuple(row.shards or ()))
        for row in read(connection, "migrate/hashes.v1", _Row)
    ]


def _parsed(text: str) -> dict[str, str]:
    """Parse the comment, which anybody who owns the version table can write."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {revision: value for revision, value in pairs if isinstance(value, str)}


VERSION_TABLE = "alembic_version"
NODE_BRANCH: Final = "node"
"""The label of the branch whose revisions run once on each node."""
ONE_AT_A_TIME = Lock()
"""Alembic keeps the running environment in module globals: a thread that runs one holds this lock."""
Direction = Literal["up", "down"]
Work = Callable[[Heads, MigrationContext], Iterable[RevisionStep]]
"""Runs inside the environment: takes the revisions in the version table, returns the steps to run."""


class Environment:
    """One graph of revisions in an Alembic environment: the shards', or that of the branch ``node``.

    A shard's revision may depend on one in the node's branch: that always holds, because it runs first.

    Args:
        config: Alembic's configuration, with its ``script_location``.
        version_table: name of the version table, in each shard's schema or in the shared one.
        body: the code that runs in place of ``env.py``.
        is_of_nodes: whether this is the node's branch.

    Raises:
        BadArgument: a revision can't be read, names a parent that does not exist, or merges the two graphs.
    """

    def __init__(
        self,
        config: Config,
        version_table: str = VERSION_TABLE,
        *,
        body: Callable[[], None] | None = None,
        is_of_nodes: bool = False,
    ) -> None:
        self.config = config
        self.version_table = version_table
        self._schema = SHARED_SCHEMA if is_of_nodes else None
        self.script, self.heads = _load(config, is_of_nodes=is_of_nodes)
        self._body = body or self.script.run_env
        self._hashes: dict[str, str | None] = {}
        for script in self.script.walk_revisions():
            self._check_contract(script)

    @classmethod
    def at(cls, folder: Path) -> Environment:
        """Open a folder that ``shardids migrate init`` created, or any Alembic script folder.

        Raises:
            BadArgument: it holds no ``env.py``.
        """
        if not (folder / "env.py").is_file():
            raise BadArgument(
                f"{folder} holds no migrations: env.py is missing",
                hint="Name their folder with --dir. To create it: shardids migrate init DIR --models …",
            )
        config = Config(output_buffer=io.StringIO(), stdout=io.StringIO(), cmd_opts=Namespace(quiet=True))
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        config.set_main_option("prepend_sys_path", ".")
        config.set_main_option("path_separator", "newline")
        return cls(config)

    def of_nodes(self) -> Environment | None:
        """Return the environment's branch for the nodes, or ``None`` if it has none."""
        environment = Environment(self.config, NODE_VERSION_TABLE, body=self._body, is_of_nodes=True)
        return environment if environment.heads else None

    def _check_contract(self, script: Script) -> None:
        expand = contract_of(script)
        if expand is not None and expand not in self.ancestors([script.revision]) - {script.revision}:
            raise BadArgument(
                f"revision {script.revision} is marked as the contract of {expand!r}, which is not a"
                " revision before it",
                hint='Name the revision that expands: contract = "…"',
            )

    def revision(self, revision: str) -> Script:
        """Return a revision by its full name.

        Raises:
            BadArgument: no revision has that name.
        """
        with _errors_as_ours():
            found = self.script.get_revision(revision)
        if found is None or found.revision != revision:
            raise BadArgument(
                f"revision {revision!r} does not exist", hint="See: shardids migrate revision --list"
            )
        return found

    def knows(self, revision: str) -> bool:
        """Return whether the revision is in this environment."""
        return revision in {script.revision for script in self.script.walk_revisions()}

    def hash_of(self, revision: str) -> str | None:
        """Return the hash of a revision's source, as it is when first asked for; ``None`` if it has none."""
        if revision not in self._hashes:
            self._hashes[revision] = hash_of_file(Path(str(self.revision(revision).module.__file__)))
        return self._hashes[revision]

    def target(self, name: str, direction: Direction) -> str:
        """Resolve ``head`` and shortened names; ``+1`` and ``-1`` stay as they are.

        Raises:
            BadArgument: the name is unknown or ambiguous, or is ``head`` and there are several heads.
        """
        if name in ("head", "heads") and direction == "up":
            return self.head()
        if name == "base" or name[:1] in ("+", "-"):
            return name
        with _errors_as_ours():
            found = self.script.get_revision(name)
        if found is None:
            raise BadArgument(
                f"revision {name!r} does not exist", hint="See: shardids migrate revision --list"
            )
        return found.revision

    def head(self) -> str:
        """Return the newest revision.

        Raises:
            BadArgument: the script has no head, or several.
        """
        if not self.heads:
            raise BadArgument(
                f"{self.script.dir} has no revisions yet",
                hint="To write the first: shardids migrate revision -m … --autogenerate",
            )
        if len(self.heads) > 1:
            raise BadArgument(
                f"there are {len(self.heads)} heads: {', '.join(self.heads)}",
                hint="Merge them (shardids migrate revision --merge -m …), or name the revision to go to.",
            )
        return self.heads[0]

    def steps(self, start: Start, target: str, direction: Direction) -> list[RevisionStep]:
        """Return the steps from a starting point to a target, in the order of their run.

        Raises:
            BadArgument: no way leads there.
        """
        heads: Any = start or ()
        walk: Any = self.script._upgrade_revs if direction == "up" else self.script._downgrade_revs
        with _errors_as_ours():
            try:
                steps: list[RevisionStep] = walk(target, heads)
            except (CommandError, RevisionError) as error:
                raise BadArgument(
                    f"no way leads {direction} from {shown_heads(start)} to {target}: {error}",
                    hint="See: shardids migrate revision --list",
                ) from error
        return steps

    def route(
        self, start: Start, target: str, direction: Direction, *, stop_at_contract: bool = False
    ) -> Route:
        """Return the route from a starting point to a target.

        The route is empty if the start is past the target already. With ``stop_at_contract`` it ends before
        the first revision that is marked as a contract.

        Raises:
            BadArgument: no way leads there.
        """
        if direction == "down" and self._is_below(start, target):
            return Route(start=start, end=start or (), target=target, revisions=())
        heads, revisions = set(start or ()), list[str]()
        for step in self.steps(start, target, direction):
            script: Script = step.revision
            if stop_at_contract and contract_of(script) is not None:
                held_back = script.revision
                break
            parents = set(to_tuple(script.down_revision, default=()))
            if direction == "up":
                heads = (heads - self.ancestors([script.revision])) | {script.revision}
            else:
                heads -= {script.revision}
                heads |= parents - self.ancestors(sorted(heads))
            revisions.append(script.revision)
        else:
            held_back = None
        end = tuple(sorted(heads))
        if direction == "up":
            target = revisions[-1] if revisions else target
        elif target[:1] == "-":
            target = end[0] if end else "base"
        return Route(start=start, end=end, target=target, revisions=tuple(revisions), held_back=held_back)

    def _is_below(self, start: Start, target: str) -> bool:
        if target == "base" or target[:1] == "-":
            return False
        return target not in (start or ()) and set(start or ()) <= self.ancestors([target])

    def ancestors(self, heads: Sequence[str]) -> set[str]:
        """Return the revisions that a version table at ``heads`` implies, themselves included."""
        with _errors_as_ours():
            if not heads:
                return set()
            return {
                script.revision
                for script in self.script.iterate_revisions(tuple(heads), "base", implicit_base=True)
            }

    def run(
        self,
        work: Work,
        *,
        connection: Connection | None = None,
        entered: Callable[[EnvironmentContext], None] = lambda _environment: None,
        **attributes: Any,
    ) -> None:
        """Run the application's ``env.py`` around ``work``: on a connection, or offline without one."""
        offline = connection is None
        with (
            self.given(connection, **attributes),
            EnvironmentContext(self.config, self.script, fn=work, as_sql=offline) as environment,
        ):
            entered(environment)
            self.run_body()

    def run_body(self) -> None:
        """Run ``env.py``, inside :meth:`given`.

        Raises:
            BadArgument: it did not get to ``run_environment()``, so it ran for no shard.
        """
        given = self.config.attributes["shardids"]
        why = ""
        try:
            self._body()
        except (ShardidsError, ImportError):
            raise
        except Exception as error:
            if "reached" in given:
                raise
            why = f": {type(error).__name__}: {error}"
        if "reached" not in given:
            raise BadArgument(
                f"{self.script.dir}/env.py did not call shardids.migrate.run_environment(){why}",
                hint="That call is its body, and connects by itself. To see one: shardids migrate init DIR …",
            )

    @contextmanager
    def given(self, connection: Connection | None, **attributes: Any) -> Iterator[Config]:
        """Yield the configuration for one Alembic command, whose ``env.py`` uses ``connection``."""
        with ONE_AT_A_TIME:
            self.config.attributes["shardids"] = {
                "connection": connection,
                "version_table": self.version_table,
                "version_table_schema": self._schema,
                "hash_of": self.hash_of,
                **attributes,
            }
            try:
                yield self.config
            except ImportError as error:
                raise BadArgument(
                    f"{self.script.dir}/env.py can't import {error.name or error}: {error}",
                    hint="Run the command from the folder that your modules are imported from.",
                ) from error
            finally:
                self.config.attributes.clear()


def _load(config: Config, *, is_of_nodes: bool) -> tuple[ScriptDirectory, Heads]:
    """Load all revisions, so that a broken one is reported now and not in the middle of a run."""
    try:
        with _errors_as_ours(), warnings.catch_warnings():
            # Alembic only warns of a parent that does not exist.
            warnings.simplefilter("error", UserWarning)
            script = ScriptDirectory.from_config(config)
            chosen = _branch(list(script._load_revisions()), is_of_nodes=is_of_nodes)
            script.revision_map = RevisionMap(lambda: chosen)
            return script, tuple(sorted(script.get_heads()))
    except BadArgument:
        raise
    except Exception as error:  # a revision is a module: importing it can raise anything
        raise BadArgument(f"a revision can't be read: {type(error).__name__}: {error}") from error


def _branch(scripts: list[Script], *, is_of_nodes: bool) -> list[Script]:
    """Choose the revisions of one of the two graphs, and drop dependencies between them."""
    of_nodes = {
        script.revision
        for script in scripts
        if NODE_BRANCH in to_tuple(getattr(script.module, "branch_labels", None), default=())
    }
    size = -1
    while size != len(of_nodes):
        size = len(of_nodes)
        of_nodes |= {
            s.revision for s in scripts if of_nodes.intersection(to_tuple(s.down_revision, default=()))
        }
    for script in scripts:
        parents = set(to_tuple(script.down_revision, default=()))
        if script.revision in of_nodes and parents - of_nodes:
            raise BadArgument(
                f"revision {script.revision} merges the node's branch with the shards' revisions"
            )
        depends_on = [
            name
            for name in to_tuple(script.dependencies, default=())
            if not (name.split("@")[0] == NODE_BRANCH or any(one.startswith(name) for one in of_nodes))
        ]
        if is_of_nodes and script.revision in of_nodes and depends_on:
            raise BadArgument(
                f"revision {script.revision} of the node's branch depends on a shard's revision"
            )
        if not is_of_nodes:
            script.dependencies = tuple(depends_on) or None
    return [script for script in scripts if (script.revision in of_nodes) == is_of_nodes]


def contract_of(script: Script) -> str | None:
    """Return the expand revision that a revision is the contract of, or ``None`` if it is not one.

    A revision says so in its file: ``contract = "<the expand revision>"``.
    """
    expand: str | None = getattr(script.module, "contract", None)
    return expand


def is_destructive(script: Script) -> bool:
    """Return whether a revision says in its file that it drops tables or columns: ``destructive = True``.

    ``revision --autogenerate`` writes that for reviewers. A run counts rows with and without it.
    """
    return bool(getattr(script.module, _MARK, False))


@contextmanager
def _errors_as_ours() -> Iterator[None]:
    try:
        yield
    except (CommandError, RevisionError) as error:
        message = str(error) or type(error).__name__
        raise BadArgument(
            message[0].lower() + message[1:], hint="See: shardids migrate revision --list"
        ) from error
