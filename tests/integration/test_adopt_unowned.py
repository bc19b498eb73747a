"""Adoptions of tables whose key may be NULL: such rows stay at the source, or go to a shard that is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardids.adopt import adoption
from shardids.adopt.plan.document import Kind, OldIds, Plan, TablePlan
from shardids.errors import AdoptionRefused
from tests.support.adoptions import SHARDS, Shop, begin_anew, home_of, schema

MEDIA = """
    create table {s}.media (
      id bigint primary key, user_id {type}, name text)"""


@pytest.fixture(scope="module")
def shop(any_shop: Shop) -> Shop:
    if not any_shop.has_row_filters:
        pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
    with any_shop.connected("source") as source:
        source.execute(MEDIA.format(s="public", type="integer").encode())
        source.execute("""
            alter table media replica identity full,
              add foreign key (user_id) references users on delete set null""")
    for node, shards in any_shop.catalog.placement().by_node().items():
        with any_shop.connected(node) as connection:
            for shard in shards:
                connection.execute(MEDIA.format(s=schema(shard), type="bigint").encode())
    return any_shop


@pytest.fixture(autouse=True)
def media(shop: Shop) -> None:
    with shop.connected("source") as source:
        source.execute("""
            insert into users (id, name) values (7, 'user 7') on conflict do nothing;
            truncate media;
            insert into media select n, nullif(n % 40, 0), 'file ' || n from generate_series(1, 400) n""")
    for node, shards in shop.catalog.placement().by_node().items():
        with shop.connected(node) as connection:
            connection.execute(f"truncate {', '.join(f'{schema(shard)}.media' for shard in shards)}".encode())


def planned(shop: Shop, unowned: str | None) -> Plan:
    table = TablePlan(
        name="public.media",
        kind=Kind.DIRECT,
        key="user_id",
        unowned=unowned,
        id="id",
        old_ids=OldIds.DIRECTORY,
        rows=400,
    )
    return replace(shop.plan, tables=(*shop.plan.tables, table))


def test_a_key_that_may_be_null_is_refused_without_a_rule(shop: Shop) -> None:
    with pytest.raises(
        AdoptionRefused, match=r"public\.media\.user_id: it may be NULL.*media_user_id_fkey"
    ) as no:
        adoption.check(shop.catalog, planned(shop, None))
    assert "--unowned public.media=source" in (no.value.hint or "")
    with pytest.raises(AdoptionRefused, match=rf"to shard {SHARDS} of {SHARDS}"):
        adoption.check(shop.catalog, planned(shop, f"shard {SHARDS}"))


@pytest.mark.parametrize("unowned", ["source", "shard 2"])
def test_rows_without_a_key_follow_their_rule(shop: Shop, unowned: str) -> None:
    adoption.run(shop.catalog, planned(shop, unowned))
    with shop.connected("source") as source:
        # Ten lose their owner, ten find one, one is new, one is deleted.
        source.execute("""
            delete from lines where user_id = 7; delete from "The Shop"."Orders" where user_id = 7;
            delete from users where id = 7;
            update media set user_id = 9 where id in (40, 80);
            insert into media values (500, null, 'new'); delete from media where id = 120""")
        rows = source.execute("select id, user_id from media").fetchall()
    adoption.compare(shop.catalog)
    assert adoption.switch(shop.catalog).outcome == "adopted"
    there = {(row[0], row[1]): shard for shard, found in shop.rows("media").items() for row in found}
    expected = {(id_, user): 2 if user is None else home_of(user) for id_, user in rows}
    if unowned == "source":
        expected = {row: shard for row, shard in expected.items() if row[1] is not None}
    assert there == expected
    assert (500, None) in expected or unowned == "source"
    begin_anew(shop)
