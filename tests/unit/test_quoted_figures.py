"""Figures in prose, held against the committed results that they are taken from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import chart

DOCS = Path(__file__).parents[2] / "docs"
COMPARISON = (DOCS / "comparison.md").read_text("utf-8")
SECTIONS = {
    section["title"]: section
    for section in json.loads((DOCS / "benchmarks.json").read_text("utf-8"))["sections"]
}
SIZES = {"k": 1_000, "M": 1_000_000}

Figure = Callable[[], float]


def median(section: str, name: str) -> Figure:
    """Return a way to read the median of a measure."""
    return lambda: float(next(one["median"] for one in SECTIONS[section]["measures"] if one["name"] == name))


def ratio(section: str, name: str) -> Figure:
    """Return a way to read a ratio."""
    return lambda: float(next(one["value"] for one in SECTIONS[section]["ratios"] if one["name"] == name))


def more(section: str, name: str) -> Figure:
    """Return a way to read by how many per cent a ratio is above one."""
    return lambda: (ratio(section, name)() - 1) * 100


def difference(section: str, name: str, less: str) -> Figure:
    """Return a way to read the difference of two medians."""
    return lambda: median(section, name)() - median(section, less)()


def cell(section: str, row: str, column: str) -> Figure:
    """Return a way to read one figure of a section's table."""

    def read() -> float:
        table = SECTIONS[section]["table"]
        return float(table["rows"][row][table["columns"].index(column)])

    return read


def fewer(section: str, row: str, column: str, than: str) -> Figure:
    """Return a way to read how many per cent of a column's figure another one lacks."""
    return lambda: (1 - cell(section, row, column)() / cell(section, row, than)()) * 100


def compared(column: str, scheme: str) -> Figure:
    """Return a way to read one figure of the published comparison."""

    def read() -> float:
        text = chart.column(COMPARISON, column)[scheme].replace(",", "")
        return float(text.rstrip("kM")) * SIZES.get(text[-1], 1)

    return read


def of_draws(name: str) -> list[Figure]:
    """Return the figures of one row of the table of costs in explanation/generator.md."""
    in_bulk = "1,000,000 rows in one INSERT"
    other = {"nextval()": "identity"}.get(name, name)
    return [median("Draws, one session", name), median(in_bulk, other), cell(in_bulk, other, "index, MB")]


COLUMN = "Adding a column in 200 and 1,024 shards on two nodes"
LOAD = "1,000,000 rows of a CSV file"
MOVE = "Moving a shard of 1,000,000 rows"
PAUSE = "Pause of writes while a shard of 1,000,000 rows moves"
ONE_ROW = "One row a transaction"
ANSWERS = "Answers: sessions with after="
NUMBERS = "Numbers for people"
TWO_NODES = "Commit on two nodes or on none"
REFERENCES = "Reference tables: a write that waits, and a join"
BUSY = "PostgreSQL 18, fsync on, {} shards, {}"
N = r"([\d,.]*\d)"
CLIENTS = "16 clients"
NEWEST = "The 20 newest rows of all shards"
ROUTED = "cluster.session() on the shard / CPU of get, a plain Session on the shard"

