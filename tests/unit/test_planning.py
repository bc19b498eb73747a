"""Plans hold what they were made for, and nonsense is refused by name."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.cli import COMMANDS
from shardids.cli.plan import _OPTIONS
from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT, DISCORD, JS53, SONYFLAKE, UIDGENERATOR, ForeignLayout, Layout
from shardids.ids.planning import Load, Node, Plan, collisions, key_bytes, limits, plan, validate
from shardids.ids.planning.load import SECONDS_A_YEAR, parse_growth, parse_keep, parse_number, parse_peak
from tests.support.clusters import command as process
from tests.support.clusters import command_here

NOW = datetime(2026, 11, 22, tzinfo=UTC)
loads = st.builds(
    Load,
    ids_per_second=st.floats(0.001, 1e9),
    peak=st.floats(1, 100),
    years=st.floats(0.1, 150),
    growth=st.floats(-0.5, 2),
    rows=st.floats(0, 1e12),
    row_bytes=st.floats(1, 1e4),
    keep_years=st.none() | st.floats(0.001, 200),
)


def planned(load: Load) -> Plan | None:
    """Returns a plan; ``None`` where the nodes can't be counted."""
    try:
        return plan(load, now=NOW)
    except BadArgument as error:
        if "takes more nodes than can be counted" not in error.message:
            raise
        return None


@given(loads)
def test_what_is_planned_holds_the_load(load: Load) -> None:
    made = planned(load)
    if made is None:
        return
    layout = made.layout
    assert validate(load, layout=layout, shards=made.shards, now=NOW, node=Node()) == made.lacking
    assert layout.id_bits <= 63
    if made.lacking:
        return  # rightly, as the next test says
    assert layout.years_left(NOW) >= load.years
    for year in (0.0, load.years / 2, load.years):
        assert load.peak_rate(year) <= made.shards * layout.ids_per_second / 2 * 1.000001
    for one in made.years:
        assert all(part <= one.nodes for part in Node().parts(load, one.year).values())
        assert made.shards >= one.nodes
    most = max(one.nodes for one in made.years)
    for part in range(101):
        assert max(Node().parts(load, load.years * part / 100).values()) <= most * 1.000001
    assert [one.year for one in made.limits] == sorted(one.year for one in made.limits)


@given(loads)
def test_only_what_no_layout_holds_does_not_fit(load: Load) -> None:
    made = planned(load)
    if made is None or made.lacking:
        ends = (0.0, load.years, min(load.keep_years or 0.0, load.years))
        nodes = max(part for end in ends for part in Node().parts(load, end).values())
        rate_bits = math.log2(max(load.most() * 2 / 1000, 1))
        years_bits = math.log2(load.years * SECONDS_A_YEAR * 1000)
        # Rounding up costs a bit each: of time and of shards; the time begins with the year.
        assert load.years > 138 or nodes * 2 > 1 << 16 or math.ceil(years_bits) + rate_bits > 60


def test_the_arithmetic() -> None:
    load = Load(ids_per_second=50_000, peak=8, years=20, growth=0.4, rows=1e9, row_bytes=100)
    assert load.rate(2) == pytest.approx(98_000)
    year = 50_000 * SECONDS_A_YEAR
    assert load.rows_after(1) == pytest.approx(1e9 + year * 0.4 / math.log(1.4))
    assert Load(ids_per_second=1).rows_after(3) == pytest.approx(3 * SECONDS_A_YEAR)
    slow = Load(ids_per_second=1, growth=5e-10).rows_after(1) / SECONDS_A_YEAR
    assert slow - 1 == pytest.approx(2.5e-10, rel=1e-5)
    assert load.bytes_after(0) == pytest.approx(122.5e9)
    made = plan(Load(ids_per_second=5000, peak=8), now=NOW)
    assert (made.layout, made.shards) == (DEFAULT, 2048)
    assert made.limits[0].year == 0 or made.limits[0].year < 10
    keys = key_bytes(Load(ids_per_second=1000))
    assert keys["UUIDv4"] / keys["bigint"] == pytest.approx((16 + 39.6) / (8 + 22.5))


