"""The report of a comparison: the page, its JSON, and the tables in a terminal and in Markdown."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from shardids.compare.report.advice import advices
from shardids.compare.report.charts import charts
from shardids.compare.report.page import html
from shardids.compare.report.summary import (
    DRAW,
    MISSING,
    RISKS_TITLE,
    best_of,
    duration,
    repeaters,
    risks,
    short,
    three,
    verdict,
)
from shardids.compare.report.table import markdown, print_table
from shardids.compare.results import Comparison, SchemeResult, from_json, to_json
from shardids.compare.schemes import SCHEMES
from shardids.errors import BadArgument
from tests.compare_samples import comparison

HOSTILE = "</script><b onclick='x'>&|\n<!-- <script>"


class Page(HTMLParser):
    """What a browser would take from the page: its elements, its text, and what scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: dict[str, str] = {}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            name = self.elements[-1][1].get("id") or ""
            self.scripts[name] = self.scripts.get(name, "") + data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def sample() -> Comparison:
    return comparison()


@pytest.fixture(scope="module")
def page(sample: Comparison) -> Page:
    return Page(html(sample))


def changed(sample: Comparison, name: str, **values: object) -> Comparison:
    """The sample with other values for one scheme."""
    return replace(
        sample,
        schemes=[
            replace(result, **values) if result.about.name == name else result for result in sample.schemes
        ],
    )


def bare(result: SchemeResult) -> SchemeResult:
    return SchemeResult(about=result.about, key_bytes=result.key_bytes)


def terminal(sample: Comparison, width: int = 118) -> str:
    file = io.StringIO()
    print_table(sample, Console(file=file, width=width, color_system=None))
    return file.getvalue()


def test_the_json_holds_an_equal_comparison(sample: Comparison) -> None:
    assert from_json(to_json(sample)) == sample


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is no JSON"),
        ("[1]", "names no format"),
        ('{"format": "1"}', "names no format"),
        ('{"format": 99}', "has format 99, but this version of shardids reads 1"),
        ('{"format": 1, "schemes": []}', "conditions"),
    ],
)
def test_what_is_no_comparison_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadArgument, match=said) as caught:
        from_json(text)
    assert caught.value.hint


def test_the_page_has_every_scheme_and_its_settings(sample: Comparison, page: Page) -> None:
    for result in sample.schemes:
        about = result.about
        for words in (about.title, about.name, about.settings, about.safe_under, about.stops, about.tells):
            assert " ".join(words.split()) in page.text
    assert len(sample.schemes) == len(SCHEMES)


def test_the_page_has_every_figure(sample: Comparison, page: Page) -> None:
    for result in sample.schemes:
        assert result.draws is not None
        assert result.inserts is not None
        assert result.spread is not None
        assert result.order is not None
        # MariaDB's tables are not PostgreSQL's: their sizes are left out.
        assert (result.storage is None) == (result.about.name == "offsets-mariadb")
        sizes = result.storage and (
            short(result.storage.rows_per_s),
            three(result.storage.table_bytes_per_row),
            three(result.storage.index_bytes_per_row),
            three(result.storage.leaf_density_percent),
            three(result.storage.wal_bytes_per_row),
        )
        for figure in (
            three(result.draws.p50_us),
            three(result.draws.p99_us),
            three(result.draws.many_us),
            *(short(rate) for rate in result.inserts.per_s.values()),
            *(short(rate) for rate in result.spread.per_s.values()),
            *(sizes or ()),
            three(result.order.out_of_order_percent),
            three(result.order.late_p99_ms),
            *(f"{case.twice:,}" for case in result.duplicates.values() if case.twice),
        ):
            assert figure in page.text, (result.about.name, figure)


def test_the_page_says_under_which_conditions(sample: Comparison, page: Page) -> None:
    conditions = sample.conditions
    for words in (
        conditions.command,
        conditions.machine,
        "20 November 2026, 17:05 UTC",
        duration(conditions.seconds),
        "PostgreSQL",
        "synchronous_commit=on",
        *conditions.sizes.values(),
        *(f"{name} {version}" for name, version in conditions.versions.items()),
    ):
        assert words in page.text


