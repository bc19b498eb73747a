"""The helper of all commands: groups that load late, common options, the catalog, errors as messages.

Every command imports this module, so it imports neither Rich nor SQLAlchemy before they are needed.
"""

from __future__ import annotations

import codecs
import errno
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from shardids.cli.printing import err, print_error, print_json, print_rows
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.ids import PRESETS

if TYPE_CHECKING:
    from shardids.catalog.rows import Catalog

Common = Literal["catalog", "catalog?", "dry-run", "yes", "allow-drop", "json"]
LAYOUTS = f"{', '.join(PRESETS)}, or widths of time, shard and sequence"
"""How a layout is named, for help texts."""
_CATALOG = typer.Option(
    "--catalog",
    envvar="SHARDIDS_CATALOG",
    metavar="URL",
    help="Database that holds the catalog: postgresql://user@host:5432/database",
)
_COMMON: dict[str, tuple[str, Any, Any]] = {
    "catalog": ("catalog", Annotated[str, _CATALOG], inspect.Parameter.empty),
    "catalog?": ("catalog", Annotated[str | None, _CATALOG], None),
    "dry-run": (
        "dry",
        Annotated[bool, typer.Option("--dry-run", help="Report the changes, and make none.")],
        False,
    ),
    "yes": (
        "yes",
        Annotated[
            bool,
            typer.Option(
                "--yes",
                "-y",
                help="Do not ask first. Without a terminal nothing is changed unless it is given.",
            ),
        ],
        False,
    ),
    "allow-drop": (
        "yes",
        Annotated[
            bool,
            typer.Option(
                "--allow-drop",
                "--yes",
                "-y",
                help="Drop tables and columns that have rows without asking first.",
            ),
        ],
        False,
    ),
    "json": ("as_json", Annotated[bool, typer.Option("--json", help="Print JSON instead.")], False),
}
"""Of each common option: the field of :class:`Run`, its type and its default."""
OnBusyOption = Annotated[
    Literal["wait", "skip"],
    typer.Option(
        "--on-busy",
        help="A shard that another command is changing: wait until it has ended, or leave the shard out.",
    ),
]
NewTablesOption = Annotated[
    Path | None,
    typer.Option(
        "--migrations",
        envvar="SHARDIDS_MIGRATIONS",
        metavar="DIR",
        help="The application's migrations: new shards get its tables, at the other shards' revision.",
    ),
]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="ROLE",
        help="A role that owns tables, or something that they use, and whose code may run as the role that"
        " connects; repeatable.",
    ),
]


class Run:
    """One run of a command: its common options, and the catalog, which is opened on first use."""

    def __init__(
        self,
        command: str = "",
        *,
        catalog: str | None = None,
        dry: bool = False,
        yes: bool = False,
        as_json: bool = False,
    ) -> None:
        self._command = command
        self.url = catalog or ""
        self.dry = dry
        self.as_json = as_json
        self.yes = yes
        self._catalog: Catalog | None = None

    @property
    def catalog(self) -> Catalog:
        """The catalog of ``--catalog``.

        Raises:
            BadArgument: the command was given none.
            ClusterConflict: the cluster is on Citus, and the command does not apply there.
        """
        if self._catalog is None:
            from shardids.catalog.rows import Catalog

            self._catalog = Catalog(self.required_url())
            self._require_engine()
        return self._catalog

    @property
    def is_on_citus(self) -> bool:
        """Whether Citus places the shards of the cluster."""
        return self.catalog.describe().engine == "citus"

    def _require_engine(self) -> None:
        """Refuse a command that does not apply to a cluster on Citus, before it looks further."""
        from shardids.beside.citus.refusals import REFUSED

        if self._command in REFUSED and self.is_on_citus:
            raise ClusterConflict(
                f"this cluster is on Citus, where shardids {self._command} does not apply",
                hint=REFUSED[self._command],
            )

    def required_url(self) -> str:
        """Return the URL of ``--catalog``.

        Raises:
            BadArgument: the command was given none.
        """
        if not self.url:
            raise BadArgument("which cluster?", hint="Name its catalog: --catalog or SHARDIDS_CATALOG.")
        return self.url

    def close(self) -> None:
        """Close the catalog."""
        if self._catalog is not None:
            self._catalog.close()

    def ask(self, question: str, *, refusal: ShardidsError | None = None) -> None:
        """Ask the person at the terminal before something is destroyed; scripts have to say ``--yes``.

        A dry run destroys nothing and asks nothing.

        Raises:
            typer.Abort: the answer is no.
            BadArgument: no terminal to ask at, and ``--yes`` is not given; ``refusal`` takes its place.
        """
        if self.yes or self.dry:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise refusal or BadArgument(
                f"{question} There is no terminal to ask at.", hint="To do it without a question: --yes"
            )
        typer.confirm(question, abort=True, err=True)

    def print_rows(self, rows: Sequence[Mapping[str, object]], *, empty: str = "") -> None:
        """Print rows as a table or as JSON; if there are none, ``empty`` to stderr."""
        if self.as_json:
            print_json(rows)
        else:
            print_rows(rows, empty=empty)