def alive(load: Load, year: float) -> float:
    """Counts the rows in ten thousand parts of the time in which they came."""
    assert load.keep_years is not None
    parts = (np.arange(10_000) + 0.5) / 10_000

    def came(start: float, end: float) -> float:
        return float(np.mean((1 + load.growth) ** (start + (end - start) * parts)) * (end - start))

    keep = load.keep_years
    left = came(year - keep, 0) / came(-keep, 0) if year < keep else 0.0
    return load.rows * left + load.ids_per_second * SECONDS_A_YEAR * came(max(0.0, year - keep), year)


@given(
    st.floats(0.01, 30), st.floats(0, 40), st.sampled_from([-0.9, -0.3, 0.0, 1e-12, 0.4, 3.0]), st.booleans()
)
def test_rows_that_are_deleted_are_gone(keep: float, year: float, growth: float, has_rows: bool) -> None:
    load = Load(ids_per_second=2.0, growth=growth, rows=1e9 * has_rows, keep_years=keep)
    assert load.rows_after(year) == pytest.approx(alive(load, year), rel=1e-3, abs=1)
    assert load.rows_after(year) <= replace(load, keep_years=None).rows_after(year) * 1.000001


@given(st.floats(0.01, 100), st.floats(0, 100), st.floats(-0.9, 5))
def test_rows_of_one_time_follow_the_rate(keep: float, year: float, growth: float) -> None:
    """If what is there today came within the time that rows are kept, so does what is there later."""
    born = Load(ids_per_second=1.0, growth=growth, keep_years=keep)
    at_start = born.rows_after(keep) / born.rate(keep)
    if at_start > 1e18:
        return  # no such rows can be given
    load = replace(born, rows=at_start)
    assert load.rows_after(year) == pytest.approx(at_start * load.rate(year), rel=1e-6)


@given(loads, st.floats(0, 1))
def test_a_disk_is_full_when_it_is_said_and_not_before(load: Load, part: float) -> None:
    node = Node(disk=1e15, connections=1e18)
    found = limits(load, layout=DEFAULT, shards=1, nodes=1, node=node, now=NOW)
    (year,) = (one.year for one in found if one.what == "disk")
    before = part * min(year, 1000) * 0.999999
    assert year == 0 or load.bytes_after(before) <= node.disk * node.fill
    assert math.isinf(year) or load.bytes_after(year) > node.disk * node.fill


def test_deleted_rows_take_no_disk_and_do_not_change_the_layout() -> None:
    load = Load(ids_per_second=1000, peak=4, years=5)
    kept, deleted = plan(load, now=NOW), plan(replace(load, keep_years=90 / 365.2425), now=NOW)
    assert (kept.layout, deleted.layout) == (DEFAULT, DEFAULT)
    assert [one.year for one in deleted.years] == [0, 90 / 365.2425, 1, 2, 3, 4, 5]
    assert deleted.years[-1].rows == pytest.approx(1000 * 90 * 86_400)
    assert (kept.years[-1].nodes, deleted.years[-1].nodes) == (22, 2)
    assert key_bytes(replace(load, keep_years=1.0))["bigint"] == pytest.approx(key_bytes(load)["bigint"] / 10)


def test_what_ends_first() -> None:
    load = Load(ids_per_second=1000, growth=1.0, row_bytes=7.5)
    node = Node(rows_per_second=4000, disk=1e13, connections=1e6)
    found = limits(load, layout=DEFAULT, shards=64, nodes=1, node=node, now=NOW)
    when = {one.what: one.year for one in found}
    assert found[0].what == "rows per second"
    assert when["rows per second"] == pytest.approx(2)
    assert when["IDs per millisecond"] == pytest.approx(math.log2(64 * 512))
    assert when["years"] == pytest.approx(DEFAULT.years_left(NOW))
    assert load.bytes_after(when["disk"]) == pytest.approx(8e12)
    steady = limits(Load(ids_per_second=1), layout=DEFAULT, shards=1, nodes=1, node=node, now=NOW)
    assert {one.what for one in steady if math.isinf(one.year)} == {
        "shards per node",
        "IDs per millisecond",
        "rows per second",
        "disk",
        "connections",
    }


