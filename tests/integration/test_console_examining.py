"""What a role needs to examine a cluster from the console, as the page and its documentation say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL
from starlette.testclient import TestClient

from tests.conftest import MakeRole, dsn
from tests.support.clusters import connected
from tests.support.consoles import browsing, told
from tests.support.waiting import wait_for

DOCS = Path(__file__).parents[2] / "docs" / "how-to"


def grants_of(page: str, role: str) -> list[str]:
    """The blocks of SQL of a page that grant something, for a role."""
    blocks = re.findall(r"```postgresql\n((?:grant|do) .*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    return [re.sub(r"to metrics\b", f"to {role}", block) for block in blocks]


def run(url: URL, statements: str) -> None:
    with connected(url) as connection:
        connection.execute(statements.encode())


def with_nodes_of(urls: Mapping[str, URL], role: URL) -> URL:
    """The catalog as this role, which the catalog's URLs of the nodes name, too."""
    with connected(urls["a"]) as connection:
        for name, url in urls.items():
            login = dsn(role.set(database=url.database))
            connection.execute("update shardids_catalog.node set url = %s where name = %s", [login, name])
    return role.set(database=urls["a"].database)


def examined(client: TestClient) -> Any:
    assert client.post("/api/doctor", json={}).status_code == 202
    wait_for(lambda: told(client, "/api/doctor")["state"] != "running", "the examination")
    return told(client, "/api/doctor")


def test_an_examination_needs_what_the_page_says(make_role: MakeRole, cluster_urls: dict[str, URL]) -> None:
    login = make_role()
    role = f'"{login.username}"'
    of_catalog, of_nodes = grants_of("metrics.md", role)
    run(cluster_urls["a"], of_catalog)
    for url in cluster_urls.values():
        run(url, of_nodes)
    with browsing(with_nodes_of(cluster_urls, login)) as client:
        wait_for(lambda: [one["up"] for one in told(client, "/api/nodes")] == [True, True], "the nodes")
        found = examined(client)
        assert (found["state"], found["checks"]) == ("failed", 0)
        assert "permission denied for table shardids_version" in found["error"]
        (advised,) = re.findall(r"GRANT pg_read_all_data TO [^,]*", found["error"])
        run(cluster_urls["a"], advised)
        found = examined(client)
        assert (found["state"], found["findings"]) == ("done", [])
