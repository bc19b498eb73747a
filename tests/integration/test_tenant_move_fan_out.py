"""Statements over several shards that are under way while rows of a key are moved between two of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import ForeignKey, event, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import shardids
from shardids import tenants
from shardids.catalog.rows import Catalog
from shardids.errors import RowsUnsettled
from shardids.replication.steps import Event, StepDone, Waiting
from tests.integration.test_routing import statements
from tests.support.moves import TwoNodes, schema
from tests.support.tenants import (
    CHOICES,
    QUICK,
    assert_once,
    home,
    new_tenant,
    nodes_with_tables,
    rows_of,
)

SHARDS = 6
TARGET = 1
"""A shard of node a: statements visit it before those of node b."""


class Base(DeclarativeBase):
    pass


class Tenant(Base):
    __tablename__ = "tenants"
    id: Mapped[int] = shardids.primary_key()
    name: Mapped[str] = shardids.sharding_key()


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = shardids.primary_key()
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str]


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with nodes_with_tables(SHARDS) as nodes:
        yield nodes


@pytest.fixture
def name(nodes: TwoNodes) -> str:
    """The name of a tenant that lives on node b."""
    found = (f"tenant {n}" for n in range(10000))
    taken = set()
    for shard in range(SHARDS):
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            taken |= {row[0] for row in connection.execute(f"select name from {schema(shard)}.tenants")}
    return next(
        one for one in found if one not in taken and nodes.catalog.node_of(home(nodes, one)).name == "b"
    )


def read_locked(session: Session) -> Any:
    return session.scalars(select(User.id).with_for_update()).all()


def change_all(session: Session) -> Any:
    return session.execute(update(User).values(name=User.name + "!")).rowcount  # type: ignore[attr-defined]  # of a CursorResult


def copy_all(session: Session) -> Any:
    rows = select(Tenant.id, Tenant.name + " 2")
    return session.execute(insert(User).from_select(["tenant_id", "name"], rows)).rowcount  # type: ignore[attr-defined]  # of a CursorResult


class Move:
    """A move in a thread, which tells when it waits for a session."""

    def __init__(
        self,
        nodes: TwoNodes,
        name: str,
        on_event: Callable[[Event], object] = lambda _: None,
        *,
        catalog: Catalog | None = None,
    ) -> None:
        self.waits: list[str] = []
        self._on_event = on_event
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(1)
        self._move = self._threads.submit(
            tenants.move,
            catalog or nodes.catalog,
            name,
            TARGET,
            CHOICES,
            options=QUICK,
            on_event=self._note,
        )
        self._move.add_done_callback(self._notify)

    def _note(self, event: Event) -> None:
        if isinstance(event, Waiting):
            self.waits.append(event.reason)
        self._on_event(event)
        self._notify()

    def _notify(self, *_: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def await_wait(self, said: str) -> str:
        """The reason of a wait that says so; an empty one if the move has ended without it."""

        def reason() -> str | None:
            return next((one for one in self.waits if said in one), None)

        with self._changed:
            assert self._changed.wait_for(lambda: reason() or self._move.done(), 60)
        return reason() or ""

    def outcome(self) -> str:
        with self._threads:
            return self._move.result(60).outcome


@pytest.mark.parametrize("ask", [read_locked, change_all, copy_all])
def test_a_move_that_begins_between_two_shards_of_a_statement_refuses_it(
    nodes: TwoNodes, name: str, ask: Callable[[Session], Any]
) -> None:
    tenant = new_tenant(nodes, name)
    before = rows_of(nodes, home(nodes, name), tenant)
    with (
        shardids.Cluster.connect(nodes.catalog_url) as cluster,
        nodes.connected("a") as old,
        cluster.sharded_session() as session,
    ):
        old.execute("begin")
        old.execute("select 1")
        move = Move(nodes, name)
        # Nobody is refused for a transaction that is left open.
        waits = move.await_wait(f"process {old.info.backend_pid} of")
        assert cluster.placement.unsettled == frozenset()

        def after(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            if "shard_0002.users" not in statement or not old.info.transaction_status:
                return
            process = session.connection({"shard_id": 0}).scalar(text("select pg_backend_pid()"))
            old.rollback()
            move.await_wait(f"process {process} of")

        event.listen(cluster.engine(cluster.placement.nodes["a"]), "after_cursor_execute", after)
        with pytest.raises(RowsUnsettled):
            ask(session)
        session.rollback()
        assert move.outcome() == "moved"
        assert re.search(
            r'on node "a" is open since before the move: .* idle in transaction, since 20', waits
        )
        assert rows_of(nodes, TARGET, tenant) == before
        assert_once(nodes, name, tenant)
        assert tenant in session.scalars(select(User.tenant_id)).all()


def test_a_role_that_sees_no_statistics_waits_for_transactions(
    nodes: TwoNodes, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pg_stat_activity hides from it when the transactions of others began, and their kind."""
    tenant = new_tenant(nodes, name)
    for node in "ab":
        with nodes.connected(node) as connection:
            connection.execute(
                "create role app login password 'p'; create role keeper; grant postgres to keeper"
            )
    with psycopg.connect(nodes.servers["a"].url(), user="app", password="p") as old:
        monkeypatch.setenv("PGOPTIONS", "-c role=keeper")
        catalog = Catalog(nodes.catalog_url)
        pid = old.info.backend_pid
        old.execute("select 1")
        query = f"select xact_start, backend_type from pg_stat_activity where pid = {pid}"
        with closing(catalog), nodes.connected("a") as hidden:
            assert hidden.execute(query).fetchall() == [(None, None)]
            move = Move(nodes, name, catalog=catalog)
            waits = move.await_wait(f"process {pid} of")
            old.rollback()
            assert move.outcome() == "moved"
        assert waits == (
            f'a transaction on node "a" is open since before the move: process {pid} of role "app"'
        )
    monkeypatch.delenv("PGOPTIONS")
    assert_once(nodes, name, tenant)


