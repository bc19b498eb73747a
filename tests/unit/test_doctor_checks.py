"""The doctor's checks on facts that no test can wait for: clocks, rates, the end of a layout's time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped

from shardids import Layout, primary_key, sharding_key
from shardids.beside.capture import Capture
from shardids.beside.citus.facts import CitusFacts
from shardids.catalog.rows import Description
from shardids.catalog.shards import Shard
from shardids.catalog.topology import Node
from shardids.errors import StatementFailed
from shardids.ids.layout import DEFAULT
from shardids.pg.clock import ClockSample
from shardids.pg.locks import AdvisoryLock
from shardids.pg.notation import shown_shards
from shardids.pg.schemas import Stranger
from shardids.watch import doctor
from shardids.watch.doctor.access import schema_owner
from shardids.watch.doctor.capture import capture_incomplete
from shardids.watch.doctor.citus import citus_second_issuer, citus_shard_local, citus_worker_away
from shardids.watch.doctor.findings import Check, Severity, call
from shardids.watch.doctor.generators import clocks_apart, tick_rate, ticks_ahead, years_left
from shardids.watch.doctor.leftovers import lock_held, slot_inactive
from shardids.watch.doctor.nodes import node_contract, nodes_differ
from shardids.watch.doctor.placement import node_unread
from shardids.watch.facts.cluster import (
    ClusterFacts,
    Installation,
    LocalShard,
    LockHolder,
    NodeFacts,
    Strangers,
    Stray,
)
from shardids.watch.facts.examining import meanwhile
from shardids.watch.facts.reading import OpenMove
from shardids.watch.facts.rows import ShardingKey, keys_of

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md"

FACTS = ClusterFacts(
    at=datetime(2026, 11, 21, tzinfo=UTC),
    description=Description(cluster=UUID(int=1), layout=DEFAULT, shard_count=8, schema_prefix="shard_"),
    catalog_revisions=(),
    placed={},
    moves=(),
    nodes={},
)
INSTALLATION = Installation(
    name="a",
    cluster=UUID(int=1),
    epoch_ms=DEFAULT.epoch_ms,
    time_bits=DEFAULT.time_bits,
    shard_bits=DEFAULT.shard_bits,
    sequence_bits=DEFAULT.sequence_bits,
    schema_prefix="shard_",
    missing_standbys=0,
    on_copy="refuse",
    max_ahead_ms=3_600_000,
    safety_margin_ms=10_000,
    max_step_ms=365 * 86_400_000,
    clock_confirmed_ms=None,
    revisions=[],
    server_version=180000,
    is_standby=False,
    is_read_only=False,
    read_only_source="default",
    database="a",
    role="postgres",
)
SHARD = LocalShard(
    shard=5,
    schema="shard_0005",
    state="active",
    moved_to=None,
    is_activated_here=True,
    has_schema=True,
    has_sequences=True,
    next_id_is_ours=True,
    is_slow=False,
    next_ids_body="",
    own_tables=[],
)


def with_clocks(**clocks: tuple[float, float]) -> ClusterFacts:
    """A cluster whose nodes' clocks are so far ahead of this machine's: offset and error in seconds."""
    nodes = {
        name: NodeFacts(node=Node(name=name, url=""), clock=ClockSample(offset_s=offset, error_s=error))
        for name, (offset, error) in clocks.items()
    }
    return replace(FACTS, nodes=nodes)


def with_draws(
    *, drawn: int = 0, offset_ms: int = 0, ahead_ms: int = 0, ahead_before_ms: int = 0
) -> ClusterFacts:
    """A shard that drew so many IDs in a second, and whose offset was raised so much."""
    first = Shard(shard=5, state="active", counter=1, drawn=0, offset_ms=ahead_before_ms, clock_ms=0)
    last = first._replace(drawn=drawn, offset_ms=ahead_before_ms + offset_ms + ahead_ms, clock_ms=1000)
    node = NodeFacts(
        node=Node(name="a", url=""), engine=INSTALLATION, shards={5: SHARD}, draws={5: (first, last)}
    )
    return replace(FACTS, nodes={"a": node})


def test_clocks() -> None:
    apart = list(clocks_apart.findings(with_clocks(a=(100.2, 0.001), b=(98.9, 0.004), c=(100.0, 0.0))))
    assert [(f.nodes, f.severity) for f in apart] == [
        (("a", "b"), Severity.WARNING),
        (("c", "b"), Severity.WARNING),
    ]
    assert 'node "a" is 1.300 s ± 5.0 ms ahead of node "b"' in apart[0].what
    # What was measured over slow round trips says less.
    assert not list(clocks_apart.findings(with_clocks(a=(1.3, 0.2), b=(0.0, 0.2))))
    assert not list(clocks_apart.findings(with_clocks(a=(0.0, 0.0), b=(0.999, 0.0))))


def test_rates() -> None:
    assert not list(tick_rate.findings(with_draws(drawn=800_000)))
    (fast,) = tick_rate.findings(with_draws(drawn=900_000))
    assert fast.shards == (5,)
    assert "drew 900,000 IDs per second in the last 1.0 s; the layout has 1,024,000" in fast.what
    # Blocks raise the offset, but so does a session with after=, which draws nothing.
    assert not list(tick_rate.findings(with_draws(offset_ms=5900, ahead_before_ms=100)))
    # One that was behind it catches up.
    assert not list(tick_rate.findings(with_draws(offset_ms=50_000)))
    # One that follows the clock in steps.
    assert not list(tick_rate.findings(with_draws(offset_ms=1000, ahead_before_ms=14)))


def test_ticks() -> None:
    assert not list(ticks_ahead.findings(with_draws(offset_ms=120_900)))
    (ahead,) = ticks_ahead.findings(with_draws(offset_ms=121_100))
    assert (ahead.severity, ahead.shards) == (Severity.WARNING, (5,))
    assert "up to 120.1 s ahead of the clock; at 3600 s next_id() fails" in ahead.what
    assert ahead.to_do == (
        "Check whether the server's clock was set back. If it is right, either more IDs are drawn than the"
        " layout has (1024000 per second and shard), or sessions with after= (advance_past) went past an ID"
        " from the future: examine the shard and the node that issued it"
    )
    (far,) = ticks_ahead.findings(with_draws(offset_ms=1_900_000))
    assert far.severity is Severity.ERROR


@pytest.mark.parametrize(
    ("layout", "year", "found"),
    [
        ("default", 2083, []),
        ("default", 2084, [("warning", "in 9.7 years, no more IDs")]),
        ("default", 2093, [("error", "in 0.7 years, no more IDs")]),
        ("instagram", 2036, []),
        ("instagram", 2037, [("warning", "years, IDs are negative")]),
        ("instagram", 2050, []),
    ],
)
def test_years(layout: str, year: int, found: list[tuple[str, str]]) -> None:
    description = replace(FACTS.description, layout=Layout.preset(layout))
    facts = replace(FACTS, at=datetime(year, 1, 1, tzinfo=UTC), description=description)
    findings = list(years_left.findings(facts))
    assert [str(f.severity) for f in findings] == [severity for severity, _ in found]
    assert all(words in f.what for f, (_, words) in zip(findings, found, strict=True))


HOLDER = LockHolder(
    lock=AdvisoryLock.GENERATOR, shard=5, pid=71, role="web", application_name="x", state="idle", age_s=6.0
)
FORGOTTEN = replace(HOLDER, lock=AdvisoryLock.SHARD_SCHEMA, state="idle in transaction")


def with_holders(*holders: LockHolder) -> ClusterFacts:
    """A node whose sessions hold locks of shards."""
    return replace(FACTS, nodes={"a": NodeFacts(node=Node(name="a", url=""), lock_holders=holders)})


def test_a_session_that_holds_locks_is_named_once_for_each_kind() -> None:
    facts = with_holders(HOLDER, replace(HOLDER, shard=6), replace(HOLDER, pid=72, state="active"), FORGOTTEN)
    one, other, schema = lock_held.findings(facts)
    assert (one.shards, one.nodes, one.commands[0].text) == (
        (5, 6),
        ("a",),
        "select pg_terminate_backend(71);",
    )
    assert (
        "process 71 of role \"web\", application 'x', holds the lock of the generator of shards 5-6"
        in one.what
    )
    assert "idle for 6 s" in one.what
    assert "in a transaction that began 6 s ago" in other.what
    assert "the lock of the schema of shard 5" in schema.what


@pytest.mark.parametrize(
    "facts",
    [
        with_holders(replace(HOLDER, age_s=4.9), replace(FORGOTTEN, age_s=4.9)),
        with_holders(replace(HOLDER, age_s=None)),
        with_holders(replace(FORGOTTEN, state="active")),
        replace(with_holders(FORGOTTEN), is_migrating=True),
        replace(
            with_holders(FORGOTTEN),
            moves=[OpenMove(shard=5, source="a", target="b", step="copy", is_running=True)],
        ),
    ],
    ids=["young", "age unknown", "a statement runs", "migrations run", "the shard moves"],
)
def test_a_lock_that_is_in_use_is_no_finding(facts: ClusterFacts) -> None:
    assert not list(lock_held.findings(facts))


def test_foreign_owners_of_schemas_are_named_by_role() -> None:
    owners = [stranger("shardids", "x"), stranger("shard_0005", "x"), stranger("shard_0006", "y")]
    strangers = Strangers(owner="Dba", found=owners, shards={"shard_0005": 5, "shard_0006": 6})
    node = NodeFacts(node=Node(name="a", url=""), strangers=strangers)
    first, second = schema_owner.findings(replace(FACTS, nodes={"a": node}))
    assert first.what.startswith('schema shardids and the schema of shard 5 on node "a": owned by role "x"')
    assert [command.text for command in first.commands] == [
        'alter schema "shardids" owner to "Dba";',
        'alter schema "shard_0005" owner to "Dba";',
    ]
    assert (first.shards, second.shards, second.thing) == ((5,), (6,), "y")
    assert not list(schema_owner.findings(FACTS))


def test_objects_of_others_and_the_right_to_create_are_named_by_role() -> None:
    found = [
        stranger("shardids_local", "public", kind="create"),
        stranger("shardids_query", "x", kind="object", thing="function shardids_query.f()"),
        stranger("shardids_foreign", "x", kind="server", thing="foreign server shardids_b"),
    ]
    facts = replace(FACTS, catalog_strangers=Strangers(owner="Dba", found=found))
    creates, owns = schema_owner.findings(facts)
    assert creates.what == (
        'role "public" may create objects in schema shardids_local in the catalog\'s database'
    )
    assert [one.text for one in creates.commands] == ['revoke create on schema "shardids_local" from public;']
    assert owns.what.startswith(
        'role "x" owns function shardids_query.f(), foreign server shardids_b in the catalog\'s database;'
    )
    # To give an object back as it is would run its code with more rights.
    assert owns.commands == ()


def stranger(schema: str, role: str, kind: str = "schema", thing: str = "") -> Stranger:
    return Stranger(
        schema=schema, kind=kind, object=thing or f"schema {schema}", role=role, message="", fix=""
    )


CAPTURE = Capture(
    node="a",
    slot="shardids_cdc_1",
    published=True,
    there=True,
    is_ours=True,
    lost=False,
    pid=7,
    kept_bytes=0,
    failover=None,
    asked='START_REPLICATION SLOT "x" LOGICAL 0/0 ("proto_version" \'1\', "origin" \'none\')',
)


def test_citus_has_one_issuer_and_every_table_on_a_worker() -> None:
    well = CitusFacts(local_schemas=(), local_tables={}, issuers={}, unheard={}, inactive=())

    def found(check: Check, citus: CitusFacts | None) -> list[str]:
        node = NodeFacts(node=Node(name="coordinator", url=""), citus=citus)
        return [one.what for one in check.findings(replace(FACTS, nodes={"coordinator": node}))]

    for check in (citus_second_issuer, citus_shard_local, citus_worker_away):
        assert found(check, None) == found(check, well) == []
    issuers = {"w:1": ("shard_0003", "shard_0004")}
    assert "worker w:1 has sequences" in found(citus_second_issuer, replace(well, issuers=issuers))[0]
    local = found(citus_shard_local, replace(well, local_schemas=(3,), local_tables={3: ("t",), 4: ("t",)}))
    assert local == ["shard 3: the schema is not distributed", "shard 4: on the coordinator only: t"]
    away = found(citus_worker_away, replace(well, unheard={"w:1": "refused"}, inactive=("w:2",)))
    assert away == ["worker w:1 does not answer the coordinator: refused", "worker w:2 is not active"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"pid": None, "asked": ""}, ""),
        ({"there": False}, 'node "a" has no slot'),
        ({"published": False}, "can't be read: publication shardids_cdc was dropped"),
        ({"lost": True}, "has lost changes"),
        ({"asked": "START_REPLICATION SLOT x LOGICAL 0/0 (proto_version '1')"}, "did not ask for origin"),
        ({"asked": "START_REPLICATION SLOT x LOGICAL 0/0 (origin 'any')"}, "did not ask for origin"),
    ],
)
def test_capture_is_whole_on_all_nodes_or_on_none(change: dict[str, Any], words: str) -> None:
    def found(*captures: Capture) -> list[str]:
        nodes = {one.node: NodeFacts(node=Node(name=one.node, url=""), capture=one) for one in captures}
        return [one.what for one in capture_incomplete.findings(replace(FACTS, nodes=nodes))]

    changed = found(replace(CAPTURE, **change), replace(CAPTURE, node="b"))
    assert [words in one for one in changed] == [True] * bool(words)
    assert found(replace(CAPTURE, published=False, there=False)) == []


def test_words() -> None:
    assert shown_shards([7, 0, 1, 2, 3, 9, 10]) == "0-3,7,9-10"
    assert call("fence", [5]) == "select shardids.fence(5);"
    assert call("fence", [6, 5]) == "select shardids.fence(shard) from unnest('{5,6}'::integer[]) shard;"


def test_every_check_has_a_name_of_its_own_and_is_in_the_how_to() -> None:
    names = [check.name for check in doctor.CHECKS]
    assert len(set(names)) == len(names)
    rows = [f"| `{c.name}` | {c.severity} | {c.finds} | {c.remedy} |" for c in doctor.CHECKS]
    page = HOW_TO.read_text("utf-8")
    assert "\n".join(["| --- | --- | --- | --- |", *rows, ""]) in page
    assert f" wrong: {len(names)} checks of " in page


def test_moves_that_begin_and_end_while_the_doctor_asks() -> None:
    def move(shard: int, *, is_running: bool) -> OpenMove:
        return OpenMove(shard=shard, source="a", target="b", step="copy", is_running=is_running)

    before = [move(1, is_running=True), move(2, is_running=False), move(3, is_running=True)]
    after = [move(3, is_running=False), move(4, is_running=True)]
    # What has ended was not broken off; what is there at the end is as it is then.
    assert meanwhile(before, after) == [
        move(1, is_running=True),
        move(2, is_running=True),
        move(3, is_running=False),
        move(4, is_running=True),
    ]


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(unique=True)


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = primary_key()


def test_the_sharding_keys_of_models_are_found() -> None:
    assert keys_of(Base.metadata) == [ShardingKey(table_name="accounts", column_name="name")]


def test_what_a_move_and_a_migration_do_is_no_fault() -> None:
    slot = Stray(kind="slot", name="pg_1_sync_2_3", shard=None, detail="logical", age_s=None, kept_bytes=0)
    error = StatementFailed("relation shard_0001.albums does not exist")
    error.sqlstate = "42P01"
    node = NodeFacts(node=Node(name="a", url=""), engine=INSTALLATION, strays=[slot], error=error)
    quiet = replace(FACTS, nodes={"a": node})
    move = OpenMove(shard=1, source="a", target="b", step="copy", is_running=True)
    moving = replace(quiet, moves=(move,))
    assert [found.thing for found in slot_inactive.findings(quiet)] == [slot.name]
    assert [found.thing for found in slot_inactive.findings(moving)] == []
    assert [found.severity for found in node_unread.findings(quiet)] == [Severity.WARNING]
    assert [found.severity for found in node_unread.findings(moving)] == [Severity.INFO]


def contracts(recorded: str, found: str) -> ClusterFacts:
    """A node whose setting or object, named as in a line, is another than is recorded."""
    (kind, name, wanted), (_, _, there) = recorded.split(":"), found.split(":")
    node = NodeFacts(node=Node(name="a", url=""), contract={(kind, name): there})
    return replace(FACTS, nodes={"a": node}, contracts={"a": {(kind, name): wanted}})


def test_a_setting_without_which_rows_are_lost_is_an_error_and_is_never_switched_off() -> None:
    (found,) = node_contract.findings(contracts("setting:fsync:on", "setting:fsync:off"))
    assert found.severity is Severity.ERROR
    assert found.commands[0].text == "alter system set fsync = 'on';"
    (found,) = node_contract.findings(contracts("setting:fsync:off", "setting:fsync:on"))
    assert (found.severity, found.commands) == (Severity.WARNING, ())


def test_a_setting_that_needs_a_restart_is_named_without_a_command() -> None:
    facts = contracts("setting:wal_level:logical", "setting:wal_level:replica")
    (found,) = node_contract.findings(facts)
    assert (found.severity, found.commands) == (Severity.ERROR, ())
    assert "restart" in found.to_do
    assert found.what == 'node "a": setting wal_level is replica, and logical is recorded'


def test_nodes_that_sort_differently_are_a_warning_and_other_differences_information() -> None:
    def facts(kind: str, name: str) -> ClusterFacts:
        nodes = {
            node: NodeFacts(node=Node(name=node, url=""), contract={(kind, name): version})
            for node, version in (("a", "2.36"), ("b", "2.36"), ("c", "2.41"))
        }
        return replace(FACTS, nodes=nodes)

    (found,) = nodes_differ.findings(facts("collation", "default"))
    assert (found.severity, found.nodes) == (Severity.WARNING, ("c",))
    (found,) = nodes_differ.findings(facts("extension", "citext"))
    assert (found.severity, found.nodes) == (Severity.INFO, ("c",))
    assert list(nodes_differ.findings(facts("tablespace", "fast"))) == []
