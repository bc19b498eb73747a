"""A published function whose IDs a shard issues from then on, while clients draw and insert."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from shardids import mover
from shardids.adopt.inplace import functions
from shardids.adopt.inplace.functions import Replaced, replace_function, restore_function
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.catalog.shards import ISSUES_IDS
from shardids.catalog.skipped import Skipped, bring, record_skipped, skipped_ranges
from shardids.errors import AdoptionRefused, BadArgument, ClusterConflict, StatementFailed
from shardids.ids.layout import INSTAGRAM
from shardids.migrate.install import provision
from shardids.mover import homes
from shardids.mover.clocks.resetting import reset_clock
from shardids.pg.sqlfiles import read_sql
from shardids.replication.steps import Event, Waiting
from shardids.watch import doctor
from tests.conftest import dsn, found_cluster
from tests.support.clusters import connected, everything
from tests.support.waiting import wait_for

TABLES = """
    create table insta5.photos (id bigint primary key default insta5.next_id(), caption text);
    create table insta5."Likes" ("Id" bigint primary key default insta5.next_id(), photo bigint);
"""


@pytest.fixture
def published(blank_database: Callable[[], URL]) -> Iterator[tuple[URL, Catalog]]:
    """A database with the published function in schema insta5, and a cluster of its layout with shard 5."""
    url = blank_database()
    with connected(url) as connection:
        connection.execute(
            "select set_config('shardids.shard', '5', false), set_config('shardids.schema', 'insta5', false)"
        )
        connection.execute(read_sql("compare/published.v1").encode())
        connection.execute(TABLES.encode())
        connection.execute("insert into insta5.photos (caption) select 'dunes' from generate_series(1, 3000)")
    found_cluster(url, {"main": url}, 8, INSTAGRAM)
    catalog = Catalog(url)
    yield url, catalog
    catalog.close()


def scalar(url: URL, query: str) -> Any:
    with connected(url) as connection:
        row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return row[0]


class Writers:
    """Clients that insert by default, and that draw first and insert later; all IDs that they got."""

    def __init__(self, url: URL, count: int = 8) -> None:
        self.url, self.ids, self.errors = url, list[int](), list[BaseException]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(count)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        wait_for(lambda: len(self.ids) > 200 or self.errors, "writers write")
        return self

    def __exit__(self, *_: object) -> None:
        before = len(self.ids)
        wait_for(lambda: len(self.ids) > before + 200 or self.errors, "writers still write")
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def _write(self, number: int) -> None:
        ways = (
            "insert into insta5.photos (caption) values ('x') returning id",
            """insert into insta5."Likes" (photo) select 1 from generate_series(1, 5) returning "Id" """,
            "select insta5.next_id()",
        )
        try:
            with psycopg.connect(dsn(self.url)) as connection:
                while not self._stop.is_set():
                    # The IDs of a transaction that has drawn stay open until its COMMIT.
                    for way in (number, number + 1):
                        found = connection.execute(ways[way % 3].encode(), prepare=True).fetchall()
                        self.ids += [row[0] for row in found]
                    connection.commit()
        except Exception as error:  # noqa: BLE001 # told by the main thread
            self.errors.append(error)


def assert_taken_over(done: Replaced, ids: list[int]) -> None:
    assert len(ids) == len(set(ids))
    # Of the old function's IDs none is as high as the shard's first; each is one or the other.
    new = [id_ for id_ in ids if id_ >= done.first_id]
    assert len(new) > 100
    assert all(INSTAGRAM.shard_of(id_) == 5 for id_ in ids)


def test_no_id_comes_again_while_writers_draw(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    with Writers(url) as writers:
        dry = replace_function(catalog, "insta5.next_id", 5, dry_run=True)
        assert scalar(url, "select prosrc ~ 'our_epoch' from pg_proc where oid = 'insta5.next_id'::regproc")
        done = replace_function(catalog, "insta5.next_id", 5)
    assert done.is_new
    assert done.columns == dry.columns == ('insta5."Likes"."Id"', "insta5.photos.id")
    assert done.highest_id is not None
    assert_taken_over(done, writers.ids)
    assert scalar(url, "select count(distinct id) = count(*) from insta5.photos")
    # Once more is no change.
    before = everything(url)
    assert not replace_function(catalog, "insta5.next_id", 5).is_new
    assert everything(url) == before


def test_an_open_transaction_that_has_drawn_is_waited_for(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    waits: list[str] = []
    with psycopg.connect(dsn(url)) as holder:
        drawn = holder.execute("insert into insta5.photos (caption) values ('late') returning id").fetchone()
        assert drawn is not None
        pid = holder.info.backend_pid

        def release(event: Event) -> None:
            assert isinstance(event, Waiting)
            waits.append(event.reason)
            holder.commit()

        done = replace_function(catalog, "insta5.next_id", 5, on_event=release)
    assert f"process {pid}" in waits[0]
    assert drawn[0] < done.first_id
    assert scalar(url, "select insta5.next_id()") >= done.first_id


def test_ids_ahead_of_the_clock_stay_below(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    ahead = scalar(url, "select shardids.max_id(clock_timestamp() + interval '30 minutes')")
    with connected(url) as connection:
        connection.execute("insert into insta5.photos values (%s)", [ahead])
    done = replace_function(catalog, "insta5.next_id", 5)
    assert done.highest_id == ahead
    assert scalar(url, "select insta5.next_id()") >= done.first_id > ahead


def test_the_functions_own_form_is_kept(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    with connected(url) as connection:
        connection.execute("alter function insta5.next_id_tidied() set work_mem = '8MB'")
        connection.execute("alter table insta5.photos alter id set default insta5.next_id_tidied()")
    replace_function(catalog, "insta5.next_id_tidied", 5)
    assert (
        scalar(url, "select proconfig::text from pg_proc where proname = 'next_id_tidied'")
        == "{work_mem=8MB}"
    )
    assert scalar(url, "insert into insta5.photos default values returning shardids.shard_of(id)") == 5


@pytest.mark.parametrize(
    ("function", "shard", "change", "says"),
    [
        ("insta5.next_id", 3, "", "one of shard 5"),
        ("insta5.next_id_tidied", 5, "", "no column has it as its default"),
        (
            "insta5.seven",
            5,
            "create function insta5.seven() returns bigint language sql as 'select 7'",
            "not a volatile PL",
        ),
        (
            "insta5.seven",
            5,
            "create function insta5.seven() returns bigint language plpgsql as 'begin return 7; end';"
            "create table insta5.t (id bigint default insta5.seven())",
            "draws from 0 sequences",
        ),
        ("insta5.next_id", 5, "select shard_0005.next_id()", "has issued IDs already"),
        (
            "insta5.next_id",
            5,
            """do $$ begin execute replace(pg_get_functiondef('insta5.next_id'::regproc),
                 'clock_timestamp()', 'clock_timestamp() + interval ''30 s'''); end $$""",
            "at most 5 s ahead of the clock",
        ),
    ],
)
def test_other_functions_are_refused(
    published: tuple[URL, Catalog], function: str, shard: int, change: str, says: str
) -> None:
    url, catalog = published
    with connected(url) as connection:
        if change:
            connection.execute(change.encode())
    definition = f"select pg_get_functiondef('{function}'::regproc)"
    before = scalar(url, definition)
    with pytest.raises(AdoptionRefused, match=says):
        replace_function(catalog, function, shard)
    assert scalar(url, definition) == before


def test_names_that_are_none_are_refused(published: tuple[URL, Catalog]) -> None:
    _, catalog = published
    for name in ("next_id", "insta5.none"):
        with pytest.raises(BadArgument):
            replace_function(catalog, name, 5)


def test_who_may_draw_must_be_granted_the_shard(
    published: tuple[URL, Catalog], make_role: Callable[..., URL]
) -> None:
    url, catalog = published
    role = str(make_role().username)
    with ExitStack() as stack:
        connection = stack.enter_context(connected(url))
        name = sql.Identifier(role)
        stack.callback(lambda: connection.execute(sql.SQL("drop owned by {}").format(name)))
        connection.execute(sql.SQL("grant usage on sequence insta5.table_id_seq to {}").format(name))
        with pytest.raises(AdoptionRefused, match=role):
            replace_function(catalog, "insta5.next_id", 5)
        provision.grant(catalog, role, [5])
        assert replace_function(catalog, "insta5.next_id", 5).is_new


DEFINITION = "select pg_get_functiondef('insta5.next_id'::regproc)"


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that takes over starts near the clock, so that the way back has little to wait for."""
    monkeypatch.setattr(functions, "LEAD_S", 2)


