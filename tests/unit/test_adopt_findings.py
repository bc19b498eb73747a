"""What a plan says of a source's server, and how many shards and nodes it suggests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardids.adopt.plan.document import Finding
from shardids.adopt.plan.facts import Facts
from shardids.adopt.plan.findings import find_all
from shardids.adopt.plan.inventory import Inventory
from shardids.adopt.plan.obstacles import Obstacles
from shardids.adopt.plan.paths import Wishes, sort_tables
from shardids.adopt.plan.planning import (
    COPIED_ROW_BYTES,
    COPIED_ROWS_PER_S,
    copy_duration,
    suggest_nodes,
    suggest_shards,
)
from shardids.cli.adopt.shown import shown_duration
from tests.support.adoption import SERVER, inventory

GB = 1_000_000_000


def all_findings(there: Facts) -> list[Finding]:
    obstacles = Obstacles(tables=(), there={}, server=there.inventory.server, shard_count=64)
    return find_all(there, obstacles)


def facts(**server: object) -> Facts:
    there = inventory(users="", orders="user_id>users")
    whole = Inventory(
        server=replace(SERVER, **server), tables=there.tables, foreign_keys=there.foreign_keys, things=[]
    )
    wishes = Wishes(root="users", root_key="id")
    return Facts(inventory=whole, wishes=wishes, sorted=sort_tables(whole, wishes), checked={})


@pytest.mark.parametrize(
    ("server", "severity", "subject", "reason"),
    [
        ({"is_standby": True}, "blocks", "the source", "it is a standby"),
        ({"wal_level": "replica"}, "blocks", "wal_level", "it is replica: changes can't be followed"),
        (
            {"slots": 4, "used_slots": 4},
            "blocks",
            "max_replication_slots",
            "0 of 4 are free; the relay takes 3",
        ),
        ({"senders": 2}, "blocks", "max_wal_senders", "2 of 2 are free; the relay takes 3"),
        ({"prepared_transactions": 2}, "note", "the source", "2 transactions are prepared"),
        ({"large_objects": 3}, "not kept", "large objects", "the source has 3 large objects"),
        ({"encoding": "LATIN1"}, "blocks", "the source", "its encoding is LATIN1"),
        ({"has_barrier": True}, "blocks", "the source", "it was adopted, or is being adopted"),
        ({"is_of_cluster": True}, "blocks", "the source", "it belongs to a cluster of shardids already"),
    ],
)
def test_what_the_server_lacks_is_found(server: dict[str, object], severity: str, subject: str, reason: str):
    plain, found = all_findings(facts()), all_findings(facts(**server))
    (new,) = [one for one in found if one not in plain]
    assert (str(new.severity), new.subject) == (severity, subject)
    assert reason in new.reason
    assert new.remedy


def test_what_blocks_comes_first():
    severities = [str(one.severity) for one in all_findings(facts(is_standby=True, large_objects=1))]
    order = ["blocks", "not kept", "note"]
    assert severities == sorted(severities, key=order.index)
    assert severities[0] == "blocks"


@pytest.mark.parametrize(
    ("size", "tables", "nodes", "shards"),
    [
        (0, 10, 2, 64),
        (100 * GB, 10, 2, 64),
        (900 * GB, 10, 2, 128),
        (5_000 * GB, 10, 10, 512),
        (20_000 * GB, 10, 40, 2048),
        (1e9 * GB, 10, 2_000_000, 4096),
        # 10,000 tables in each of 64 shards would be 320,000 a node.
        (0, 10_000, 2, 16),
        (0, 1_000_000, 2, 2),
    ],
)
def test_shards_and_nodes_are_suggested_by_size_and_number_of_tables(
    size: float, tables: int, nodes: int, shards: int
):
    assert suggest_nodes(size)[0] == nodes
    assert suggest_shards(size, tables, nodes)[0] == shards


def test_the_copy_takes_as_long_as_its_rows_or_their_bytes():
    """Large rows count as several."""
    assert copy_duration(0, 0) == 0
    assert copy_duration(60 * COPIED_ROWS_PER_S, 1) == 60
    assert copy_duration(1, 3600 * COPIED_ROWS_PER_S * COPIED_ROW_BYTES) == 3600


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "a minute"), (59, "a minute"), (90, "2 min"), (7100, "118 min"), (7200, "2 h"), (360_000, "100 h")],
)
def test_a_duration_is_said_in_minutes_or_hours(seconds: float, said: str):
    assert shown_duration(seconds) == said
