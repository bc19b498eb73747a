"""How commands print: results to stdout, progress and messages to stderr, rows as tables."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardids.cli.common import print_json

_WIDEST = 100_000

out = Console(soft_wrap=True, highlight=False)
"""The console for results: stdout. What reads a pipe reads lines: there a row is one, however long."""
if not (out.is_terminal or os.environ.get("COLUMNS")):
    out.width = _WIDEST
err = Console(stderr=True, soft_wrap=True, highlight=False)
"""The console for progress and messages: stderr."""


def print_error(message: str, hint: str) -> None:
    """Prints what went wrong and what to do next."""
    err.print("[bold red]Error:[/] ", end="")
    err.print(message, markup=False)
    if hint:
        err.print(hint, markup=False, style="dim")


def print_warnings(warnings: Iterable[str]) -> None:
    """Prints what went wrong although the work itself was done."""
    for warning in warnings:
        err.print("[yellow]Warning:[/] ", end="")
        err.print(warning, markup=False)


def print_rows(rows: Sequence[Mapping[str, object]], *, as_json: bool, empty: str) -> None:
    """Prints rows as a table or as a JSON array of objects; if there are none, prints ``empty`` to stderr."""
    if as_json:
        print_json(rows)
        return
    if not rows:
        err.print(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    out.print(table)


def figures(rows: Sequence[Mapping[str, str]], *, left: Collection[str] = ()) -> Table:
    """Returns rows as a table of figures, flush right but for ``left``. Headings wrap, figures never do: part
    of a figure would be another one."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        width = max(len(row[name]) for row in rows)
        table.add_column(name, justify="left" if name in left else "right", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table
