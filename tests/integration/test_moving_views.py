"""Views over all shards follow a shard that moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shardids import mover, views
from shardids.cli import app
from shardids.dev.embedded import temporary_servers
from shardids.errors import BadArgument, MoveRefused, StatementFailed
from shardids.install import provision
from tests.support.moves import TwoNodes, two_nodes

TABLE = """
    create table {s}.photos (id bigint primary key default {s}.next_id(), title text);
    insert into {s}.photos (title) select 'photo ' || n from generate_series(1, 10) n"""
SHARDS = 4
ROWS = "select shard, count(*) from shardids_views.photos group by 1 order by 1"


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Shards 0 and 1 on a, 2 and 3 on b, and a view of their photos on a."""
    with temporary_servers(2, settings={"log_statement": "ddl"}) as servers:
        nodes = two_nodes(servers, SHARDS)
        for shard in range(SHARDS):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(TABLE.replace("{s}", f"shard_{shard:04}"))
        views.create(nodes.catalog, "photos", table="photos", node="a", store_password=True)
        yield nodes
        nodes.catalog.close()


def shown(nodes: TwoNodes) -> list[tuple[int, int]]:
    with nodes.connected("a") as connection:
        return connection.execute(ROWS).fetchall()


def add_photo(nodes: TwoNodes, shard: int) -> None:
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        connection.execute(f"insert into shard_{shard:04}.photos (title) values ('new')")


def run(nodes: TwoNodes, *words: str) -> Result:
    environment = {"SHARDIDS_CATALOG": nodes.catalog_url, "COLUMNS": "200"}
    return CliRunner().invoke(app, [*words], env=environment, prog_name="shardids")


@pytest.mark.long
def test_a_view_shows_what_is_written_after_a_move_and_after_the_way_back(nodes: TwoNodes) -> None:
    with nodes.connected("a") as connection:
        before = connection.execute("select * from shardids_views.photos order by id").fetchall()
    for shard, to in ((0, "b"), (1, "b"), (3, "a"), (2, "a"), (0, "a"), (3, "b")):
        done = mover.move(nodes.catalog, shard, to, back=True, options=mover.Options(offline=shard == 1))
        assert done.stale_views == ()
        with nodes.connected("a") as connection:
            assert connection.execute("select * from shardids_views.photos order by id").fetchall() == before
        add_photo(nodes, shard)
        with nodes.connected("a") as connection:
            after = connection.execute("select * from shardids_views.photos order by id").fetchall()
        assert len(after) == len(before) + 1
        before = after
    purged = mover.purge(nodes.catalog, range(SHARDS))
    assert {copy.shard for copy in purged} == {1, 2, 3, 0}
    assert shown(nodes) == [(0, 12), (1, 11), (2, 11), (3, 12)]


@pytest.mark.long
def test_moves_at_once_leave_the_view_right(nodes: TwoNodes) -> None:
    done = run(nodes, "shard", "move", "0-1", "--to", "b", "--jobs", "2", "--json")
    assert done.exit_code == 0, done.stderr
    assert "Warning" not in done.stderr
    assert [row["stale"] for row in views.listed(nodes.catalog)] == [0]
    assert shown(nodes) == [(shard, 10) for shard in range(SHARDS)]


def spoil(nodes: TwoNodes) -> Callable[[], None]:
    """Takes a column of the table away in a shard, so that no view can be made; what gives it back."""

    def alter(change: str) -> None:
        with nodes.connected("b") as connection:
            connection.execute(f"alter table shard_0003.photos {change}")

    alter("add note text")
    return lambda: alter("drop column note")


@pytest.mark.long
def test_a_view_that_can_not_be_refreshed_does_not_fail_the_move(nodes: TwoNodes) -> None:
    mend = spoil(nodes)
    moved = run(nodes, "shard", "move", "0", "--to", "b", "--json")
    assert moved.exit_code == 0
    assert json.loads(moved.stdout)[0]["outcome"] == "moved"
    assert 'Warning: view "photos" on node "a" still reads shards where they were: ' in moved.stderr
    assert "when that is repaired: shardids view refresh photos" in moved.stderr
    # It would go with the copy that it reads.
    with pytest.raises(
        StatementFailed, match=r"view shardids_views\.photos still reads the old copy of shard 0"
    ):
        mover.purge(nodes.catalog, [0])
    with pytest.raises(MoveRefused, match=r"still reads the old copy of shard 0\n.*view refresh photos"):
        mover.move(nodes.catalog, 0, "a", back=True)
    assert shown(nodes)[0] == (0, 10)
    mend()
    add_photo(nodes, 0)
    purged = run(nodes, "shard", "purge", "0", "--yes")
    assert purged.exit_code == 0, purged.stderr
    assert shown(nodes)[0] == (0, 11)


FORBIDDING = """
    create function forbid() returns event_trigger language plpgsql as 'begin raise ''not now''; end';
    create event trigger forbid on ddl_command_start when tag in ('CREATE USER MAPPING')
    execute function forbid()"""


def test_no_password_comes_into_a_log(nodes: TwoNodes) -> None:
    with nodes.connected("b") as connection:
        password = connection.info.password
    with nodes.connected("a") as connection:
        views.drop(nodes.catalog, "photos")
        connection.execute(FORBIDDING)
        with pytest.raises(StatementFailed, match="not now"):
            views.create(nodes.catalog, "photos", table="photos", node="a", store_password=True)
        connection.execute("drop event trigger forbid")
        views.create(nodes.catalog, "photos", table="photos", node="a", store_password=True)
        stored = connection.execute("select umoptions::text from pg_user_mappings").fetchall()
    assert password in stored[0][0]
    log = nodes.servers["a"].log_file.read_text()
    assert "create server" in log
    assert "not now" in log
    assert password not in log


def test_a_node_that_asks_for_no_password_comes_to_a_view_without_one(nodes: TwoNodes) -> None:
    server = nodes.servers["b"]
    with nodes.connected("b") as connection:
        connection.execute("create database trusting")
        rules = server.data_directory / "pg_hba.conf"
        lines = "host trusting all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n"
        rules.write_text(lines + rules.read_text())
        connection.execute("select pg_reload_conf()")
    url = f"postgresql://postgres@127.0.0.1:{server.port}/trusting"
    provision.add_node(nodes.catalog, "c", url)
    assert mover.move(nodes.catalog, 2, "c").stale_views == ()
    assert shown(nodes) == [(shard, 10) for shard in range(SHARDS)]
    with pytest.raises(BadArgument, match=r'node "c" was logged in to without a password'):
        views.refresh(nodes.catalog, "photos", store_password=True)
