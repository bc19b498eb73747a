"""A comparison of plausible shape for tests of the report: made up, always the same, and measured nowhere."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from shardids.compare.results import (
    CASES,
    Answers,
    Comparison,
    Conditions,
    Draws,
    Duplicates,
    Growth,
    Inserts,
    Order,
    Outage,
    Point,
    SchemeResult,
    ServerKind,
    Storage,
    Told,
)
from shardids.compare.schemes import SCHEMES, About

NODES = 3
ROWS = 1_000_000
LASTED_MS = 2000.0
HEARING = ("shardids", "lamport", "hlc")
REFUSES = ("snowflake-fail", "clock back")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the figures of a scheme are made from: µs a draw, and how its keys lie against the time."""

    draw_us: float
    many_us: float
    rows_per_s: float
    keys: str
    twice: Mapping[str, int] | None = None


SHAPES: Mapping[str, Shape] = {
    "shardids": Shape(draw_us=61, many_us=1.1, rows_per_s=412_000, keys="time"),
    "shardids-blocks": Shape(draw_us=1.4, many_us=0.24, rows_per_s=845_000, keys="blocks"),
    "id-service": Shape(draw_us=710, many_us=1.9, rows_per_s=344_000, keys="blocks"),
    "sequence": Shape(draw_us=54, many_us=0.31, rows_per_s=781_000, keys="counter"),
    "identity": Shape(draw_us=880, many_us=2.2, rows_per_s=903_000, keys="counter"),
    "counter": Shape(draw_us=910, many_us=8.8, rows_per_s=98_000, keys="counter", twice={"lost server": 29}),
    "offsets": Shape(draw_us=55, many_us=0.33, rows_per_s=771_000, keys="offsets", twice={"lost server": 31}),
    "offsets-mariadb": Shape(
        draw_us=310,
        many_us=4.1,
        rows_per_s=0,
        keys="offsets",
        twice={"lost server": 44, "lost in bulk": 20_000},
    ),
    "tickets": Shape(draw_us=410, many_us=9.2, rows_per_s=92_400, keys="tickets", twice={"lost server": 212}),
    "ranges": Shape(draw_us=0.9, many_us=0.12, rows_per_s=690_000, keys="blocks"),
    "redis": Shape(draw_us=39, many_us=0.4, rows_per_s=601_000, keys="counter", twice={"lost server": 4411}),
    "redis-blocks": Shape(
        draw_us=0.8, many_us=0.1, rows_per_s=702_000, keys="blocks", twice={"lost server": 4000}
    ),
    "redis-wait": Shape(draw_us=71, many_us=0.5, rows_per_s=590_000, keys="counter"),
    "published": Shape(
        draw_us=66,
        many_us=2.7,
        rows_per_s=255_000,
        keys="time",
        twice={"full speed": 811, "clock back": 61_204},
    ),
    "lamport": Shape(draw_us=300, many_us=6.5, rows_per_s=120_000, keys="offsets", twice={"lost server": 12}),
    "hlc": Shape(draw_us=310, many_us=6.9, rows_per_s=118_000, keys="time"),
    "snowflake": Shape(draw_us=2.1, many_us=1.6, rows_per_s=398_000, keys="time"),
    "snowflake-offset": Shape(draw_us=2.1, many_us=1.6, rows_per_s=399_000, keys="time"),
    "snowflake-fail": Shape(draw_us=2.1, many_us=1.6, rows_per_s=397_000, keys="time"),
    "uuid1": Shape(draw_us=0.42, many_us=0.4, rows_per_s=301_000, keys="wrapped"),
    "uuid4": Shape(draw_us=57, many_us=2.1, rows_per_s=203_000, keys="random"),
    "uuid4-client": Shape(draw_us=0.37, many_us=0.36, rows_per_s=211_000, keys="random"),
    "uuid6": Shape(draw_us=0.43, many_us=0.4, rows_per_s=388_000, keys="time"),
    "uuid7": Shape(draw_us=57, many_us=2.2, rows_per_s=322_000, keys="time"),
    "uuid7-client": Shape(draw_us=0.4, many_us=0.38, rows_per_s=377_000, keys="time"),
    "ulid": Shape(draw_us=3.1, many_us=3.0, rows_per_s=190_000, keys="time"),
    "flake128": Shape(draw_us=2.9, many_us=2.7, rows_per_s=201_000, keys="time"),
}


def comparison(*, quick: bool = False) -> Comparison:
    """All schemes, the same figures each time."""
    random_ = random.Random(41)
    return Comparison(
        conditions=_conditions(quick=quick),
        schemes=[_result(scheme.about, SHAPES[name], random_) for name, scheme in SCHEMES.items()],
    )