def test_a_statement_that_waited_for_a_connection_during_a_switch_is_refused(
    nodes: TwoNodes, name: str
) -> None:
    tenant = new_tenant(nodes, name)
    found: list[Any] = []
    with shardids.Cluster.connect(nodes.catalog_url, pool_size=1, max_overflow=0) as cluster:

        def ask() -> Any:
            with cluster.sharded_session() as session:
                rows = session.execute(select(User.id, User.tenant_id))
                return [id_ for id_, owner in rows if owner == tenant]

        assert len(ask()) == 20
        pool: Any = cluster.engine(cluster.placement.nodes["b"]).pool
        only = pool.connect()

        def at_switch(event: Event) -> None:
            if event == StepDone(step="switch"):
                only.close()
                found.append(asking.exception(60) or asking.result())

        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask)
            move = Move(nodes, name, at_switch)
            assert move.outcome() == "moved"
        assert [type(one) for one in found] == [RowsUnsettled]
        assert len(ask()) == 20


def test_statements_are_answered_while_a_reader_keeps_the_barrier_of_removed_rows(
    nodes: TwoNodes, name: str
) -> None:
    tenant, s = new_tenant(nodes, name), schema(home(nodes, name))
    with nodes.connected("b") as reader, shardids.Cluster.connect(nodes.catalog_url) as cluster:

        def at_settled(event: Event) -> None:
            if event == StepDone(step="settle"):
                reader.execute("begin")
                reader.execute(f"select from {s}.users")

        # From here on it listens.
        assert cluster.placement.unsettled == frozenset()
        move = Move(nodes, name, at_settled)
        assert move.await_wait(f"transactions read or write table {s}.users")
        with cluster.sharded_session() as session:
            assert list(session.scalars(select(User.tenant_id))).count(tenant) == 20
        reader.rollback()
        assert move.outcome() == "moved"
    assert_once(nodes, name, tenant)


def test_a_statement_over_all_shards_sends_one_statement_to_each(nodes: TwoNodes) -> None:
    with (
        shardids.Cluster.connect(nodes.catalog_url) as cluster,
        cluster.sharded_session() as session,
        statements(cluster) as sent,
    ):
        change_all(session)
        assert len(sent) == SHARDS
        sent.clear()
        read_locked(session)
        assert len(sent) == len(nodes.servers)
