"""What all commands share: consoles, the --catalog option, errors as messages, tables and JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import DBAPIError
from typer.core import TyperGroup

from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ShardidsError

out = Console(soft_wrap=True, highlight=False)
"""For results: stdout."""
err = Console(stderr=True, soft_wrap=True, highlight=False)
"""For progress and messages: stderr."""

CatalogOption = Annotated[
    str,
    typer.Option(
        "--catalog",
        envvar="SHARDIDS_CATALOG",
        metavar="URL",
        help="Database that holds the catalog: postgresql://user@host:5432/database",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]


_NUMBER = re.compile(r"[0-9]{1,9}")


class ErrorsAsMessages(TyperGroup):
    """Prints errors as a message and a hint: exit 2 for a wrong argument, 1 for the rest."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except ShardidsError as error:
            _print_error(error.message, error.hint)
            raise typer.Exit(2 if isinstance(error, BadArgument) else 1) from None
        except DBAPIError as error:
            diag = getattr(error.orig, "diag", None)
            _print_error(getattr(diag, "message_primary", None) or str(error.orig), "")
            raise typer.Exit(1) from None


def _print_error(message: str, hint: str) -> None:
    err.print("[bold red]Error:[/] ", end="")
    err.print(message, markup=False)
    if hint:
        err.print(hint, markup=False, style="dim")


@contextmanager
def opened(url: str) -> Iterator[Catalog]:
    """The catalog, closed afterwards."""
    catalog = Catalog(url)
    try:
        yield catalog
    finally:
        catalog.close()


def print_warnings(warnings: Iterable[str]) -> None:
    """Prints what went wrong beside the work that was done."""
    for warning in warnings:
        err.print("[yellow]Warning:[/] ", end="")
        err.print(warning, markup=False)


def print_json(value: object) -> None:
    """Prints a value as JSON, in plain text also on a terminal."""
    typer.echo(json.dumps(value, indent=2))


def print_rows(rows: Sequence[Mapping[str, object]], *, as_json: bool, empty: str) -> None:
    """Prints rows as a table, or as a JSON array of objects. ``empty`` is said if there are none."""
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
        table.add_row(*(Text(str(value)) for value in row.values()))
    out.print(table)