@pytest.mark.parametrize(
    ("shards", "nodes", "year"), [(1024, 1, math.inf), (1025, 1, 0), (4096, 4, math.inf)]
)
def test_more_shards_a_node_than_were_measured(shards: int, nodes: int, year: float) -> None:
    found = limits(Load(ids_per_second=1), layout=DEFAULT, shards=shards, nodes=nodes, node=Node(), now=NOW)
    (crowded,) = [one for one in found if one.what == "shards per node"]
    assert crowded.year == year
    assert "no more than 1,024 have been measured" in crowded.message


@pytest.mark.parametrize(
    ("layout", "shards", "load", "words"),
    [
        (JS53, 65, Load(ids_per_second=1), ["65 shards: 6 bits"]),
        (JS53, 64, Load(ids_per_second=3e6), ["IDs per millisecond: a shard of 64"]),
        (DEFAULT, 64, Load(ids_per_second=1, years=100), ["years: its time ends at 2093"]),
        (DISCORD, 64, Load(ids_per_second=1, years=57), []),
        (DISCORD, 64, Load(ids_per_second=1, years=58), ["sign: its IDs turn negative at 2084"]),
        (
            Layout.parse("41-12-10@4102444800000"),
            64,
            Load(ids_per_second=1),
            ["years: its time begins at 2100"],
        ),
        (DEFAULT, 64, Load(ids_per_second=1000), []),
        # 256 per 10 ms and machine, 174 years; 8,192 per second and worker, 4 million workers, until 2024.
        (SONYFLAKE, 2, Load(ids_per_second=25_600), []),
        (
            SONYFLAKE,
            2,
            Load(ids_per_second=25_700),
            ["IDs in 10 ms: a shard of 2 needs 128.5 at the peak; half"],
        ),
        (UIDGENERATOR, 1 << 22, Load(ids_per_second=1e9, years=1), ["years: its time ends at 2024-11-20"]),
    ],
)
def test_why_a_layout_does_not_fit(
    layout: Layout | ForeignLayout, shards: int, load: Load, words: list[str]
) -> None:
    why = validate(load, layout=layout, shards=shards, now=NOW)
    assert len(why) == len(words)
    assert all(one.startswith(word) for one, word in zip(why, words, strict=True))


ROWS, DISK = Node(rows_per_second=11_500, disk=1e18), Node(disk=4e8)