def test_the_page_loads_nothing(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        assert "src" not in attributes, tag
        assert "srcset" not in attributes, tag
    policy = next(of["content"] for _, of in page.elements if of.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("page_is", ["made now", "the documentation's"])
def test_the_page_has_the_licences_of_the_code_in_it(sample: Comparison, page_is: str) -> None:
    """What vl-convert bundles is minified without them, and they ask that copies have them."""
    docs = Path(__file__).parents[2] / "docs"
    text = html(sample) if page_is == "made now" else (docs / "comparison-charts.html").read_text("utf-8")
    (notice,) = re.findall(r"<!--(.*?)-->\s*<script>", text, re.DOTALL)
    for name in ("Vega:", "Vega-Lite:", "Vega-Embed:", "D3:"):
        assert re.search(rf"^{name} Copyright .*(Interactive Data Lab|Bostock)", notice, re.MULTILINE), name
    for words in (
        "Redistributions in binary form must reproduce the above copyright notice",
        "THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS",
        "this permission notice appear in all copies",
        "Permission is hereby granted, free of charge",
    ):
        assert words in notice
    assert re.search(r"Versions: Vega [\d.]+, Vega-Lite [\d.]+, Vega-Embed [\d.]+\n", notice)


def test_the_page_carries_the_comparison(sample: Comparison, page: Page) -> None:
    assert from_json(page.scripts["comparison"]) == sample


def test_every_chart_has_its_place_in_the_page(sample: Comparison, page: Page) -> None:
    specs = json.loads(page.scripts["specs"])["charts"]
    places = {of["data-chart"] for _, of in page.elements if "data-chart" in of}
    assert places == set(specs) == {chart.name for chart in charts(sample)}
    assert [of["data-points"] for _, of in page.elements if "data-points" in of] == list(SCHEMES)


def test_strings_from_outside_stay_strings(sample: Comparison) -> None:
    (shardids, *_) = sample.schemes
    hostile = changed(
        sample,
        "shardids",
        about=replace(shardids.about, title=HOSTILE, settings=HOSTILE, described_at=f"javascript:{HOSTILE}"),
        duplicates={
            name: replace(case, refused=1, refusal=HOSTILE) for name, case in shardids.duplicates.items()
        },
        left_out={"outage": HOSTILE},
    )
    hostile = replace(
        hostile, conditions=replace(hostile.conditions, command=HOSTILE, sizes={"draws": HOSTILE})
    )
    page = Page(html(hostile))
    assert not any("onclick" in of or (tag == "b" and of) for tag, of in page.elements)
    assert not any((of.get("href") or "").startswith("javascript") for _, of in page.elements)
    assert from_json(page.scripts["comparison"]) == hostile
    assert " ".join(HOSTILE.split()) in page.text


def test_a_measure_that_is_missing_is_shown_with_its_reason(sample: Comparison) -> None:
    without = changed(
        sample,
        "redis",
        draws=None,
        inserts=None,
        storage=None,
        order=None,
        outage=None,
        told=None,
        duplicates={},
        left_out={"storage": "the disk was full", "order": "no time", "crash": "it did not come back"},
    )
    without = replace(without, left_out={"mongodb": "its server is missing"})
    for text in (Page(html(without)).text, markdown(without), terminal(without)):
        for words in ("the disk was full", "no time", "it did not come back", "its server is missing"):
            assert words in text
    page = Page(html(without))
    assert "redis" not in [of.get("data-points") for _, of in page.elements]
    assert page.text.count("mongodb") > 6  # below each chart


@pytest.mark.parametrize("left", [0, 1])
def test_a_comparison_without_figures_makes_a_page(sample: Comparison, left: int) -> None:
    empty = replace(sample, schemes=[bare(result) for result in sample.schemes[:left]])
    assert charts(empty) == []
    assert best_of(empty) == []
    assert not any(advice.figures for advice in advices(empty))
    assert "No keys were counted" in Page(html(empty)).text
    assert "No keys were counted" in markdown(empty)
    assert "No keys were counted" in terminal(empty)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_the_summary_does_without_any_scheme(sample: Comparison, name: str) -> None:
    without = replace(sample, schemes=[each for each in sample.schemes if each.about.name != name])
    for advice in advices(without):
        for figure in advice.figures:
            assert name not in [value.name for value in figure.values]
            assert len(figure.values) > 1


def test_figures_of_the_summary_come_from_the_comparison(sample: Comparison) -> None:
    (shardids, *_) = sample.schemes
    assert shardids.storage is not None
    other = changed(sample, "shardids", storage=replace(shardids.storage, rows_per_s=123_456.0))
    texts = [
        value.text
        for advice in advices(other)
        for figure in advice.figures
        if figure.label == "Rows/s, filled in bulk"
        for value in figure.values
        if value.name == "shardids"
    ]
    assert texts
    assert set(texts) == {"123k"}


def test_the_best_is_named_whoever_it_is(sample: Comparison) -> None:
    best = {row.label: row for row in best_of(sample)}
    draw = best["A single draw, median µs"]
    assert draw.name == "uuid4-client"
    assert 1 < draw.place < draw.of == len(SCHEMES)
    # A client that draws one at a time has not what one with blocks has.
    own = next(result for result in sample.schemes if result.about.name == "shardids")
    assert draw.own_text == DRAW.text(DRAW.value(own) or 0)
    order = best["Pairs out of order, %"]
    assert order.text == "0"
    assert order.name == "sequence and 4 more"


def test_the_verdict_names_who_issued_a_key_twice_and_when(sample: Comparison) -> None:
    assert "19 issued none twice, 8 did." in verdict(sample)
    named = dict(repeaters(sample))
    assert named["Instagram's published function"] == "full speed (811) and clock back (61,204)"
    assert len(named) == 8
    nobody = replace(sample, schemes=[result for result in sample.schemes if not result.twice])
    assert "none was issued twice" in verdict(nobody)
    assert repeaters(nobody) == []


def test_a_quick_run_is_called_rough() -> None:
    quick = comparison(quick=True)
    for text in (Page(html(quick)).text, markdown(quick), terminal(quick)):
        assert "figures are rough" in text


def test_a_full_run_is_not(sample: Comparison, page: Page) -> None:
    for text in (page.text, markdown(sample), terminal(sample)):
        assert "figures are rough" not in text


def test_markdown_has_tables_of_even_rows(sample: Comparison) -> None:
    hostile = changed(sample, "shardids", left_out={"crash": "a | b"}, duplicates={})
    text = markdown(hostile)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    rows: list[int] = []
    for token in tokens:
        match token.type:
            case "tr_open":
                rows.append(0)
            case "th_open" | "td_open":
                rows[-1] += 1
    tables = [token.type for token in tokens].count("table_open")
    assert tables == 5
    # The best at each measure have five columns, sizes and order six, speed and safety nine.
    assert sorted(set(rows)) == [5, 6, 9]
    assert rows.count(6) == rows.count(9) == 2 * (len(SCHEMES) + 1)
    for result in sample.schemes:
        assert f"### {result.about.title} (`{result.about.name}`)" in text


def test_markdown_leaves_strings_from_outside_alone(sample: Comparison) -> None:
    (shardids, *_) = sample.schemes
    words = "a *b* [c](d) `e` | f \\ <b>g</b> &amp;\nh"
    tokens = MarkdownIt("commonmark").parse(
        markdown(changed(sample, "shardids", about=replace(shardids.about, settings=words)))
    )
    texts = ["".join(each.content for each in token.children or ()) for token in tokens]
    assert f"set up: {' '.join(words.split())}" in texts
    kinds = {each.type for token in tokens for each in token.children or ()}
    assert not kinds & {"html_inline", "link_open"}


@pytest.mark.parametrize("width", [92, 110])
def test_the_terminal_shows_all_tables(sample: Comparison, width: int) -> None:
    lines = terminal(sample, width).splitlines()
    for name in SCHEMES:
        assert sum(line.startswith(f"{name} ") for line in lines) == 4, name
    assert not any("…" in line for line in lines)
    assert max(len(line) for line in lines) <= width


def test_a_narrow_terminal_breaks_neither_names_nor_numbers(sample: Comparison) -> None:
    assert terminal(sample, 40).splitlines()[:28] == terminal(sample, 75).splitlines()[:28]


@pytest.mark.parametrize(
    ("value", "text", "brief"),
    [
        (None, MISSING, MISSING),
        (0.0, "0", "0"),
        (0.0004, "<0.001", "<0.001"),
        (0.1394, "0.139", "0.139"),
        (9.999, "10.0", "10.0"),
        (1234.5, "1,234", "1,234"),
        (412_345.0, "412,345", "412k"),
        (10_440.0, "10,440", "10.4k"),
        (1_204_000.0, "1,204,000", "1.20M"),
    ],
)
def test_numbers_have_three_digits_that_count(value: float | None, text: str, brief: str) -> None:
    assert three(value) == text
    assert short(value) == brief


@pytest.mark.parametrize(
    ("seconds", "text"), [(45.0, "45 s"), (89.6, "90 s"), (750.0, "12 min"), (7500.0, "2 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_schemes_without_repetition_say_what_would_make_one(sample: Comparison, page: Page) -> None:
    found = dict(risks(sample))
    assert "safety_margin" in found["shardids, next_id()"]
    assert "Redis INCR" not in found
    for words in (found["shardids, next_id()"], RISKS_TITLE):
        assert words in page.text
        assert words in markdown(sample)


NOT_PUBLISHED_YET = ("id-service", "counter")
"""Schemes that are newer than the published run: the next one has them, and none is named here."""


def test_the_comparison_in_the_documentation() -> None:
    """Of a whole run; the tables are those of the page, as this version prints them."""
    docs = Path(__file__).parents[2] / "docs"
    page = Page((docs / "comparison-charts.html").read_text(encoding="utf-8"))
    found = from_json(page.scripts["comparison"])
    assert not found.conditions.quick
    names = [result.about.name for result in found.schemes]
    assert names == [name for name in SCHEMES if name not in NOT_PUBLISHED_YET]
    assert (docs / "comparison.md").read_text(encoding="utf-8") == markdown(found)
    assert {
        result.about.name for result in found.schemes if "shardids" in result.about.name and result.twice
    } == set()
