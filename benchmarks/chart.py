"""The chart of README and home page, from the published comparison: python -m benchmarks.chart

What a row and its COMMIT cost over 64 shards, beside what the key costs the index and whether it came twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"
SVG: Final = DOCS / "rows-over-shards.svg"
_SHOWN: Final[Mapping[str, tuple[str, str]]] = {
    "shardids": ("shardids, next_id()", ""),
    "shardids-blocks": ("shardids, next_ids(n)", ""),
    "identity": ("Identity column", "Identity column"),
    "published": ("Instagram's function", "Instagram's published function"),
    "snowflake": ("Snowflake, in the client", ""),
    "uuid7": ("UUIDv7", ""),
    "uuid4": ("UUIDv4", ""),
    "ulid": ("ULID", ""),
    "redis": ("Redis INCR", "Redis INCR"),
    "tickets": ("Ticket servers", "Flickr's ticket servers"),
}
"""The schemes of the chart: what they are called there, and in the comparison's list of duplicates."""
_STYLE: Final = """
    svg { --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --bar: #b6c2cf; --own: #0969da; --bad: #bc4c00; }
    @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9da7b1; --line: #3d444d; \
--bar: #57606a; --own: #58a6ff; --bad: #f0883e; } }
    text { fill: var(--ink); } .soft { fill: var(--soft); } .bad { fill: var(--bad); }
    .end { text-anchor: end; }
    .bar { fill: var(--bar); } .own { fill: var(--own); }
    .line { stroke: var(--line); } .head { font-weight: 600; }
"""
_WIDTH, _LEFT, _BAR, _INDEX, _TWICE = 760, 176, 250, 560, 580
_TOP, _ROW = 58, 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What the chart shows of a key scheme.

    Attributes:
        name: what it is called.
        is_own: whether it is shardids'.
        rows_per_s: rows a second, committed one by one by 16 clients, each in another of 64 shards.
        index_bytes: bytes a row in the index of the primary key.
        twice: what made keys come twice, empty if nothing did.
    """

    name: str
    is_own: bool
    rows_per_s: int
    index_bytes: str
    twice: str


def read_schemes(comparison: str) -> list[Scheme]:
    """Return the schemes of the chart as a comparison in Markdown has them, the fastest first.

    Raises:
        ValueError: a table or a scheme is missing.
    """
    speed = column(comparison, "over 64 shards, 16 clients")
    index = column(comparison, "index B/row")
    twice = dict(re.findall(r"^- ([^:\n]+): (.+ \([\d,]+\).*)$", comparison, re.MULTILINE))
    if missing := _SHOWN.keys() - speed.keys() | _SHOWN.keys() - index.keys():
        raise ValueError(f"the comparison lacks {', '.join(sorted(missing))}")
    found = [
        Scheme(
            name=name,
            is_own=key.startswith("shardids"),
            rows_per_s=int(speed[key].replace(",", "")),
            index_bytes=index[key],
            twice=re.sub(r" \([\d,]+\)", "", twice.get(title, "")),
        )
        for key, (name, title) in _SHOWN.items()
    ]
    return sorted(found, key=lambda scheme: -scheme.rows_per_s)


def column(comparison: str, title: str) -> dict[str, str]:
    """Return a column of the table that has it, by the table's first column."""
    place = None
    found = {}
    for line in comparison.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if title in cells:
            place = cells.index(title)
        elif place is not None and not line.startswith("|"):
            break
        elif place is not None and not cells[0].startswith("---"):
            found[cells[0]] = cells[place]
    if not found:
        raise ValueError(f"the comparison has no column {title!r}")
    return found


def drawn(schemes: list[Scheme]) -> str:
    """Return the chart as SVG, for light and dark pages."""
    height = _TOP + _ROW * len(schemes) + 8
    said = "; ".join(f"{one.name} {one.rows_per_s:,}" for one in schemes)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
            ' aria-labelledby="title desc" font-family="system-ui, sans-serif" font-size="13">',
            '  <title id="title">Rows a second over 64 shards</title>',
            f'  <desc id="desc">Rows a second, committed one by one over 64 shards: {escape(said)}.</desc>',
            f"  <style>{_STYLE}  </style>",
            *_heads(),
            *(line for number, one in enumerate(schemes) for line in _bar(number, one, schemes)),
            "</svg>\n",
        ]
    )


def _heads() -> Iterator[str]:
    yield f'  <text x="{_LEFT}" y="20" class="head">rows/s over 64 shards</text>'
    yield f'  <text x="{_LEFT}" y="38" class="soft" font-size="12">a row and its COMMIT, 16 clients</text>'
    yield f'  <text x="{_INDEX}" y="20" class="head end">index</text>'
    yield f'  <text x="{_INDEX}" y="38" class="soft end" font-size="12">bytes a row</text>'
    yield f'  <text x="{_TWICE}" y="20" class="head">a key came twice</text>'
    yield f'  <text x="{_TWICE}" y="38" class="soft" font-size="12">in one full run, after</text>'
    yield f'  <path class="line" d="M8 48.5H{_WIDTH - 8}"/>'


def _bar(number: int, one: Scheme, schemes: list[Scheme]) -> Iterator[str]:
    top = _TOP + _ROW * number
    base = top + 14
    width = round(_BAR * one.rows_per_s / max(other.rows_per_s for other in schemes), 1)
    weight = ' font-weight="600"' if one.is_own else ""
    yield f'  <text x="{_LEFT - 10}" y="{base}" class="end"{weight}>{escape(one.name)}</text>'
    yield (
        f'  <rect x="{_LEFT}" y="{top}" width="{width}" height="18" rx="2"'
        f' class="{"own" if one.is_own else "bar"}"/>'
    )
    yield f'  <text x="{_LEFT + width + 8}" y="{base}"{weight}>{one.rows_per_s:,}</text>'
    yield f'  <text x="{_INDEX}" y="{base}" class="end"{weight}>{one.index_bytes}</text>'
    kind, said = ("bad", one.twice) if one.twice else ("soft", "never")
    yield f'  <text x="{_TWICE}" y="{base}" class="{kind}">{escape(said)}</text>'


if __name__ == "__main__":
    SVG.write_text(drawn(read_schemes((DOCS / "comparison.md").read_text("utf-8"))), "utf-8")
    print(SVG)
