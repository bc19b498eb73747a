"""Reference tables when servers are lost, promoted, or can't be reached."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.engine import make_url

from shardids import mover
from shardids.catalog.topology import Node
from shardids.errors import ReferencesBehind, ShardidsError
from shardids.mover import failover
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.tables import references
from shardids.tables.references import following, state
from shardids.watch import doctor
from tests.conftest import dsn
from tests.support.clusters import command
from tests.support.proxy import Proxy
from tests.support.referring import Country, Nodes, nodes_at
from tests.support.replicas import deafen
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for


@pytest.fixture
def servers() -> Iterator[dict[str, EmbeddedServer]]:
    with temporary_servers(3) as servers:
        yield dict(zip("abc", servers, strict=True))


@pytest.fixture
def nodes(servers: dict[str, EmbeddedServer]) -> Iterator[Nodes]:
    urls = {name: make_url(server.url()).set(drivername="postgresql") for name, server in servers.items()}
    with nodes_at(urls) as nodes:
        yield nodes


def test_a_reader_is_lost_and_its_standby_lacks_rows(
    nodes: Nodes, servers: dict[str, EmbeddedServer]
) -> None:
    with standby_of(servers["c"]) as standby:
        deafen(servers["c"], standby)
        nodes.write(Country(code="IT", name="Italy"))
        servers["c"].kill()
        with (
            pytest.raises(ReferencesBehind, match='node "c"'),
            nodes.cluster.reference_session(wait=True, within_s=0.5) as session,
            session.begin(),
        ):
            session.add(Country(code="ES", name="Spain"))
        with pytest.raises(ShardidsError, match='"c"'):
            references.delete_row(nodes.catalog, "countries", ["FR"])
        assert "FR" in nodes.codes("a")
        assert "FR" in nodes.codes("b")
        with psycopg.connect(standby.url(), autocommit=True) as promoted:
            promoted.execute("select pg_promote()")
        done = command("node", "replace", "c", "--url", standby.url(), **nodes.environment)
        assert (done.returncode, done.stderr) == (0, "")
        nodes.urls["c"] = make_url(standby.url()).set(drivername="postgresql")
        assert nodes.codes("c") == nodes.codes("a") == nodes.codes("b")
        nodes.cluster.refresh()
        nodes.write(Country(code="PT", name="Portugal"))
        assert "PT" in nodes.codes("c")
        references.delete_row(nodes.catalog, "countries", ["PT"])
        assert references.repair(nodes.catalog) == []


def test_a_writer_that_crashes_sends_no_row_again_that_a_node_was_given(
    nodes: Nodes, servers: dict[str, EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that crashes forgets how far a slot was advanced since its last checkpoint."""
    with nodes.connected("c") as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute("delete from shardids_ref.countries where code = 'FR'")
    read = following._read

    def read_later(*arguments: Any) -> Any:
        # After the slot was made, before its rows are read: it is among these, and is not to be sent again.
        with nodes.cluster.reference_session() as session, session.begin():
            session.add(Country(code="NO", name="Norway"))
        return read(*arguments)

    monkeypatch.setattr(following, "_read", read_later)
    assert references.repair(nodes.catalog) != []
    monkeypatch.undo()
    servers["a"].kill()
    servers["a"].start(attached=True)
    with nodes.connected("a") as connection:
        connection.execute("insert into shardids_ref.countries (code, name) values ('SE', 'Sweden')")
    wait_for(lambda: "SE" in nodes.codes("c"), "node c follows the writer")
    assert nodes.codes("c") == nodes.codes("a")


