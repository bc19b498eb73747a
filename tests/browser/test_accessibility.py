"""The console's page for everybody: contrast, landmarks, names and order, as axe-core judges them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.axe import violations
from tests.support.browsers import opened
from tests.support.console_pages import Open, console, make_users, pages
from tests.support.consoles import process
from tests.support.moves import TwoNodes


@pytest.fixture(scope="module")
def url(nodes: TwoNodes) -> Iterator[str]:
    with console(nodes) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    with pages(browser) as open_page:
        yield open_page


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", ["desk", "phone"])
def test_no_section_has_a_serious_or_moderate_fault(
    nodes: TwoNodes, url: str, open_page: Open, size: str, colours: str
) -> None:
    ids = make_users(nodes, 3, 40)
    with nodes.connected("a") as connection:
        connection.execute("select shardids.fence(21)")
    try:
        page = open_page(url, size=size, colours=colours).page
        expect(page.locator(".findings > li").first).to_be_visible(timeout=20_000)
        assert violations(page) == []
        for section in ("rates", "map", "map/3", "ids", "moves"):
            page.goto(f"{url}/#{section}")
            if section == "rates":
                expect(page.locator(".uplot").first).to_be_visible(timeout=20_000)
            if section == "map/3":
                expect(page.locator(".drawer .field.time")).to_be_visible()
            if section == "ids":
                page.locator("#ids").fill(" ".join(map(str, ids)) + " 12x")
                expect(page.get_by_role("heading", name="When they were born")).to_be_visible()
            assert violations(page) == [], section
        page.goto(f"{url}/#map")
        page.get_by_role("button", name="Table", exact=True).click()
        expect(page.locator("table.shards tbody tr").first).to_be_visible()
        assert violations(page) == []
    finally:
        with nodes.connected("a") as connection:
            connection.execute("select shardids.activate(21)")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_login_has_none(nodes: TwoNodes, browser: Browser, tmp_path: Path, colours: str) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-tests")
    with (
        process(nodes.catalog_url, "--token-file", str(file)) as (_, url),
        opened(browser, f"{url}/login", colours=colours) as found,
    ):
        expect(found.page.locator("form")).to_be_visible()
        assert violations(found.page) == []


def test_a_dead_node_is_no_fault_of_the_page(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url).page
    nodes.servers["b"].stop()
    try:
        expect(page.locator(".steps").first).to_be_visible(timeout=20_000)
        assert violations(page) == []
    finally:
        nodes.servers["b"].start(attached=True)
