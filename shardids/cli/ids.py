"""``shardids id``: decode, encode, range, next, stats."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.common import LAYOUTS, CatalogOption, JsonOption, opened, print_json
from shardids.cli.id_stats import stats
from shardids.errors import BadArgument
from shardids.ids import DecodedId, Layout
from shardids.ids.text import parse_id, to_decimal, to_text

if TYPE_CHECKING:
    from shardids.catalog.rows import Catalog
    from shardids.catalog.topology import OldIdRule, Placement

app = typer.Typer(help="Take IDs apart, put them together, draw them.", no_args_is_help=True)

app.command()(stats)

LayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME|T-S-Q[@EPOCH_MS]",
        help=f"{LAYOUTS}. Without it: that of the catalog if one is given, else default.",
    ),
]
OptionalCatalog = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        envvar="SHARDIDS_CATALOG",
        metavar="URL",
        help="Take the layout from this catalog, and say where the shard lives now.",
    ),
]


def _context(layout: str | None, catalog: str | None) -> tuple[Layout, Placement | None]:
    if layout is not None or catalog is None:
        return Layout.parse(layout or "default"), None
    with opened(catalog) as there:
        return there.describe().layout, there.placement()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldId:
    """An ID from before the cluster, and by which rule each adopted table finds its row's shard."""

    id: int
    rows: list[tuple[OldIdRule, int | None]]


def _old_ids(catalog: Catalog, numbers: list[int]) -> dict[int, _OldId]:
    from shardids.catalog.old_ids import tables_of

    rules = catalog.placement().old_ids
    if rules is None:
        return {}
    count = catalog.describe().shard_count
    with catalog.engine.connect() as connection:
        return {
            number: _OldId(
                id=number,
                rows=[
                    (rules.of_table[table], shard)
                    for table, shard in tables_of(connection, rules, count, number).items()
                ],
            )
            for number in numbers
            if rules.has(number)
        }


@app.command(context_settings={"ignore_unknown_options": True})
def decode(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Decimal, 0x hex, or 13 characters of base 32; - or none: stdin."),
    ] = None,
    layout: LayoutOption = None,
    catalog: OptionalCatalog = None,
    as_json: JsonOption = False,
) -> None:
    """Show when and where IDs were born, with a picture of their bits.

    With a catalog, of an ID from before the cluster: where each adopted table would have its row.
    """
    # IDs may be negative, so unknown options arrive here as arguments.
    if not ids or ids == ["-"]:
        ids = sys.stdin.read().split()
        if not ids:
            raise BadArgument("no ID given", hint="shardids id decode ID..., or one a line on stdin")
    numbers = [parse_id(text) for text in ids]
    old: dict[int, _OldId] = {}
    used, placement = _context(layout, catalog)
    if placement is not None and placement.old_ids is not None and catalog is not None:
        with opened(catalog) as there:
            old = _old_ids(there, numbers)
    decoded = [old.get(number) or used.decode(number) for number in numbers]
    if as_json:
        print_json([_as_json(one, placement) for one in decoded])
        return
    _print_pictures(decoded, used, placement)


def _print_pictures(decoded: list[DecodedId | _OldId], layout: Layout, placement: Placement | None) -> None:
    from shardids.cli.output import out
    from shardids.cli.picture import bit_picture

    for number, one in enumerate(decoded):
        if number:
            out.print()
        if isinstance(one, _OldId):
            out.print(f"[bold]{one.id}[/]   issued before this cluster")
            for rule, shard in one.rows:
                out.print(f"  {rule.table}.{rule.column}: {_told(rule, shard, placement)}", markup=False)
            continue
        out.print(bit_picture(one, layout, _where(one.shard, placement)))


def _told(rule: OldIdRule, shard: int | None, placement: Placement | None) -> str:
    from shardids.catalog.old_ids import BY_FAN_OUT, BY_KEY

    if rule.rule == BY_FAN_OUT:
        return "any shard; all are asked"
    if shard is None:
        return "no row had it, by the directory"
    how = "by its key" if rule.rule == BY_KEY else "by the directory"
    where = _where(shard, placement)
    return f"shard {shard} {how}" + (f", {where}" if where else "")


