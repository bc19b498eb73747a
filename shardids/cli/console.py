"""``shardids console``: one page that shows the cluster as it is."""

from __future__ import annotations

import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from shardids.cli.common import CatalogOption
from shardids.cli.output import err, print_warnings
from shardids.errors import BadArgument

if TYPE_CHECKING:
    from shardids.serving.addresses import Address

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def console(
    catalog: CatalogOption,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where to listen. Elsewhere than on loopback, a token is asked for."
        ),
    ] = "127.0.0.1:8088",
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A name under which browsers ask for it, beside addresses; repeatable."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Ask for the token in this file. Else one is made up where it is needed."
        ),
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let the page move, rebalance and fence shards.")
    ] = False,
    prometheus: Annotated[
        str | None,
        typer.Option(
            envvar="SHARDIDS_PROMETHEUS",
            metavar="URL",
            help="Take the last hour's rates from this Prometheus, which scrapes shardids metrics serve.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show this report of the key schemes: shardids compare --html FILE"
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            min=1,
            max=300,
            metavar="SECONDS",
            help="How often the cluster is read; with over 300 shards for each second, less often.",
        ),
    ] = 5.0,
) -> None:
    """Serve a page that shows the cluster: health, rates, the map of shards, IDs, moves. Reads only."""
    from shardids.console.app import Console
    from shardids.console.guard import Access
    from shardids.console.prometheus import Prometheus
    from shardids.console.settings import Settings
    from shardids.serving.addresses import Address
    from shardids.serving.server import serve

    address = Address.parse(listen)
    if report is not None and not report.is_file():
        raise BadArgument(
            f"there is no report {report}", hint=f"Make one: shardids compare --quick --html {report}"
        )
    token = _token(token_file, address)
    served = Console(
        Settings(
            catalog_url=catalog,
            access=Access(names=[*(host or ()), address.host], token=token),
            interval_s=interval,
            allow_actions=allow_actions,
            prometheus=None if prometheus is None else Prometheus(prometheus),
            report=report,
        )
    )

    def tell(at: Address) -> None:
        err.print(f"Serving http://{at}", markup=False)
        if token is not None and token_file is None:
            err.print(f"Its token, until it ends: {token}", markup=False)
        if token_file is not None and token_file.stat().st_mode & _OTHERS:
            print_warnings([f"others may read the token in {token_file}: chmod 600 {token_file}"])
        if not at.is_loopback:
            print_warnings(
                [f"other machines may reach {at}; without TLS in front, the network sees the token"]
            )

    serve(served.app(), address, on_start=tell, before_end=served.end)
    if served.left is not None:
        print_warnings([served.left])
        raise typer.Exit(1)


def _token(file: Path | None, address: Address) -> str | None:
    """The token that is asked for; None on loopback, unless there is a file."""
    from shardids.console.guard import LEAST_TOKEN

    if file is None:
        return None if address.is_loopback else secrets.token_urlsafe(24)
    token = file.read_text("utf-8").strip()
    if len(token) < LEAST_TOKEN or any(not one.isprintable() or one.isspace() for one in token):
        raise BadArgument(
            f"{file} holds no token of {LEAST_TOKEN} characters or more, without spaces",
            hint=f"Make one: (umask 077; openssl rand -hex 24 > {file})",
        )
    return token