@pytest.mark.parametrize(
    ("node", "shards", "load", "words"),
    [
        (ROWS, 9, Load(ids_per_second=100_000), []),
        (
            ROWS,
            8,
            Load(ids_per_second=100_000),
            "after 0 years rows per second takes 9, and there are 8",
        ),
        (ROWS, 8, Load(ids_per_second=100_000, growth=-0.5), "after 0 years rows per second takes 9,"),
        (ROWS, 8, Load(ids_per_second=50_000, growth=0.1), "after 10 years rows per second takes 12,"),
        (ROWS, 8, Load(ids_per_second=1e8, years=1), "after 0 years rows per second takes 8,696,"),
        (ROWS, 8, Load(ids_per_second=1, peak=1e12), "after 0 years rows per second takes 8.7e+07,"),
        (DISK, 60, Load(ids_per_second=9, growth=-0.9, keep_years=2.0), "after 2 years disk takes 85,"),
        (DISK, 90, Load(ids_per_second=9, growth=-0.9, keep_years=2.0), []),
        (DISK, 90, Load(ids_per_second=9, growth=-0.9, rows=2e8), "after 10 years disk takes 225,"),
    ],
)
def test_each_node_takes_a_shard(node: Node, shards: int, load: Load, words: str) -> None:
    why = validate(load, layout=DEFAULT, shards=shards, now=NOW, node=node)
    without = validate(load, layout=DEFAULT, shards=shards, now=NOW)
    assert len(why) - len(without) == bool(words)
    assert not words or why[-1].startswith(f"nodes: {words}")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ids_per_second": 0}, "ids_per_second must be above 0"),
        ({"ids_per_second": -1}, "ids_per_second"),
        ({"ids_per_second": math.nan}, "ids_per_second"),
        ({"ids_per_second": math.inf}, "ids_per_second"),
        ({"peak": 0.5}, "peak must be at least 1"),
        ({"years": 0}, "years must be above 0"),
        ({"growth": -1.0}, "growth must be above -1"),
        ({"rows": -5}, "rows must be at least 0"),
        ({"row_bytes": True}, "row_bytes must be a number"),
        ({"years": 1000, "growth": 100}, "after 150 years disk takes more nodes than can be counted"),
        ({"ids_per_second": 10**400}, "ids_per_second must be above 0 and at most 1e+18, not that"),
        ({"keep_years": 0.0}, "keep_years must be above 0"),
        ({"keep_years": math.nan}, "keep_years must be above 0"),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, float], word: str) -> None:
    with pytest.raises(BadArgument) as caught:
        plan(Load(**{"ids_per_second": 1.0, **options}), now=NOW)
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("load", "layout", "words"),
    [
        (
            Load(ids_per_second=1e6, years=69, row_bytes=100),
            "42-16-5@1767225600000",
            ["nodes: after 69 years disk takes 166,710, and there are 65,536 shards"],
        ),
        (
            Load(ids_per_second=1, years=200),
            "42-6-15@1767225600000",
            ["years: its time ends at 2165-05-15, in 138.5 of 200 years"],
        ),
        (
            Load(ids_per_second=1e12, years=1),
            "36-16-11@1767225600000",
            [
                "IDs per millisecond: a shard of 65,536 needs 1.526e+04",
                "nodes: after 1 years disk takes 4.39e+09",
            ],
        ),
    ],
)
def test_a_load_that_no_cluster_holds_has_the_plan_that_comes_closest(
    load: Load, layout: str, words: list[str]
) -> None:
    made = plan(load, now=NOW)
    assert str(made.layout) == layout
    assert all(why.startswith(word) for why, word in zip(made.lacking, words, strict=True))


def test_the_chance_of_a_collision() -> None:
    # 10^9 keys have 5 * 10^17 pairs.
    assert collisions(Load(ids_per_second=1.0, rows=1e9), years=0)["UUIDv4"] == pytest.approx(
        1e9 * (1e9 - 1) / 2 / 2**122
    )
    # 2^32 random 64-bit keys: 1 - exp(-1/2).
    many = collisions(Load(ids_per_second=1.0, rows=2.0**32), years=0)
    assert many["random bigint"] == pytest.approx(1 - math.exp(-0.5), rel=1e-6)
    # A million a second for a year: 1,000 in each millisecond have 499,500 pairs, of 74 bits.
    busy = collisions(Load(ids_per_second=1e6), years=1)
    assert busy["UUIDv7"] == pytest.approx(SECONDS_A_YEAR * 1000 * 500_000 / 2**74, rel=1e-3)
    # Rows that are deleted had keys.
    assert collisions(Load(ids_per_second=1e6, keep_years=0.1), years=1) == busy
    one = Load(ids_per_second=1e-9, rows=1.0)
    assert collisions(one, years=0) == {
        "random bigint": 0,
        "UUIDv4": 0,
        "UUIDv7": pytest.approx(0, abs=1e-30),
    }
    with pytest.raises(BadArgument, match="years"):
        collisions(one, years=-1)


