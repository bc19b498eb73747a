"""The files of the console's page: data in it is never markup, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "shardids/watch/console/static"
OWN = sorted(path for path in STATIC.iterdir() if path.is_file())
MODULES = [path for path in OWN if path.suffix == ".js"]
UPLOT = "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba"
"""uPlot as npm has it: dist/uPlot.esm.js."""
UPLOT_VERSION = "1.6.32"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_data_becomes_text(module: Path) -> None:
    source = module.read_text("utf-8")
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser", source) == []
    assert re.findall(r"createContextualFragment|\beval\(|new Function", source) == []
    assert re.findall(r"""setAttribute\(["']style|style:\s*["'`]""", source) == []  # the policy forbids it


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_ids_are_never_numbers(module: Path) -> None:
    assert re.findall(r"(?:Number|parseInt|parseFloat)\([^()]*\bid\b", module.read_text("utf-8")) == []


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_is_fetched_from_elsewhere(path: Path) -> None:
    source = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|url\((?!#)|@import", source) == []


@pytest.mark.parametrize("page", ["index.html", "login.html"])
def test_pages_hold_no_script_and_no_style_and_name_files_that_are_there(page: str) -> None:
    source = (STATIC / page).read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son[a-z]+=", source) == []
    named = re.findall(r'(?:src|href)="([^"#]+)"', source)
    assert [name for name in named if not (STATIC / name).is_file()] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_modules_are_small_and_import_what_is_there(module: Path) -> None:
    source = module.read_text("utf-8")
    assert source.startswith("// ")
    assert source.count("\n") < 350
    for name in re.findall(r"""(?:from|import\()\s*["'](\./[^"']+)["']""", source):
        assert (STATIC / name).is_file(), name


def test_what_is_not_ours_is_of_the_version_that_is_recorded() -> None:
    assert [one.name for one in (STATIC / "vendor").iterdir()] == ["uplot"]
    assert f"uPlot (v{UPLOT_VERSION})" in (STATIC / "vendor/uplot/uPlot.esm.js").read_text("utf-8")
    assert sha256((STATIC / "vendor/uplot/uPlot.esm.js").read_bytes()).hexdigest() == UPLOT
    assert "MIT License" in (STATIC / "vendor/uplot/LICENSE").read_text("utf-8")
