"""Moves of keys between shards whose node is replaced by a standby that lacks the last transactions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardids import tenants
from shardids.errors import MoveFailed
from shardids.mover import failover
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.tenants import leaving
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.replicas import deafen
from tests.support.standbys import standby_of
from tests.support.tenants import (
    CHOICES,
    QUICK,
    assert_once,
    home,
    make_tables,
    new_tenant,
    other_shard,
    rows_of,
)


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 4)
        make_tables(nodes, 4)
        yield nodes
        nodes.catalog.close()


def on_a(nodes: TwoNodes) -> str:
    """A key that lives on node a."""
    names = (f"tenant {n}" for n in range(100))
    return next(name for name in names if nodes.catalog.node_of(home(nodes, name)).name == "a")


class Stop(BaseException):
    """The end of a mover, as by a kill."""


def test_rows_that_a_promoted_standby_lacks_are_still_in_the_source(nodes: TwoNodes) -> None:
    name = on_a(nodes)
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    before = rows_of(nodes, source, tenant)

    def stop(event: Event) -> None:
        if event == StepDone(step="switch"):
            raise Stop

    with standby_of(nodes.servers["b"]) as standby:
        deafen(nodes.servers["b"], standby)
        with pytest.raises(Stop):
            tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=stop)
        assert home(nodes, name) == target
        nodes.servers["b"].kill()
        nodes.servers["b"] = standby  # type: ignore[assignment]
        with nodes.connected("b") as connection:
            connection.execute("select pg_promote()")
        done = failover.replace_node(nodes.catalog, "b", standby.url())
        assert done.lost == ()
        (line,) = done.open_key_moves
        assert f"key {name!r} from shard {source} to {target} is not over" in line
        with pytest.raises(MoveFailed, match='node "b" lacks the rows of key') as failed:
            tenants.resume(nodes.catalog, name, options=QUICK)
        assert f"shardids tenant move '{name}' --abort" in str(failed.value.hint)
        assert rows_of(nodes, source, tenant) == before
        # Somebody signs up again meanwhile.
        with nodes.connected("b") as connection:
            connection.execute(f"insert into {schema(target)}.tenants (name) values (%s)", [name])
            with pytest.raises(MoveFailed, match="1 rows of the key were made in its table tenants since"):
                tenants.abort(nodes.catalog, name, options=QUICK)
            connection.execute(f"delete from {schema(target)}.tenants")
        assert tenants.abort(nodes.catalog, name, options=QUICK).outcome == "aborted"
        assert home(nodes, name) == source
        assert rows_of(nodes, source, tenant) == before
        assert nodes.catalog.placement().unsettled == frozenset()
        with nodes.connected("a") as connection:
            connection.execute(
                f"insert into {schema(source)}.users (tenant_id, name) values (%s, 'again')", [tenant]
            )
        done_again = tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK)
        assert done_again.outcome == "moved"
        assert assert_once(nodes, name, tenant) == 82


def test_rows_that_are_lost_while_they_are_removed_stay_where_they_are(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "_BATCH", 7)
    name = on_a(nodes)
    tenant, source, target = new_tenant(nodes, name), home(nodes, name), other_shard(nodes, name)
    checked = []
    real = tenants.steps.Actions.has_arrived

    def lose(actions: tenants.steps.Actions) -> bool:
        if removing:
            checked.append(None)
            if len(checked) == 3:
                # As on a server that was promoted without them.
                with nodes.connected("b") as connection:
                    connection.execute("delete from shardids.key_arrival")
        return real(actions)

    removing: list[Event] = []

    def note(event: Event) -> None:
        if event == StepBegun(step="remove"):
            removing.append(event)

    monkeypatch.setattr(tenants.steps.Actions, "has_arrived", lose)
    with pytest.raises(MoveFailed, match=f"shard {source} has only those that were not removed yet"):
        tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=note)
    left = rows_of(nodes, source, tenant)
    assert len(left["photos"]) == 60 - 14
    assert len(left["users"]) == 20
    with pytest.raises(MoveFailed, match=f"shard {source} has only those that were not removed yet"):
        tenants.abort(nodes.catalog, name, options=QUICK)
    (move,) = tenants.open_key_moves(nodes.catalog)
    with nodes.connected("b") as connection:
        connection.execute("insert into shardids.key_arrival (move) values (%s)", [move.id])
    assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert assert_once(nodes, name, tenant) == 81
    with nodes.connected("b") as connection:
        assert connection.execute("select count(*) from shardids.key_arrival").fetchone() == (0,)