QUOTES: list[tuple[str, str, list[Figure]]] = [
    (
        "../README.md",
        rf"by itself {N} µs \(`nextval\(\)` {N}, `uuidv7\(\)` {N}\). Over 1,024 shards, 16 clients\n"
        rf"commit {N} % fewer rows per second than with an identity column, and one client {N} % fewer",
        [
            *(median("Draws, one session", name) for name in ("next_id()", "nextval()", "uuidv7()")),
            *(
                fewer(ONE_ROW, BUSY.format("1,024", clients), "rows/s, next_id()", "rows/s, identity")
                for clients in (CLIENTS, "1 client")
            ),
        ],
    ),
    (
        "how-to/route-queries.md",
        rf"row by its ID costs {N} % more .* on the shard, and a row inserted {N} % more",
        [
            more("Routing", f"CPU of get, {ROUTED}"),
            more(
                "One row in a session",
                "CPU of cluster.session() / CPU of a plain Session on the shard, primary_key()",
            ),
        ],
    ),
    (
        "how-to/route-queries.md",
        rf"on two nodes that is {N} ms instead\nof {N}",
        [
            median(NEWEST, f"1,024 shards, in {session}, the session over all shards")
            for session in ("a kept session", "a new one")
        ],
    ),
    ("explanation/generator.md", rf"\| `next_id\(\)` \| {N} \| {N} s \| {N} MB", of_draws("next_id()")),
    (
        "explanation/generator.md",
        rf"`next_ids\(n\)` \| {N} \| {N} s \| {N} MB",
        of_draws("IDs from next_ids(n)"),
    ),
    (
        "explanation/generator.md",
        rf"published function \| {N} \| {N} s \| {N} MB",
        of_draws("the published function"),
    ),
    (
        "explanation/generator.md",
        rf"read tidied \| {N} \| {N} s \| {N} MB",
        of_draws("the same, clock read tidied"),
    ),
    ("explanation/generator.md", rf"identity \| {N} \| {N} s \| {N} MB", of_draws("nextval()")),
    (
        "explanation/generator.md",
        rf"`gen_random_uuid\(\)` \| {N} \| {N} s \| {N} MB",
        of_draws("gen_random_uuid()"),
    ),
    ("explanation/generator.md", rf"`uuidv7\(\)` \| {N} \| {N} s \| {N} MB", of_draws("uuidv7()")),
    (
        "explanation/generator.md",
        rf"MB \| {N} duplicates \|\n.*MB \| {N} duplicates",
        [
            cell("Duplicates at full speed", "the published function", "of a million"),
            cell("Duplicates at full speed", "the same, clock read tidied", "of a million"),
        ],
    ),
    (
        "explanation/order.md",
        rf"{N} µs beside {N} for a session that inserts and commits one row, {N} %\s+more",
        [
            difference(ANSWERS, "a row, after an ID that the shard is past", "a row, no after"),
            median(ANSWERS, "a row, no after"),
            more(ANSWERS, "a row, after an ID that the shard is past / a row, no after"),
        ],
    ),
    (
        "how-to/migrate.md",
        rf"psql: {N}, {N} and {N} s beside {N} in 200 shards, {N}, {N} and\n{N} s beside {N} in 1,024",
        [
            median(COLUMN, f"{case}, {shards} shards")
            for shards in ("200", "1,024")
            for case in ("the run", "whole command", "nothing to do", "psql")
        ],
    ),
    (
        "how-to/load-rows.md",
        rf"took {N} s,\n{N} times as long as",
        [median(LOAD, "shardids load"), ratio(LOAD, "shardids load / \\copy")],
    ),
    (
        "how-to/move-shards.md",
        rf"moved in {N} s while nobody wrote, {N} times as long",
        [median(MOVE, "shard move"), ratio(MOVE, "shard move / CREATE SUBSCRIPTION")],
    ),
    (
        "how-to/move-shards.md",
        rf"it took {N} s on PostgreSQL 15, and the slowest write {N} ms",
        [cell(PAUSE, "PostgreSQL 15, shard move", column) for column in ("s in all", "worst write, ms")],
    ),
    (
        "explanation/order.md",
        rf"{N} µs of it are the function. Where the shard has to be raised it is\s+{N} % more",
        [
            median(ANSWERS, "advance_past, shard past the ID"),
            more(ANSWERS, "a row, after an ID 2 ms ahead of the shard / a row, no after"),
        ],
    ),
    (
        "explanation/choosing.md",
        rf"over 1,024 shards {N} % fewer single-row commits",
        [fewer(ONE_ROW, BUSY.format("1,024", CLIENTS), "rows/s, next_id()", "rows/s, identity")],
    ),
    (
        "explanation/choosing.md",
        rf"{N} bytes of log per row loaded by COPY instead of {N}",
        [compared("WAL B/row", "shardids"), compared("WAL B/row", "identity")],
    ),
    (
        "explanation/choosing.md",
        rf"{N} rows/s against {N} of an identity column",
        [compared("bulk rows/s", "shardids-blocks"), compared("bulk rows/s", "identity")],
    ),
    (
        "explanation/choosing.md",
        rf"{N} bytes of index per row instead of {N}",
        [compared("index B/row", "uuid7"), compared("index B/row", "shardids")],
    ),
    (
        "explanation/choosing.md",
        rf"{N} bytes of index per row, pages {N} % full, {N} bytes of log per row instead of {N}",
        [
            compared("index B/row", "uuid4"),
            compared("leaf full %", "uuid4"),
            compared("WAL B/row", "uuid4"),
            compared("WAL B/row", "shardids"),
        ],
    ),
    (
        "explanation/choosing.md",
        rf"draws in {N} µs, round trip included, where `next_id\(\)` takes {N}",
        [compared("draw p50 µs", "sequence"), compared("draw p50 µs", "shardids")],
    ),
    (
        "explanation/choosing.md",
        rf"loads {N} rows per second by COPY against {N} with",
        [compared("bulk rows/s", "sequence"), compared("bulk rows/s", "shardids")],
    ),
    (
        "explanation/choosing.md",
        rf"{N} % of all pairs were out of order, by {N} ms at the 99th percentile",
        [compared("out of order %", "shardids"), compared("late p99 ms", "shardids")],
    ),
    (
        "explanation/choosing.md",
        rf"blocks cost {N} µs, and then order between clients is gone: {N} % of all pairs",
        [compared("draw p50 µs", "shardids-blocks"), compared("out of order %", "shardids-blocks")],
    ),
    (
        "how-to/plan-a-cluster.md",
        rf"some {N} rows per second on two cores",
        [cell(ONE_ROW, BUSY.format("1,024", CLIENTS), "rows/s, next_id()")],
    ),
    (
        "how-to/numbers-for-people.md",
        rf"{N} rows per second, {N} of the rate without numbers, and {N} \({N}\) without gaps",
        [
            median(NUMBERS, "quick, 1 tenant"),
            ratio(NUMBERS, "quick / no number, one tenant"),
            median(NUMBERS, "gapless, 1 tenant"),
            lambda: median(NUMBERS, "gapless, 1 tenant")() / median(NUMBERS, "no number, 1 tenant")(),
        ],
    ),
    (
        "how-to/numbers-for-people.md",
        rf"the gapless kind was the quicker one: {N} against {N}",
        [median(NUMBERS, "gapless, 64 tenants"), median(NUMBERS, "quick, 64 tenants")],
    ),
    (
        "how-to/commit-on-two-nodes.md",
        rf"{N} times the time of two updates on\s+one node, {N} times that of two COMMITs in turn",
        [
            ratio(TWO_NODES, "two nodes, twophase=True / one node"),
            ratio(TWO_NODES, "two nodes, twophase=True / two nodes, one after another"),
        ],
    ),
    (
        "how-to/reference-tables.md",
        rf"took {N} times as long as one that does not, {N} ms",
        [
            ratio(REFERENCES, "write, COMMIT waits for two other nodes / write, COMMIT on the writer"),
            median(REFERENCES, "write, COMMIT waits for two other nodes"),
        ],
    ),
    (
        "how-to/migrate.md",
        rf"in 1,000 shards on two nodes took {N} times as\s+long",
        [ratio("Migrating 1,000 shards on two nodes", "migrate up, the run / psql")],
    ),
]


