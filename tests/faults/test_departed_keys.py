"""A shard that many keys have left: it refuses each of them for good, wherever it goes itself."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from shardids import Cluster, mover, tenants
from shardids.catalog.keys.copies import bring_homes
from shardids.catalog.keys.homes import drop_home, put_home
from shardids.errors import MoveRefused, ShardBusy
from shardids.mover import failover
from shardids.tenants import examining
from shardids.watch import doctor
from tests.support.moves import TwoNodes, schema
from tests.support.standbys import standby_of
from tests.support.tenants import (
    CHOICES,
    QUICK,
    assert_once,
    home,
    neighbour_in,
    new_tenant,
    nodes_with_tables,
)
from tests.support.waiting import wait_for

SHARDS = 4
LEFT, TARGET = 3, 0
"""A shard of node b that keys have left, and one of node a where they live."""


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with nodes_with_tables(SHARDS) as nodes:
        yield nodes


def depart(nodes: TwoNodes, count: int, first: int = 1_000_000) -> list[str]:
    """Lets keys leave a shard by the engine's own functions, as moves do; they have no rows."""
    names = [neighbour_in(nodes, LEFT) for _ in range(count)]
    table = f"{schema(LEFT)}.tenants"
    with nodes.connected(nodes.catalog.node_of(LEFT).name) as connection:
        for number, name in enumerate(names, start=first):
            is_old, is_new = (
                sql.SQL("{} = {}").format(sql.Identifier(row, "name"), sql.Literal(name)).as_string()
                for row in ("old", "new")
            )
            connection.execute("select shardids.make_gate(%s)", [number])
            connection.execute(
                "select shardids.guard_key(%s, 0, %s::regclass, %s, %s, %s, %s, true, '{id}', true)",
                [number, table, TARGET, name, is_old, is_new],
            )
            connection.execute("select shardids.unguard_key(%s, %s::regclass, true)", [number, table])
            connection.execute("select shardids.forget_key(%s)", [number])
    for name in names:
        put_home(nodes.catalog, "text", name, TARGET)
    bring_homes(nodes.catalog)
    return names


def assert_departed(nodes: TwoNodes, names: list[str]) -> None:
    """The old shard refuses the keys, takes others, and clients and SQL go to the new one."""
    with Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        assert {cluster.at(key=name).number for name in names} == {TARGET}
    node = nodes.catalog.node_of(LEFT).name
    with nodes.connected(node) as connection:
        for name in names:
            with pytest.raises(psycopg.Error, match=f"has moved to shard {TARGET}") as refused:
                connection.execute(f"insert into {schema(LEFT)}.tenants (name) values (%s)", [name])
            assert refused.value.sqlstate == "SI017"
            found = connection.execute("select shardids.home_of('text', %s)", [name]).fetchone()
            assert found == (TARGET,)
        connection.execute(f"insert into {schema(LEFT)}.tenants (name) values ('another')")
        connection.execute(f"delete from {schema(LEFT)}.tenants where name = 'another'")
    assert doctor.examine(nodes.catalog, ["directory-copy", "key-homeless"]).findings == ()


def test_a_shard_with_fifty_exceptions_is_moved(nodes: TwoNodes) -> None:
    names = depart(nodes, 50)
    assert_departed(nodes, names)
    assert mover.move(nodes.catalog, LEFT, "a").outcome == "moved"
    assert_departed(nodes, names)
    assert mover.move(nodes.catalog, TARGET, "b").outcome == "moved"
    assert_departed(nodes, names)
    assert mover.move(nodes.catalog, LEFT, "b", back=True).outcome == "moved"
    assert_departed(nodes, names)


def test_a_shard_with_fifty_exceptions_fails_over(nodes: TwoNodes) -> None:
    """One of them has rows, and comes back to the promoted standby."""
    names = depart(nodes, 49)
    whale = neighbour_in(nodes, LEFT)
    tenant = new_tenant(nodes, whale)
    tenants.move(nodes.catalog, whale, TARGET, CHOICES, options=QUICK)
    with standby_of(nodes.servers["b"]) as standby:
        with nodes.connected("b") as primary, psycopg.connect(standby.url(), autocommit=True) as copy:
            has_it = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            written = primary.execute("select pg_current_wal_flush_lsn()::text").fetchone()
            wait_for(lambda: copy.execute(has_it, written).fetchone() == (True,), "the standby has it all")
            nodes.servers["b"].kill()
            copy.execute("select pg_promote()")
        nodes.servers["b"] = standby
        failover.replace_node(nodes.catalog, "b", standby.url())
        assert_departed(nodes, [*names, whale])
        assert_once(nodes, whale, tenant)
        assert tenants.move(nodes.catalog, whale, options=QUICK, back=True).target == LEFT
        assert_once(nodes, whale, tenant)
        assert home(nodes, whale) == LEFT
        assert_departed(nodes, names)


def test_a_node_is_lost_while_a_key_leaves_it(nodes: TwoNodes) -> None:
    """Its mover stopped before the switch: the promoted standby has the key, and the move goes on."""
    whale = neighbour_in(nodes, LEFT)
    tenant = new_tenant(nodes, whale)

    def stop(event: tenants.Event) -> None:
        if event == tenants.StepDone(step="copy"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tenants.move(nodes.catalog, whale, TARGET, CHOICES, options=QUICK, on_event=stop)
    with standby_of(nodes.servers["b"]) as standby:
        nodes.servers["b"].kill()
        nodes.servers["b"] = standby
        with nodes.connected("b") as promoted:
            promoted.execute("select pg_promote()")
            # As a standby that lacked the lease when it was promoted: the open move keeps the shard.
            promoted.execute("delete from shardids.lease")
        failover.replace_node(nodes.catalog, "b", standby.url())
        with pytest.raises(ShardBusy, match=f"interrupted move of key '{whale}'"):
            mover.move(nodes.catalog, LEFT, "a")
        assert home(nodes, whale) == LEFT
        assert tenants.resume(nodes.catalog, whale, options=QUICK).outcome == "moved"
        assert_once(nodes, whale, tenant)


def test_the_next_after_two_hundred_is_refused_by_name(nodes: TwoNodes) -> None:
    """Those that have left stay refused; writers of others pass all of the conditions."""
    whale = neighbour_in(nodes, LEFT)
    new_tenant(nodes, whale)
    names = depart(nodes, examining.MOST_GUARDS)
    assert_departed(nodes, [names[0], names[-1]])
    with pytest.raises(MoveRefused, match=f"table tenants refuses {examining.MOST_GUARDS} keys already"):
        tenants.move(nodes.catalog, whale, TARGET, CHOICES, options=QUICK)
    # More than that can come from elsewhere, as with a shard that an older version has moved.
    more = depart(nodes, 5, first=2_000_000)
    assert_departed(nodes, more)
    with nodes.connected(nodes.catalog.node_of(LEFT).name) as connection:
        for number in range(1_000_000, 1_000_000 + 6):
            connection.execute(
                "select shardids.unguard_key(%s, %s::regclass, false)", [number, f"{schema(LEFT)}.tenants"]
            )
    for name in names[:6]:
        drop_home(nodes.catalog, "text", name)
    assert tenants.move(nodes.catalog, whale, TARGET, CHOICES, options=QUICK).outcome == "moved"
