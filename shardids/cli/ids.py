"""``shardids id``: decode, encode, range, next."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import LAYOUTS, Run, takes
from shardids.cli.id_stats import stats
from shardids.cli.printing import out, print_json, printable
from shardids.errors import BadArgument
from shardids.ids import FOREIGN, DecodedId, ForeignId, ForeignLayout, Layout, parse_layout
from shardids.ids.text import parse_id, to_decimal, to_text, to_unsigned

if TYPE_CHECKING:
    from rich.console import Group

    from shardids.catalog.keys.moved_ids import MovedKey
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


ForeignLayoutOption = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="NAME|T-S-Q[@EPOCH_MS]",
        help=f"As for encode; or another generator's: {', '.join(FOREIGN)}, 39x10ms-8seq-16shard@EPOCH_MS.",
    ),
]


def _layout(run: Run, layout: str | None) -> Layout:
    if layout is not None or not run.url:
        return Layout.parse(layout or "default")
    return run.catalog.describe().layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldId:
    """An ID from before the cluster, and the rule of each adopted table to find its row's shard."""

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


def _moved_ids(catalog: Catalog, numbers: list[int]) -> dict[int, MovedKey]:
    """Return the keys of IDs whose rows have left the shard that they were born in."""
    from shardids.catalog.keys.moved_ids import keys_of_ids

    with catalog.engine.connect() as connection:
        found = keys_of_ids(connection, numbers)
    return {id_: key for id_, key in found.items() if key.shard != key.origin}


@app.command(context_settings={"ignore_unknown_options": True})
@takes("catalog?", "json")
def decode(
    run: Run,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Decimal, 0x hex, or 13 characters of base 32; - or none: stdin."),
    ] = None,
    layout: ForeignLayoutOption = None,
) -> None:
    """Show when and where IDs were born, with a picture of their bits.

    With a catalog, of an ID from before the cluster: where each adopted table would have its row; of a row
    that has left its shard with its tenant: where it lives.
    """
    # IDs may be negative, so unknown options arrive here as arguments.
    if not ids or ids == ["-"]:
        ids = sys.stdin.read().split()
        if not ids:
            raise BadArgument("no ID given", hint="shardids id decode ID..., or one per line on stdin")
    numbers = [parse_id(text) for text in ids]
    old: dict[int, _OldId] = {}
    moved: dict[int, MovedKey] = {}
    used: Layout | ForeignLayout
    placement: Placement | None = None
    if layout is not None or not run.url:
        used = parse_layout(layout or "default")
    else:
        used, placement = run.catalog.describe().layout, run.catalog.placement()
    if placement is not None and placement.old_ids is not None:
        old = _old_ids(run.catalog, numbers)
    if placement is not None and placement.homes_version:
        moved = _moved_ids(run.catalog, [number for number in numbers if number not in old])
    decoded = [old.get(number) or used.decode(number) for number in numbers]
    if run.as_json:
        print_json([_as_json(one, placement, moved.get(one.id)) for one in decoded])
        return
    _print_pictures(decoded, used, placement, moved)


def _print_pictures(
    decoded: Sequence[DecodedId | ForeignId | _OldId],
    layout: Layout | ForeignLayout,
    placement: Placement | None,
    moved: Mapping[int, MovedKey],
) -> None:
    for number, one in enumerate(decoded):
        if number:
            out.print()
        if isinstance(one, _OldId):
            out.print(f"[bold]{one.id}[/]   issued before this cluster", markup=True)
            for rule, shard in one.rows:
                out.print(f"  {rule.table}.{rule.column}: {_told(rule, shard, placement)}")
            continue
        out.print(bit_picture(one, layout, _where(one.shard, placement)))
        if (its := moved.get(one.id)) is not None:
            where = f", {_where(its.shard, placement)}"
            out.print(f"  born in {its.origin}; its tenant {printable(its.key)} lives in {its.shard}{where}")


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
    """Return where a shard is and belongs, as far as that is known."""
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


def _as_json(
    decoded: DecodedId | ForeignId | _OldId, placement: Placement | None, moved: MovedKey | None
) -> dict[str, object]:
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
    if placement is None:
        return value
    lives: dict[str, object] = {}
    if moved is not None:
        lives["lives"] = {
            "shard": moved.shard,
            "kind": moved.kind,
            "key": moved.key,
            **_place(moved.shard, placement),
        }
    return value | _place(decoded.shard, placement) | lives