def test_what_can_not_be_planned() -> None:
    load = Load(ids_per_second=1.0)
    naive = datetime(2026, 1, 1)
    for judge in (
        lambda: plan(load, now=naive),
        lambda: validate(load, layout=DEFAULT, shards=1, now=naive),
        lambda: limits(load, layout=DEFAULT, shards=1, nodes=1, node=Node(), now=naive),
    ):
        with pytest.raises(BadArgument, match="has no time zone"):
            judge()
    for years, foreign_keys in ((-1.0, 1), (math.nan, 1), (1001.0, 1), (1.0, -1)):
        with pytest.raises(BadArgument):
            key_bytes(load, years=years, foreign_keys=foreign_keys)


def test_how_people_write_numbers() -> None:
    assert [parse_number("x", one) for one in ("50000", "50,000", "50k", "1.5M")] == [5e4, 5e4, 5e4, 1.5e6]
    assert parse_number("x", "2TB", "B") == 2e12
    assert (parse_peak("8x"), parse_peak("1.5")) == (8, 1.5)
    assert parse_growth("40%/y") == pytest.approx(0.4)
    assert parse_growth("2%/m") == pytest.approx(1.02**12 - 1)
    assert parse_growth("-5%") == pytest.approx(-0.05)
    assert [parse_keep(one) for one in ("2y", "365.2425d", " 90d ")] == pytest.approx([2, 1, 90 / 365.2425])
    assert parse_number("x", "1_000_000.5") == 1_000_000.5
    for parse, text in (
        (parse_growth, "fast"),
        (parse_growth, "40"),
        (parse_growth, "-100%/y"),
        (parse_growth, "9" * 40 + "%/m"),
        (parse_growth, "10001%/y"),
        *((parse_keep, one) for one in ("90", "0d", "-1d", "1e3d", "1001y", "nan", "6m")),
        (parse_peak, "x8"),
    ):
        with pytest.raises(BadArgument):
            parse(text)
    for text in ("-1", "1e5", "", "many", "5kk", "1,5", "1,,000", "1_", "12,34"):
        with pytest.raises(BadArgument, match="--rows"):
            parse_number("--rows", text)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return command_here("plan", *words)


def test_the_command() -> None:
    words = [
        "--ids-per-second",
        "500",
        "--peak",
        "8x",
        "--years",
        "5",
        "--growth",
        "40%/y",
        "--row-bytes",
        "200B",
    ]
    ran = command(*words, "--price", "node=400", "--price", "TB=20")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "layout 41-12-10@1704067200000 (default)" in ran.stdout
    # The headings of the table wrap where an earlier test has made the console narrow.
    assert "cost" in ran.stdout
    told = json.loads(command(*words, "--json").stdout)
    assert [one["year"] for one in told["years"]] == [0, 1, 2, 3, 4, 5]
    assert "cost_a_month" not in told["years"][0]
    assert (told["fits"], told["why"]) == (True, [])
    assert told["collision_chance_in_10_years"].keys() == {"random bigint", "UUIDv4", "UUIDv7"}
    fits = command(*words, "--layout", "default", "--shards", "4096")
    assert (fits.returncode, fits.stdout) == (0, "layout 41-12-10@1704067200000 fits\n")
    unfit = command(*words, "--layout", "js53", "--shards", "65", "--json")
    assert unfit.returncode == 1
    assert json.loads(unfit.stdout)["fits"] is False
    crowded = command(*words, "--layout", "default", "--node-disk", "4GB")
    assert crowded.returncode == 1
    assert crowded.stdout.startswith("nodes: after 5 years disk takes ")


