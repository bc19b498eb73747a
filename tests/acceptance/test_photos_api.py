"""The FastAPI example: a process of its own, real HTTP calls, and a shard that moves beneath it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import httpx
import psycopg
import pytest
from sqlalchemy.engine import URL

from shardids import Cluster
from tests.support import moves_by_hand
from tests.support.clusters import connected, sessions
from tests.support.services import EXAMPLES, serving
from tests.support.waiting import wait_for


@pytest.fixture
def photos(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the models, after it has made its tables."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import photos

    photos.create_tables(cluster)
    return photos


@pytest.fixture
def client(cluster_url: URL, photos: ModuleType, admin: psycopg.Connection) -> Iterator[httpx.Client]:
    """A client of the service, which listens on a free port."""
    before = sessions(admin, cluster_url)
    with (
        serving("photos_api:app", cluster_url) as address,
        httpx.Client(base_url=address, timeout=20) as client,
    ):
        yield client
    wait_for(lambda: sessions(admin, cluster_url) <= before, "the service's sessions end")


def create(client: httpx.Client, path: str, **fields: str) -> dict[str, str]:
    answer = client.post(path, json=fields)
    assert answer.status_code == 201, answer.text
    made: dict[str, str] = answer.json()
    return made


def test_the_photo_service(
    client: httpx.Client, cluster: Cluster, cluster_url: URL, photos: ModuleType
) -> None:
    ann = create(client, "/users", name="ann")
    assert ann == {"id": ann["id"], "name": "ann"}
    assert int(ann["id"]) > 2**53
    shard = cluster.shard_of(int(ann["id"]))
    assert shard == cluster.shard_for("ann")
    assert client.get("/users", params={"name": "ann"}).json() == ann
    assert client.get(f"/users/{ann['id']}").json() == ann

    path = f"/users/{ann['id']}/photos"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: create(client, path, caption=f"no. {number}"), range(30)))
    assert {cluster.shard_of(int(photo["id"])) for photo in made} == {shard}
    assert {photo["user_id"] for photo in made} == {ann["id"]}
    made.sort(key=lambda photo: int(photo["id"]))
    pages = [client.get(path).json()]
    while pages[-1]:
        pages.append(client.get(path, params={"after": pages[-1][-1]["id"], "limit": 7}).json())
    assert [len(page) for page in pages] == [20, 7, 3, 0]
    assert [photo for page in pages for photo in page] == made

    assert client.post("/users", json={"name": "ann"}).status_code == 409
    nobody = cluster.layout.encode(ms=1, shard=shard)
    nowhere = cluster.layout.encode(ms=1, shard=8)
    for unknown in (nobody, nowhere, -1):
        assert client.get(f"/users/{unknown}").status_code == 404
        assert client.post(f"/users/{unknown}/photos", json={"caption": "?"}).status_code == 404
    for no_id in ("ann", 2**70, "1.0"):
        assert client.get(f"/users/{no_id}").status_code == 422
    assert client.get("/users", params={"name": "nobody"}).status_code == 404


@pytest.mark.long
def test_the_photo_service_goes_on_while_a_shard_moves(
    client: httpx.Client, cluster: Cluster, cluster_url: URL, photos: ModuleType
) -> None:
    ann = create(client, "/users", name="ann")
    path = f"/users/{ann['id']}/photos"
    first = create(client, path, caption="before")
    shard = cluster.shard_of(int(ann["id"]))
    to = "b" if cluster.node_of(shard).name == "a" else "a"

    tick = moves_by_hand.fence(cluster_url, shard, to)
    answer = client.post(path, json={"caption": "meanwhile"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    moves_by_hand.copy(cluster_url, shard, to, photos.Base.metadata, tick)
    moves_by_hand.place(cluster_url, shard, to)
    second = create(client, path, caption="after")

    assert client.get(path).json() == [first, second]
    wait_for(lambda: cluster.node_of(shard).name == to, "the move is heard")
    there = cluster.engine(cluster.node_of(shard)).url.database
    with connected(cluster_url.set(database=there)) as direct:
        found = direct.execute(
            f"select id::text from {cluster.schema_of(shard)}.photos order by id"
        ).fetchall()
    assert [one for (one,) in found] == [first["id"], second["id"]]
