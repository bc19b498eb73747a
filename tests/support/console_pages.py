"""The console's page in a browser, and what there is to see on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from playwright.sync_api import Browser, expect

from tests.support.browsers import Opened, opened
from tests.support.consoles import process
from tests.support.moves import TwoNodes, schema

Open = Callable[..., Opened]


@contextmanager
def console(nodes: TwoNodes, *options: str) -> Iterator[str]:
    """The address of a console that reads every second."""
    with process(nodes.catalog_url, "--interval", "1", *options) as (_, url):
        yield url


@contextmanager
def pages(browser: Browser) -> Iterator[Open]:
    """Opens pages of consoles.

    In the end none may have reported an error, such as a breach of the content security policy, asked
    another origin, or made markup of data.
    """
    with ExitStack() as stack:
        all_pages: list[tuple[Opened, str]] = []

        def open_page(url: str, section: str = "health", **how: str) -> Opened:
            found = stack.enter_context(opened(browser, f"{url}/#{section}", **how))
            all_pages.append((found, url))
            expect(found.page.locator("main .view > :not(.waiting)").first).to_be_attached()
            expect(found.page.locator("#status")).to_contain_text("live")
            return found

        yield open_page
        for found, url in all_pages:
            assert found.errors == []
            assert [asked for asked in found.requests if not asked.startswith(f"{url}/")] == []
            assert found.page.evaluate("() => window.hostile ?? null") is None
            assert found.page.locator(".hostile").count() == 0


def make_users(nodes: TwoNodes, shard: int, rows: int) -> list[int]:
    """Rows in a shard's table of users, which is made on first use; their IDs."""
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        connection.execute(
            f"""create table if not exists {schema(shard)}.users (
                  id bigint primary key default {schema(shard)}.next_id(), name text)"""
        )
        made = connection.execute(
            f"insert into {schema(shard)}.users (name) select 'x' from generate_series(1, %s) returning id",
            [rows],
        )
        return [id_ for (id_,) in made]
