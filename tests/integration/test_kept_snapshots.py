"""Transactions that keep the snapshot of their first statement on a node, while rows move to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

import shardids
from shardids import mover, tenants
from shardids.errors import RowsUnsettled, ShardMoved
from shardids.replication.steps import Event, StepDone
from tests.integration.test_routing import statements
from tests.integration.test_tenant_move_fan_out import Tenant, User
from tests.support.moves import TwoNodes
from tests.support.tenants import CHOICES, QUICK, neighbour_in, new_tenant, nodes_with_tables
from tests.support.waiting import wait_for

SHARDS = 6
TARGET = 1
"""A shard of node a that tenants move to."""
NEIGHBOUR, FAR = 2, 4
"""A shard of node a, and one of node b."""
MOVING = 0
"""The shard that moves between the nodes."""

KEEPING = ("REPEATABLE READ", "SERIALIZABLE")


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with nodes_with_tables(SHARDS) as nodes:
        yield nodes


@contextmanager
def opened(nodes: TwoNodes, isolation: str) -> Iterator[tuple[shardids.Cluster, Session]]:
    with (
        shardids.Cluster.connect(nodes.catalog_url, isolation_level=isolation) as cluster,
        cluster.sharded_session() as session,
    ):
        # From here on it listens.
        assert cluster.placement.unsettled == frozenset()
        yield cluster, session


def look(session: Session, shard: int) -> None:
    """Take the snapshot of the shard's node; no table is locked."""
    session.execute(text("select 1"), bind_arguments={"shard_id": shard})


def move_key(
    nodes: TwoNodes, cluster: shardids.Cluster, name: str, step: str, then: Callable[[], None]
) -> None:
    """Move a tenant, call ``then`` after a step, and wait until the cluster has heard of the end."""

    def heard(event: Event) -> None:
        if event == StepDone(step=step):
            then()

    done = tenants.move(nodes.catalog, name, TARGET, CHOICES, options=QUICK, on_event=heard)
    assert done.outcome == "moved"
    version = nodes.catalog.placement().version
    wait_for(lambda: cluster.placement.version == version, "the cluster has heard of the end of the move")


def of_all(session: Session, tenant: int) -> int:
    return list(session.scalars(select(User.tenant_id))).count(tenant)


def of_named(session: Session, tenant: int) -> int:
    return list(
        session.scalars(select(User.tenant_id).where(User.tenant_id.in_([tenant, tenant + 1])))
    ).count(tenant)


@pytest.mark.parametrize("isolation", KEEPING)
@pytest.mark.parametrize(
    ("source", "step", "first"),
    [
        # Twice: the snapshot of the source has the rows still.
        (FAR, "announce", FAR),
        # Nowhere: the snapshot of the target does not have them yet.
        (FAR, "announce", TARGET),
        # Twice, by one snapshot of both.
        (NEIGHBOUR, "switch", TARGET),
    ],
)
def test_a_kept_snapshot_of_the_time_before_a_key_had_moved_is_not_asked_after_it(
    nodes: TwoNodes, source: int, step: str, first: int, isolation: str
) -> None:
    name = neighbour_in(nodes, source)
    tenant = new_tenant(nodes, name)
    with opened(nodes, isolation) as (cluster, session):
        move_key(nodes, cluster, name, step, lambda: look(session, first))
        for _ in range(2):
            with pytest.raises(RowsUnsettled, match="after this transaction began"):
                of_all(session, tenant)
        with pytest.raises(RowsUnsettled):
            session.execute(update(User).values(name=User.name + "!"))
        if step == "announce":
            # After the switch one shard has all rows of the key.
            with pytest.raises(RowsUnsettled):
                session.scalars(select(Tenant.id).where(Tenant.name == name)).all()
        session.rollback()
        assert session.scalars(select(Tenant.id).where(Tenant.name == name)).all() == [tenant]
        assert of_all(session, tenant) == 20


def test_a_transaction_that_keeps_no_snapshot_goes_on_after_a_move(nodes: TwoNodes) -> None:
    name = neighbour_in(nodes, FAR)
    tenant = new_tenant(nodes, name)
    with opened(nodes, "READ COMMITTED") as (cluster, session):
        move_key(nodes, cluster, name, "announce", lambda: look(session, TARGET))
        assert of_all(session, tenant) == 20
        with statements(cluster) as sent:
            assert of_all(session, tenant) == 20
            assert len(sent) == 2


def test_a_kept_snapshot_is_asked_after_moves_that_do_not_concern_it(nodes: TwoNodes) -> None:
    name = neighbour_in(nodes, NEIGHBOUR)
    tenant = new_tenant(nodes, name)
    with opened(nodes, "REPEATABLE READ") as (cluster, session):
        look(session, FAR)
        here = nodes.catalog.placement().node_of[MOVING]
        move_shard(nodes, cluster, MOVING, "b" if here == "a" else "a")
        assert session.scalars(select(Tenant.id).where(Tenant.name == name)).all() == [tenant]
        assert of_named(session, tenant) == 20


def move_shard(nodes: TwoNodes, cluster: shardids.Cluster, shard: int, to: str) -> None:
    mover.move(nodes.catalog, shard, to, back=True)
    version = nodes.catalog.placement().version
    wait_for(lambda: cluster.placement.version == version, "the cluster has heard of the move")


@pytest.mark.parametrize("isolation", KEEPING)
@pytest.mark.parametrize("is_first", ["source", "target"])
def test_a_kept_snapshot_of_the_time_before_a_shard_had_moved_is_not_asked_about_it(
    nodes: TwoNodes, is_first: str, isolation: str
) -> None:
    name = neighbour_in(nodes, MOVING)
    tenant = new_tenant(nodes, name)
    here = nodes.catalog.placement().node_of[MOVING]
    there = "b" if here == "a" else "a"
    with opened(nodes, isolation) as (cluster, session):
        look(session, FAR if (here if is_first == "source" else there) == "b" else NEIGHBOUR)
        move_shard(nodes, cluster, MOVING, there)
        asks: tuple[Callable[[], object], ...] = (
            lambda: of_all(session, tenant),
            lambda: session.scalars(select(Tenant.id).where(Tenant.name == name)).all(),
            lambda: session.execute(update(User).values(name=User.name + "!")),
        )
        for ask in asks:
            with pytest.raises(
                ShardMoved, match=f'shard {MOVING} moved from node "{here}" to node "{there}"'
            ):
                ask()
        session.rollback()
        assert of_all(session, tenant) == 20