@pytest.mark.parametrize(("page", "phrase", "figures"), QUOTES, ids=[quote[0] for quote in QUOTES])
def test_a_page_quotes_the_committed_results(page: str, phrase: str, figures: list[Figure]) -> None:
    found = re.search(phrase, (DOCS / page).read_text("utf-8"))
    assert found, f"{page} no longer says {phrase}: change it here too"
    for quoted, figure in zip(found.groups(), figures, strict=True):
        assert agree(quoted, figure()), f"{page} says {quoted}, the results {figure():.4g}: {found[0]}"


def agree(quoted: str, value: float) -> bool:
    """Return whether a number is the value, rounded to as many places; zeros at the end don't count."""
    whole, _, parts = quoted.replace(",", "").partition(".")
    places = len(parts) if parts else -(len(whole) - len(whole.rstrip("0")))
    return abs(float(quoted.replace(",", "")) - value) <= 0.5001 * 10.0**-places


@pytest.mark.parametrize(
    ("quoted", "value", "agrees"),
    [
        ("12,000", 11_771, True),
        ("11,800", 11_771, True),
        ("11,700", 11_771, False),
        ("0.36", 0.364, True),
        ("5", 5.6, False),
    ],
)
def test_a_quoted_figure_may_be_rounded(quoted: str, value: float, agrees: bool) -> None:
    assert agree(quoted, value) is agrees
