"""Who may ask the console, and what every answer carries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from starlette.testclient import TestClient
from typer.main import get_command

from shardids.cli import app
from shardids.watch.console.answers import as_json
from shardids.watch.console.guard import MOST_WAITING, WAIT_S, Access, Attempts
from tests.conftest import MakeDatabase
from tests.support.clusters import COMMAND, command_here, environment
from tests.support.consoles import HERE, TOKEN, browsing, ended, process
from tests.support.logged import run
from tests.support.waiting import wait_for

NOBODY = "postgresql://nobody:word-of-nobody@127.0.0.1:1/none"
"""A catalog that does not answer: who may ask is decided before it is."""


@pytest.fixture(scope="module")
def open_console() -> Iterator[TestClient]:
    with browsing(NOBODY, interval_s=60.0) as client:
        yield client


@pytest.fixture
def closed_console() -> Iterator[TestClient]:
    """With a token, under one name."""
    access = Access(names=["Console.Example"], token=TOKEN, attempts=Attempts(wait_s=0))
    with browsing(NOBODY, access=access, interval_s=60.0) as client:
        yield client


@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("127.0.0.1:8088", True),
        ("localhost:8088", True),
        ("[::1]:8088", True),
        ("10.0.0.5", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("", False),
        ("[::1", False),
        ("console.example", False),
    ],
)
def test_names_that_others_could_make_lead_here_are_refused(
    open_console: TestClient, host: str, is_served: bool
) -> None:
    answer = open_console.get("/api/job", headers={"Host": host})
    assert answer.status_code == (200 if is_served else 403)
    if not is_served:
        assert "--host" in answer.json()["hint"]


def test_a_name_that_was_given_is_served(closed_console: TestClient) -> None:
    for host, status in (("console.example:8088", 401), ("other.example", 403)):
        assert closed_console.get("/api/job", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8089"},
        {"Origin": "http://[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_other_pages_can_post_nothing(open_console: TestClient, headers: dict[str, str]) -> None:
    for page in ("/api/inspect", "/api/doctor", "/api/actions/move", "/login", "/logout"):
        answer = open_console.post(page, json={}, headers=headers)
        assert answer.status_code == 403, page
    assert open_console.get("/api/doctor").json()["state"] == "never"


def test_other_pages_can_have_nothing_asked(open_console: TestClient) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        headers = {"Sec-Fetch-Site": site}
        for page in ("/api/cluster", "/api/map", "/api/doctor"):
            assert open_console.get(page, headers=headers).status_code == status, (page, site)
        # A link may lead to the page.
        assert open_console.get("/", headers=headers).status_code == 200


def test_a_form_of_another_page_is_no_json(open_console: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = open_console.post("/api/doctor", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 400
    for body in (b"[]", b"{", b"\xff", b"[" * 100_000):
        answer = open_console.post("/api/doctor", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
    own = {"Origin": HERE, "Sec-Fetch-Site": "same-origin"}
    assert open_console.post("/api/doctor", json={}, headers=own).status_code == 202


def test_without_the_token_nothing_is_told(closed_console: TestClient) -> None:
    client = closed_console
    for page in (
        "cluster",
        "nodes",
        "rates",
        "map",
        "events",
        "shards/1",
        "moves",
        "doctor",
        "job",
    ):
        answer = client.get(f"/api/{page}")
        assert answer.status_code == 401, page
        assert set(answer.json()) == {"error", "hint"}
    for page in ("cluster.js", "shards/1.css", "actions/move.js", "x.svg"):
        assert client.get(f"/api/{page}").status_code == 401, page
    for page in ("inspect", "doctor", "actions/move", "actions/move.js"):
        assert client.post(f"/api/{page}", json={"text": "5"}).status_code == 401
    for page in ("/", "/index.html", "/nothing", "/api"):
        assert client.get(page).headers["location"] == "/login"
    assert client.get("/healthz").status_code == 200
    wrong = [
        {"Cookie": "shardids_console_8088=x"},
        {"Cookie": f"shardids_console_8088={TOKEN}"},
        {"Cookie": "shardids_console_8088="},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer é".encode("latin-1").decode("latin-1")},
    ]
    for headers in wrong:
        encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        assert client.get("/api/job", headers=encoded).status_code == 401, headers


def test_the_token_is_exchanged_for_a_cookie(closed_console: TestClient) -> None:
    client = closed_console
    for wrong in ("", "x", TOKEN + " ", TOKEN[:-1], "é"):
        answer = client.post("/login", json={"token": wrong})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    for body in (b"{", b"[]", b"\xff", b'{"token": "\\ud800"}'):
        given = client.post("/login", content=body, headers={"Content-Type": "application/json"})
        assert given.status_code == 401
    entered = client.post("/login", data={"token": TOKEN})
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert client.get("/api/job").status_code == 200
    assert client.get("/").status_code == 200
    assert client.post("/logout").headers["location"] == "/login"
    assert client.get("/api/job").status_code == 401
    assert client.get("/api/job", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.long
def test_a_wrong_token_slows_down_the_next_ones_from_its_network(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text(TOKEN)
    right, wrong = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, TOKEN[:-1] + "x"))
    # Longer than usual: a busy machine takes a second to send as many requests as may wait at once.
    wait_s = 2 * WAIT_S
    from_guard = "from shardids.watch.console.guard import Attempts"
    slow = f"{from_guard}; Attempts.__init__.__kwdefaults__.update(wait_s={wait_s})"
    with (
        process(NOBODY, "--token-file", str(file), before=slow) as (_, address),
        ExitStack() as kept,
    ):

        def asked(headers: dict[str, str], *, of: str = "203.0.113.5") -> tuple[int, float]:
            begun = time.monotonic()
            # A proxy on loopback says who asks.
            answer = httpx.get(f"{address}/api/job", headers=headers | {"X-Forwarded-For": of}, timeout=30)
            return answer.status_code, time.monotonic() - begun

        def is_quick(answer: tuple[int, float], status: int) -> bool:
            return answer[0] == status and answer[1] < wait_s

        browser = kept.enter_context(httpx.Client(headers={"X-Forwarded-For": "203.0.113.5"}))
        assert browser.post(f"{address}/login", data={"token": TOKEN}).status_code == 303
        assert is_quick(asked(right), 200)
        assert is_quick(asked(wrong), 401)
        pool = kept.enter_context(ThreadPoolExecutor(2 * MOST_WAITING))
        many = [pool.submit(asked, wrong) for _ in range(2 * MOST_WAITING)]
        statuses = Counter(one.result()[0] for one in many)
        assert statuses[401] >= MOST_WAITING
        assert statuses[429] == 2 * MOST_WAITING - statuses[401] > 0
        assert all(one.result()[1] >= wait_s for one in many if one.result()[0] == 401)
        status, seconds = asked(right)
        assert (status, wait_s <= seconds < wait_s + 5) == (200, True)
        for token, expected in ((TOKEN, 303), ("x", 401)):
            begun = time.monotonic()
            entered = browser.post(f"{address}/login", data={"token": token})
            assert entered.status_code == expected
            assert time.monotonic() - begun >= wait_s
        # Who has entered, and others, wait for nobody.
        begun = time.monotonic()
        assert browser.get(f"{address}/api/job", headers=wrong).status_code == 200
        assert time.monotonic() - begun < wait_s
        assert is_quick(asked(right, of="203.0.113.6"), 200)
        assert is_quick(asked(wrong, of="2001:db8::1"), 401)
        assert asked(right, of="2001:db8::2")[1] >= wait_s
        assert is_quick(asked(right, of="2001:db8:0:1::2"), 200)


def test_consoles_on_two_ports_of_a_host_keep_their_cookies(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text(TOKEN)
    with (
        process(NOBODY, "--token-file", str(file)) as (_, first),
        process(NOBODY, "--token-file", str(file)) as (_, second),
        httpx.Client() as browser,
    ):
        for address in (first, second):
            assert browser.post(f"{address}/login", data={"token": TOKEN}).status_code == 303
        for address in (first, second):
            assert browser.get(f"{address}/api/job").status_code == 200


def test_a_cookie_ends_with_its_console() -> None:
    with browsing(NOBODY, access=Access(token=TOKEN), interval_s=60.0) as client:
        client.post("/login", data={"token": TOKEN})
        cookies = dict(client.cookies)
    with browsing(NOBODY, access=Access(token=TOKEN), interval_s=60.0) as client:
        client.cookies.update(cookies)
        assert client.get("/api/job").status_code == 401


def test_on_loopback_there_is_nothing_to_log_in_to(open_console: TestClient) -> None:
    assert open_console.get("/login").headers["location"] == "/"
    assert open_console.post("/login", json={"token": ""}).status_code == 401


def test_every_answer_has_the_headers(open_console: TestClient, closed_console: TestClient) -> None:
    answers = [open_console.get(page) for page in ("/", "/api/job", "/api/cluster", "/nothing", "/healthz")]
    answers += [closed_console.get(page) for page in ("/", "/api/job", "/login")]
    answers += [open_console.get("/", headers={"Host": "evil.example"}), open_console.post("/api/doctor")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers
        assert "access-control-allow-origin" not in answer.headers


def test_without_its_option_the_console_changes_nothing(open_console: TestClient) -> None:
    for action in ("move", "rebalance", "fence", "unfence", "other"):
        answer = open_console.post(
            f"/api/actions/{action}", json={"shard": 1}, headers={"X-Shardids-Action": "1"}
        )
        assert answer.status_code == 403
        assert "--allow-actions" in answer.json()["hint"]
        assert open_console.get(f"/api/actions/{action}").status_code == 404


def test_a_catalog_that_never_answered(open_console: TestClient) -> None:
    found = open_console.get("/api/cluster")
    assert found.status_code == 200
    assert not found.json()["catalog"]["up"]
    assert "can't be reached" in found.json()["catalog"]["error"]
    assert open_console.get("/api/map").json()["node"] == []
    assert open_console.get("/api/nodes").json() == []
    for page in ("/api/moves", "/api/shards/1", "/api/migrations"):
        assert open_console.get(page).status_code == 503
    assert open_console.post("/api/inspect", json={"text": "5"}).status_code == 503
    for page in ("cluster", "nodes", "map", "moves", "doctor"):
        assert "word-of-nobody" not in open_console.get(f"/api/{page}").text


def test_a_database_without_a_catalog_is_refused(make_database: MakeDatabase) -> None:
    _, said = run(make_database(), "console", "--listen", "127.0.0.1:0", code=1)
    assert "holds no shardids catalog" in said
    assert "shardids init" in said


def test_users_and_options_of_urls_are_left_out() -> None:
    secrets = "options=-c%20myapp.key%3Dhunter2&sslcert=/home/dba/secret.crt"
    with browsing(f"postgresql://dbauser:word-of-dba@127.0.0.1:1/none?{secrets}", interval_s=60.0) as client:
        client.post("/api/doctor", json={})
        wait_for(lambda: client.get("/api/doctor").json()["state"] == "failed", "the examination")
        for page in ("cluster", "moves", "doctor"):
            told = client.get(f"/api/{page}")
            assert "postgresql://…@127.0.0.1:1/none?…: " in str(told.json()), page
            for secret in ("dbauser", "word-of-dba", "hunter2", "secret.crt", "options", "sslcert"):
                assert secret not in told.text, page
    event = as_json({"nodes": [{"error": "at postgresql://u%20v@h/a?sslkey=x&b=c: refused?"}, "k@x?a"]})
    assert json.loads(event) == {"nodes": [{"error": "at postgresql://…@h/a?…: refused?"}, "k@x?a"]}


def test_all_hosts_of_a_catalog_are_shown() -> None:
    with browsing("postgresql://u:word@/none?host=127.0.0.1:1&host=127.0.0.1:2", interval_s=60.0) as client:
        assert client.get("/api/cluster").json()["catalog"]["host"] == "127.0.0.1:1,127.0.0.1:2"


def test_tokens_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for text in ("", "short", "with a space in the midst", "x" * 15):
        file.write_text(text + "\n", "utf-8")
        ran = command_here("console", "--token-file", str(file), SHARDIDS_CATALOG=NOBODY)
        assert ran.returncode == 2, text
        assert "openssl rand" in ran.stderr
        assert text == "" or text not in ran.stderr
    ran = command_here("console", "--token-file", str(tmp_path / "none"), SHARDIDS_CATALOG=NOBODY)
    assert (ran.returncode, "No such file" in ran.stderr) == (1, True)


@pytest.mark.long
def test_a_token_that_others_may_read_is_warned_of(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "console.md"
    (make,) = re.findall(r"^    (.*openssl rand.*)$", page.read_text("utf-8"), re.MULTILINE)
    subprocess.run(["bash", "-c", f"umask 022; {make}"], cwd=tmp_path, check=True, timeout=60)
    file = tmp_path / "token"
    for mode, is_warned in ((None, False), (0o400, False), (0o640, True), (0o444, True)):
        if mode is not None:
            file.chmod(mode)
        with process(NOBODY, "--token-file", str(file)) as (running, address):
            assert httpx.get(f"{address}/healthz").text == "ok\n"
            assert running.stderr is not None
            # It is told after the address, while the page is served already.
            said = running.stderr.readline() if is_warned else ""
            said += ended(running)[1]
        assert ("others may read the token" in said and f"chmod 600 {file}" in said) == is_warned, mode
        assert file.read_text().strip() not in said


@pytest.mark.parametrize("prometheus", ["ftp://x", "prometheus:9090", "http://", "file:///etc/passwd"])
def test_an_address_of_prometheus_that_is_none(prometheus: str) -> None:
    ran = command_here("console", "--prometheus", prometheus, SHARDIDS_CATALOG=NOBODY)
    assert ran.returncode == 2
    assert "http://127.0.0.1:9090" in ran.stderr


def test_each_command_of_the_page_has_its_options() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "console.md"
    lines = re.findall(r"^    shardids console(.*)$", page.read_text("utf-8"), re.MULTILINE)
    assert len(lines) == 5
    group: Any = get_command(app)
    found = group.get_command(click.Context(group), "console")
    for line in lines:
        found.make_context("console", ["--catalog", NOBODY, *line.split()])


@pytest.mark.parametrize("library", ["starlette", "uvicorn", "numpy"])
def test_a_library_that_is_missing_is_named_with_its_extra(library: str) -> None:
    script = f"import sys; sys.modules[{library!r}] = None; {COMMAND}"
    ran = subprocess.run(
        [sys.executable, "-c", script, "console"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(SHARDIDS_CATALOG=NOBODY),
    )
    assert ran.returncode == 1
    assert "pip install 'shardids[ops]'" in ran.stderr
    assert "Traceback" not in ran.stderr
