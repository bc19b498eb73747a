"""The application's Alembic environment: its folder, its graph of revisions, the body of its ``env.py``."""

from __future__ import annotations

import io
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Final, Literal

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import Script, ScriptDirectory
from alembic.script.revision import RevisionError, RevisionMap
from alembic.util import CommandError, to_tuple
from sqlalchemy import Connection

from shardids.catalog.revisions import NODE_VERSION_TABLE, SHARED_SCHEMA
from shardids.errors import BadArgument, ShardidsError
from shardids.migrate.hashes import hash_of_file
from shardids.migrate.plan import Heads, Route, Start, shown_heads

VERSION_TABLE = "alembic_version"
NODE_BRANCH: Final = "node"
"""The label of the branch whose revisions run once on each node."""
ONE_AT_A_TIME = Lock()
"""Alembic keeps the running environment in module globals: whoever runs one holds this lock."""
Direction = Literal["up", "down"]
Work = Callable[[Heads, MigrationContext], Iterable[RevisionStep]]
"""Runs inside the environment: takes the revisions in the version table, returns the steps to run."""


class Environment:
    """One graph of revisions in an Alembic environment: the shards', or that of the branch ``node``.

    A shard's revision may depend on one in the node's branch: that always holds, because it runs first.

    Args:
        config: Alembic's configuration, with its ``script_location``.
        version_table: name of the version table, in each shard's schema or in the shared one.
        body: what is run in place of ``env.py``.
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
        """Opens a folder that ``shardids migrate init`` created, or any Alembic script folder.

        Raises:
            BadArgument: it holds no ``env.py``.
        """
        if not (folder / "env.py").is_file():
            raise BadArgument(
                f"{folder} holds no migrations: there is no env.py",
                hint="Name their folder with --dir. To create it: shardids migrate init DIR --models …",
            )
        config = Config(output_buffer=io.StringIO(), stdout=io.StringIO(), cmd_opts=Namespace(quiet=True))
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        config.set_main_option("prepend_sys_path", ".")
        config.set_main_option("path_separator", "newline")
        return cls(config)

    def of_nodes(self) -> Environment | None:
        """Returns the environment's branch for the nodes, or ``None`` if it has none."""
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
        """Returns a revision by its full name.

        Raises:
            BadArgument: there is none of that name.
        """
        with _errors_as_ours():
            found = self.script.get_revision(revision)
        if found is None or found.revision != revision:
            raise BadArgument(f"there is no revision {revision!r}", hint="See: shardids migrate history")
        return found

    def knows(self, revision: str) -> bool:
        """Returns whether the revision is in this environment."""
        return revision in {script.revision for script in self.script.walk_revisions()}

    def hash_of(self, revision: str) -> str | None:
        """Returns the hash of a revision's source, as it is when first asked for; ``None`` if it has none."""
        if revision not in self._hashes:
            self._hashes[revision] = hash_of_file(Path(str(self.revision(revision).module.__file__)))
        return self._hashes[revision]

    def target(self, name: str, direction: Direction) -> str:
        """Resolves ``head`` and shortened names; ``+1`` and ``-1`` stay as they are.

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
            raise BadArgument(f"there is no revision {name!r}", hint="See: shardids migrate history")
        return found.revision

    def head(self) -> str:
        """Returns the newest revision.

        Raises:
            BadArgument: there is none, or there are several.
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
        """Returns the steps from a starting point to a target, in the order in which they run.

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
                    hint="See: shardids migrate history",
                ) from error
        return steps

    def route(
        self, start: Start, target: str, direction: Direction, *, stop_at_contract: bool = False
    ) -> Route:
        """Returns the route from a starting point to a target.

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
        """Returns the revisions that a version table at ``heads`` implies, themselves included."""
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
        """Runs the application's ``env.py`` around ``work``: on a connection, or offline without one."""
        offline = connection is None
        with (
            self.given(connection, **attributes),
            EnvironmentContext(self.config, self.script, fn=work, as_sql=offline) as environment,
        ):
            entered(environment)
            self.run_body()

    def run_body(self) -> None:
        """Runs ``env.py``, inside :meth:`given`.

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
        """Yields the configuration for one Alembic command, whose ``env.py`` uses ``connection``."""
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
    """Loads all revisions, so that a broken one is reported now and not in the middle of a run."""
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
    """Chooses the revisions of one of the two graphs, and drops dependencies between them."""
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
    """Returns the expand revision that a revision is the contract of, or ``None`` if it is not one.

    A revision says so in its file: ``contract = "<the expand revision>"``.
    """
    expand: str | None = getattr(script.module, "contract", None)
    return expand


@contextmanager
def _errors_as_ours() -> Iterator[None]:
    try:
        yield
    except (CommandError, RevisionError) as error:
        message = str(error) or type(error).__name__
        raise BadArgument(message[0].lower() + message[1:], hint="See: shardids migrate history") from error
