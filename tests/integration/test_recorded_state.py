"""Damages that hit every shard alike: only a recorded state tells them from what is meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from shardids.watch.doctor.findings import Severity
from tests.support.lengths import sampled
from tests.support.patient import Patient, admitted
from tests.support.waiting import wait_for

SHARDS = {"a": range(4), "b": range(4, 8)}
BROKEN = "insert into {s}.users (name, age) values ('young', -1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Everywhere:
    """What is done to every shard, the check that finds it, and what ends it if no command does.

    ``first``: what is done before the state is recorded; ``last``: what takes it away again.
    """

    done: str
    found: str = "schema-differs"
    undo: str = ""
    first: str = ""
    last: str = ""


def damage(done: str, undo: str = "") -> Everywhere:
    return Everywhere(done=done, undo=undo)


TICKET = """
    create table {s}.tickets (id bigint primary key default {s}.next_id(), tenant text, number text);
    select shardids.number_rows('{s}.tickets', 'number', 'tenant', 'order', 'day');
"""
SERIAL = "create table {s}.lines (id bigint primary key default {s}.next_id(), line serial unique)"
EVERYWHERE = (
    # States that a definition has.
    damage("alter table {s}.photos disable trigger all"),
    damage("alter table {s}.users disable trigger all"),
    damage("alter table {s}.photos set unlogged"),
    damage("alter table {s}.photos set unlogged; alter table {s}.users set unlogged"),
    damage("alter table {s}.users replica identity nothing"),
    damage("alter table {s}.photos replica identity full"),
    damage("alter table {s}.users disable row level security"),
    damage("alter table {s}.users disable trigger touched"),
    damage("alter table {s}.users enable always trigger touched"),
    damage("drop trigger touched on {s}.users"),
    damage("drop index {s}.photos_user"),
    damage(
        "alter table {s}.users drop constraint positive;"
        " alter table {s}.users add constraint positive check (age >= 0) not valid"
    ),
    damage(
        "alter table {s}.users drop constraint positive; "
        + BROKEN
        + "; alter table {s}.users add constraint positive check (age >= 0) not valid",
        "delete from {s}.users where age < 0; alter table {s}.users validate constraint positive",
    ),
    Everywhere(
        first=TICKET,
        done='alter table {s}.tickets disable trigger "shardids_number_tickets.number"',
        last='drop table {s}.tickets cascade; drop function {s}."shardids_number_tickets.number"()',
    ),
    # Objects.
    damage(
        "alter table {s}.users drop constraint positive",
        "alter table {s}.users add constraint positive check (age >= 0)",
    ),
    damage("alter table {s}.users alter name drop not null", "alter table {s}.users alter name set not null"),
    damage("alter table {s}.users alter age set default 1", "alter table {s}.users alter age set default 0"),
    damage("alter table {s}.users add nick text", "alter table {s}.users drop nick"),
    damage("alter table {s}.photos owner to reader", "alter table {s}.photos owner to current_user"),
    damage(
        "alter policy own on {s}.users using (true)",
        "alter policy own on {s}.users using (name = current_user)",
    ),
    damage(
        "alter table {s}.photos drop constraint photos_user_id_fkey",
        "alter table {s}.photos add foreign key (user_id) references {s}.users",
    ),
    damage("alter sequence {s}.numbers cache 50", "alter sequence {s}.numbers cache 1"),
    # How far sequences are.
    Everywhere(
        first=SERIAL + "; insert into {s}.lines select from generate_series(1, 3)",
        done="alter sequence {s}.lines_line_seq restart",
        found="sequence-behind",
        last="drop table {s}.lines",
    ),
    Everywhere(
        done="insert into {s}.users (name) select 'x' from generate_series(1, 9);"
        " select setval('{s}.id_counter', 1)",
        found="generator-behind",
    ),
    # Rights.
    Everywhere(done="grant insert, delete on {s}.users to public", found="role-rights"),
    Everywhere(done="grant select (name) on {s}.users to public", found="role-rights"),
    Everywhere(done="grant select on {s}.users to reader with grant option", found="role-rights"),
    Everywhere(done="grant execute on function {s}.next_id() to public", found="role-rights"),
    Everywhere(
        done="revoke select on {s}.users from reader",
        found="role-rights",
        undo="grant select on {s}.users to reader",
    ),
)


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    with admitted() as there:
        yield there


def everywhere(patient: Patient, statements: str) -> None:
    for node, shards in SHARDS.items():
        with psycopg.connect(patient.urls[node], autocommit=True) as connection:
            for shard in shards:
                if statements:
                    connection.execute(statements.replace("{s}", f"shard_{shard:04}").encode())


@pytest.mark.parametrize(
    "done", sampled([pytest.param(one) for one in EVERYWHERE], every=3), ids=lambda one: one.done[:60]
)
def test_a_damage_of_all_shards_is_found_and_its_remedy_works_when_pasted(
    patient: Patient, done: Everywhere
) -> None:
    if done.first:
        everywhere(patient, done.first)
        patient.accept()
    assert patient.findings() == []
    everywhere(patient, done.done)
    try:
        found = patient.findings()
        assert {finding.check for finding in found} == {done.found}, found
        assert sorted(shard for finding in found for shard in finding.shards) == [*range(8)]
        commands = [command for finding in found for command in finding.commands]
        assert not any(word in one.text for one in commands for word in ("grant select", " to public"))
        if not done.undo:
            assert commands
            patient.paste(commands)
    finally:
        everywhere(patient, done.undo)
    assert patient.findings() == []
    if done.last:
        everywhere(patient, done.last)
        patient.accept()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodewide:
    """What is done to a node, how bad that is, and what ends it if no command does."""

    done: str
    severity: Severity = Severity.WARNING
    undo: str = ""


RELOAD = "; select pg_reload_conf()"
NODEWIDE = (
    Nodewide(done="alter system set synchronous_standby_names = 'gone'" + RELOAD, severity=Severity.ERROR),
    Nodewide(done="alter role current_user set statement_timeout = '5s'"),
    Nodewide(done="alter role current_user in database postgres set lock_timeout = '5s'"),
    Nodewide(done="alter database postgres set session_replication_role = replica", severity=Severity.ERROR),
    Nodewide(done="alter role all set idle_in_transaction_session_timeout = '5s'"),
    Nodewide(done="create extension citext", undo="drop extension citext"),
    Nodewide(done="create publication everything for all tables", undo="drop publication everything"),
    Nodewide(
        done="create function public.seen() returns event_trigger language plpgsql as 'begin end';"
        " create event trigger seen on ddl_command_end execute function public.seen()",
        undo="drop event trigger seen; drop function public.seen()",
    ),
    Nodewide(
        done="create extension if not exists postgres_fdw;"
        " create server nowhere foreign data wrapper postgres_fdw options (host 'nowhere.invalid')",
        undo="drop server nowhere",
    ),
)


@pytest.mark.parametrize(
    "done", sampled([pytest.param(one) for one in NODEWIDE], every=3), ids=lambda one: one.done[:60]
)
def test_a_change_of_a_node_is_found_and_its_remedy_works_when_pasted(
    patient: Patient, done: Nodewide
) -> None:
    assert patient.findings() == []
    patient.run("b", done.done)
    try:
        wait_for(lambda: patient.findings() != [], "the change is found")
        found = [one for one in patient.findings() if one.check == "node-contract"]
        assert [(one.severity, one.nodes) for one in found] == [(done.severity, ("b",))]
        if not done.undo:
            assert found[0].commands
            patient.paste(found[0].commands)
    finally:
        if done.undo:
            patient.run("b", done.undo)
    wait_for(lambda: patient.findings() == [], "the node is as before")


def test_a_standby_that_is_not_there_is_named(patient: Patient) -> None:
    patient.run("b", "alter system set synchronous_standby_names = 'any 2 (here, gone)'" + RELOAD)
    try:
        wait_for(lambda: patient.findings() != [], "the standby is missed")
        found = [one for one in patient.findings() if one.check == "standby-missing"]
        assert "waits for 2 synchronous standbys" in found[0].what
    finally:
        patient.run("b", "alter system reset synchronous_standby_names" + RELOAD)
    wait_for(lambda: patient.findings() == [], "the node is as before")
