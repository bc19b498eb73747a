"""Moving a key whose tables have unusual keys: the rows arrive as they are, or the plan refuses by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from shardids import tenants
from shardids.errors import MoveRefused
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.tenants import arriving, leaving
from tests.support.moves import TwoNodes
from tests.support.tenants import (
    QUICK,
    TABLES,
    abort_open,
    ask,
    home,
    new_tenant,
    nodes_with_tables,
    other_shard,
)

SHARDS = 4
CHOICES = tenants.Choices(root="tenants.name")


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with nodes_with_tables(SHARDS, TABLES) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _each_alone(nodes: TwoNodes) -> Iterator[None]:
    """A test that fails in a move leaves none to the next."""
    yield
    abort_open(nodes)


def every(nodes: TwoNodes, query: str) -> None:
    for shard in range(SHARDS):
        ask(nodes, shard, query)


def moved(
    nodes: TwoNodes,
    name: str,
    on_event: Callable[[Event], None] = lambda _event: None,
    choices: tenants.Choices = CHOICES,
) -> str:
    target = other_shard(nodes, name)
    return tenants.move(nodes.catalog, name, target, choices, options=QUICK, on_event=on_event).outcome


REFUSED = {
    "a table that stays inherits from one that goes": (
        "create table {s}.odd () inherits ({s}.users)",
        tenants.Choices(root="tenants.name", loose=("odd",)),
        "table .*odd inherits from .*users: its rows are read as rows of both",
    ),
    "a table inherits": (
        "create table {s}.odd (primary key (id)) inherits ({s}.users)",
        tenants.Choices(root="tenants.name", keys=("odd.tenant_id",)),
        "table .*odd inherits from .*users: its rows are read as rows of both",
    ),
    "a generated column holds the key": (
        "create table {s}.odd (id bigint primary key, doc jsonb,"
        " tenant_id bigint generated always as ((doc ->> 'tenant')::bigint) stored)",
        tenants.Choices(root="tenants.name", keys=("odd.tenant_id",)),
        "column tenant_id of table odd, which leads to rows of the key, is generated",
    ),
    "a generated column is the root's": (
        "alter table {s}.tenants add odd text generated always as (lower(name)) stored not null unique",
        tenants.Choices(root="tenants.odd"),
        "column odd of table tenants, which leads to rows of the key, is generated",
    ),
    "a generated column is of a primary key": (
        "create table {s}.odd (tenant_id bigint not null references {s}.tenants, name text,"
        " low text generated always as (lower(name)) stored, primary key (tenant_id, low))",
        CHOICES,
        "column low of table odd, which leads to rows of the key, is generated",
    ),
    "a primary key is deferrable": (
        "create table {s}.odd (id bigint primary key deferrable,"
        " tenant_id bigint not null references {s}.tenants)",
        CHOICES,
        "primary key odd_pkey of table odd of schema .* is deferrable",
    ),
    "equal values are not the same": (
        'create collation {s}.anycase from "C";'
        " update pg_collation set collisdeterministic = false where collname = 'anycase';"
        " create table {s}.odd (id text collate {s}.anycase primary key,"
        " tenant_id bigint not null references {s}.tenants)",
        CHOICES,
        "column id of table odd, which leads to rows of the key, has a collation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_rows_are_not_found_by_is_refused(nodes: TwoNodes, case: str) -> None:
    definition, choices, said = REFUSED[case]
    name = f"odd {list(REFUSED).index(case)}"
    new_tenant(nodes, name)
    source = home(nodes, name)
    every(nodes, definition)
    try:
        for attempt in (tenants.plan, tenants.move):
            with pytest.raises(MoveRefused, match=said):
                attempt(nodes.catalog, name, other_shard(nodes, name), choices)
    finally:
        every(
            nodes,
            "drop table if exists {s}.odd; alter table {s}.tenants drop column if exists odd;"
            " drop collation if exists {s}.anycase",
        )
    assert home(nodes, name) == source
    assert tenants.open_key_moves(nodes.catalog) == []


@pytest.mark.parametrize(
    ("of", "value"), [("numeric(6, 2)", "1.50"), ("date", "2026-01-31"), ("char(4)", "ab")]
)
def test_the_roots_primary_key_may_be_of_any_type_that_can_be_noted(
    nodes: TwoNodes, of: str, value: str
) -> None:
    name = f"root of {of[:4]}"
    every(
        nodes,
        f"create table {{s}}.firms (id {of} primary key, name varchar(20) not null unique);"
        f" create table {{s}}.sites (id bigint primary key, firm_id {of} not null references {{s}}.firms)",
    )
    try:
        source = home(nodes, name)
        ask(nodes, source, f"insert into {{s}}.firms values ('{value}', '{name}')")
        ask(nodes, source, f"insert into {{s}}.sites values (1, '{value}')")
        choices = tenants.Choices(root="firms.name", loose=("tenants", "users", "photos"))
        assert moved(nodes, name, choices=choices) == "moved"
        query = "select id, firm_id::text from {s}.sites"
        assert ask(nodes, home(nodes, name), query) == [(1, value)]
        assert ask(nodes, source, query) == []
    finally:
        every(nodes, "drop table {s}.sites, {s}.firms")


CHANGED = {
    "an equal primary key": ("n", "update {s}.n set id = 1.00, body = 'b' where id = 1"),
    "an equal primary key, twice": (
        "n",
        "update {s}.n set id = 1.00 where id = 1; update {s}.n set body = 'c' where id = 1",
    ),
    "the place of another row": (
        "places",
        "delete from {s}.places where id = 1;"
        " insert into {s}.places select 2, tenant_id, '[11,12)', '{}' from {s}.n",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_row_that_changes_after_the_comparison_arrives_as_it_is(nodes: TwoNodes, case: str) -> None:
    """Its arrays mean the same where a database reads NULL as a word."""
    table, change = CHANGED[case]
    name = f"changed {list(CHANGED).index(case)}"
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    every(
        nodes,
        "create table {s}.n (id numeric primary key, tenant_id bigint not null references {s}.tenants,"
        " body text); create table {s}.places (id bigint primary key,"
        " tenant_id bigint not null references {s}.tenants, place int4range, marks text[],"
        " exclude using gist (place with &&))",
    )
    ask(nodes, source, f"insert into {{s}}.n values (1.0, {tenant}, 'a')")
    ask(nodes, source, f"insert into {{s}}.places values (1, {tenant}, '[10,15)', array[null, 'NULL'])")
    query = f"select to_jsonb(a), a::text from {{s}}.{table} a"
    seen = []

    def interfere(event: Event) -> None:
        if event == StepDone(step="announce"):
            ask(nodes, source, change)
            seen.append(ask(nodes, source, query))

    with nodes.connected(nodes.catalog.node_of(target).name) as connection:
        database = connection.info.dbname
        connection.execute(f'alter database "{database}" set array_nulls = off')
        try:
            assert moved(nodes, name, interfere) == "moved"
        finally:
            connection.execute(f'alter database "{database}" reset array_nulls')
    assert seen == [ask(nodes, target, query)]
    every(nodes, "drop table {s}.n, {s}.places")


def test_tables_that_were_made_during_an_interruption_are_refused(nodes: TwoNodes) -> None:
    """Rows in a table without a path to the key would stay behind."""
    name = "interrupted"
    new_tenant(nodes, name)

    def stop(event: Event) -> None:
        if event == StepBegun(step="copy"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moved(nodes, name, stop)
    every(nodes, "create table {s}.late (id bigint primary key, tenant_id bigint)")
    try:
        with pytest.raises(MoveRefused, match="table late has no path to the key"):
            tenants.resume(nodes.catalog, name, options=QUICK)
    finally:
        every(nodes, "drop table {s}.late")
    assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"


def test_writers_may_wait_for_longer_than_the_server_waits_for_a_silent_mover(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "patient"
    new_tenant(nodes, name)
    monkeypatch.setattr(leaving, "_HELD_MS", 200)
    follow = arriving.Arriving.follow

    def slowly(self: arriving.Arriving, *, is_last: bool = False) -> int:
        if is_last:
            time.sleep(1)
        return follow(self, is_last=is_last)

    monkeypatch.setattr(arriving.Arriving, "follow", slowly)
    options = tenants.Options(settle_s=0.3, max_pause_s=5)
    result = tenants.move(nodes.catalog, name, other_shard(nodes, name), CHOICES, options=options)
    assert result.outcome == "moved"
    assert (result.pause_ms or 0) > 1000
