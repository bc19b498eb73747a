"""What the console tells of a cluster, beside what the cluster is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from starlette.testclient import TestClient

from shardids.errors import ClusterConflict, UnsupportedServer
from shardids.ids.layout import DEFAULT, Layout
from shardids.pg import clock
from shardids.watch.console.databases import Databases, SlowFacts, SlowReader
from shardids.watch.console.inspector import look
from shardids.watch.console.unusual import Unusual
from shardids.watch.console.watching import SHARDS_A_SECOND, History, Watcher
from tests.conftest import BlankDatabases, MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected
from tests.support.consoles import browsing, told
from tests.support.waiting import wait_for

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text);
    create table {s}.photos (id bigint primary key default {s}.next_id(), caption text);
    create table {s}.seats (place integer primary key)"""


@pytest.fixture(scope="module")
def cluster(databases: BlankDatabases) -> Iterator[tuple[URL, URL]]:
    """Eight shards, half on node a with the catalog, half on b, with tables."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    for shard in range(8):
        with connected(urls[shard // 4]) as connection:
            connection.execute(TABLES.replace("{s}", f"shard_000{shard}").encode())
    yield urls
    for url in urls:
        databases.give_back(url)


@pytest.fixture(scope="module")
def client(cluster: tuple[URL, URL]) -> Iterator[TestClient]:
    with browsing(cluster[0]) as client:
        yield client


def drawn(cluster: tuple[URL, URL], shard: int, table: str = "photos", count: int = 1) -> list[int]:
    """Writes rows; their IDs."""
    with connected(cluster[shard // 4]) as connection:
        query = f"insert into shard_000{shard}.{table} select from generate_series(1, {count}) returning id"
        return [id_ for (id_,) in connection.execute(query.encode()).fetchall()]


def inspected(client: TestClient, text: str, *, look: bool = True) -> Any:
    answer = client.post("/api/inspect", json={"text": text, "look": look})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_cluster_and_its_nodes(cluster: tuple[URL, URL], client: TestClient) -> None:
    found = told(client, "/api/cluster")
    with catalog_at(cluster[0]) as catalog:
        assert found["placement_version"] == catalog.placement().version
    assert found["shard_count"] == 8
    assert found["layout"]["name"] == "default"
    assert [found["layout"][f"{part}_bits"] for part in ("time", "shard", "sequence")] == [41, 12, 10]
    assert found["catalog"]["up"]
    assert found["catalog"]["dbname"] == cluster[0].database
    assert not found["actions"]
    assert found["todo"]["looked_s"] is None
    assert found["todo"]["entries"] == []
    assert [node["name"] for node in told(client, "/api/nodes")] == ["a", "b"]
    for node in told(client, "/api/nodes"):
        assert node["up"]
        assert node["error"] is None
        assert node["shards"] == {"active": 4}
        assert node["placed"] == 4
        assert 0 < node["connections"] < node["max_connections"]
        assert node["years_left"] > 60
        assert node["in_doubt"] == node["replication_lag_bytes"] == 0
        assert abs(node["clock_skew_s"]) < 1


def test_rates_and_the_map_follow_what_is_drawn(cluster: tuple[URL, URL], client: TestClient) -> None:
    def rate_of_5() -> float:
        drawn(cluster, 5, count=50)
        found = told(client, "/api/map")
        return float(found["ticks_per_s"][5] or 0)

    wait_for(rate_of_5, "a rate of shard 5")
    rates = told(client, "/api/rates")
    assert rates["source"] == "memory"
    assert len(rates["times"]) == len(rates["nodes"]["a"]) == len(rates["nodes"]["b"])
    assert max(rate or 0 for rate in rates["nodes"]["b"]) > 0
    found = told(client, "/api/map")
    assert [found["nodes"][node] for node in found["node"]] == ["a"] * 4 + ["b"] * 4
    assert {found["states"][state] for state in found["state"]} == {"active"}
    assert all(len(found[column]) == 8 for column in ("ticks_per_s", "lead_s", "size_bytes", "lag_bytes"))

    def sizes() -> bool:
        return told(client, "/api/map")["sizes_at"] is not None

    wait_for(sizes, "sizes in the background")
    assert client.post("/api/map", json={}).json().keys() == found.keys()
    assert client.post("/api/map").status_code == 400
    # Keys of three tables, the version table and its key.
    assert min(told(client, "/api/map")["size_bytes"]) >= 5 * 8192


def test_what_is_unusual_in_an_hour_of_readings_is_told(cluster: tuple[URL, URL]) -> None:
    watcher = Watcher(dsn(cluster[0]))
    seen = watcher.look()
    watcher.close()
    history = History()
    for number in range(720):
        rates = dict.fromkeys(range(8), 20.0 + number % 3) | {5: 2000.0}
        history.add(seen.at - 3600 + 5 * number, {"a": 1.0, "b": 1.0}, rates)
    unusual = Unusual()
    unusual.look(seen, history.points(), watcher.interval_s)
    (told_of,) = unusual.values["found"]
    assert (told_of["kind"], told_of["shard"], told_of["node"]) == ("hot shard", 5, "b")
    json.dumps(unusual.values, allow_nan=False)


def test_a_shard(cluster: tuple[URL, URL], client: TestClient) -> None:
    (last,) = drawn(cluster, 6)
    wait_for(
        lambda: (told(client, "/api/shards/6")["highest_id"] or {}).get("id") == str(last), "the highest ID"
    )
    found = told(client, "/api/shards/6")
    decoded = DEFAULT.decode(last)
    assert found["highest_id"]["time"] == decoded.time.timestamp()
    assert found["highest_id"]["sequence"] == decoded.sequence
    assert int("".join(found["highest_id"]["bits"].values()), 2) == last
    assert (found["node"], found["state"], found["schema"]) == ("b", "active", "shard_0006")
    # It was never analyzed.
    assert next(table for table in found["tables"] if table["name"] == "seats")["rows_estimate"] == -1
    assert {"users", "photos", "seats"} <= {table["name"] for table in found["tables"]}
    assert found["size_bytes"] == sum(table["size_bytes"] for table in found["tables"])
    assert (found["moves"], found["errors"]) == ([], [])
    assert len(found["times"]) == len(found["ticks_per_s"])


def test_who_keeps_a_table_locked_is_named_where_its_size_is_missing(
    cluster: tuple[URL, URL], client: TestClient
) -> None:
    with connected(cluster[1]) as holder:
        holder.execute("begin; lock table shard_0006.users in access exclusive mode")
        who = f'shard 6, node "b": table users is locked by process {holder.info.backend_pid} '
        found = told(client, "/api/shards/6")
    assert found["tables"] is None
    assert who in " ".join(found["errors"])


def test_the_highest_id_of_a_shard_is_none_that_it_never_reached(
    cluster: tuple[URL, URL], client: TestClient
) -> None:
    def highest() -> int:
        return int((told(client, "/api/shards/7")["highest_id"] or {"id": 0})["id"])

    (single,) = drawn(cluster, 7)
    wait_for(lambda: highest() == single, "the highest ID")
    with connected(cluster[1]) as connection:
        (block,) = connection.execute("select max(id) from shard_0007.next_ids(5000) id").fetchone() or (0,)
        wait_for(lambda: highest() >= block, "that the block is below it")
        connection.execute("select shardids.fence(7)")
        wait_for(lambda: highest() == 0, "that it is not told of a fenced shard")
        connection.execute("select shardids.activate(7)")
    wait_for(lambda: highest() >= block, "that it is active")
    (again,) = drawn(cluster, 7)
    wait_for(lambda: highest() == again, "the highest ID since")


@pytest.mark.parametrize("number", ["8", "65536", "-1", "x", "1e3", "%00", "٣"])
def test_a_shard_that_there_is_not(client: TestClient, number: str) -> None:
    answer = client.get(f"/api/shards/{number}")
    assert answer.status_code == 404
    assert "shard" in answer.json()["error"]


def test_ids_tell_when_and_where_and_their_rows_are_found(
    cluster: tuple[URL, URL], client: TestClient
) -> None:
    (photo,), (user,) = drawn(cluster, 2), drawn(cluster, 7, "users")
    not_there = DEFAULT.encode(at=DEFAULT.decode(photo).time, shard=2, sequence=1023)
    text = f'GET /photos/{photo}?by="{user}" -- {hex(not_there)}, and words'
    found = inspected(client, text)
    assert [one["id"] for one in found["ids"]] == [str(photo), str(user), str(not_there)]
    first, second, third = found["ids"]
    assert (first["shard"], first["node"], first["table"], first["found"]) == (2, "a", "photos", True)
    assert (second["shard"], second["node"], second["table"], second["found"]) == (7, "b", "users", True)
    assert (third["found"], third["table"], third["note"]) == (False, None, None)
    assert first["time"] == DEFAULT.decode(photo).time.timestamp()
    assert (first["born_on"], first["origin_differs"]) == ("a", False)
    assert int("".join(first["bits"].values()), 2) == photo
    assert sorted(found["shards"]) == [[2, 2], [7, 1]]
    assert sum(found["histogram"]["counts"]) == 3
    assert found["bad"] == []
    assert inspected(client, str(photo), look=False)["ids"][0]["found"] is None


def test_a_row_with_the_same_key_in_two_tables_is_told_of_both(
    cluster: tuple[URL, URL], client: TestClient
) -> None:
    (photo,) = drawn(cluster, 3)
    with connected(cluster[0]) as connection:
        connection.execute("insert into shard_0003.users values (%s, 'ann')", [photo])
    assert inspected(client, str(photo))["ids"][0]["table"] == "photos, users"


def test_ids_that_are_none_of_this_cluster(client: TestClient) -> None:
    born = DEFAULT.decode(1 << 58).time
    future, nowhere = DEFAULT.encode(ms=(1 << 41) - 2, shard=1), DEFAULT.encode(at=born, shard=9)
    found = inspected(client, f"-5 12x {1 << 64} {future} {nowhere} 0x '; drop table users; --1")
    assert [one["id"] for one in found["ids"]] == [str(future), str(nowhere)]
    assert "from the future" in found["ids"][0]["note"]
    assert "no shard 9" in found["ids"][1]["note"]
    assert found["ids"][1]["node"] is None
    assert [one["text"] for one in found["bad"]] == ["12x", str(1 << 64), "0x", "--1", "-5"]
    assert found["bad_count"] == 5
    assert all(one["why"] for one in found["bad"])
    nothing = inspected(client, "12x")
    assert (nothing["ids"], nothing["count"], nothing["histogram"], nothing["bad_count"]) == ([], 0, None, 1)
    assert any("future" in sentence for sentence in found["anomalies"])
    assert sum(found["histogram"]["counts"]) == 1
    assert found["left_out"] == {"future": 1, "far": 0}
    alone = inspected(client, str(future))
    assert (alone["histogram"], alone["left_out"]) == (None, {"future": 1, "far": 0})


def test_many_ids(cluster: tuple[URL, URL], client: TestClient) -> None:
    ids = drawn(cluster, 1, count=20_000)
    found = inspected(client, " ".join(map(str, ids)))
    assert (found["count"], len(found["ids"])) == (20_000, 200)
    assert sum(found["histogram"]["counts"]) == 20_000
    assert all(one["table"] == "photos" for one in found["ids"])
    refused = client.post("/api/inspect", json={"text": "7 " * (1 << 19)})
    assert refused.status_code == 413
    assert client.post("/api/inspect", json={"text": "words alone"}).status_code == 400
    assert client.post("/api/inspect", json={"text": 5}).status_code == 400


def test_names_are_quoted(client: TestClient, cluster: tuple[URL, URL]) -> None:
    (photo,) = drawn(cluster, 0)
    with connected(cluster[0]) as connection:
        connection.execute('alter table shard_0000.photos rename column id to "Odd \'id"')
        try:
            assert inspected(client, str(photo))["ids"][0]["table"] == "photos"
        finally:
            connection.execute('alter table shard_0000.photos rename column "Odd \'id" to id')


def test_doctor_runs_when_it_is_told_to(client: TestClient) -> None:
    assert told(client, "/api/doctor")["state"] == "never"
    assert client.post("/api/doctor", json={}).status_code == 202
    wait_for(lambda: told(client, "/api/doctor")["state"] == "done", "the examination")
    found = told(client, "/api/doctor")
    assert found["checks"] > 60
    assert found["well"] == all(one["severity"] == "info" for one in found["findings"])


def test_ids_are_judged_by_the_clocks_that_made_them(
    cluster: tuple[URL, URL], monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = SimpleNamespace(time=lambda: time.time() - 600, monotonic=time.monotonic)
    monkeypatch.setattr(clock, "time", behind)  # as if the servers were ten minutes ahead of this machine
    now = datetime.now(UTC)
    ids = [DEFAULT.encode(at=now + timedelta(minutes=minutes), shard=1) for minutes in (5, 20)]
    with browsing(cluster[0]) as client:
        assert round(told(client, "/api/cluster")["clock_offset_s"]) == 600
        found = inspected(client, " ".join(map(str, ids)))
    assert found["ids"][0]["note"] is None
    assert "from the future" in found["ids"][1]["note"]
    assert found["left_out"] == {"future": 1, "far": 0}


def test_moves_and_migrations_of_a_cluster_that_had_none(client: TestClient) -> None:
    assert told(client, "/api/moves") == []
    wait_for(lambda: told(client, "/api/migrations")["read_at"], "revisions in the background")
    assert told(client, "/api/migrations") | {"read_at": 0, "running_at": 0} == {
        "read_at": 0,
        "revisions": [{"revision": None, "shards": 8}],
        "errors": [],
        "running": [],
        "running_at": 0,
        "running_error": None,
    }


def test_a_move_that_the_last_reading_does_not_have_is_running(cluster: tuple[URL, URL]) -> None:
    with browsing(cluster[0], interval_s=60.0) as client, connected(cluster[0]) as connection:
        assert told(client, "/api/moves") == []
        wait_for(lambda: len(told(client, "/api/rates")["times"]) == 2, "the second reading")
        connection.execute(
            "insert into shardids_catalog.move (shard, source, target, offline, step)"
            " values (1, 'a', 'b', false, 'copy')"
        )
        try:
            (move,) = told(client, "/api/moves")
        finally:
            connection.execute("delete from shardids_catalog.move")
    assert (move["state"], move["do"]) == ("running", None)


def test_an_id_was_born_where_its_tick_was_drawn(cluster: tuple[URL, URL], client: TestClient) -> None:
    before, after = drawn(cluster, 1, count=2)
    tick = (DEFAULT.decode(before).ms << DEFAULT.sequence_bits) + DEFAULT.decode(before).sequence
    with connected(cluster[0]) as connection:
        # Its clean-up was resumed long after the target had issued IDs.
        connection.execute(
            "insert into shardids_catalog.move"
            " (shard, source, target, offline, step, high_water_tick, ended_at, outcome)"
            " values (1, 'b', 'a', false, 'clean', %s, now() + interval '1 h', 'moved')",
            [tick],
        )
        try:
            found = inspected(client, f"{before} {after}")["ids"]
        finally:
            connection.execute("delete from shardids_catalog.move")
    assert [one["born_on"] for one in found] == ["b", "a"]
    assert [one["origin_differs"] for one in found] == [True, False]


def test_all_viewers_share_one_reading(cluster: tuple[URL, URL]) -> None:
    with browsing(cluster[0], interval_s=60.0) as client, ThreadPoolExecutor(8) as pool:
        pages = ["/api/cluster", "/api/nodes", "/api/rates", "/api/map"] * 10
        assert {answer.status_code for answer in pool.map(client.get, pages)} == {200}
        with connected(cluster[1]) as connection:
            (sessions,) = connection.execute(
                "select count(*) from pg_stat_activity"
                " where datname = current_database() and application_name = 'shardids metrics'"
            ).fetchone() or (0,)
        # Of the module's console and of this one.
        assert sessions <= 2


def test_code_of_a_table_s_owner_does_not_run_as_the_console_s_role(
    cluster: tuple[URL, URL], make_role: MakeRole
) -> None:
    role = make_role().set(database=cluster[0].database)
    (photo,) = drawn(cluster, 0)
    with connected(cluster[0]) as connection:
        for statement in (
            f'grant pg_read_all_data to "{role.username}"',
            "create table shard_0000.traps (id bigint primary key)",
            "create function shard_0000.trap() returns boolean language plpgsql as 'begin raise; end'",
            f"insert into shard_0000.traps values ({photo})",
            "alter table shard_0000.traps enable row level security",
            "create policy trap on shard_0000.traps using (shard_0000.trap())",
        ):
            connection.execute(statement.encode())
        try:
            with browsing(role) as client:
                wait_for(lambda: told(client, "/api/nodes")[0]["up"], "node a")
                found = inspected(client, f"{photo} {photo + 1}")
            (unread,) = found["unread"]
            assert "shard_0000.traps was not looked at" in unread
            assert 'would be affected by row-level security policy for table "traps"' in unread
            assert [one["table"] for one in found["ids"]] == ["photos", None]
            # Where a table was not looked at, a row may be.
            assert [one["found"] for one in found["ids"]] == [True, None]
        finally:
            connection.execute("drop table shard_0000.traps")
            connection.execute("drop function shard_0000.trap")


def test_sizes_are_shown_though_revisions_may_not_be_read(
    cluster: tuple[URL, URL], make_role: MakeRole
) -> None:
    role = make_role().set(database=cluster[0].database)

    def grant(statement: str) -> None:
        for url in cluster:
            with connected(url) as connection:
                connection.execute(statement.format(f'"{role.username}"').encode())

    for url in cluster:
        with connected(url) as connection:
            schemas = [
                name
                for (name,) in connection.execute(
                    "select nspname from pg_namespace where nspname in ('shardids', 'shardids_catalog')"
                )
            ]
            for name in schemas:
                connection.execute(f'grant usage on schema {name} to "{role.username}"'.encode())
                connection.execute(
                    f'grant select on all tables in schema {name} to "{role.username}"'.encode()
                )
    with connected(cluster[1]) as connection:
        connection.execute("create table shard_0007.alembic_version as select 'r1' as version_num")
    try:
        with browsing(role) as client:
            wait_for(lambda: told(client, "/api/map")["sizes_at"], "sizes")
            found = told(client, "/api/map")
            assert min(found["size_bytes"]) > 0
            (error,) = found["sizes_errors"]
            assert "alembic_version of shard 7 was not looked at" in error
            assert "permission denied" in error
        grant("grant pg_read_all_data to {}")
        with browsing(role) as client:
            wait_for(lambda: told(client, "/api/map")["sizes_at"], "sizes")
            assert told(client, "/api/map")["sizes_errors"] == []
            assert told(client, "/api/migrations")["revisions"] == [
                {"revision": None, "shards": 7},
                {"revision": "r1", "shards": 1},
            ]
    finally:
        with connected(cluster[1]) as connection:
            connection.execute("drop table shard_0007.alembic_version")


def test_sizes_wait_for_the_catalog_and_are_not_said_to_be_read_without_a_node(
    cluster: tuple[URL, URL],
) -> None:
    watcher = Watcher(dsn(cluster[0]))
    databases = Databases(dsn(cluster[0]), watcher)
    reader = SlowReader(databases)
    seen = watcher.look()
    assert reader.facts(replace(seen, known=None)) == SlowFacts()
    down = {name: replace(node, up=False) for name, node in seen.nodes.items()}
    watcher._seen = replace(seen, nodes=down)
    reader.facts(seen)
    wait_for(lambda: reader.known.tried_at, "a reading")
    assert reader.known.at is None
    assert reader.known.errors.keys() == {"a", "b"}
    watcher._seen = seen
    assert reader._read(seen).at is not None
    databases.close()
    watcher.close()


def test_negative_ids_are_looked_for_where_there_are_old_ones(cluster: tuple[URL, URL]) -> None:
    watcher = Watcher(dsn(cluster[0]))
    databases = Databases(dsn(cluster[0]), watcher)
    id_ = -(2**63) + (5 << 10)
    with connected(cluster[1]) as connection:
        connection.execute("insert into shard_0005.photos (id) values (%s)", [id_])
        try:
            looked = look(databases, watcher.look(), Layout.parse("42-12-10"), [id_, 7], 1000)
        finally:
            connection.execute("delete from shard_0005.photos where id = %s", [id_])
    assert {one: found.table for one, found in looked.found.items()} == {id_: "photos"}
    databases.close()
    watcher.close()


def test_a_table_in_a_schema_that_may_not_be_used_is_named(
    cluster: tuple[URL, URL], make_role: MakeRole
) -> None:
    role = make_role().set(database=cluster[0].database)
    with connected(cluster[0]) as connection:
        for statement in (
            "grant usage on schema shardids, shardids_catalog to {}",
            "grant select on all tables in schema shardids, shardids_catalog, shard_0000, shard_0001 to {}",
            "grant usage on schema shard_0000 to {}",
        ):
            connection.execute(statement.format(f'"{role.username}"').encode())
    (there,), (hidden,) = drawn(cluster, 0), drawn(cluster, 1)
    with browsing(role) as client:
        wait_for(lambda: told(client, "/api/nodes")[0]["up"], "node a")
        found = inspected(client, f"{there} {hidden}")
    assert [one["found"] for one in found["ids"]] == [True, None]
    assert any(
        "shard_0001.photos was not looked at" in one and "permission denied for schema" in one
        for one in found["unread"]
    )


def test_a_statement_for_a_viewer_can_t_write(cluster: tuple[URL, URL]) -> None:
    watcher = Watcher(dsn(cluster[0]))
    databases = Databases(dsn(cluster[0]), watcher)
    watcher.look()

    def write(connection: Connection) -> None:
        connection.execute(text("insert into shard_0000.users default values"))

    with pytest.raises(UnsupportedServer, match="read-only"):
        databases.of_node("a", write)
    with pytest.raises(ClusterConflict, match='no node "c"'):
        databases.of_node("c", write)
    databases.close()
    watcher.close()


def test_regions_are_shown(databases: BlankDatabases) -> None:
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    with connected(urls[0]) as connection:
        connection.execute("insert into shardids_catalog.region values ('eu', 2, 5)")
        connection.execute("update shardids_catalog.node set region = 'eu' where name = 'b'")
    with browsing(urls[0]) as client:
        eu = {"name": "eu", "first": 2, "last": 5, "nodes": ["b"]}
        assert told(client, "/api/cluster")["regions"] == [eu]
        found = told(client, "/api/map")
        assert (found["regions"], found["region"]) == (["eu"], [None, None, 0, 0, 0, 0, None, None])
        # Shards 2 and 3 are on node a, which has no region; 6 and 7 on b.
        assert [node["outside_region"] for node in told(client, "/api/nodes")] == [2, 2]
        assert [node["region"] for node in told(client, "/api/nodes")] == [None, "eu"]
        assert told(client, "/api/shards/3")["region"] == "eu"
        ids = f"{DEFAULT.encode(ms=5, shard=3)} {DEFAULT.encode(ms=5, shard=7)}"
        assert [one["region"] for one in inspected(client, ids)["ids"]] == ["eu", None]
    for url in urls:
        databases.give_back(url)


def test_a_node_that_is_added_or_removed_is_seen(databases: BlankDatabases) -> None:
    urls = [databases.take() for _ in range(3)]
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    with browsing(urls[0]) as client:
        assert [node["name"] for node in told(client, "/api/nodes")] == ["a", "b"]
        found_cluster(urls[0], {"c": urls[2]}, 8)
        wait_for(lambda: len(told(client, "/api/nodes")) == 3, "the new node")
        assert told(client, "/api/map")["nodes"] == ["a", "b", "c"]
        with connected(urls[0]) as connection:
            connection.execute("delete from shardids_catalog.node where name = 'c'")
        wait_for(lambda: len(told(client, "/api/nodes")) == 2, "that it is gone")
    for url in urls:
        databases.give_back(url)


def test_the_interval_grows_with_the_shards() -> None:
    watcher = Watcher("postgresql://nobody@localhost/none")
    watcher._follow_size(4096)
    assert watcher.interval_s == 4096 / SHARDS_A_SECOND
    watcher._follow_size(64)
    assert watcher.interval_s == 5.0
    watcher.close()


def test_what_is_not_there(client: TestClient) -> None:
    for page in ("/api/nothing", "/nothing", "/../app.py", "/%2e%2e/app.py", "/vendor/../../app.py"):
        answer = client.get(page)
        assert answer.status_code == 404, page
        assert "class" not in answer.text
    assert client.post("/api/nodes", json={}).status_code == 405
    assert client.get("/healthz").text == "ok\n"


def test_the_page_is_there(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "<script>" not in answer.text
    assert " style=" not in answer.text


def test_json_is_small_and_without_nan(client: TestClient) -> None:
    for page in ("cluster", "nodes", "rates", "map", "shards/1"):
        json.loads(client.get(f"/api/{page}").text, parse_constant=pytest.fail)


def test_no_password_is_told(cluster: tuple[URL, URL], make_role: MakeRole) -> None:
    role = make_role()
    url = cluster[0].set(username=role.username, password=role.password)
    secret = str(role.password)
    assert secret in dsn(url)
    with browsing(url) as client:
        pages = ["cluster", "nodes", "rates", "map", "shards/1", "moves", "migrations", "doctor", "job"]
        answers = [client.get(f"/api/{page}") for page in pages]
        answers.append(client.post("/api/inspect", json={"text": "5", "look": True}))
        client.post("/api/doctor", json={})
        wait_for(lambda: told(client, "/api/doctor")["state"] != "running", "the examination")
        answers.append(client.get("/api/doctor"))
        for answer in answers:
            assert secret not in answer.text
            assert secret not in str(answer.headers)
        # The role may read nothing; each page still answers, and says so.
        assert told(client, "/api/cluster")["catalog"]["error"]