def test_the_writer_is_lost_and_its_standby_lacks_rows(servers: dict[str, EmbeddedServer]) -> None:
    """What nobody refers to is given up; what rows refer to is named, and kept until it is decided."""
    urls = {name: make_url(server.url()).set(drivername="postgresql") for name, server in servers.items()}
    with standby_of(servers["a"]) as standby, nodes_at(urls) as nodes:
        # The catalog is lost with the writer, and is on its standby.
        with psycopg.connect(standby.url(), autocommit=True) as copy:
            wait_for(
                lambda: (
                    copy.execute("select to_regclass('shardids_ref.countries')").fetchone()[0]
                    and copy.execute("select count(*) from shardids_ref.countries").fetchone() == (2,)
                ),
                "the standby to have the tables",
            )
        deafen(servers["a"], standby)
        nodes.write(Country(code="IT", name="Italy"), Country(code="ES", name="Spain"))
        users = f"shard_{nodes.shard_on('b'):04}.users"
        with nodes.connected("b") as connection:
            connection.execute(f"insert into {users} (name, country_code) values ('ann', 'IT')")
        servers["a"].kill()
        with psycopg.connect(standby.url(), autocommit=True) as promoted:
            promoted.execute("select pg_promote()")
            with pytest.raises(psycopg.Error, match="countries takes no writes: this server was promoted"):
                promoted.execute("insert into shardids_ref.countries values ('XX', 'x')")
        done = command("node", "replace", "a", "--url", standby.url(), SHARDIDS_CATALOG=standby.url())
        assert done.returncode == 0, done.stderr
        assert f"rows of {users} refer to a row of reference table countries" in done.stderr
        nodes.urls["a"] = make_url(standby.url()).set(drivername="postgresql")
        assert nodes.codes("c") == nodes.codes("a") == ["DE", "FR"]
        assert nodes.codes("b") == ["DE", "ES", "FR", "IT"]
        with nodes.connected("a") as connection:
            connection.execute("insert into shardids_ref.countries values ('IT', 'Italy')")
        repaired = command("reference", "repair", SHARDIDS_CATALOG=standby.url())
        assert repaired.returncode == 0, repaired.stderr
        assert nodes.codes("a") == nodes.codes("b") == nodes.codes("c") == ["DE", "FR", "IT"]


def test_a_former_writer_whose_standby_has_not_heard_of_it_takes_no_writes(
    nodes: Nodes, servers: dict[str, EmbeddedServer]
) -> None:
    references.move_writer(nodes.catalog, "c")
    with standby_of(servers["c"]) as standby:
        deafen(servers["c"], standby)
        references.move_writer(nodes.catalog, "a")
        nodes.cluster.refresh()
        nodes.write(Country(code="IT", name="Italy"))
        servers["c"].kill()
        with psycopg.connect(standby.url(), autocommit=True) as promoted:
            promoted.execute("select pg_promote()")
            with pytest.raises(psycopg.Error, match=r'was promoted, .* since node "c" became the writer'):
                promoted.execute("update shardids_ref.countries set name = 'x'")
            failover.replace_node(nodes.catalog, "c", standby.url(), with_references=True)
            with pytest.raises(psycopg.Error, match='is written to on node "a" alone'):
                promoted.execute("update shardids_ref.countries set name = 'x'")
        nodes.urls["c"] = make_url(standby.url()).set(drivername="postgresql")
        assert [(one.node, one.error) for one in references.repair(nodes.catalog)] == [("c", "")]
        assert nodes.codes("c") == nodes.codes("a")