def takes(*options: Common) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the common options, which it finds in its first argument, a :class:`Run`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        common = [_COMMON[option] for option in options]

        def called(context: typer.Context, **given: Any) -> None:
            run = Run(_words(context), **{name: given.pop(name) for name, _, _ in common})
            try:
                command(run, **given)
            finally:
                run.close()

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        parameters += [one.replace(kind=keyword) for one in own]
        parameters += [
            inspect.Parameter(name, keyword, annotation=kind, default=default)
            for name, kind, default in common
        ]
        called.__name__, called.__doc__, called.__module__ = (
            command.__name__,
            _flowed(command.__doc__ or ""),
            command.__module__,
        )
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # PEP 362
        called.__annotations__ = {one.name: one.annotation for one in parameters}
        return called

    return decorate


def _flowed(text: str) -> str:
    """Return a docstring with each paragraph as one line, which terminals wrap."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _words(context: Any) -> str:
    """Return the words of a command after the program's own name; ``context`` is Typer's, or ``None``."""
    if context is None or context.parent is None:
        return ""
    return f"{_words(context.parent)} {context.info_name}".strip()


def refuse(why: str, **given: object) -> None:
    """Refuse options that do not apply, by name.

    Raises:
        BadArgument: one of ``given`` is set.
    """
    names = [f"--{name.strip('_').replace('_', '-')}" for name, value in given.items() if value]
    if names:
        raise BadArgument(f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} not apply {why}")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command or a group is defined (``module:name``), its line in the help, and its panel."""

    where: str
    help: str
    panel: str = ""

    def load(self, name: str) -> Any:
        """Import the command, and return it as Typer would have added it to the group."""
        module, _, attribute = self.where.partition(":")
        found = getattr(import_module(f"{__package__}.{module}"), attribute)
        holder = typer.Typer()
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            holder.command(name)(found)
        return get_group(holder).commands[name]


class _Unloaded(TyperCommand):
    """A stand-in for a command in the group's help."""


class LazyGroup(TyperGroup):
    """A group whose commands are those of ``entries``.

    It prints its help from ``entries`` alone. Any other use of a command imports its module.
    """

    entries: ClassVar[Mapping[str, Entry]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._is_listing = False
        for name, entry in self.entries.items():
            self.commands[name] = _Unloaded(name, help=entry.help, rich_help_panel=entry.panel or None)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name."""
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, _Unloaded) and not self._is_listing:
            command = self.commands[cmd_name] = self.entries[cmd_name].load(cmd_name)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the group."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


class ErrorsAsMessages(TyperGroup):
    """A group that prints errors as a message and a hint.

    It exits 2 for a wrong argument, 1 for any other error, 130 after Ctrl-C. Work that can be resumed then
    says how.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            for note in getattr(interrupt, "__notes__", ()):
                err.print(note)
            raise
        except ShardidsError as error:
            print_error(error.message, error.hint)
            raise typer.Exit(2 if isinstance(error, BadArgument) else 1) from None
        except BrokenPipeError:
            raise  # Click ends the command without a word, as others in a pipe do.
        except OSError as error:
            print_error(*_of_system(error))
            raise typer.Exit(1) from None
        except Exception as error:
            if (message := _database_message(error)) is None:
                raise
            print_error(message)
            raise typer.Exit(1) from None


def _database_message(error: Exception) -> str | None:
    """Return the database's message, or None if the error is not one of SQLAlchemy's."""
    # SQLAlchemy can only have raised an error if it has been imported.
    sqlalchemy_errors = sys.modules.get("sqlalchemy.exc")
    if sqlalchemy_errors is None or not isinstance(error, sqlalchemy_errors.DBAPIError):
        return None
    diag = getattr(error.orig, "diag", None)
    return getattr(diag, "message_primary", None) or str(error.orig)


def _of_system(error: OSError) -> tuple[str, str]:
    """Return the refusal of the operating system, and a remedy."""
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error)
    hint = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Make room there. Temporary files go where the variable TMPDIR says."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Choose a folder or file that you may write to."
    return f"{files}: {reason}" if files else reason, hint


def print_escapes() -> None:
    """Make stdout and stderr escape what their encoding lacks, where Python would raise an error."""
    codecs.register_error("shardids", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="shardids")


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    try:
        # A byte of an argument that Python could not decode is printed unchanged.
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)
