"""``shardids console``: one page that shows the cluster as it is."""

from __future__ import annotations

from typing import Annotated

import typer

from shardids.cli.common import CatalogOption
from shardids.cli.output import err


def console(
    catalog: CatalogOption,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:8088",
) -> None:
    """Serve a page that shows the cluster: health, rates, the map of shards, IDs, moves. Reads only."""
    from shardids.console.app import Console
    from shardids.console.serving import serve
    from shardids.console.watching import Watcher
    from shardids.metrics.addresses import Address

    address = Address.parse(listen)
    serve(
        Console(catalog, Watcher(catalog)),
        address,
        on_start=lambda at: err.print(f"Serving http://{at}", markup=False),
    )