def pass_over_later_ticks(catalog: Catalog, url: URL) -> None:
    """Let shard 5 have a range to pass over, as a reset of its clock leaves one."""
    month = 30 * 86_400_000
    now = scalar(url, "select shardids.ms_of(clock_timestamp())")
    bits = INSTAGRAM.sequence_bits
    skipped = Skipped(shard=5, first_tick=(now + month) << bits, last_tick=(now + 2 * month) << bits)
    with catalog.engine.begin() as connection:
        record_skipped(connection, skipped)
    with Nodes(catalog.nodes(), catalog.url) as nodes, nodes["main"].begin() as connection:
        bring(connection, skipped_ranges(catalog, [5]))


@pytest.mark.usefixtures("near")
def test_the_way_back_restores_the_body_and_no_id_comes_again(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    before = scalar(url, DEFINITION)
    with Writers(url, count=2) as old:
        pass
    replace_function(catalog, "insta5.next_id", 5)
    assert scalar(url, DEFINITION) != before
    with Writers(url, count=2) as new:
        pass
    dry = restore_function(catalog, "insta5.next_id", 5, dry_run=True)
    assert scalar(url, DEFINITION) != before
    waits: list[Event] = []
    done = restore_function(catalog, "insta5.next_id", 5, on_event=waits.append)
    mark = f"\n-- {ISSUES_IDS}5\n"
    assert scalar(url, DEFINITION).replace(mark, "") == before
    assert done.last_id >= dry.last_id >= max(new.ids)
    with Writers(url, count=2) as again:
        pass
    assert min(again.ids) > done.last_id
    ids = [*old.ids, *new.ids, *again.ids]
    assert len(ids) == len(set(ids))
    assert scalar(url, "select state from shardids.shard where id = 5") == "fenced"
    with pytest.raises(ClusterConflict, match="not active"):
        restore_function(catalog, "insta5.next_id", 5)
    with pytest.raises(ClusterConflict, match=r"insta5\.next_id\(\) .* issues its IDs"):
        mover.activate(catalog, 5)
    pass_over_later_ticks(catalog, url)
    for dry_run in (True, False):
        with pytest.raises(ClusterConflict, match=r"insta5\.next_id\(\) .* issues its IDs"):
            reset_clock(catalog, 5, dry_run=dry_run)
    with (
        Nodes(catalog.nodes(), catalog.url) as nodes,
        nodes["main"].connect() as home,
        pytest.raises(ClusterConflict, match=r"insta5\.next_id\(\) .* issues its IDs"),
    ):
        homes._activate(home, 5, "main", done.last_id, may_be_empty=False)
    assert scalar(url, "select state from shardids.shard where id = 5") == "fenced"
    (found,) = [one for one in doctor.examine(catalog, ["shard-stopped"]).findings if 5 in one.shards]
    assert (str(found.severity), found.shards) == ("info", (5,))
    assert "where insta5.next_id() issues its IDs" in found.what
    assert [one.text for one in found.commands] == ["shardids key function insta5.next_id --shard 5"]


@pytest.mark.usefixtures("near")
def test_a_function_that_was_restored_draws_from_the_shard_again(published: tuple[URL, Catalog]) -> None:
    """By the command that the doctor and a refused activation print."""
    url, catalog = published
    before = scalar(url, DEFINITION)
    replace_function(catalog, "insta5.next_id", 5)
    with Writers(url, count=2) as new:
        pass
    restore_function(catalog, "insta5.next_id", 5)
    with Writers(url, count=2) as old:
        pass
    dry = replace_function(catalog, "insta5.next_id", 5, dry_run=True)
    assert scalar(url, "select state from shardids.shard where id = 5") == "fenced"
    done = replace_function(catalog, "insta5.next_id", 5)
    assert (done.is_new, done.first_id >= dry.first_id > max(old.ids)) == (True, True)
    with Writers(url, count=2) as again:
        pass
    assert min(again.ids) >= done.first_id
    ids = [*new.ids, *old.ids, *again.ids]
    assert len(ids) == len(set(ids))
    assert scalar(url, "select state from shardids.shard where id = 5") == "active"
    assert [one for one in doctor.examine(catalog, ["shard-stopped"]).findings if 5 in one.shards] == []
    restore_function(catalog, "insta5.next_id", 5)
    assert scalar(url, DEFINITION).replace(f"\n-- {ISSUES_IDS}5\n", "") == before


def test_another_role_can_not_pretend_that_its_function_issues_ids(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    with connected(url) as connection:
        connection.execute("create schema odd")
        connection.execute(
            "create function odd.f() returns int language plpgsql as"
            f" 'begin return 1; end\n-- {ISSUES_IDS}5\n'"
        )
        connection.execute("select shardids.fence(5)")
    (found,) = [one for one in doctor.examine(catalog, ["shard-stopped"]).findings if 5 in one.shards]
    assert str(found.severity) == "error"
    mover.activate(catalog, 5)
    with connected(url) as connection:
        connection.execute("drop schema odd cascade")


@pytest.mark.usefixtures("near")
def test_draws_during_the_way_back_are_never_doubled(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    replace_function(catalog, "insta5.next_id", 5)
    ids, fenced, stop = list[int](), list[str | None](), threading.Event()

    def draw() -> None:
        with psycopg.connect(dsn(url), autocommit=True) as connection:
            while not stop.is_set():
                try:
                    row = connection.execute("select insta5.next_id()", prepare=True).fetchone()
                    assert row is not None
                    ids.append(row[0])
                except psycopg.Error as error:
                    fenced.append(error.sqlstate)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        done = restore_function(catalog, "insta5.next_id", 5)
        after = len(ids)
        wait_for(lambda: len(ids) > after + 500, "the function draws")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(ids) == len(set(ids))
    assert {*fenced} <= {"SI002"}
    assert sum(id_ > done.last_id for id_ in ids) > 400


@pytest.mark.usefixtures("near")
def test_a_way_back_that_fails_leaves_the_shard_drawing(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    with pytest.raises(AdoptionRefused, match="does not draw from shard 5"):
        restore_function(catalog, "insta5.next_id", 5)
    replace_function(catalog, "insta5.next_id", 5)
    with connected(url) as connection:
        connection.execute("create table insta5.own (id bigint default shard_0005.next_id())")
        with pytest.raises(AdoptionRefused, match=r"insta5\.own\.id would have no IDs"):
            restore_function(catalog, "insta5.next_id", 5)
        connection.execute("drop table insta5.own")
        connection.execute("""
            create function refuse_it() returns event_trigger language plpgsql
              as 'begin raise exception ''not today''; end';
            create event trigger refuse_it on ddl_command_start when tag in ('CREATE FUNCTION')
              execute function refuse_it()""")
        replaced = scalar(url, DEFINITION)
        with pytest.raises(StatementFailed, match="not today"):
            restore_function(catalog, "insta5.next_id", 5)
        connection.execute("drop event trigger refuse_it; drop function refuse_it")
    assert scalar(url, DEFINITION) == replaced
    assert scalar(url, "select state from shardids.shard where id = 5") == "active"
    assert INSTAGRAM.shard_of(scalar(url, "select insta5.next_id()")) == 5
    restore_function(catalog, "insta5.next_id", 5)


def test_a_shard_far_ahead_of_the_clock_is_waited_for_by_the_operator(published: tuple[URL, Catalog]) -> None:
    url, catalog = published
    ahead = scalar(url, "select shardids.max_id(clock_timestamp() + interval '30 minutes')")
    with connected(url) as connection:
        connection.execute("insert into insta5.photos values (%s)", [ahead])
    replace_function(catalog, "insta5.next_id", 5)
    with pytest.raises(AdoptionRefused, match="s ahead of the clock"):
        restore_function(catalog, "insta5.next_id", 5)
    assert scalar(url, "select insta5.next_id()") > ahead