def _conditions(*, quick: bool) -> Conditions:
    return Conditions(
        made_at=datetime(2026, 11, 20, 17, 5, tzinfo=UTC),
        seconds=2570.0,
        command="shardids compare" + (" --quick" if quick else ""),
        quick=quick,
        machine="2 cores, 7.8 GiB, Linux 6.8 x86_64",
        versions={"Python": "3.11.7", "shardids": "0.1.0", "psycopg": "3.2.3", "PyMySQL": "1.1.1"},
        servers=[
            ServerKind(
                kind="PostgreSQL",
                version="18.6",
                count=NODES,
                settings={"fsync": "on", "synchronous_commit": "on", "shared_buffers": "128MB"},
            ),
            ServerKind(kind="MariaDB", version="11.8", count=2, settings={"auto_increment_increment": "2"}),
            ServerKind(kind="Redis", version="8.0", count=1, settings={"appendonly": "yes"}),
        ],
        sizes={
            "draws": "5 rounds of 20,000 draws by one client",
            "inserts": "5 rounds of 4 s, 1 and 8 clients",
            "spread": "3 rounds of 2 s, 1 and 8 clients, 64 tables",
            "storage": "1,000,000 rows in statements of 10,000, 3 rounds",
            "order": "6 clients of 3 nodes for 2 s",
            "causality": "2 clients that answer each other, clocks 0 and 50 ms apart",
            "duplicates": "3 rounds of 5 s each, 16 clients",
        },
    )


def _result(about: About, shape: Shape, random_: random.Random) -> SchemeResult:
    key_bytes = 16 if about.name.startswith(("uuid", "ulid", "flake")) else 8
    left_out = {} if key_bytes == 8 else {"added server": "every process is alike: there is nothing to add"}
    return SchemeResult(
        about=about,
        key_bytes=key_bytes,
        draws=_draws(shape, random_),
        inserts=Inserts(
            rounds_per_s={1: [1e6 / (shape.draw_us * 0.4 + 900)], 8: [8e6 / (shape.draw_us * 0.4 + 2500)]}
        ),
        spread=Inserts(
            rounds_per_s={1: [1e6 / (shape.draw_us * 0.7 + 950)], 8: [8e6 / (shape.draw_us * 0.8 + 2600)]}
        ),
        storage=_storage(shape, key_bytes) if shape.rows_per_s else None,
        order=_order(shape, random_),
        causality=_causality(about.name, shape),
        duplicates={
            case: Duplicates(
                keys=1_000_000 + random_.randrange(90_000),
                twice=(shape.twice or {}).get(case, 0),
                refused=12 if (about.name, case) == REFUSES else 0,
                refusal="the clock is 41 ms behind" if (about.name, case) == REFUSES else "",
            )
            for case in CASES
            if case not in left_out
        },
        outage=Outage(
            server="the first PostgreSQL server",
            keys={node: 0 if node == 0 and key_bytes == 8 else 1000 for node in range(NODES)},
            tried=1000,
        ),
        told=Told(
            key="382529960780272642",
            time=datetime(2026, 11, 20, 17, 9, 1, 52_000, tzinfo=UTC) if shape.keys == "time" else None,
            origin=37 if about.name == "shardids" else None,
        ),
        left_out=left_out,
    )


def _draws(shape: Shape, random_: random.Random) -> Draws:
    times = sorted(shape.draw_us * random_.lognormvariate(0, 0.18) for _ in range(99))
    return Draws(
        draws=100_000,
        quantiles_us=[times[0] * 0.9, *times[:-1], times[-1] * 2.4, times[-1] * 20],
        many_us=shape.many_us,
        many=1000,
    )


def _storage(shape: Shape, key_bytes: int) -> Storage:
    at_random = shape.keys in {"random", "wrapped"}
    index = {8: 22.4, 16: 39.6 if at_random else 31.5}[key_bytes]
    return Storage(
        rows=ROWS,
        rows_per_s=shape.rows_per_s,
        table_bytes_per_row=36.2 if key_bytes == 8 else 44.3,
        index_bytes_per_row=index,
        leaf_density_percent=69.8 if at_random else 90.1,
        wal_bytes_per_row=(129 if key_bytes == 8 else 147) * (2.6 if at_random else 1),
        growth=[Growth(rows=ROWS * at // 10, index_bytes=round(index * ROWS * at / 10)) for at in range(11)],
    )


def _order(shape: Shape, random_: random.Random) -> Order:
    points = []
    for at in range(480):
        node = at % NODES
        ms = LASTED_MS * at / 480
        points.append(
            Point(ms=round(ms, 2), key=round(_key(shape.keys, ms / LASTED_MS, node, random_), 5), node=node)
        )
    wrong = {
        "random": 49.97,
        "wrapped": 48.2,
        "offsets": 33.1,
        "tickets": 12.0,
        "blocks": 8.31,
        "time": 0.0042,
    }
    percent = wrong.get(shape.keys, 0.0)
    return Order(
        keys=60_000,
        pairs=1_800_000,
        out_of_order_percent=percent,
        late_p99_ms=percent * 35,
        late_most_ms=percent * 39,
        lasted_ms=LASTED_MS,
        points=points,
    )


def _causality(name: str, shape: Shape) -> list[Answers]:
    hears = name in HEARING
    return [
        Answers(
            skew_ms=skew_ms,
            answers=1000,
            first=0 if shape.keys == "counter" else 500 if skew_ms else 37,
            told=900 if hears else None,
            told_first=0 if hears else None,
        )
        for skew_ms in (0.0, 50.0)
    ]


def _key(keys: str, part: float, node: int, random_: random.Random) -> float:
    """Where a key lies (0 … 1) that was drawn after so much of the run."""
    match keys:
        case "random":
            return random_.random()
        case "wrapped":
            return (part * 7.3) % 1
        case "offsets":
            return part * (1.0, 0.8, 0.55)[node]
        case "tickets":
            return part * (1.0, 0.94, 0.97)[node]
        case "blocks":
            return min(1.0, (int(part * 12) * 3 + node) / 36 + (part * 12 % 1) / 36)
        case _:
            return part