def _place(shard: int, placement: Placement) -> dict[str, str | None]:
    return {"node": placement.node_of.get(shard), "region": placement.region_of(shard)}


_NOWHERE: dict[str, str | None] = {"node": None, "region": None}


@app.command()
@takes("catalog?")
def encode(
    run: Run,
    shard: Annotated[int, typer.Option(help="Shard number.")],
    time: Annotated[str, typer.Option(help="Time, ISO 8601; UTC if it names no zone. Or: now.")],
    sequence: Annotated[int, typer.Option(help="Sequence number.")] = 0,
    layout: LayoutOption = None,
) -> None:
    """Compose an ID for tests and queries; it is not drawn, so it is not unique."""
    used = _layout(run, layout)
    typer.echo(used.encode(at=parse_time(time), shard=shard, sequence=sequence))


@app.command("range")
@takes("catalog?", "json")
def id_range(
    run: Run,
    start: Annotated[str, typer.Option("--from", metavar="TIME", help="First time, ISO 8601, or: now.")],
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Time that is past the range.")],
    shard: Annotated[int | None, typer.Option(help="Bounds for one shard.")] = None,
    layout: LayoutOption = None,
) -> None:
    """Print the lowest and the highest ID of a time range: WHERE id BETWEEN ... AND ..."""
    used = _layout(run, layout)
    bounds = used.id_range(parse_time(start), parse_time(end), shard)
    if run.as_json:
        print_json({"first": to_decimal(bounds.first), "last": to_decimal(bounds.last)})
    else:
        typer.echo(f"{bounds.first} {bounds.last}")


@app.command("next")
@takes("catalog")
def next_ids(
    run: Run,
    shard: Annotated[int, typer.Option(help="The shard to draw from.")],
    count: Annotated[int, typer.Option("-n", help="How many.")] = 1,
) -> None:
    """Draw IDs from a shard, one per line."""
    from shardids.client.cluster import Cluster

    with Cluster.connect(run.url, listen=False) as cluster:
        for id_ in cluster.at(shard=shard).reserve(count):
            typer.echo(id_)


def parse_time(text: str) -> datetime:
    """Parse an ISO 8601 time, taken as UTC if it names no zone, or ``now``.

    Raises:
        BadArgument: the text is neither.
    """
    if text == "now":
        return datetime.now(UTC)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadArgument(
            f"{text!r} is not a time", hint="For example: 2026-11-21T12:00:00, or: now"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


STYLES = {"unused": "dim", "time": "cyan", "shard": "magenta", "sequence": "yellow"}


def bit_picture(decoded: DecodedId | ForeignId, layout: Layout | ForeignLayout, where: str = "") -> Group:
    """Return the ID, its 64 bits in the colours of the fields, and what each field says.

    ``where`` is printed beside the shard: the node that owns it now.
    """
    from rich.console import Group
    from rich.text import Text

    widths = {"unused": 64 - layout.id_bits} | layout.widths
    bits = f"{to_unsigned(decoded.id):064b}"
    drawn, start = Text("  "), 0
    for field, width in widths.items():
        drawn.append(bits[start : start + width], STYLES[field])
        drawn.append(" " if width else "")
        start += width
    time = f"{decoded.time:%Y-%m-%d %H:%M:%S}.{decoded.time.microsecond // 1000:03d} UTC"
    head = Text.assemble((str(decoded.id), "bold"), ("   " + to_text(decoded.id), "dim"))
    said = {"time": (decoded.ms, time), "shard": (decoded.shard, where), "sequence": (decoded.sequence, "")}
    facts = [(field, *said[field]) for field in layout.widths]
    unit = f" of {layout.unit_ms:,} ms" if isinstance(layout, ForeignLayout) else ""
    labels = {
        field: f"{field} ({width} bits{unit * (field == 'time')})" for field, width in layout.widths.items()
    }
    longest = max(map(len, labels.values()))
    digits = max(len(str(value)) for _, value, _ in facts)
    # Lines, not a table: a narrow terminal wraps them, and would cut a table's cells.
    lines = [
        Text.assemble(
            "    ",
            (f"{labels[field]:<{longest}}", STYLES[field]),
            f"    {value:>{digits}}    {meaning}".rstrip(),
        )
        for field, value, meaning in facts
    ]
    return Group(head, drawn, *lines)