def _where(shard: int, placement: Placement | None) -> str:
    """Returns where a shard is and belongs, as far as that is known."""
    node = placement.node_of.get(shard) if placement else None
    region = placement.region_of(shard) if placement else None
    words = [f'of region "{region}"'] * bool(region) + [f'on node "{node}" now'] * bool(node)
    return ", ".join(words)


def _old_as_json(one: _OldId, placement: Placement | None) -> dict[str, object]:
    return {
        "id": to_decimal(one.id),
        "old": True,
        "tables": [
            {
                "table": rule.table,
                "column": rule.column,
                "rule": rule.rule,
                "shard": shard,
                **(_place(shard, placement) if placement and shard is not None else _NOWHERE),
            }
            for rule, shard in one.rows
        ],
    }


def _as_json(decoded: DecodedId | _OldId, placement: Placement | None) -> dict[str, object]:
    if isinstance(decoded, _OldId):
        return _old_as_json(decoded, placement)
    value: dict[str, object] = {
        # A string, because JavaScript and jq round numbers above 2^53.
        "id": to_decimal(decoded.id),
        "text": to_text(decoded.id),
        "time": decoded.time.isoformat(timespec="milliseconds"),
        "ms": decoded.ms,
        "shard": decoded.shard,
        "sequence": decoded.sequence,
    }
    return value | _place(decoded.shard, placement) if placement else value


def _place(shard: int, placement: Placement) -> dict[str, str | None]:
    return {"node": placement.node_of.get(shard), "region": placement.region_of(shard)}


_NOWHERE: dict[str, str | None] = {"node": None, "region": None}


@app.command()
def encode(
    shard: Annotated[int, typer.Option(help="Shard number.")],
    time: Annotated[str, typer.Option(help="Time, ISO 8601; UTC if it names no zone. Or: now.")],
    sequence: Annotated[int, typer.Option(help="Sequence number.")] = 0,
    layout: LayoutOption = None,
    catalog: OptionalCatalog = None,
) -> None:
    """Compose an ID for tests and queries; it is not drawn, so it is not unique."""
    used, _ = _context(layout, catalog)
    typer.echo(used.encode(at=parse_time(time), shard=shard, sequence=sequence))


@app.command("range")
def id_range(
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="First time, ISO 8601, or: now.")],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Time that is past the range.")],
    shard: Annotated[int | None, typer.Option(help="Bounds for one shard.")] = None,
    layout: LayoutOption = None,
    catalog: OptionalCatalog = None,
    as_json: JsonOption = False,
) -> None:
    """Print the lowest and the highest ID of a time range: WHERE id BETWEEN ... AND ..."""
    used, _ = _context(layout, catalog)
    bounds = used.id_range(parse_time(start), parse_time(end), shard)
    if as_json:
        print_json({"first": to_decimal(bounds.first), "last": to_decimal(bounds.last)})
    else:
        typer.echo(f"{bounds.first} {bounds.last}")


@app.command("next")
def next_ids(
    shard: Annotated[int, typer.Option(help="The shard to draw from.")],
    catalog: CatalogOption,
    count: Annotated[int, typer.Option("-n", help="How many.")] = 1,
) -> None:
    """Draw IDs from a shard, one per line."""
    from shardids.client.cluster import Cluster

    with Cluster.connect(catalog, listen=False) as cluster:
        for id_ in cluster.reserve(shard, count):
            typer.echo(id_)


def parse_time(text: str) -> datetime:
    """Parses an ISO 8601 time, taken as UTC if it names no zone, or ``now``.

    Raises:
        BadArgument: the text is neither.
    """
    if text == "now":
        return datetime.now(UTC)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadArgument(f"{text!r} is no time", hint="For example: 2026-11-21T12:00:00, or: now") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
