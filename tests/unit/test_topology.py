"""Names, placement, and the hash that sends a key to its shard."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from decimal import Decimal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.catalog.topology import (
    Node,
    Placement,
    key_hash,
    schema_name,
    shard_for_key,
    validate_node_name,
    validate_schema_prefix,
)
from shardids.errors import BadArgument, ShardLost, UnknownShard, UnsupportedKey

SAMPLE_UUID = UUID("12345678-1234-5678-1234-567812345678")

# Worked out with sha256sum, and for the SQL types with PostgreSQL's sha256(): these must never
# change, or every row's shard does.
VECTORS = [
    (0, 0x0947928E0AAE9FE0),
    (5, 0xFBAB69242C8FCF0C),
    (-5, 0xDD36D718F7644875),
    (2**63 - 1, 0xBDB672E7E988F878),
    ("", 0x05D8BD490F04E608),
    ("5", 0x659BBDE1BE495E9E),
    ("user@example.org", 0x30B15845CDD66EE7),
    ("Grüße", 0x2361B841AA3F2526),
    (b"", 0x1F867FAA1C89EACF),
    (b"\x00\xff", 0xBAFED4EAA781BD30),
    (SAMPLE_UUID, 0x71C981618F563446),
]


# Hashing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "number"), VECTORS, ids=repr)
def test_the_hash_never_changes(key, number):
    assert key_hash(key) == number
    for shard_count in (1, 2, 1000, 4096, 65536):
        assert shard_for_key(key, shard_count) == number % shard_count


def test_keys_of_different_types_differ():
    assert len({key_hash(key) for key in (5, "5", b"5", UUID(int=5))}) == 4


def test_text_is_not_normalised():
    assert key_hash("\u00e9") != key_hash("e\u0301")


def test_subclasses_count_as_what_they_are():
    class Number(enum.IntEnum):
        FIVE = 5

    class Word(enum.StrEnum):
        FIVE = "5"

    class Token(bytes):
        def __radd__(self, other):
            raise AssertionError

    class Guid(UUID):
        pass

    assert key_hash(Number.FIVE) == key_hash(5)
    assert key_hash(Word.FIVE) == key_hash("5")
    assert key_hash(Token(b"5")) == key_hash(b"5")
    assert key_hash(Guid(int=5)) == key_hash(UUID(int=5))
    assert key_hash(np.str_("5")) == key_hash("5")


@pytest.mark.parametrize(
    "key",
    [
        True,
        False,
        1.0,
        None,
        bytearray(b"5"),
        memoryview(b"5"),
        Decimal(5),
        (5,),
        np.int64(5),
        np.float64(5),
        np.bool_(True),
    ],
    ids=lambda key: type(key).__name__,
)
def test_other_types_have_no_stable_hash(key):
    message = rf"type {type(key).__name__} .* int, str, bytes or uuid\.UUID"
    with pytest.raises(UnsupportedKey, match=message):
        shard_for_key(key, 64)
    with pytest.raises(UnsupportedKey, match=message):
        key_hash(key)


def test_lone_surrogates_have_no_utf8_form():
    with pytest.raises(BadArgument, match="no UTF-8 form"):
        key_hash("a\ud800")


def test_integers_too_long_to_print_are_refused():
    with pytest.raises(BadArgument, match="too long"):
        key_hash(10**5000)


@pytest.mark.parametrize("shard_count", [0, -1, True, 4.0, 2**16 + 1])
def test_impossible_shard_counts_are_refused(shard_count):
    with pytest.raises(BadArgument, match="shard_count must be"):
        shard_for_key(5, shard_count)


@given(
    st.one_of(
        st.integers(),
        st.text("aZ5 \0\u00e9\u0301\U0001f600"),
        st.binary(),
        st.uuids(),
    ),
    st.integers(1, 65536),
)
def test_every_key_has_a_shard(key, shard_count):
    assert 0 <= shard_for_key(key, shard_count) < shard_count


def test_keys_spread_evenly():
    count = Counter(shard_for_key(key, 16) for key in range(16_000))
    assert min(count.values()) > 880  # mean 1000, standard deviation about 31
    assert max(count.values()) < 1120


# Names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "Z", "db-1.eu_west", "A" * 40])
def test_node_names(name):
    assert validate_node_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "1a", "-a", "_a", ".a", "a b", "a'b", 'a"b', "a\n", "a/b", "é", "aé", "a" * 41],
)
def test_bad_node_names_are_refused_with_the_rule(name):
    with pytest.raises(BadArgument, match="1 to 40 characters, first a letter"):
        validate_node_name(name)
    with pytest.raises(BadArgument, match="can't be a node's name"):
        Node(name=name, url="postgresql://")


@pytest.mark.parametrize("prefix", ["shard_", "s", "_s", "tenant1_", "pg", "shardid", "a" * 40])
def test_schema_prefixes(prefix):
    assert validate_schema_prefix(prefix) == prefix


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("", "1 to 40 characters"),
        ("1s", "first a lower-case letter"),
        ("Shard_", "lower-case"),
        ("shard-", "lower-case"),
        ("shard ", "lower-case"),
        ("shard_\n", "lower-case"),
        ("schäd_", "lower-case"),
        ("a" * 41, "1 to 40 characters"),
        ("pg_", "'pg_' are reserved"),
        ("pg_shard_", "'pg_' are reserved"),
        ("shardids", "'shardids' are reserved"),
        ("shardids_catalog", "'shardids' are reserved"),
    ],
)
def test_bad_schema_prefixes_are_refused_with_the_rule(prefix, message):
    with pytest.raises(BadArgument, match=message):
        validate_schema_prefix(prefix)


@pytest.mark.parametrize(
    ("shard", "name"),
    [(0, "shard_0000"), (5, "shard_0005"), (9999, "shard_9999"), (12345, "shard_12345")],
)
def test_schema_names(shard, name):
    assert schema_name("shard_", shard) == name


def test_schema_names_fit_an_identifier():
    assert len(schema_name("a" * 40, 65535)) <= 63


def test_bad_schema_names_are_refused():
    for shard in (-1, 65536, True, 5.0):
        with pytest.raises(BadArgument, match="shard must be"):
            schema_name("shard_", shard)
    with pytest.raises(BadArgument, match="can't be a schema prefix"):
        schema_name("Shard_", 5)


# Placement -------------------------------------------------------------------------------------


def placement():
    nodes = {name: Node(name=name, url=f"postgresql://{name}.example/app") for name in "ab"}
    return Placement(version=3, nodes=nodes, node_of={0: "a", 1: "b", 2: "b"})


def test_a_shard_is_located():
    assert placement().locate(0).name == "a"
    assert placement().locate(2).url == "postgresql://b.example/app"


def test_an_unknown_shard_is_named_with_the_command_that_lists_shards():
    with pytest.raises(UnknownShard, match="no node holds shard 7") as caught:
        placement().locate(7)
    assert "shardids shard list" in str(caught.value)


def test_a_placement_cannot_be_changed():
    node_of = {0: "a"}
    nodes = {"a": Node(name="a", url="postgresql://")}
    frozen = Placement(version=1, nodes=nodes, node_of=node_of)
    node_of[1] = "a"
    nodes.clear()
    assert frozen.locate(0).name == "a"
    with pytest.raises(UnknownShard):
        frozen.locate(1)
    with pytest.raises(TypeError):
        frozen.node_of[1] = "a"
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.version = 2
    assert placement() == placement()


def test_a_placement_must_fit_together():
    node = Node(name="a", url="postgresql://")
    with pytest.raises(BadArgument, match="shard 0 is on node 'b'"):
        Placement(version=1, nodes={"a": node}, node_of={0: "b"})
    with pytest.raises(BadArgument, match="node 'a' is placed under another name, 'b'"):
        Placement(version=1, nodes={"b": node}, node_of={})


def test_a_node_never_shows_its_url():
    assert "secret" not in repr(Node(name="a", url="postgresql://u:secret@host/db"))
    assert "secret" not in repr(Placement(version=1, nodes={"a": Node(name="a", url="secret")}, node_of={}))


def test_a_lost_shard_is_neither_located_nor_left_out() -> None:
    node = Node(name="a", url="postgresql://a/x")
    placement = Placement(version=1, nodes={"a": node}, node_of={0: "a"}, lost={1: "a"})
    assert placement.by_node() == {"a": [0]}
    assert placement.owners() == {0: "a", 1: "a"}
    for ask in (lambda: placement.locate(1), placement.all_shards, lambda: placement.by_node([0, 1])):
        with pytest.raises(ShardLost, match='shard 1 was lost: the server that took over node "a"'):
            ask()
    with pytest.raises(TypeError):
        placement.lost[1] = "b"
