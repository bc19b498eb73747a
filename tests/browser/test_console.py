"""The console's page in a real browser: what it shows of a cluster of two servers, which it only reads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from shardids.catalog.region_changes import create_region, drop_region
from shardids.catalog.regions import Region
from shardids.ids.layout import DEFAULT
from tests.support.browsers import SIZES, opened
from tests.support.console_pages import Open, console, make_users, pages
from tests.support.consoles import get
from tests.support.moves import TwoNodes, schema
from tests.support.waiting import wait_for

SECTIONS = ["health", "rates", "map", "ids", "moves"]
HOSTILE = "<img src=x onerror=\"window.hostile='yes'\"></script><b class=hostile>"
NAMELESS = """
() => [...document.querySelectorAll("a, button, input, select, textarea, [role=img], [role=region], dialog")]
  .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length
    || one.getAttribute("aria-labelledby"))).map((one) => one.outerHTML)
"""


@pytest.fixture(scope="module")
def url(nodes: TwoNodes) -> Iterator[str]:
    with console(nodes) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    with pages(browser) as open_page:
        yield open_page


def pixel(page: Page, shard: int) -> list[int]:
    """The colour of a shard's cell, read from the canvas beside the number in it."""
    at: list[int] = page.evaluate(
        """(shard) => {
          const canvas = document.querySelector("main canvas");
          const copy = new OffscreenCanvas(canvas.width, canvas.height);
          const pen = copy.getContext("2d", {willReadFrequently: true});
          pen.drawImage(canvas, 0, 0);
          const cell = (canvas.getBoundingClientRect().width - 48) / 16;
          const x = 46 + (shard % 16) * cell + 5, y = Math.floor(shard / 16) * cell + 6;
          return [...pen.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data];
        }""",
        shard,
    )
    return at


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", list(SIZES))
def test_every_section_fits(nodes: TwoNodes, url: str, open_page: Open, size: str, colours: str) -> None:
    ids = make_users(nodes, 3, 40)
    page = open_page(url, size=size, colours=colours).page
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(18, 22, 28)") == (colours == "dark")
    for section in [*SECTIONS, "map/3"]:
        page.goto(f"{url}/#{section}")
        name = section.partition("/")[0]
        expect(page.locator("#tabs [aria-current=page]")).to_have_attribute("href", f"#{name}")
        expect(page.locator(f"main .view.{name} > :not(.waiting)").first).to_be_attached()
        if section == "ids":
            page.locator("#ids").fill(" ".join(map(str, ids)) + " 12x")
            expect(page.get_by_role("heading", name="When they were born")).to_be_visible()
        if section == "map/3":
            expect(page.locator(".drawer .field.time")).to_be_visible()
        scrolled, width = page.evaluate(
            "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert scrolled <= width == SIZES[size][0], section
        assert page.evaluate(NAMELESS) == [], section


def test_keys_lead_everywhere(url: str, open_page: Open) -> None:
    page = open_page(url).page
    for number, section in enumerate(SECTIONS, 1):
        page.keyboard.press(str(number))
        expect(page.locator("#tabs [aria-current=page]")).to_have_attribute("href", f"#{section}")
        if section == "ids":  # digits are typed there, until Escape
            expect(page.locator("#ids")).to_be_focused()
            page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.locator("#find-text")).to_be_focused()
    page.keyboard.type("17")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Shard 17")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".drawer")).to_be_hidden()
    canvas = page.locator(".picture canvas")
    expect(canvas).to_be_focused()
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
    expect(page.get_by_role("tooltip")).to_contain_text("Shard 32")
    expect(page.get_by_role("tooltip")).to_contain_text("b")
    expect(page.locator("#said")).to_contain_text("Shard 32, Node b, State active")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Shard 63")).to_be_visible()
    page.keyboard.press("Tab")
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_what_is_chosen_while_a_section_loads_is_shown(url: str, open_page: Open) -> None:
    page = open_page(url).page
    held: list[Route] = []

    def hold(asked: Route) -> None:
        held.append(asked)

    page.route("**/map.js", hold)
    with page.expect_request("**/map.js"):
        page.evaluate("location.hash = 'map'")
    for section in ("rates", "map", "map/3", "map/17"):
        page.evaluate(f"location.hash = '{section}'")
        page.wait_for_timeout(50)
    for one in held:
        one.continue_()
    expect(page.get_by_role("heading", name="Shard 17")).to_be_visible()
    expect(page.locator(".drawer")).to_have_count(1)


