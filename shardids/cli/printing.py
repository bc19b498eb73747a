"""How commands print: results to stdout, progress and messages to stderr, rows as tables.

Rich is imported when something is printed: a command that prints JSON, or nothing, does not wait for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.status import Status
    from rich.table import Table

_WIDEST = 100_000


class Stream:
    """Stdout or stderr, as a console of Rich that is made on first use."""

    def __init__(self, *, stderr: bool) -> None:
        self._stderr = stderr

    @cached_property
    def console(self) -> Console:
        """The console itself. What reads a pipe reads lines: there a row is one, however long."""
        from rich.console import Console

        console = Console(stderr=self._stderr, soft_wrap=True, highlight=False)
        if not (self._stderr or console.is_terminal or os.environ.get("COLUMNS")):
            console.width = _WIDEST
        return console

    @property
    def is_terminal(self) -> bool:
        """Whether a person sees it at once."""
        return self.console.is_terminal

    def print(
        self, *what: RenderableType, markup: bool = False, style: str | None = None, end: str = "\n"
    ) -> None:
        """Print texts as they are; with ``markup``, Rich's tags in them are styles."""
        self.console.print(*what, markup=markup, style=style, end=end)

    def status(self, text: str) -> Status:
        """Return a line with a spinner, for ``with``."""
        return self.console.status(text)


out = Stream(stderr=False)
"""Where results go."""
err = Stream(stderr=True)
"""Where progress and messages go."""


def bars(*columns: str, transient: bool = True) -> Progress:
    """Return bars that are shown on a terminal only.

    A column is a text, or one of ``bar``, ``count`` (how many of how many) and ``left`` (how long still).
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    known = {"bar": BarColumn, "count": MofNCompleteColumn, "left": TimeRemainingColumn}
    made: list[Any] = [known[one]() if one in known else one for one in columns]
    return Progress(*made, console=err.console, disable=not err.is_terminal, transient=transient)


def print_error(message: str, hint: str = "") -> None:
    """Print what went wrong and what to do next."""
    err.print("[bold red]Error:[/] ", markup=True, end="")
    err.print(message)
    if hint:
        err.print(hint, style="dim")


def print_warnings(warnings: Iterable[str]) -> None:
    """Print what went wrong although the work itself was done."""
    for warning in warnings:
        err.print("[yellow]Warning:[/] ", markup=True, end="")
        err.print(warning)


def printable(text: str) -> str:
    """Return a text of an application's data, without characters that a terminal would obey."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def print_json(value: object) -> None:
    """Print a value as JSON, without colours even on a terminal."""
    typer.echo(json.dumps(value, indent=2, default=_in_json))


def _in_json(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def print_rows(rows: Sequence[Mapping[str, object]], *, empty: str = "") -> None:
    """Print rows as a table; if there are none, prints ``empty`` to stderr.

    A time is shown to the minute, ``size_bytes`` as ``size`` with a unit. Cells wrap between words only: part
    of an address or a time would be another one.
    """
    if not rows:
        err.print(empty)
        return
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, value in rows[0].items():
        cells = [_cell(name, row[name]) for row in rows]
        is_whole = isinstance(value, datetime) or name == "size_bytes"
        parts = [part for cell in cells for part in ([cell] if is_whole else cell.split())]
        table.add_column(
            "size" if name == "size_bytes" else name,
            justify="right" if isinstance(value, int) else "left",
            min_width=max(map(cell_len, parts), default=0),
        )
    for row in rows:
        table.add_row(*(Text(_cell(name, value)) for name, value in row.items()))
    out.print(table)


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if name == "size_bytes" and isinstance(value, int):
        from rich.filesize import decimal

        return decimal(value)
    return str(value)


def figures(rows: Sequence[Mapping[str, str]], *, left: Collection[str] = ()) -> Table:
    """Return rows as a table of figures, flush right except ``left``. Headings wrap, figures never do: part
    of a figure would be another one."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        width = max(len(row[name]) for row in rows)
        table.add_column(name, justify="left" if name in left else "right", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table