def test_the_command_shows_what_comes_closest_to_a_load_that_does_not_fit() -> None:
    words = ["--ids-per-second", "1000000", "--years", "69", "--row-bytes", "100", "--price", "node=400"]
    ran = command(*words)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert ran.stdout.startswith("layout 42-16-5@")
    assert "nodes: after 69 years disk takes 166,710, and there are 65,536 shards\n" in ran.stdout
    told = json.loads(command(*words, "--json").stdout)
    assert (told["fits"], len(told["why"]), len(told["years"])) == (False, 1, 70)


def test_the_command_reads_layouts_of_other_generators() -> None:
    fits = command("--ids-per-second", "1000", "--layout", "sonyflake")
    assert (fits.returncode, fits.stdout) == (0, "layout 39x10ms-8seq-16shard@1409529600000 fits\n")
    late = command("--ids-per-second", "1000", "--years", "3", "--layout", "uidgenerator")
    assert late.returncode == 1
    assert late.stdout.startswith("years: its time ends at 2024-11-20")


@pytest.mark.parametrize(
    "words",
    [
        ["--peak", "0.5x"],
        ["--years", "0"],
        ["--growth", "lots"],
        ["--ids-per-second", "-1"],
        ["--price", "gold"],
        ["--price", "TB=1", "--price", "TB=2"],
        ["--price", "node=" + "9" * 400],
        ["--keep", "90"],
        ["--shards", "4"],
        ["--layout", "js53", "--shards", "0"],
        ["--layout", "js53", "--shards", "65537"],
    ],
)
def test_the_command_refuses_nonsense(words: list[str]) -> None:
    ran = command("--ids-per-second", "5", *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ids-per-second", "0"], "--ids-per-second must be above 0"),
        (["--peak", "0.5x"], "--peak must be at least 1"),
        (["--row-bytes", "0"], "--row-bytes must be above 0"),
        (["--node-rows", "0"], "--node-rows must be above 0"),
        (["--node-disk", "0TB"], "--node-disk must be above 0"),
        (["--node-connections", "0"], "--node-connections must be above 0"),
        (["--latency-ms", "-3"], "--latency-ms must be above 0 and at most 1e+18, not -3"),
        (["--years", "inf"], "--years must be above 0 and at most 1000, not inf"),
        (["--growth", "-99%/m"], "--growth: '-99%/m' leaves no load after a year"),
        (["--layout", "default", "--price", "node=400"], "--price does not go with --layout"),
    ],
)
def test_what_is_wrong_is_said_in_the_name_of_its_option(words: list[str], said: str) -> None:
    ran = command("--ids-per-second", "5", *words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in " ".join(ran.stderr.split())


def test_each_field_that_an_error_names_has_an_option() -> None:
    """``fill`` alone has none, and the command leaves it as it is."""
    named = {one.name for one in (*fields(Load), *fields(Node))}
    assert named - {"fill"} == _OPTIONS.keys()
    taken = {option for one in COMMANDS["plan"].load("plan").params for option in one.opts}
    assert {*_OPTIONS.values()} <= taken


def test_figures_are_whole_on_a_narrow_terminal() -> None:
    options = ["--ids-per-second", "500", "--peak", "8x", "--years", "3", "--growth", "40%/y"]
    ran = process("plan", *options, "--keep", "2y", "--price", "node=400", COLUMNS="40")
    (last,) = [line for line in ran.stdout.splitlines() if line.lstrip().startswith("3 ")]
    assert last.split() == ["3", "10,976", "0.0858", "63G", "14TB", "9", "disk", "3,600"]
    assert "disk: after 0.42 years; disk of 1 node\n" in ran.stdout


def test_the_commands_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "plan-a-cluster.md").read_text("utf-8")
    lines = [line.strip() for line in page.splitlines() if line.startswith("    shardids plan")]
    assert len(lines) == 4
    for line in lines:
        ran = command(*shlex.split(line)[2:])
        assert ran.returncode == 0
        is_crowded = "shards per node: now; 65,536" in ran.stdout
        assert is_crowded == ran.stderr.startswith("Warning: shards per node: 65,536; no more than 1,024")
        assert is_crowded or not ran.stderr
