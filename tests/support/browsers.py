"""Real Chromium for the tests of pages: what a page says on its console, and what it asks of whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
SIZES = {"desk": (1280, 900), "phone": (400, 844)}


@dataclass
class Opened:
    """A page, with the errors and warnings of its console and the addresses that it asked."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; if it is not installed, the test fails."""
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, size: str = "desk", colours: str = "light") -> Iterator[Opened]:
    """A page in a context of its own, closed afterwards."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if colours == "dark" else "light",
        is_mobile=size == "phone",
        has_touch=size == "phone",
        reduced_motion="reduce",
    )
    found = Opened(context.new_page())
    found.page.on(
        "console", lambda said: found.errors.append(said.text) if said.type in {"error", "warning"} else None
    )
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto(url)
    try:
        yield found
    finally:
        context.close()
