"""The report of a comparison in a real browser: drawn, light and dark, on a desk and a phone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from shardids.compare.report.page import html
from shardids.compare.schemes import SCHEMES
from tests.compare_samples import comparison
from tests.support.browsers import SIZES, Opened, opened

HOSTILE = "</script><b class=hostile>x</b><img class=hostile src=x onerror='window.hostile = 1'>"

# Of each chart: the size of its drawing, and how many marks it has.
DRAWN = """
() => Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => {
  const svg = chart.querySelector("svg");
  const box = svg ? svg.getBoundingClientRect() : {width: 0, height: 0};
  const of = (kind) => svg ? svg.querySelectorAll(`.mark-${kind}.role-mark > *`).length : 0;
  const room = chart.getBoundingClientRect();
  return [chart.dataset.chart || "points " + chart.dataset.points, {
    width: box.width, height: box.height, over: box.right - room.right,
    rect: of("rect"), symbol: of("symbol"), line: of("line"), text: of("text"), rule: of("rule"),
  }];
}))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(html(comparison()), "utf-8")
    return file


Open = Callable[..., Opened]


@pytest.fixture
def drawn(browser: Browser) -> Iterator[Open]:
    """Opens reports, and waits until their charts are drawn."""
    with ExitStack() as stack:

        def open_report(file: Path, size: str = "desk", colours: str = "light") -> Opened:
            found = stack.enter_context(opened(browser, file.as_uri(), size, colours))
            found.page.evaluate("() => drawn")
            return found

        yield open_report


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_every_chart_is_drawn_and_fits(drawn: Open, file: Path, size: str, colours: str) -> None:
    found = drawn(file, size, colours)
    assert found.errors == []
    assert found.requests == [file.as_uri()]
    charts = found.page.evaluate(DRAWN)
    assert len(charts) == 7 + len(SCHEMES)
    for name, chart in charts.items():
        assert chart["width"] > 100, name
        assert chart["height"] > 100, name
        assert chart["over"] <= 1, name
    filled = sum(scheme.storage is not None for scheme in comparison().schemes)
    for name in ("inserts", "spread", "bulk", "index", "wal", "draws"):
        count = filled if name in ("bulk", "index", "wal") else len(SCHEMES)
        assert charts[name]["rect"] >= count, name
        assert charts[name]["text"] == count, name
    assert charts["growth"]["line"] >= 1
    assert charts["growth"]["text"] >= 3
    for name in SCHEMES:
        assert charts[f"points {name}"]["symbol"] == 480
    scrolled, width = found.page.evaluate(
        "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert scrolled == width == SIZES[size][0]


def test_colours_follow_the_system(drawn: Open, file: Path) -> None:
    found = drawn(file)
    bar = found.page.locator("[data-chart=inserts] .mark-rect.role-mark path").first
    look = "element => [getComputedStyle(element).fill, getComputedStyle(document.body).backgroundColor]"
    light = bar.evaluate(look)
    found.page.emulate_media(color_scheme="dark")
    dark = bar.evaluate(look)
    assert all(colour.startswith("rgb(") for colour in (*light, *dark))
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert found.errors == []


@pytest.mark.parametrize(
    ("chart", "said"),
    [
        ("inserts", ["UUIDv4 (client)", "Rows/s, 1 client", "1,111", "Rows/s, 8 clients", "3,200"]),
        ("index", ["shardids, next_id()", "Leaf pages full, %", "90.1", "Rows in the table", "1,000,000"]),
        ("draws", ["UUIDv4 (client)", "p99, µs", "A key of many at once, µs", "0.360"]),
    ],
)
def test_a_bar_tells_more_when_it_is_pointed_at(drawn: Open, file: Path, chart: str, said: list[str]) -> None:
    found = drawn(file)
    found.page.locator(f"[data-chart={chart}] .mark-text.role-mark text").first.hover()
    tip = found.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    for words in said:
        assert words in tip.inner_text()
    assert "undefined" not in tip.inner_text()
    box = tip.bounding_box()
    assert box is not None
    assert box["height"] < 250


def test_charts_follow_the_width_of_the_window(drawn: Open, file: Path) -> None:
    found = drawn(file)
    found.page.set_viewport_size({"width": 600, "height": 900})
    found.page.wait_for_function(
        "() => [...document.querySelectorAll('.chart')].every((chart) => {"
        " const width = (element) => element.getBoundingClientRect().width;"
        " return Math.abs(width(chart.querySelector('svg')) - width(chart)) < 2; })"
    )
    assert found.errors == []


def test_the_raw_data_can_be_downloaded_and_shown(drawn: Open, file: Path) -> None:
    found = drawn(file)
    with found.page.expect_download() as download:
        found.page.locator("#download").click()
    kept = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert len(kept["schemes"]) == len(SCHEMES)
    found.page.locator("#raw summary").click()
    found.page.wait_for_function("() => document.querySelector('#raw pre').textContent.length > 1000")
    assert json.loads(found.page.locator("#raw pre").inner_text()) == kept


def test_strings_from_outside_stay_strings(drawn: Open, tmp_path: Path) -> None:
    sample = comparison(quick=True)
    (first, *others) = sample.schemes
    hostile = replace(
        first,
        about=replace(first.about, title=HOSTILE, settings=HOSTILE),
        duplicates={name: replace(case, refusal=HOSTILE) for name, case in first.duplicates.items()},
    )
    file = tmp_path / "hostile.html"
    file.write_text(html(replace(sample, schemes=[hostile, *others])), "utf-8")
    found = drawn(file)
    bar = "[data-chart=index] .mark-rect.role-mark path"
    for at in range(3):  # the tooltip's words come from the data too
        found.page.locator(bar).nth(at).hover()
    assert found.page.locator(".hostile").count() == 0
    assert found.page.evaluate("() => window.hostile") is None
    assert found.errors == []
    assert found.requests == [file.as_uri()]
