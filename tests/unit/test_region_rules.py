"""Regions: their names, the shards of their keys, and what is outside of them."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.catalog.regions import Region, existing_region, require_region
from shardids.catalog.rows import spread_by_region
from shardids.catalog.topology import Node, Placement, key_hash
from shardids.errors import BadArgument, ClusterConflict

EU = Region(name="eu", first_shard=0, last_shard=3)
US = Region(name="us", first_shard=6, last_shard=6)


def placement(node_of: dict[int, str] | None = None, **regions: str | None) -> Placement:
    """Regions eu (shards 0-3) and us (6), and nodes, each with its region."""
    nodes = {name: Node(name=name, url="postgresql://h", region=region) for name, region in regions.items()}
    return Placement(version=1, nodes=nodes, node_of=node_of or {}, regions={"eu": EU, "us": US})


KEYS = st.one_of(st.integers(), st.text(st.characters(exclude_categories=["Cs"])), st.binary(), st.uuids())


@given(KEYS, st.integers(0, 60000), st.integers(1, 5000))
def test_a_key_is_in_its_region_whatever_else_there_is(key, first, count):
    region = Region(name="r", first_shard=first, last_shard=first + count - 1)
    shard = region.shard_for(key)
    assert shard in region.shards
    assert shard == first + key_hash(key) % count
    assert (
        Region(name="another-name", first_shard=first, last_shard=first + count - 1).shard_for(key) == shard
    )


def test_keys_spread_evenly_over_a_region():
    counts = Counter(EU.shard_for(f"user {number}") for number in range(4000))
    assert set(counts) == set(EU.shards)
    assert all(900 < count < 1100 for count in counts.values())


@pytest.mark.parametrize("name", ["", "1a", "é", "a b", "x" * 41, "a;b", 'a"'])
def test_bad_names_are_refused_with_the_rule(name):
    with pytest.raises(
        BadArgument, match=re.escape(repr(name)) + " can't be a region's name: it takes 1 to 40"
    ):
        Region(name=name, first_shard=0, last_shard=0)


@pytest.mark.parametrize(("first", "last"), [(1, 0), (-1, 3)])
def test_a_region_has_shards(first, last):
    with pytest.raises(BadArgument, match='region "eu" has no shards'):
        Region(name="eu", first_shard=first, last_shard=last)


def test_what_is_outside_is_found():
    there = placement({0: "a", 1: "b", 4: "b", 5: "a", 6: "a"}, a="eu", b=None)
    assert [there.region_of(shard) for shard in (0, 3, 4, 5, 6, 7)] == ["eu", "eu", None, None, "us", None]
    assert there.outside() == {1: "b", 5: "a", 6: "a"}
    assert there.nodes_of_region("eu") == ["a"]
    assert there.nodes_of_region(None) == ["b"]
    assert there.nodes_of_region("us") == []


def test_a_node_takes_the_shards_of_its_region_and_no_others():
    there = placement(a="eu", b=None)
    require_region(there, 0, "a")
    require_region(there, 4, "b")
    for shard, node, message in (
        (0, "b", 'shard 0 is of region "eu", and node "b" is of no region'),
        (4, "a", 'shard 4 is of no region, and node "a" is of region "eu"'),
        (6, "a", 'shard 6 is of region "us", and node "a" is of region "eu"'),
        (0, "z", 'there is no node "z" any more'),
    ):
        with pytest.raises(ClusterConflict, match=message):
            require_region(there, shard, node)


def test_new_shards_go_to_the_nodes_of_their_region():
    there = placement(a="eu", b=None, c="eu", d="us")
    spread = spread_by_region(range(8), {"a": 1}, there)
    assert {shard for shard, node in spread.items() if node in "ac"} == {0, 1, 2, 3}
    assert Counter(spread.values()) == {"a": 2, "b": 3, "c": 2, "d": 1}
    assert spread[6] == "d"
    with pytest.raises(ClusterConflict, match='there is no node of region "us" to take shard 6') as caught:
        spread_by_region(range(8), {}, placement(a="eu", b=None))
    assert "--region us; to assign one: shardids region assign us NODE" in caught.value.hint
    with pytest.raises(ClusterConflict, match="there is no node without a region to take shards 4-5,7"):
        spread_by_region(range(8), {}, placement(a="eu", b="us"))


def test_an_unknown_region_is_named_with_those_there_are():
    with pytest.raises(BadArgument, match='there is no region "mars"') as caught:
        existing_region("mars", placement().regions)
    assert caught.value.hint == 'Regions: "eu", "us".'