def test_a_writer_is_lost_while_it_is_moved_and_its_standby_has_no_shard_as_it_was(
    nodes: Nodes, servers: dict[str, EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    references.move_writer(nodes.catalog, "c")
    shards = sorted(s for s, node in nodes.catalog.placement().node_of.items() if node == "c")
    with standby_of(servers["c"]) as standby:
        deafen(servers["c"], standby)
        for shard in shards:
            mover.move(nodes.catalog, shard, "a")
            mover.purge(nodes.catalog, [shard])
            mover.move(nodes.catalog, shard, "c")
        with monkeypatch.context() as patch:
            patch.setattr("shardids.tables.references.moving._turn", interrupt)
            with pytest.raises(KeyboardInterrupt):
                references.move_writer(nodes.catalog, "b")
        servers["c"].kill()
        with psycopg.connect(standby.url(), autocommit=True) as promoted:
            promoted.execute("select pg_promote()")
        arguments = ("node", "replace", "c", "--url", standby.url())
        refused = command(*arguments, **nodes.environment)
        assert "has no shard of node" in refused.stderr
        accepting = ("--accept-loss", ",".join(map(str, shards)), "--yes")
        done = command(*arguments, *accepting, **nodes.environment)
        assert done.returncode == 0, done.stderr
        nodes.urls["c"] = make_url(standby.url()).set(drivername="postgresql")
        owners = nodes.catalog.placement().node_of
        assert [owners[shard] for shard in shards] == ["a"] * len(shards)
        nodes.cluster.refresh()
        nodes.write(Country(code="IT", name="Italy"))
        assert nodes.codes("a") == nodes.codes("b") == nodes.codes("c") == ["DE", "FR", "IT"]
        assert references.status(nodes.catalog)[0].node == "c"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_old_files_of_a_former_writer_in_its_place_are_found_and_closed(
    nodes: Nodes, servers: dict[str, EmbeddedServer], tmp_path: Path
) -> None:
    """To PostgreSQL they are the same server: it takes writes until a command has seen it."""
    references.move_writer(nodes.catalog, "c")
    servers["c"].stop()
    data = servers["c"].data_directory
    subprocess.run(["cp", "-a", data, tmp_path / "old"], check=True)
    servers["c"].restart()
    references.move_writer(nodes.catalog, "a")
    servers["c"].stop()
    shutil.rmtree(data)
    subprocess.run(["cp", "-a", tmp_path / "old", data], check=True)
    servers["c"].restart()
    (found,) = doctor.examine(nodes.catalog, ["reference-writer"]).findings
    assert found.nodes == ("c",)
    with nodes.connected("c") as connection:
        connection.execute("insert into shardids_ref.countries values ('XX', 'lost')")
        failover.replace_node(nodes.catalog, "c", dsn(nodes.urls["c"]), with_references=True)
        with pytest.raises(psycopg.Error, match='is written to on node "a" alone'):
            connection.execute("insert into shardids_ref.countries values ('XY', 'refused')")
    assert [(one.node, one.error) for one in references.repair(nodes.catalog)] == [("c", "")]
    assert nodes.codes("c") == nodes.codes("a") == ["DE", "FR"]


def test_a_commit_whose_writer_dies_before_others_have_confirmed_it_says_so(
    nodes: Nodes, servers: dict[str, EmbeddedServer]
) -> None:
    references.move_writer(nodes.catalog, "c")
    nodes.cluster.refresh()
    with nodes.cluster.reference_session(wait=True) as session:
        session.add(Country(code="IT", name="Italy"))
        event.listen(session, "after_commit", lambda _: servers["c"].kill())
        with pytest.raises(ReferencesBehind, match='committed on node "c", which was lost before'):
            session.commit()


def test_a_node_that_falls_silent_stops_no_writer_and_follows_again(
    nodes: Nodes, servers: dict[str, EmbeddedServer]
) -> None:
    with Proxy(servers["a"].port) as proxy:
        # Node c follows through the proxy.
        through = nodes.urls["a"].set(host="127.0.0.1", port=proxy.port)
        nodes.catalog.point_node(Node(name="a", url=through.render_as_string(hide_password=False)))
        with nodes.connected("c") as connection:
            (name,) = connection.execute("select subname from pg_subscription").fetchone()
            connection.execute(f"alter subscription {name} disable")
        assert [one.node for one in references.repair(nodes.catalog)] == ["c"]
        nodes.catalog.point_node(Node(name="a", url=nodes.urls["a"].render_as_string(hide_password=False)))
        nodes.write(Country(code="IT", name="Italy"))
        proxy.swallow()
        with (
            pytest.raises(ReferencesBehind, match='node "c"'),
            nodes.cluster.reference_session(wait=True, within_s=0.5) as session,
            session.begin(),
        ):
            session.add(Country(code="ES", name="Spain"))
        assert "ES" in nodes.codes("a")
        wait_for(lambda: "ES" in nodes.codes("b"), "the other node to have it")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(state.await_all, "__defaults__", (1.0,))
            with pytest.raises(ReferencesBehind):
                references.delete_row(nodes.catalog, "countries", ["ES"])
        assert "ES" in nodes.codes("b")
        proxy.forward()
        wait_for(lambda: "ES" in nodes.codes("c"), "the silent node to follow again")
        shown = command("reference", "list", "--json", **nodes.environment)
        assert [one["node"] for one in json.loads(shown.stdout)["nodes"]] == ["a", "b", "c"]
        assert references.repair(nodes.catalog) == []