def test_map_shows_all_shards_in_colours_and_as_a_table(nodes: TwoNodes, url: str, open_page: Open) -> None:
    make_users(nodes, 9, 5)
    # A shard's page has its highest ID as of the last reading before it was opened.
    wait_for(lambda: get(url, "/api/shards/9")["highest_id"], "the highest ID of shard 9")
    page = open_page(url, "map").page
    legend = page.locator(".legend")
    expect(legend).to_contain_text("a 32")
    expect(legend).to_contain_text("b 32")
    assert pixel(page, 0) == pixel(page, 31) != pixel(page, 32)
    assert pixel(page, 32) == pixel(page, 63)
    for choice in ("State", "Rate", "Lead", "Size", "Move lag", "Revision"):
        page.get_by_role("button", name=choice, exact=True).click()
        expect(page.get_by_role("button", name=choice, exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="State", exact=True).click()
    expect(legend).to_contain_text("active 64")
    box = page.locator("canvas").bounding_box()
    assert box is not None
    cell = (box["width"] - 48) / 16
    page.mouse.click(box["x"] + 46 + 9.5 * cell, box["y"] + cell / 2)
    expect(page.get_by_role("heading", name="Shard 9")).to_be_visible()
    expect(page.locator(".drawer")).to_contain_text("users")
    expect(page.locator(".drawer")).to_contain_text("It was never moved.")
    expect(page.locator(".drawer")).to_contain_text("It had issued none above this one when it was read, ")
    page.get_by_role("button", name="Table", exact=True).click()
    expect(page.locator("table.shards tbody tr")).to_have_count(64)
    page.get_by_role("searchbox", name="Show shards").fill("30-33")
    expect(page.locator("table.shards tbody tr")).to_have_count(4)
    page.get_by_role("button", name="Node").last.click()
    expect(page.locator("table.shards tbody th").first).to_have_text("30")
    page.get_by_role("button", name="Node").last.click()
    expect(page.locator("table.shards tbody th").first).to_have_text("32")
    page.get_by_role("searchbox", name="Show shards").fill("nowhere")
    expect(page.locator("main")).to_contain_text("No shard is like “nowhere”.")


def test_a_shard_that_is_not_there_is_not_just_left_out(url: str, open_page: Open) -> None:
    page = open_page(url, "map/4095").page
    words = "There is no shard 4095 in this cluster: it has shards 0 to 63."
    expect(page.locator("main")).to_contain_text(words)
    expect(page.locator(".drawer")).to_be_hidden()
    page.goto(f"{url}/#map/63")
    expect(page.get_by_role("heading", name="Shard 63")).to_be_visible()
    expect(page.locator("main")).not_to_contain_text(words)


def test_an_id_is_taken_apart_to_its_last_digit(nodes: TwoNodes, url: str, open_page: Open) -> None:
    (id_,) = make_users(nodes, 5, 1)
    assert id_ > 1 << 53
    decoded = nodes.catalog.describe().layout.decode(id_)
    page = open_page(url, "ids").page
    page.locator("#ids").fill(str(id_))
    one = page.locator(".one")
    expect(one.get_by_role("heading")).to_have_text(str(id_))
    shown = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".one .field")].map((field) => [
          field.classList[1], [".row", ".value"].map((part) => field.querySelector(part).textContent)]))"""
    )
    assert "".join(bits for bits, _ in shown.values()) == f"{id_:064b}"
    assert shown["time"] == [f"{decoded.ms:041b}", str(decoded.ms)]
    assert shown["shard"] == [f"{5:012b}", "5"]
    assert shown["sequence"] == [f"{decoded.sequence:010b}", str(decoded.sequence)]
    expect(one).to_contain_text(
        f"{decoded.time:%Y-%m-%d %H:%M:%S}.{decoded.time.microsecond // 1000:03d} UTC"
    )
    expect(one).to_contain_text("found users")
    with nodes.connected("a") as connection:
        connection.execute(f"delete from {schema(5)}.users where id = %s", [id_])
    page.get_by_role("button", name="Take apart").click()
    expect(one).to_contain_text("in no table")


def test_what_is_ahead_of_now_says_so(nodes: TwoNodes, url: str, open_page: Open) -> None:
    (id_,) = make_users(nodes, 5, 1)
    now = nodes.catalog.describe().layout.decode(id_)
    ahead = DEFAULT.encode(at=now.time + timedelta(hours=10), shard=5)
    page = open_page(url, "ids").page
    page.locator("#ids").fill(str(ahead))
    expect(page.locator(".one")).to_contain_text("in 10 h")
    expect(page.locator(".one")).to_contain_text("from the future, by 10.0 h")
    page.locator("#ids").fill(f"{id_} {id_ + 1} {ahead}")
    times = page.get_by_role("region", name="When they were born")
    expect(times).to_contain_text("Left out: 1 ID from the future.")
    page.locator("#ids").fill(f"{ahead} {ahead + 1}")
    expect(times).to_contain_text("Left out: 2 IDs from the future.")
    ticks = page.evaluate(
        """async () => {
          const { ago } = await import("/format.js");
          return [-36000, -720, -1, 0, 1, 720, null].map(ago);
        }"""
    )
    assert ticks == ["in 10 h", "in 12 min", "just now", "just now", "just now", "12 min ago", "never"]


def test_too_long_a_text_is_refused_at_once_and_leaves_no_answer(
    nodes: TwoNodes, url: str, open_page: Open
) -> None:
    (id_,) = make_users(nodes, 5, 1)
    opened = open_page(url, "ids")
    page = opened.page
    for text in ("\n".join([str(id_)] * 60_000), " ".join([str(id_)] * 1_000_000)):
        for how in ("filled", "pasted"):
            page.locator("#ids").fill(str(id_))
            expect(page.locator(".one").get_by_role("heading")).to_have_text(str(id_))
            opened.requests.clear()
            if how == "filled":
                page.locator("#ids").fill(text)
            else:
                is_taken = page.evaluate(
                    """(data) => document.querySelector("#ids").dispatchEvent(new InputEvent(
                      "beforeinput", { data, inputType: "insertFromPaste", cancelable: true }))""",
                    text,
                )
                assert not is_taken
            expect(page.locator(".ask [role=status]")).to_contain_text("More than 1 MB")
            expect(page.locator(".one")).to_have_count(0)
            expect(page.locator("#ids")).to_have_value("")
            assert not [asked for asked in opened.requests if asked.endswith("/api/inspect")]


def test_notes_and_chips_have_their_room_on_a_phone(nodes: TwoNodes, url: str, open_page: Open) -> None:
    ids = make_users(nodes, 3, 6)
    ahead = DEFAULT.encode(
        at=nodes.catalog.describe().layout.decode(ids[0]).time + timedelta(hours=10), shard=5
    )
    page = open_page(url, "ids", size="phone").page
    page.locator("#ids").fill(" ".join(map(str, [*ids, ahead])))
    rows = page.get_by_role("group", name="IDs", exact=True).locator("tbody tr")
    expect(rows).to_have_count(7)
    page.set_viewport_size({"width": 390, "height": 844})
    heights = [(row.bounding_box() or {"height": 0})["height"] for row in rows.all()]
    assert max(heights) < 180, heights
    assert page.evaluate(
        "() => [...document.querySelectorAll('.tall *')].every((one) => one.scrollWidth <= 366)"
    )
    page.evaluate(
        """async () => {
          const { live } = await import("/live.js");
          location.hash = "health";
          const crowded = { outside_region: 6, shards: { active: 30, fenced: 1, moved: 12 } };
          const value = live.nodes.map((node) => ({ ...node, ...crowded }));
          Object.defineProperty(live, "nodes", { get: () => value, set: () => {} });
        }"""
    )
    chip = page.locator("tr[data-node=a] .chip", has_text="6 outside their region")
    expect(chip).to_be_visible()
    box = chip.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 400
    for cell in page.locator("tr[data-node=a] td:not(:has(.chip))").all():
        other = cell.bounding_box()
        assert other is not None
        apart = other["y"] >= box["y"] + box["height"] - 1 or other["y"] + other["height"] <= box["y"] + 1
        assert apart, (box, other)


def test_many_ids_and_what_is_none(nodes: TwoNodes, url: str, open_page: Open) -> None:
    ids = make_users(nodes, 6, 30) + make_users(nodes, 40, 10)
    page = open_page(url).page
    page.keyboard.press("/")  # the field in the bar takes IDs, too
    page.keyboard.insert_text(" ".join(map(str, ids)) + " 12x 99999999999999999999999")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="40 IDs")).to_be_visible()
    expect(page.get_by_role("group", name="IDs", exact=True).locator("tbody tr")).to_have_count(40)
    expect(page.locator(".bars li").first).to_contain_text("75 %")
    assert page.locator(".histogram rect").count() > 0
    bad = page.get_by_role("group", name="Not IDs")
    expect(bad).to_contain_text("12x")
    expect(bad).to_contain_text("is beyond the 64 bits of an ID")
    page.get_by_role("button", name=str(ids[-1])).click()
    expect(page.locator(".one").get_by_role("heading")).to_have_text(str(ids[-1]))
    expect(page.locator(".one")).to_contain_text("b")
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("main")).to_contain_text("An ID tells when and in which shard its row was born")


def test_rates_are_drawn_as_they_come(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url, "rates").page
    figures = page.get_by_role("group", name="Shards that draw most: figures")
    expect(page.locator(".u-wrap canvas").first).to_be_visible()
    row = figures.locator("tbody tr").filter(has_text="Shard 11")

    def is_shown() -> bool:
        make_users(nodes, 11, 50)
        page.wait_for_timeout(100)  # the page's events are handled only while Playwright waits
        return row.is_visible()

    wait_for(is_shown, "the busiest shard among the rates")
    page.get_by_role("button", name="5 min", exact=True).click()
    expect(page.get_by_role("button", name="5 min", exact=True)).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("group", name="Nodes: figures").locator("tbody tr")).to_have_count(2)


def lively(page: Page) -> Page:
    """A page that has what it knows as ``live`` of its window: what waits takes no promise for an answer."""
    page.evaluate("async () => { window.live = (await import('/live.js')).live; }")
    return page


def test_the_page_keeps_an_hour_of_rates_however_often_they_come(url: str, open_page: Open) -> None:
    page = lively(open_page(url, "rates").page)
    page.wait_for_function(
        """() => {
          // Again after a page that missed a reading has asked for all rates.
          if (live.rates.times.length < 3500) {
            const now = live.cluster.read_at;
            const times = Array.from({ length: 4000 }, (_, at) => now - 3999 + at);
            const old = times.map((_, at) => at < 9 ? 1 : null);
            live.rates = { times, nodes: { a: times.map(() => 1) }, shards: { 5: old } };
          }
          const { times, nodes, shards } = live.rates;
          return times.length < 3610 && times.at(-1) - times[0] <= 3600
            && nodes.a.length === times.length && shards[5].length === times.length
            && shards[5].at(-1) !== null;
        }"""
    )


def test_the_page_asks_again_for_what_it_missed(url: str, open_page: Open) -> None:
    page = lively(open_page(url, "rates").page)
    page.wait_for_function("() => live.rates.times.length > 5")
    page.evaluate("() => { live.rates.times = live.rates.times.map((time) => time - 1000); }")
    page.wait_for_function(
        """() => {
          const { times } = live.rates;
          return times.at(-1) > Date.now() / 1000 - 100 && times.length > 5 && times.at(-1) - times[0] < 900;
        }"""
    )


def test_ages_are_right_when_the_server_s_clock_is_set(url: str, open_page: Open) -> None:
    page = lively(open_page(url, "rates").page)
    for seconds in (600, -600):
        page.evaluate(
            """seconds => {
              const now = performance.now;
              performance.now = () => now.call(performance) + seconds * 1000;
            }""",
            seconds,
        )
        page.wait_for_function("() => Math.abs(live.now() - Date.now() / 1000) < 3")


def test_sizes_are_read_again_when_asked_for(url: str, open_page: Open) -> None:
    page = open_page(url, "map").page
    page.get_by_role("button", name="Size", exact=True).click()
    expect(page.locator("main")).to_contain_text("Sizes and revisions were read")
    with page.expect_response("**/api/map") as asked:
        page.get_by_role("button", name="Read them again").click()
    assert (asked.value.request.method, asked.value.status) == ("POST", 200)


def test_a_node_that_answers_without_its_shards_says_so(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url).page
    row = page.locator("tr[data-node=b]")
    with nodes.connected("b") as connection, connection.transaction(force_rollback=True):
        connection.execute(f"alter sequence {schema(40)}.id_counter cache 1")
        expect(row).to_contain_text("not all read", timeout=20_000)
        expect(row).to_contain_text("up")
        expect(row.locator(".why")).to_contain_text("lock timeout")
        expect(page.locator(".tile").filter(has_text="Shards active")).to_contain_text("32 unknown")
        expect(page.locator("#tabs a").first).to_contain_text("to do")
    expect(row).not_to_contain_text("not all read", timeout=20_000)


def test_findings_say_what_to_do(nodes: TwoNodes, url: str, open_page: Open) -> None:
    with nodes.connected("a") as connection:
        connection.execute("select shardids.fence(20)")
    page = open_page(url).page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Examine all").click()
    finding = page.locator(".findings > li").filter(has_text="fence").first
    expect(finding).to_be_visible(timeout=30_000)
    expect(page.locator(".tile").filter(has_text="Shards active")).to_contain_text("1 fenced")
    expect(page.locator("#tabs a").first).to_contain_text("to do")
    command = finding.locator(".command pre").first.inner_text()
    finding.get_by_role("button", name="Copy").first.click()
    expect(page.locator("#said")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == command
    page.keyboard.press("3")
    page.get_by_role("button", name="State", exact=True).click()
    expect(page.locator(".legend")).to_contain_text("fenced 1")
    with nodes.connected("a") as connection:
        connection.execute("select shardids.activate(20)")
    expect(page.locator(".legend")).not_to_contain_text("fenced")


def test_unusual_rates_are_told_with_their_shard(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url).page
    todo = page.get_by_role("region", name="What to do")
    expect(todo).to_contain_text("no rates yet")
    page.evaluate(
        """async () => {
          const { live } = await import("/live.js");
          const one = { severity: "warning", check: "hot shard", source: "rates", where: "", do: [],
            shards: [5], nodes: ["a"], of_shards: null, start: null, end: null };
          const hot = "<b class='hostile'>90% of all IDs</b>";
          const entries = [{ ...one, says: hot, to_do: "Find the key." },
            { ...one, check: "clock jump", of_shards: 12, start: 1e9, says: "5.0 s behind", to_do: null }];
          const value = { entries, more: 0, checks: 15, checked_at: 1e9, examined_at: null, looked_s: 3540 };
          // The next events would take it away.
          Object.defineProperty(live.cluster, "todo", { get: () => value, set: () => {} });
          live.changed("tick");
        }"""
    )
    expect(todo).to_contain_text("rates of 59 min")
    expect(todo.locator("li").first).to_contain_text("Shard 5 on a")
    expect(todo.locator("li").first).to_contain_text("<b class='hostile'>90% of all IDs</b>")
    expect(todo.locator("li").last).to_contain_text("12 shards of a, most of all Shard 5")
    expect(page.locator("#tabs a").first).to_contain_text("to do")
    expect(page.locator("#status .dot")).to_have_class("dot warn")
    todo.get_by_role("link", name="Shard 5").first.click()
    expect(page.get_by_role("heading", name="Shard 5")).to_be_visible()


def test_names_stay_text(nodes: TwoNodes, url: str, open_page: Open) -> None:
    with nodes.connected("a") as connection:
        table = HOSTILE.replace('"', '""')[:63]
        connection.execute(f'create table {schema(8)}."{table}" (id bigint primary key)')
        connection.execute(
            "insert into shardids_catalog.node (name, url) values (%s, %s)",
            [HOSTILE, "postgresql://nobody@127.0.0.1:1/<b class=hostile>x"],
        )
    try:
        page = open_page(url).page
        row = page.locator("tr[data-node]").filter(has_text="onerror")
        expect(row).to_contain_text("down", timeout=20_000)
        expect(row.locator(".name")).to_have_text(HOSTILE)
        for section, shown in {"rates": "Nodes", "map/8": "<img src=x", "moves": "Migrations"}.items():
            page.goto(f"{url}/#{section}")
            expect(page.locator("main")).to_contain_text(shown)
        page.goto(f"{url}/#ids")
        page.locator("#ids").fill(f"{HOSTILE} 1{HOSTILE}2 7<b")
        page.get_by_role("button", name="Take apart").click()
        expect(page.locator("main .card").nth(1)).to_be_visible()
    finally:
        with nodes.connected("a") as connection:
            connection.execute("delete from shardids_catalog.node where name = %s", [HOSTILE])


def test_regions_are_named_where_their_shards_are(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url, "map/3").page
    expect(page.locator(".drawer .facts")).not_to_contain_text("Region")
    create_region(nodes.catalog, Region(name="eu", first_shard=0, last_shard=31), ["a"])
    try:
        expect(page.locator(".legend")).to_contain_text("Outlined: eu 0–31")  # noqa: RUF001 -- a dash
        expect(page.locator(".drawer .facts")).to_contain_text("Regioneu")
        page.goto(f"{url}/#health")
        expect(page.locator("tr[data-node=a]")).to_contain_text("region eu")
    finally:
        drop_region(nodes.catalog, "eu")


def test_a_dead_node_is_shown_as_one(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url).page
    row = page.locator("tr[data-node=b]")
    expect(row).to_contain_text("up")
    make_users(nodes, 40, 1)
    wait_for(lambda: get(url, "/api/shards/40")["highest_id"], "the highest ID of shard 40")
    nodes.servers["b"].stop()
    try:
        expect(row).to_contain_text("down", timeout=20_000)
        expect(row).to_contain_text("answered")
        expect(row.locator(".why")).not_to_be_empty()
        expect(page.locator("tr[data-node=a]")).to_contain_text("up")
        expect(page.locator(".tile").first).to_contain_text("1 of 2")
        expect(page.locator(".tile").filter(has_text="Shards active")).to_contain_text(
            "32 unknown: b not read"
        )
        expect(page.locator(".tile").filter(has_text="In doubt")).to_contain_text("not known of b")
        page.goto(f"{url}/#map/40")
        expect(page.locator("#alerts")).to_contain_text("1 node down: b")
        expect(page.locator(".drawer")).to_contain_text("Not all could be read")
        expect(page.locator(".legend")).to_contain_text("b is down 32")  # the placement is known all the same
        red = page.evaluate(
            "() => getComputedStyle(document.documentElement).getPropertyValue('--state-bad')"
        )
        assert pixel(page, 40)[:3] == [int(red.strip()[at : at + 2], 16) for at in (1, 3, 5)]
        expect(page.locator("#status .dot")).to_have_class("dot bad")
        drawer = page.locator(".drawer")
        expect(drawer.locator(".facts")).to_contain_text("Stateunknown")
        expect(drawer.locator(".facts")).not_to_contain_text("Lead")
        expect(drawer.locator(".facts")).to_contain_text("Last readactive, ")
        expect(drawer).to_contain_text("Not known: the shard's node can't be read now.")
        expect(drawer).to_contain_text("It had issued none above this one when it was read, ")
    finally:
        nodes.servers["b"].start(attached=True)
    expect(page.locator("#alerts")).not_to_contain_text("down", timeout=20_000)
    expect(page.locator(".drawer")).to_contain_text("users")  # without being opened again


def test_a_dead_catalog_leaves_what_was_known(nodes: TwoNodes, url: str, open_page: Open) -> None:
    page = open_page(url, "moves").page
    expect(page.locator("main")).to_contain_text("No shard has a revision", timeout=20_000)
    page.goto(f"{url}/#map")
    nodes.servers["a"].stop()
    try:
        expect(page.locator("#alerts")).to_contain_text("The catalog does not answer", timeout=20_000)
        expect(page.locator("#alerts")).to_contain_text("Placement and moves are those of")
        expect(page.locator(".legend")).to_contain_text("a is down 32")
        page.goto(f"{url}/#moves")
        page.reload()  # what is known is the console's, not the page's
        expect(page.locator("main")).to_contain_text("no move was open.")
        expect(page.locator("main")).to_contain_text("no shard had been moved yet.")
        expect(page.locator("main")).to_contain_text("When the catalog answered last, ")
        migrations = page.locator("section", has=page.get_by_role("heading", name="Migrations")).last
        expect(migrations).to_contain_text(", no run was under way.")
        expect(migrations).to_contain_text("No shard has a revision")
        page.goto(f"{url}/#health")
        expect(page.locator(".tile").filter(has_text="Moves open")).to_contain_text("none, as of ")
        page.goto(f"{url}/#map/40")
        expect(page.locator(".drawer")).to_contain_text("Not known: the catalog can't be read now.")
    finally:
        nodes.servers["a"].start(attached=True)
    expect(page.locator("#alerts")).to_be_empty(timeout=20_000)
    expect(page.locator(".drawer")).to_contain_text("It was never moved.")


def test_a_lost_connection_is_told_and_comes_back(nodes: TwoNodes, browser: Browser) -> None:
    with console(nodes) as url:
        page_of = opened(browser, f"{url}/#health")
        page = page_of.__enter__().page
        expect(page.locator("#status")).to_contain_text("live")
    try:
        expect(page.locator("#status")).to_contain_text("lost")
        expect(page.locator("#alerts")).to_contain_text("Connection lost")
        expect(page.locator("#alerts")).to_contain_text("What is shown was read")
        expect(page.locator("tr[data-node]")).to_have_count(2)
        with console(nodes, "--listen", url.removeprefix("http://")):
            expect(page.locator("#status")).to_contain_text("live", timeout=20_000)
            expect(page.locator("#alerts")).to_be_empty()
    finally:
        page_of.__exit__(None, None, None)


def test_the_token_is_asked_for(nodes: TwoNodes, browser: Browser, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token that is long enough".replace(" ", "-"))
    with console(nodes, "--token-file", str(token)) as url, opened(browser, f"{url}/") as found:
        page = found.page
        expect(page.get_by_label("Token")).to_be_focused()
        page.get_by_label("Token").fill("another-token-altogether")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("this is not the token")
        found.errors.clear()  # the browser itself reports the refusal
        page.get_by_label("Token").fill(token.read_text())
        page.get_by_role("button", name="Log in").click()
        expect(page.locator("#status")).to_contain_text("live")
        expect(page.locator("tr[data-node]")).to_have_count(2)
        assert found.errors == []
        assert token.read_text() not in page.content()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token")).to_be_visible()
