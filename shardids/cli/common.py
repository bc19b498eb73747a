"""What all commands share: options, the catalog, errors shown as messages, JSON.

Every command imports this module, so it imports neither Rich nor SQLAlchemy before they are needed.
"""

from __future__ import annotations

import codecs
import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from shardids.errors import BadArgument, ShardidsError
from shardids.ids import PRESETS

if TYPE_CHECKING:
    from shardids.catalog.rows import Catalog

CatalogOption = Annotated[
    str,
    typer.Option(
        "--catalog",
        envvar="SHARDIDS_CATALOG",
        metavar="URL",
        help="Database that holds the catalog: postgresql://user@host:5432/database",
    ),
]
LAYOUTS = f"{', '.join(PRESETS)}, or widths of time, shard and sequence"
"""How a layout is named, for help texts."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
TrustOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="ROLE",
        help="A role that owns tables, or something that they use, and whose code may run as the role that"
        " connects; repeatable.",
    ),
]
YesOption = Annotated[
    bool,
    typer.Option(
        "--yes", "-y", help="Do not ask first. Without a terminal nothing is destroyed unless it is given."
    ),
]


class ErrorsAsMessages(TyperGroup):
    """A group that prints errors as a message and a hint.

    It exits 2 for a wrong argument, 1 for any other error, 130 after Ctrl-C.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except ShardidsError as error:
            _print_error(error.message, error.hint)
            raise typer.Exit(2 if isinstance(error, BadArgument) else 1) from None
        except BrokenPipeError:
            raise  # Click ends the command without a word, as others in a pipe do.
        except OSError as error:
            _print_error(*_of_system(error))
            raise typer.Exit(1) from None
        except Exception as error:
            if (message := _database_message(error)) is None:
                raise
            _print_error(message)
            raise typer.Exit(1) from None


def _database_message(error: Exception) -> str | None:
    """Returns what the database said, or None if the error is not one of SQLAlchemy's."""
    # SQLAlchemy can only have raised an error if it has been imported.
    sqlalchemy_errors = sys.modules.get("sqlalchemy.exc")
    if sqlalchemy_errors is None or not isinstance(error, sqlalchemy_errors.DBAPIError):
        return None
    diag = getattr(error.orig, "diag", None)
    return getattr(diag, "message_primary", None) or str(error.orig)


def _of_system(error: OSError) -> tuple[str, str]:
    """Returns what the operating system refused, and what helps."""
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error)
    hint = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "Make room there. Temporary files go where the variable TMPDIR says."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "Choose a folder or file that you may write to."
    return f"{files}: {reason}" if files else reason, hint


def confirm(question: str, *, yes: bool) -> None:
    """Asks the person at the terminal before something is destroyed; scripts have to say ``--yes``.

    Raises:
        typer.Abort: the answer is no.
        BadArgument: there is no terminal to ask at, and ``yes`` is not set.
    """
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadArgument(
            f"{question} There is no terminal to ask at.", hint="To do it without a question: --yes"
        )
    typer.confirm(question, abort=True, err=True)


def _print_error(message: str, hint: str = "") -> None:
    from shardids.cli.output import print_error

    print_error(message, hint)


@contextmanager
def opened(url: str) -> Iterator[Catalog]:
    """Yields the catalog and closes it afterwards."""
    from shardids.catalog.rows import Catalog

    catalog = Catalog(url)
    try:
        yield catalog
    finally:
        catalog.close()


def print_escapes() -> None:
    """Makes stdout and stderr escape what their encoding lacks, where Python would raise an error."""
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


def print_json(value: object) -> None:
    """Prints a value as JSON, without colours even on a terminal."""
    typer.echo(json.dumps(value, indent=2))
