"""The console while servers are down, stopped or slow, while viewers come and go, and when it ends."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from sqlalchemy.engine import make_url
from starlette.testclient import TestClient

from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.locks import AdvisoryLock
from shardids.testing import devcluster
from shardids.watch.console import watching
from shardids.watch.console.answers import MOST_STREAMS
from shardids.watch.console.databases import ANSWER_S
from shardids.watch.console.figures import rates
from shardids.watch.console.guard import Access
from shardids.watch.console.prometheus import STEP_S, Prometheus
from shardids.watch.console.watching import Watcher, rate_of
from shardids.watch.facts.reading import INTERVAL_S
from shardids.watch.serving import MOST_CONNECTIONS, REQUEST_S
from tests.support.clusters import catalog_at, sessions
from tests.support.consoles import TOKEN, browsing, ended, get, process, told
from tests.support.series import served
from tests.support.waiting import wait_for

pytestmark = pytest.mark.long

SHARDS = 6
NOBODY = "postgresql://nobody@127.0.0.1:1/none"
PAGES = ("cluster", "nodes", "rates", "map", "shards/0", "shards/5", "moves", "migrations", "doctor")


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EmbeddedServer]]:
    """Shards 0 to 2 on node a, with the catalog; 3 to 5 on node b."""
    with temporary_servers(2) as servers:
        devcluster.create_cluster(servers, SHARDS)
        yield servers


@contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """All processes of a server stopped, as by a machine that hangs; they go on afterwards."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.pid)], capture_output=True, text=True, check=True
    )
    processes = [int(server.pid or 0), *map(int, listed.stdout.split())]
    for one in processes:
        os.kill(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in reversed(processes):
            os.kill(one, signal.SIGCONT)


def node(client: TestClient, name: str) -> Any:
    return next(one for one in told(client, "/api/nodes") if one["name"] == name)


def test_a_node_that_hangs_holds_no_page_and_keeps_what_was_known(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client:
        wait_for(lambda: node(client, "b")["up"], "node b")
        client.post("/api/inspect", json={"text": "5", "look": True})
        id_on_b = DEFAULT.encode(ms=5, shard=4)
        with stopped(servers[1]):
            # What was asked just now waits for its own answer; then the reading says that the node is down.
            begun = time.monotonic()
            assert client.post("/api/inspect", json={"text": str(id_on_b), "look": True}).status_code == 200
            assert time.monotonic() - begun < 3 * ANSWER_S
            wait_for(lambda: not node(client, "b")["up"], "that node b is down")
            down = node(client, "b")
            assert "has not answered within" in down["error"]
            assert down["shards"] == {"active": 3}
            assert down["read_at"] < told(client, "/api/cluster")["read_at"]
            assert down["ticks_per_s"] is None
            assert node(client, "a")["up"]
            begun = time.monotonic()
            for page in PAGES:
                assert client.get(f"/api/{page}").status_code == 200, page
            found = client.post("/api/inspect", json={"text": str(id_on_b), "look": True}).json()
            assert time.monotonic() - begun < 2 * ANSWER_S
            assert 'node "b"' in found["ids"][0]["note"]
            assert found["ids"][0]["found"] is None
            assert found["unread"]
            shard = told(client, "/api/shards/5")
            assert shard["errors"]
            assert (shard["state"], shard["last_state"], shard["tables"]) == ("unknown", "active", None)
            state = told(client, "/api/map")
            assert [state["states"][one] for one in state["state"]] == ["active"] * 3 + ["unknown"] * 3
        wait_for(lambda: node(client, "b")["up"], "that node b is back")
        assert told(client, "/api/shards/5")["errors"] == []


def test_a_catalog_that_is_down_leaves_what_it_said(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client:
        assert told(client, "/api/cluster")["catalog"]["up"]
        servers[0].stop("immediate")
        try:
            wait_for(lambda: not told(client, "/api/cluster")["catalog"]["up"], "that the catalog is down")
            found = told(client, "/api/cluster")
            assert found["shard_count"] == SHARDS
            assert found["catalog"]["answered_at"] < found["read_at"]
            assert node(client, "b")["up"]
            assert not node(client, "a")["up"]
            assert len(told(client, "/api/map")["node"]) == SHARDS
            assert found["moves_open"] == 0
            # What IDs say by themselves needs no server.
            ids = client.post("/api/inspect", json={"text": "77", "look": True}).json()["ids"]
            assert (ids[0]["shard"], ids[0]["found"]) == (0, None)
        finally:
            servers[0].start(attached=True)
        wait_for(lambda: told(client, "/api/cluster")["catalog"]["up"], "that the catalog is back")


def draw(server: EmbeddedServer, shard: int) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"select shard_{shard:04}.next_id() from generate_series(1, 100)".encode())


def test_what_was_not_read_of_a_shard_is_neither_none_nor_nothing(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client:
        wait_for(lambda: told(client, "/api/shards/4")["ticks_per_s"][-1:] == [0], "a reading with rates")
        servers[1].stop("immediate")
        try:
            wait_for(lambda: told(client, "/api/shards/4")["ticks_per_s"][-1] is None, "a gap")
            found = told(client, "/api/shards/4")
            assert (found["state"], found["is_read"], found["last_state"]) == ("unknown", False, "active")
            assert found["read_at"] < told(client, "/api/cluster")["read_at"]
            assert found["tables"] is None
            assert found["moves"] == []
            assert told(client, "/api/shards/1")["ticks_per_s"][-1] is not None
            columns = told(client, "/api/map")
            assert [columns["lead_s"][shard] is None for shard in range(SHARDS)] == [False] * 3 + [True] * 3
        finally:
            servers[1].start(attached=True)

        def has_rates() -> bool:
            draw(servers[1], 4)
            return "4" in told(client, "/api/rates")["shards"]

        wait_for(has_rates, "rates of shard 4")
        gaps = [rate is None for rate in told(client, "/api/rates")["shards"]["4"]]
        assert gaps[0]
        assert gaps.index(True, gaps.index(False)) < len(gaps) - 1
        assert not gaps[-1]


def test_moves_are_those_of_the_last_answer_while_the_catalog_is_down(servers: list[EmbeddedServer]) -> None:
    with psycopg.connect(servers[0].url(), autocommit=True) as connection:
        connection.execute(
            "insert into shardids_catalog.move (shard, source, target, offline, step, ended_at, outcome)"
            " values (4, 'a', 'b', false, 'clean', now(), 'moved'), (5, 'b', 'a', false, 'copy', null, null)"
        )
    try:
        with browsing(servers[0].url()) as client:
            # Nobody asks for them while the catalog is up: they are read with the rest.
            wait_for(lambda: len(told(client, "/api/rates")["times"]) > 1, "all of a reading")
            servers[0].stop("immediate")
            wait_for(lambda: not told(client, "/api/cluster")["catalog"]["up"], "that the catalog is down")
            assert told(client, "/api/cluster")["moves_open"] == 1
            states = [(move["shard"], move["state"]) for move in told(client, "/api/moves")]
            assert states == [(5, "interrupted"), (4, "moved")]
            found = told(client, "/api/shards/4")
            assert found["moves"] is None
            assert found["tables"]
            assert found["is_read"]
            assert "the catalog" in found["errors"][0]
    finally:
        if not servers[0].is_running:
            servers[0].start(attached=True)
        with psycopg.connect(servers[0].url(), autocommit=True) as connection:
            connection.execute("delete from shardids_catalog.move")


def test_migrations_are_those_of_the_last_answer_while_the_catalog_is_down(
    servers: list[EmbeddedServer],
) -> None:
    with browsing(servers[0].url()) as client:
        try:
            with psycopg.connect(
                servers[0].url(), autocommit=True, application_name="a run of ann"
            ) as connection:
                connection.execute("select pg_advisory_lock(%s)", [int(AdvisoryLock.MIGRATE_RUN)])
                found = told(client, "/api/migrations")
                assert (found["running"], found["running_error"]) == (["a run of ann"], None)
            wait_for(lambda: told(client, "/api/migrations")["read_at"], "revisions in the background")
            begun = time.time()
            servers[0].stop("immediate")
            wait_for(lambda: not told(client, "/api/cluster")["catalog"]["up"], "that the catalog is down")
            found = told(client, "/api/migrations")
            assert found["revisions"] == [{"revision": None, "shards": SHARDS}]
            assert found["running_at"] <= begun
            assert "the catalog" in found["running_error"]
        finally:
            if not servers[0].is_running:
                servers[0].start(attached=True)


def test_a_shard_that_is_fenced_or_gone_is_shown_as_that(servers: list[EmbeddedServer]) -> None:
    def state_of(client: TestClient, shard: int) -> str:
        found = told(client, "/api/map")
        return str(found["states"][found["state"][shard]])

    with browsing(servers[0].url()) as client, psycopg.connect(servers[1].url(), autocommit=True) as b:
        b.execute("select shardids.fence(4)")
        wait_for(lambda: state_of(client, 4) == "fenced", "that shard 4 is fenced")
        assert told(client, "/api/shards/4")["state"] == "fenced"
        b.execute("select shardids.activate(4)")
        wait_for(lambda: state_of(client, 4) == "active", "that shard 4 is active")


def test_a_console_that_stopped_for_a_while_draws_no_line_over_it(
    servers: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Watcher(servers[0].url(), interval_s=5.0)) as watcher:
        for now in (1000.0, 1005.0, 1010.0, 3000.0, 3005.0):
            monkeypatch.setattr(watching, "time", SimpleNamespace(time=lambda now=now: now))
            time.sleep(INTERVAL_S)
            seen = watcher.look()
        draw(servers[1], 4)
        found = rates(seen, watcher.history)
    assert found["times"] == [1000.0, 1005.0, 1010.0, 2995.0, 3000.0, 3005.0]
    assert [rate is None for rate in found["nodes"]["b"]] == [True, False, False, True, False, False]
    shard = [rate_of(point, 4) for point in watcher.history.points()]
    assert [rate is None for rate in shard] == [True, False, False, True, False, False]


def test_a_database_that_is_no_node_any_more_can_be_dropped(servers: list[EmbeddedServer]) -> None:
    with psycopg.connect(servers[1].url(), autocommit=True) as b:
        b.execute("create database left_over")
        try:
            url = make_url(servers[1].url("left_over"))
            with catalog_at(servers[0].url()) as catalog:
                provision.add_node(catalog, "c", servers[1].url("left_over"))
                with browsing(servers[0].url()) as client:
                    wait_for(lambda: any(one["name"] == "c" for one in told(client, "/api/nodes")), "node c")
                    wait_for(lambda: told(client, "/api/map")["sizes_at"], "the sizes of shards")
                    # Readings have one there, questions another.
                    wait_for(lambda: sessions(b, url) == 2, "that node c is asked for sizes")
                    provision.remove_node(catalog, "c")
                    wait_for(lambda: not sessions(b, url), "that the console leaves it")
        finally:
            b.execute("drop database left_over")


def test_a_node_whose_shards_can_t_be_read_does_not_look_well(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url()) as client, psycopg.connect(servers[1].url()) as b:
        wait_for(lambda: node(client, "b")["shards"] == {"active": 3}, "the shards of node b")
        b.execute("alter sequence shard_0004.id_counter cache 1")
        wait_for(lambda: node(client, "b")["error"], "that the sequence is locked")
        locked = node(client, "b")
        assert locked["up"]
        assert (locked["shards"], locked["lead_s"], locked["ticks_per_s"]) == ({}, None, None)
        assert locked["read_at"] < locked["answered_at"] <= told(client, "/api/cluster")["read_at"]
        found = told(client, "/api/map")
        assert [found["states"][state] for state in found["state"]] == ["active"] * 3 + ["unknown"] * 3
        assert told(client, "/api/shards/4")["highest_id"] is None
        b.rollback()
        wait_for(lambda: node(client, "b")["error"] is None, "that it is read again")
        assert node(client, "b")["shards"] == {"active": 3}


@contextmanager
def opened(address: str, page: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request("GET", page, headers=headers)
        with connection.getresponse() as answer:
            yield answer


def status_of(address: str, page: str) -> int:
    with opened(address, page) as answer:
        return answer.status


def events(stream: http.client.HTTPResponse, name: str) -> Iterator[Any]:
    """The values of the events of a name, as they come."""
    is_wanted = False
    while line := stream.readline().decode():
        if line.startswith("event: "):
            is_wanted = line == f"event: {name}\n"
        elif is_wanted and line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_viewers_hear_of_each_reading_and_a_console_ends_at_once(
    servers: list[EmbeddedServer], number: int
) -> None:
    with process(servers[0].url(), "--interval", "1") as (running, address), ExitStack() as kept:
        streams = [kept.enter_context(opened(address, "/api/events")) for _ in range(20)]
        for stream in streams:
            with_rates = next(
                tick for tick in events(stream, "tick") if tick["rates"]["nodes"]["a"] is not None
            )
            assert len(with_rates["map"]["ticks_per_s"]) == SHARDS
            assert [one["name"] for one in with_rates["nodes"]] == ["a", "b"]
        # One that reads no more, and one that is gone, hold nobody.
        streams[0].close()
        seconds, said = ended(running, number)
        assert said == ""
        assert seconds < 5
        assert running.returncode == 0
        for stream in streams[1:]:
            assert stream.read() is not None


def ask_and_be_left(address: str, page: str) -> None:
    with suppress(OSError, http.client.HTTPException):
        status_of(address, page)


def test_a_console_ends_while_a_node_hangs(servers: list[EmbeddedServer]) -> None:
    with process(servers[0].url(), "--interval", "1") as (running, address):
        assert status_of(address, "/api/cluster") == 200
        with stopped(servers[1]):
            asking = threading.Thread(target=ask_and_be_left, args=(address, "/api/shards/4"))
            asking.start()
            time.sleep(0.5)
            seconds, said = ended(running)
            asking.join()
        assert "Traceback" not in said
        assert seconds < 15


def test_the_token_that_was_made_up_is_told_once(servers: list[EmbeddedServer]) -> None:
    with process(servers[0].url(), "--listen", "0.0.0.0:0") as (running, address):
        assert running.stderr is not None
        line = running.stderr.readline()
        token = line.removeprefix("Its token, until it ends: ").strip()
        warned = running.stderr.readline()
        assert len(token) >= 32, line
        port = urlsplit(address).port
        here = f"http://127.0.0.1:{port}"
        assert status_of(here, "/api/cluster") == 401
        with opened(here, "/api/cluster", Authorization=f"Bearer {token}") as answer:
            assert answer.status == 200
            assert token not in answer.read().decode()
        _, said = ended(running)
        assert token not in warned + said
        assert "TLS" in warned


def test_an_endless_request_is_cut_off(servers: list[EmbeddedServer]) -> None:
    head = "POST /api/inspect HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with (
        process(servers[0].url()) as (_, address),
        socket.create_connection((urlsplit(address).hostname, urlsplit(address).port)) as connection,
    ):
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with suppress(OSError):
            for _ in range(200):
                connection.sendall(piece)
        with suppress(ConnectionResetError):
            assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        assert status_of(address, "/healthz") == 200


def test_who_goes_before_a_request_is_whole_leaves_no_trace(servers: list[EmbeddedServer]) -> None:
    with process(servers[0].url()) as (running, address):
        host = urlsplit(address)
        for path in (b"/api/inspect", b"/api/doctor", b"/login"):
            with socket.create_connection((host.hostname, host.port)) as client:
                client.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                client.sendall(b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
                time.sleep(0.2)  # the console has begun to wait for the rest
        assert get(address, "/api/doctor")["state"] == "never"
        assert ended(running)[1] == ""


def test_who_is_silent_locks_nobody_out_and_fills_no_log() -> None:
    with process(NOBODY) as (running, address), ExitStack() as kept:
        streams = [kept.enter_context(opened(address, "/api/events")) for _ in range(MOST_STREAMS - 1)]
        assert {stream.status for stream in streams} == {200}
        with opened(address, "/api/events") as last, opened(address, "/api/events") as one_too_many:
            assert (last.status, one_too_many.status) == (200, 503)
            assert "Close some" in json.loads(one_too_many.read())["hint"]
        wait_for(lambda: status_of(address, "/api/events") == 200, "a place for another page")
        place = (urlsplit(address).hostname, urlsplit(address).port)
        for number in range(MOST_CONNECTIONS + 50):
            silent = kept.enter_context(socket.create_connection(place))
            if number % 10 == 0:
                silent.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
                assert status_of(address, "/healthz") == 200
        # Some are the console's own.
        assert len(list(Path(f"/proc/{running.pid}/fd").iterdir())) < MOST_CONNECTIONS + 30
        assert all(stream.readline() == b"retry: 2000\n" for stream in streams)
        _, said = ended(running)
        assert said == ""


@contextmanager
def sent(address: str, text: str) -> Iterator[socket.socket]:
    """A connection on which a request was sent, as it is."""
    with socket.create_connection((urlsplit(address).hostname, urlsplit(address).port), 30) as client:
        client.sendall(text.encode())
        yield client


def status_on(client: socket.socket) -> int:
    """The status of the answer on a connection; 0 if it was closed without one."""
    with suppress(ConnectionResetError):
        return int((client.recv(4096).split() or [b"", b"0"])[1])
    return 0


def test_streams_that_come_at_once_leave_connections_for_requests() -> None:
    ask = "GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with process(NOBODY) as (running, address), ExitStack() as kept:
        clients = [kept.enter_context(sent(address, "")) for _ in range(MOST_CONNECTIONS)]
        for client in clients:
            client.sendall(ask.encode())
        statuses = Counter(map(status_on, clients))
        assert statuses == {200: MOST_STREAMS, 503: MOST_CONNECTIONS - MOST_STREAMS}
        for page in ("/healthz", "/api/cluster", "/"):
            assert status_of(address, page) == 200
        for _ in range(MOST_CONNECTIONS):
            client = kept.enter_context(sent(address, ask))
            assert status_on(client) == 503
            assert status_of(address, "/healthz") == 200
        assert ended(running)[1] == ""


def test_streams_are_closed_before_requests(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text(TOKEN)
    stream = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    wrong = "GET /api/job HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\n"
    slow = "from shardids.watch.console.guard import Attempts; Attempts.__init__.__kwdefaults__['wait_s'] = 5"
    with (
        process(NOBODY, "--token-file", str(file), before=slow) as (_, address),
        ExitStack() as kept,
    ):
        more = MOST_CONNECTIONS - MOST_STREAMS + 20
        networks = [f"198.51.{number}.1" for number in range(more)]
        for network in networks:
            with sent(address, f"{wrong}X-Forwarded-For: {network}\r\n\r\n") as client:
                assert status_on(client) == 401
        streams = [kept.enter_context(sent(address, stream)) for _ in range(MOST_STREAMS)]
        assert {status_on(client) for client in streams} == {200}
        # A second wrong token is answered after 5 s, so all of these are open at once.
        waiting = []
        for network in networks:
            waiting.append(kept.enter_context(sent(address, f"{wrong}X-Forwarded-For: {network}\r\n\r\n")))
            # The system keeps 32 until they are accepted; one that is not read yet counts as idle.
            time.sleep(0.02)
        # One that a busy machine has accepted and not read yet is the oldest idle one, and closed.
        statuses = Counter(map(status_on, waiting))
        assert statuses[0] < 10, statuses
        assert statuses[401] == more - statuses[0], statuses
        for client in streams:
            client.setblocking(False)
        assert sum(_is_closed(client) for client in streams) >= 20 - statuses[0]


def _is_closed(client: socket.socket) -> bool:
    try:
        while client.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("command", ["console", "metrics"])
@pytest.mark.parametrize(
    "begun",
    [
        "",
        "GET /metrics HTTP/1.1\r\nHost: ",
        "POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=["silent", "half a head", "half a body", "after an answer"],
)
def test_connections_without_a_request_are_closed(
    servers: list[EmbeddedServer], command: str, begun: str
) -> None:
    at = process(NOBODY) if command == "console" else served(make_url(servers[0].url()))
    with at as (_, address, *_more), sent(address, begun) as client:
        started = time.monotonic()
        with suppress(ConnectionResetError):
            while client.recv(65536):
                pass
        assert time.monotonic() - started < REQUEST_S + 5


class _Prometheus(BaseHTTPRequestHandler):
    answer: Any = None

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        body = json.dumps(self.answer(asked)) if callable(self.answer) else str(self.answer)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def a_prometheus(answer: Any) -> Iterator[str]:
    handler = type(
        "Handler", (_Prometheus,), {"answer": staticmethod(answer) if callable(answer) else answer}
    )
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://user:word-of-prometheus@127.0.0.1:{server.server_port}"
        server.shutdown()


def series(asked: dict[str, list[str]]) -> Any:
    end = int(asked["end"][0])
    by = {"node": "a"} if "by (node)" in asked["query"][0] else {"shard": "1"}
    values = [[end - 2 * STEP_S, "+Inf"], [end - STEP_S, "12.5"], [end, "NaN"]]
    return {"status": "success", "data": {"result": [{"metric": by, "values": values}]}}


def test_the_last_hour_comes_from_prometheus(servers: list[EmbeddedServer]) -> None:
    with (
        a_prometheus(series) as address,
        browsing(servers[0].url(), prometheus=Prometheus(address)) as client,
    ):
        found = told(client, "/api/rates")
        assert found["source"] == "prometheus"
        assert len(found["times"]) == 3600 // STEP_S
        assert found["nodes"]["a"][-3:] == [None, 12.5, None]
        assert set(found["nodes"]["b"]) == {None}


@pytest.mark.parametrize(
    "answer",
    [
        "<html>not Prometheus",
        '{"status": "error"}',
        "[]",
        '{"status": "success", "data": {"result": [{}]}}',
        '{"status": "success", "data": {"result": [{"metric": {"node": "a"}, "values": [[Infinity, "1"]]}]}}',
    ],
)
def test_what_is_no_prometheus_is_told_and_memory_serves(servers: list[EmbeddedServer], answer: str) -> None:
    with (
        a_prometheus(answer) as address,
        browsing(servers[0].url(), prometheus=Prometheus(address)) as client,
    ):
        assert_memory_serves(client)


def test_a_prometheus_that_is_down_or_silent(servers: list[EmbeddedServer]) -> None:
    with browsing(
        servers[0].url(), prometheus=Prometheus("http://u:word-of-prometheus@127.0.0.1:1")
    ) as client:
        assert_memory_serves(client)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://u:word-of-prometheus@127.0.0.1:{silent.getsockname()[1]}"
        with browsing(servers[0].url(), prometheus=Prometheus(address)) as client:
            begun = time.monotonic()
            for _ in range(5):
                assert_memory_serves(client)
            # It is not asked again for each viewer.
            assert time.monotonic() - begun < 6


def test_what_does_not_even_speak_http_is_no_prometheus(servers: list[EmbeddedServer]) -> None:
    class Babbler(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n")

    with TCPServer(("127.0.0.1", 0), Babbler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        prometheus = Prometheus(f"http://u:word-of-prometheus@127.0.0.1:{server.server_address[1]}")
        with browsing(servers[0].url(), prometheus=prometheus) as client:
            assert_memory_serves(client)
        server.shutdown()


def assert_memory_serves(client: TestClient) -> None:
    found = told(client, "/api/rates")
    assert found["source"] == "memory"
    assert "Prometheus at http://127.0.0.1:" in found["note"]
    assert "word-of-prometheus" not in str(found)
    assert set(found["nodes"]) == {"a", "b"}


def test_a_token_on_loopback_is_asked_for_too(servers: list[EmbeddedServer]) -> None:
    with browsing(servers[0].url(), access=Access(token=TOKEN)) as client:
        assert client.get("/api/cluster").status_code == 401
        assert client.get("/api/cluster", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
