"""How tables are sorted by their foreign keys: on inventories without a database."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.adopt.plan.document import Kind
from shardids.adopt.plan.inventory import ForeignKey, Inventory
from shardids.adopt.plan.paths import (
    Sorted,
    Wishes,
    parents_first,
    parse_name,
    read_wishes,
    sort_tables,
)
from shardids.errors import BadArgument
from tests.support.adoption import SERVER, foreign_key, inventory


def sorted_by(there: Inventory, *more: ForeignKey, **wishes: object) -> Sorted:
    whole = Inventory(
        server=SERVER, tables=there.tables, foreign_keys=[*there.foreign_keys, *more], things=[]
    )
    return sort_tables(whole, Wishes(**{"root": "users", "root_key": "id"} | wishes))


def kinds(found: Sorted, there: Inventory) -> dict[str, str]:
    return {name: str(found.kind(name)) for name in there.tables}


def test_tables_are_sorted_by_what_leads_to_the_root():
    there = inventory(
        users="country>countries",
        orders="user_id>users",
        items="order_id>orders product_id>products",
        products="made_in>countries",
        countries="",
        audit="user_id",
        shops="country>countries",
    )
    found = sorted_by(there)
    assert kinds(found, there) == {
        "users": "root",
        "orders": "direct",
        "items": "derived",
        "products": "reference",
        "countries": "reference",
        "audit": "loose",
        # Nothing that is split refers to it.
        "shops": "loose",
    }
    assert found.ways["orders"].key == "user_id"
    assert [hop.referenced_table for hop in found.ways["items"].path] == ["orders"]
    assert found.ways["items"].key == "user_id"
    assert not found.further


def test_of_two_columns_the_first_is_the_key_and_the_other_is_to_be_checked():
    found = sorted_by(inventory(users="", messages="sender>users recipient>users"))
    assert found.ways["messages"].key == "sender"
    assert [key.columns for key in found.further["messages"]] == [("recipient",)]


def test_a_column_that_is_always_filled_is_chosen_before_one_that_may_be_null():
    found = sorted_by(inventory(users="", posts="editor?>users author>users"))
    assert (found.ways["posts"].key, found.ways["posts"].is_nullable) == ("author", False)


def test_a_column_of_the_table_is_chosen_before_a_path():
    found = sorted_by(inventory(users="", orders="user_id>users", items="order_id>orders buyer?>users"))
    assert (found.ways["items"].kind, found.ways["items"].key) == (Kind.DIRECT, "buyer")
    assert [key.columns for key in found.further["items"]] == [("order_id",)]


def test_a_composite_foreign_key_brings_the_key_along():
    there = inventory(users="", orders="user_id>users", items="user_id order_id", parts="item_id>items")
    found = sorted_by(there, foreign_key("items", "user_id,order_id", "orders", "user_id,id"))
    assert (found.ways["items"].kind, found.ways["items"].key) == (Kind.DIRECT, "user_id")
    assert found.ways["parts"].path[-1].referenced_table == "items"
    assert not found.further


def test_a_composite_foreign_key_that_is_not_valid_says_nothing_of_the_key():
    there = inventory(users="", orders="user_id>users", items="user_id order_id")
    composite = foreign_key("items", "user_id,order_id", "orders", "user_id,id", is_checked=False)
    assert sorted_by(there, composite).further == {"items": [composite]}


def test_a_reference_to_another_column_of_the_root_is_a_path():
    there = inventory(users="email:text", letters="to:text")
    found = sorted_by(there, foreign_key("letters", "to", "users", "email"))
    assert (found.ways["letters"].kind, found.ways["letters"].key) == (Kind.DERIVED, "id")


def test_circles_and_references_to_the_table_itself_are_to_be_checked():
    there = inventory(users="boss?>users home?>addresses", addresses="user_id>users near?>addresses")
    found = sorted_by(there)
    assert kinds(found, there) == {"users": "root", "addresses": "direct"}
    further = {key.columns for keys in found.further.values() for key in keys}
    assert further == {("boss",), ("home",), ("near",)}


def test_a_nullable_hop_makes_the_whole_path_nullable():
    found = sorted_by(inventory(users="", a="user_id>users", b="a_id?>a", c="b_id>b"))
    assert [found.ways[name].is_nullable for name in "abc"] == [False, True, True]


def test_wishes_come_before_foreign_keys():
    there = inventory(
        users="",
        products="made_by>users",
        items="product_id>products user_id>users",
        logs="who",
        old="user_id>users",
    )
    found = sorted_by(there, keys={"logs": "who"}, references={"products"}, loose={"old"})
    assert kinds(found, there) == {
        "users": "root",
        "products": "reference",
        "items": "direct",
        "logs": "direct",
        "old": "loose",
    }
    assert not found.further


def test_a_foreign_key_to_a_partition_alone_is_no_path():
    there = inventory(users="", events="user_id")
    assert (
        sorted_by(there, foreign_key("events", "user_id", "users", is_to_partition=True)).kind("events")
        == "loose"
    )


NAMES = [f"t{number}" for number in range(8)]


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES), st.booleans()), max_size=25),
    st.sets(st.sampled_from(NAMES[1:]), max_size=2),
)
def test_whatever_the_foreign_keys_each_way_ends_at_the_key_and_parents_come_first(links, references):
    words = dict.fromkeys(NAMES, "")
    for number, (child, parent, is_nullable) in enumerate(links):
        words[child] += f" c{number}{'?' * is_nullable}>{parent}"
    there = inventory(**words)
    found = sorted_by(there, root="t0", references=references)
    for name, way in found.ways.items():
        holder = way.path[-1].referenced_table if way.path else name
        assert all(one.referenced_table == two.table for one, two in pairwise(way.path))
        assert way.key in there.tables[holder].columns
        assert found.ways[holder].kind is not Kind.DERIVED
        assert name not in references
        for key in there.foreign_keys:
            if key.table == name and key.referenced_table in found.ways:
                is_direct = key.referenced_table == "t0" and key.columns == (way.key,)
                assert key == way.first or is_direct or key in found.further[name]
    order = parents_first(list(there.tables), found, there.foreign_keys)
    assert sorted(order) == sorted(NAMES)
    for name, way in found.ways.items():
        if way.first is not None:
            assert order.index(way.first.referenced_table) < order.index(name)


def test_parents_come_before_children_where_foreign_keys_do_not_go_round():
    there = inventory(
        users="c>countries", countries="", items="order_id>orders", orders="user_id>users", z=""
    )
    order = parents_first(list(there.tables), sorted_by(there), there.foreign_keys)
    assert order == ["countries", "users", "orders", "items", "z"]


# Names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("users", ["users"]),
        ("Users.ID", ["users", "id"]),
        ('"Users"."a.b""c"', ["Users", 'a.b"c']),
        ("größe", ["größe"]),
    ],
)
def test_names_are_read_as_sql_reads_them(text: str, parts: list[str]):
    assert parse_name(text) == parts


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a b", '"a', "a;drop table x", "1a", 'a"b"', "a..b"])
def test_what_is_no_name_is_refused(text: str):
    with pytest.raises(BadArgument, match="is not a name"):
        parse_name(text)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"root": "user"}, "the source has no table user"),
        ({"root": "users.name"}, "users.name is not unique"),
        ({"root": "users.none"}, "users has no column 'none'"),
        ({"root": "a.b.c.d"}, "the source has no table a.b.c"),
        ({"root": "users", "keys": ["orders"]}, "orders is not a column"),
        ({"root": "users", "keys": ["orders.none"]}, "orders has no column 'none'"),
        ({"root": "users", "references": ["order"]}, "the source has no table order"),
        ({"root": "users", "loose": ["users"]}, "users: more than one of"),
        ({"root": "users", "loose": ["orders"], "keys": ["orders.id"]}, "orders: more than one of"),
    ],
)
def test_wishes_that_name_nothing_are_refused(wishes: dict[str, object], message: str):
    with pytest.raises(BadArgument, match=message):
        read_wishes(inventory(users="name:text", orders=""), **wishes)


def test_an_unknown_table_is_answered_by_one_of_a_similar_name():
    with pytest.raises(BadArgument) as refused:
        read_wishes(inventory(users="", orders=""), root="user")
    assert refused.value.hint == "Perhaps users?"


def test_split_tables_are_those_with_a_way():
    there = inventory(users="", orders="user_id>users", other="")
    found = sorted_by(there)
    assert {name for name in there.tables if found.kind(name).is_split} == set(found.ways)
