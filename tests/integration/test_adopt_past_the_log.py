"""Changes at the source that replication does not bring: they stop the switch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardids.adopt import adoption
from shardids.errors import AdoptionFailed
from tests.support.adoptions import Shop, assert_as_before, assert_in_shards, begin_anew


@pytest.fixture
def following(shop: Shop) -> Iterator[Shop]:
    adoption.run(shop.catalog, shop.plan)
    yield shop
    adoption.abort(shop.catalog)
    assert_as_before(shop)


def test_a_table_that_another_has_replaced_stops_the_switch(following: Shop) -> None:
    with following.connected("source") as source:
        source.execute("""
            create table countries_new (like countries including all);
            insert into countries_new select * from countries;
            alter table countries rename to countries_old;
            alter table countries_new rename to countries;
            insert into countries values ('it', 'Italia')""")
        with pytest.raises(AdoptionFailed, match=r"public\.countries was changed at the source"):
            adoption.switch(following.catalog)
        source.execute("drop table countries; alter table countries_old rename to countries")


def test_a_partition_that_another_has_replaced_stops_the_switch(following: Shop) -> None:
    with following.connected("source") as source:
        source.execute("""
            create table lines_new (like lines_low including all);
            alter table lines detach partition lines_low;
            alter table lines_low rename to lines_old;
            alter table lines_new rename to lines_low;
            alter table lines_low replica identity full;
            alter table lines attach partition lines_low for values from (minvalue) to (300)""")
        with pytest.raises(AdoptionFailed, match=r"public\.lines was changed at the source"):
            adoption.switch(following.catalog)
        source.execute("""
            alter table lines detach partition lines_low; drop table lines_low;
            alter table lines_old rename to lines_low;
            alter table lines attach partition lines_low for values from (minvalue) to (300)""")


def test_a_table_that_is_no_longer_published_stops_the_switch(following: Shop) -> None:
    with following.connected("source") as source:
        (name,) = source.execute("select pubname from pg_publication").fetchone()
        source.execute(f"alter publication {name} drop table countries")
        with pytest.raises(AdoptionFailed, match=r"the publication at the source lacks public\.countries"):
            adoption.switch(following.catalog)


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ("truncate lines_high", "lines"),
        (
            """
            alter table lines detach partition lines_low;
            update lines_low set what = 'past the log' where number = 1;
            alter table lines attach partition lines_low for values from (minvalue) to (300)""",
            "lines",
        ),
        ("""alter table users alter column "od:d %s" type text using lower("od:d %s" || 'X')""", "users"),
    ],
)
def test_rows_that_may_have_changed_past_the_log_are_compared_first(
    following: Shop, changes: str, table: str
) -> None:
    refused = rf"rows of public\.{table} may have changed at the source past its log"
    with following.connected("source") as source:
        source.execute(changes.encode())
        with pytest.raises(AdoptionFailed, match=refused) as no:
            adoption.switch(following.catalog)
        assert "shardids adopt run --compare" in (no.value.hint or "")
        status = adoption.status(following.catalog)
        assert status is not None
        assert not status.is_source_closed
    with pytest.raises(AdoptionFailed, match=rf"rows of public\.{table} are not the same"):
        adoption.compare(following.catalog)
    with pytest.raises(AdoptionFailed, match="a comparison found rows in the shards that are not those"):
        adoption.switch(following.catalog)


def test_rows_that_a_comparison_found_different_stop_the_switch_until_one_finds_them_the_same(
    shop: Shop,
) -> None:
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("relay") as relay:
        relay.execute("update users set name = 'of nobody' where id = 5")
        with pytest.raises(AdoptionFailed, match=r"1 rows of public\.users are not the same"):
            adoption.compare(shop.catalog)
        with pytest.raises(AdoptionFailed, match="a comparison found rows in the shards") as no:
            adoption.switch(shop.catalog)
        assert "shardids adopt run --compare" in (no.value.hint or "")
        with shop.connected("source") as source:
            source.execute("update users set name = 'user 5' where id = 5")
        relay.execute("update users set name = 'user 5' where id = 5")
    adoption.compare(shop.catalog)
    assert adoption.switch(shop.catalog).outcome == "adopted"
    assert_in_shards(shop)
    begin_anew(shop)


def test_partitions_that_were_only_written_anew_do_not_stop_the_switch_once_compared(shop: Shop) -> None:
    adoption.run(shop.catalog, shop.plan)
    with shop.connected("source") as source:
        # Of a table that is not partitioned, replication brings a TRUNCATE.
        source.execute("vacuum full users")
        source.execute("vacuum full lines_low")
    with pytest.raises(AdoptionFailed, match=r"public\.lines may have changed"):
        adoption.switch(shop.catalog)
    adoption.compare(shop.catalog)
    assert adoption.switch(shop.catalog).outcome == "adopted"
    assert_in_shards(shop)
    begin_anew(shop)
