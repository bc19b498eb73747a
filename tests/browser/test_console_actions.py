"""What the console's page changes where it may, behind a confirmation, and moves seen as they run."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread

import pytest
from playwright.sync_api import Browser, Page, expect

from shardids import mover
from shardids.catalog.region_changes import create_region, drop_region
from shardids.catalog.regions import Region
from tests.support.console_pages import Open, console, make_users, pages
from tests.support.moves import TwoNodes, schema


@pytest.fixture(scope="module")
def url(nodes: TwoNodes) -> Iterator[str]:
    with console(nodes, "--allow-actions") as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    with pages(browser) as open_page:
        yield open_page


def confirm(page: Page, action: str, button: str, typed: str) -> None:
    """Goes through the dialog of an action, after looking that nothing less than the typed word will do."""
    page.get_by_role("button", name=action).click()
    dialog = page.get_by_role("dialog")
    if dialog.get_by_role("button", name="Show the plan").is_enabled():
        dialog.get_by_role("button", name="Show the plan").click()
    expect(dialog.locator(".plan")).not_to_be_empty(timeout=20_000)
    begin = dialog.get_by_role("button", name=button)
    expect(begin).to_be_disabled()
    dialog.get_by_role("textbox").fill(f"{typed}1")
    expect(begin).to_be_disabled()
    dialog.get_by_role("textbox").fill(typed)
    begin.click()
    expect(dialog).to_be_hidden()


def state(nodes: TwoNodes, shard: int) -> str:
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        ((state,),) = connection.execute("select state from shardids.shard where id = %s", [shard]).fetchall()
        return str(state)


def test_without_the_option_there_is_nothing_to_press(nodes: TwoNodes, open_page: Open) -> None:
    with console(nodes) as url:
        page = open_page(url, "map/2").page
        expect(page.locator(".drawer .field.time, .drawer .empty").first).to_be_visible()
        expect(page.locator("#context")).to_contain_text("read-only")
        for words in ("Move …", "Fence …", "Rebalance …"):
            expect(page.get_by_role("button", name=words)).to_have_count(0)
        page.goto("about:blank")


def test_a_shard_is_fenced_and_activated(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url, "map/2").page
    expect(page.locator("#context")).to_contain_text("actions allowed")
    page.get_by_role("button", name="Fence …").click()
    expect(page.get_by_role("dialog").locator(".plan")).to_contain_text('Fence shard 2 on node "a"')
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert state(nodes, 2) == "active"
    confirm(page, "Fence …", "Fence it", "2")
    expect(page.get_by_role("button", name="Activate …")).to_be_visible()
    expect(page.locator(".drawer .facts")).to_contain_text("fenced")
    assert state(nodes, 2) == "fenced"
    confirm(page, "Activate …", "Activate it", "2")
    expect(page.get_by_role("button", name="Fence …")).to_be_visible()
    assert state(nodes, 2) == "active"


def test_a_shard_is_moved_from_the_page(nodes: TwoNodes, url: str, open_page: Open) -> None:
    make_users(nodes, 4, 100)
    page = open_page(url, "map/4").page
    confirm(page, "Move …", "Move it", "4")
    expect(page.locator("#tabs [aria-current=page]")).to_have_attribute("href", "#moves")
    job = page.locator(
        "section", has=page.get_by_role("heading", name='Move shard 4 from node "a" to node "b"')
    )
    expect(job.last).to_contain_text("done", timeout=40_000)
    over = page.get_by_role("group", name="Moves that are over")
    expect(over.locator("tr").filter(has_text="moved").first).to_contain_text("4")
    assert nodes.catalog.node_of(4).name == "b"
    page.goto(f"{url}/#map/4")
    expect(page.locator(".drawer .facts")).to_contain_text("b")
    expect(page.locator(".drawer")).to_contain_text("moved")


def test_a_move_is_seen_as_it_runs(nodes: TwoNodes, url: str, open_page: Open) -> None:
    make_users(nodes, 7, 100)
    page = open_page(url, "moves").page
    go_on, failures = Event(), []

    def hold(event: mover.Event) -> None:
        if isinstance(event, mover.StepBegun) and event.step in ("indexes", "catch up"):
            assert go_on.wait(60)
            go_on.clear()

    def run() -> None:
        try:
            mover.move(nodes.catalog, 7, "b", on_event=hold)
        except BaseException as failure:  # noqa: BLE001 -- raised again below
            failures.append(failure)

    thread = Thread(target=run)
    thread.start()
    moving = page.locator(".moving li").filter(has_text="Shard 7")
    expect(moving).to_contain_text("a → b", timeout=30_000)
    expect(moving).to_contain_text("indexes", timeout=30_000)
    expect(page.locator("#tabs a").filter(has_text="Moves")).to_contain_text("1 not over")
    go_on.set()
    expect(moving).to_contain_text("catch up", timeout=30_000)
    go_on.set()
    thread.join(60)
    assert failures == []
    expect(moving).to_have_count(0, timeout=30_000)
    over = page.get_by_role("group", name="Moves that are over").locator("tbody tr")
    expect(over.filter(has=page.get_by_role("link", name="7", exact=True))).to_contain_text("moved")


def test_a_shard_comes_back_over_its_old_copy(nodes: TwoNodes, url: str, open_page: Open) -> None:
    mover.move(nodes.catalog, 9, "b")
    found = open_page(url, "map/9")
    page = found.page
    expect(page.locator(".drawer .facts")).to_contain_text("Nodeb", timeout=20_000)
    page.get_by_role("button", name="Move …").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Show the plan").click()
    expect(dialog.get_by_role("alert")).to_contain_text("still has the copy", timeout=20_000)
    found.errors.clear()  # the browser itself reports the refusal
    dialog.get_by_label("Replace an old copy").check()
    dialog.get_by_role("button", name="Show the plan").click()
    dialog.get_by_role("textbox").fill("9")
    dialog.get_by_role("button", name="Move it").click()
    expect(page.get_by_role("heading", name='Move shard 9 from node "b" to node "a"')).to_be_visible()
    expect(page.locator("section .chip.good").first).to_have_text("done", timeout=40_000)
    assert nodes.catalog.node_of(9).name == "a"


def test_nothing_is_offered_that_a_catalog_that_is_down_would_refuse(
    nodes: TwoNodes, url: str, open_page: Open
) -> None:
    page = open_page(url, "map/40").page
    buttons = page.get_by_role("button", name="…")
    expect(buttons).to_have_count(3)
    nodes.servers["a"].stop()
    try:
        actions = page.locator(".drawer .actions")
        expect(actions).to_contain_text("once the catalog answers", timeout=20_000)
        expect(page.locator(".drawer .facts")).to_contain_text("active")
        expect(page.locator(".head")).to_contain_text("rebalanced once the catalog answers")
        expect(buttons).to_have_count(0)
    finally:
        nodes.servers["a"].start(attached=True)
        nodes.catalog.engine.dispose()  # the server has ended its connections
    expect(buttons).to_have_count(3, timeout=20_000)


def test_a_rebalance_is_planned_first(url: str, open_page: Open) -> None:
    page = open_page(url, "map").page
    page.get_by_role("button", name="Rebalance …").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Even out the nodes by").select_option("rows")
    dialog.get_by_role("button", name="Show the plan").click()
    expect(dialog).to_contain_text("Move shard", timeout=20_000)
    expect(dialog).to_contain_text("To go on, type rebalance")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)


def test_a_rebalance_is_carried_out_from_the_page(nodes: TwoNodes, url: str, open_page: Open) -> None:
    make_users(nodes, 12, 5_000)
    make_users(nodes, 13, 5_000)
    with nodes.connected("a") as connection:
        connection.execute("analyze")
    planned = mover.plan_balance(nodes.catalog, mover.By.ROWS).transfers
    assert planned
    page = open_page(url, "map").page
    page.get_by_role("button", name="Rebalance …").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Even out the nodes by").select_option("rows")
    dialog.get_by_role("button", name="Show the plan").click()
    dialog.get_by_role("textbox").fill("rebalance")
    dialog.get_by_role("button", name="Rebalance", exact=True).click()
    expect(page.locator("#tabs [aria-current=page]")).to_have_attribute("href", "#moves")
    job = page.locator("section", has=page.get_by_role("heading", name="Rebalance by rows"))
    expect(job.last).to_contain_text("done", timeout=90_000)
    for one in planned:
        assert nodes.catalog.node_of(one.shard).name == one.target
        expect(job.last).to_contain_text(f'shard {one.shard}: moved to node "{one.target}"')


def test_a_refused_action_says_why(nodes: TwoNodes, url: str, open_page: Open) -> None:
    found = open_page(url, "map/60")
    page = found.page
    page.get_by_role("button", name="Move …").click()
    nodes.servers["b"].stop()
    try:
        page.get_by_role("button", name="Show the plan").click()
        expect(page.get_by_role("alert")).to_contain_text("b", timeout=30_000)
        expect(page.get_by_role("dialog").get_by_role("button", name="Move it")).to_be_hidden()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".drawer .facts")).to_contain_text("unknown", timeout=20_000)
        expect(page.locator(".drawer .actions button")).to_have_count(0)
    finally:
        nodes.servers["b"].start(attached=True)
    expect(page.locator(".drawer .actions button").first).to_be_visible(timeout=20_000)
    found.errors.clear()  # the browser itself reports the refusal


def test_a_move_is_offered_to_nodes_that_may_hold_the_shard(
    nodes: TwoNodes, url: str, open_page: Open
) -> None:
    page = open_page(url, "map/3").page
    page.get_by_role("button", name="Move …").click()
    expect(page.get_by_label("To node").locator("option")).to_have_text(["b"])
    page.get_by_role("button", name="Cancel").click()
    create_region(nodes.catalog, Region(name="eu", first_shard=0, last_shard=31), ["a"])
    try:
        expect(page.locator(".drawer .facts")).to_contain_text("Regioneu")
        page.get_by_role("button", name="Move …").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("There is no other node that may hold the shard.")
        expect(dialog.get_by_role("button", name="Show the plan")).to_be_disabled()
    finally:
        drop_region(nodes.catalog, "eu")


def test_a_broken_shard_is_told_as_one(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url, "map/50").page
    expect(page.get_by_role("button", name="Fence …")).to_be_visible()
    with nodes.connected("b") as connection:
        connection.execute(f"drop schema {schema(50)} cascade")
    drawer = page.locator(".drawer")
    expect(drawer).to_contain_text("The shard is broken", timeout=20_000)
    expect(drawer.locator(".command")).to_contain_text("shardids doctor")
    expect(drawer).to_contain_text("None was found.")
    expect(drawer).not_to_contain_text("They come with")
    expect(drawer.locator(".actions button")).to_have_count(0)
