"""The example of FastAPI and SQLModel: accounts and items over two nodes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.engine import URL

from shardids import Cluster
from tests.conftest import dsn

EXAMPLES = Path(__file__).parents[2] / "examples"
PASSWORD = "correct horse"
Person = dict[str, Any]


@pytest.fixture
def cluster(cluster_url: URL) -> Iterator[Cluster]:
    with Cluster.connect(cluster_url) as cluster:
        yield cluster


@pytest.fixture
def models(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the models, after it has made its tables."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from fullstack import models

    models.create_tables(cluster)
    return models


@pytest.fixture
def client(cluster_url: URL, models: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(cluster_url))
    monkeypatch.setenv("SECRET_KEY", "a secret of the tests, long enough for HS256")
    from fullstack.app import app

    with TestClient(app) as client:
        yield client


def address(cluster: Cluster, shard: int, nth: int = 0) -> str:
    """An address whose hash names a shard."""
    fitting = (f"p{n}@example.com" for n in range(10_000) if cluster.shard_for(f"p{n}@example.com") == shard)
    return [next(fitting) for _ in range(nth + 1)][-1]


def join(client: TestClient, email: str, **more: str) -> tuple[Person, dict[str, str]]:
    """A new user, and the headers that log the user in."""
    answer = client.post("/signup", json={"email": email, "password": PASSWORD, **more})
    assert answer.status_code == 201, answer.text
    made: Person = answer.json()
    return made, logged_in(client, email)


def logged_in(client: TestClient, email: str) -> dict[str, str]:
    answer = client.post("/login", json={"email": email, "password": PASSWORD})
    assert answer.status_code == 200, answer.text
    return {"Authorization": f"Bearer {answer.json()['access_token']}"}


def add(client: TestClient, headers: dict[str, str], title: str) -> dict[str, Any]:
    answer = client.post("/items", json={"title": title}, headers=headers)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def test_accounts(client: TestClient, cluster: Cluster) -> None:
    email = address(cluster, 5)
    ann, headers = join(client, f" {email.upper()} ", full_name="Ann")
    assert ann == {
        "id": ann["id"],
        "email": email,
        "full_name": "Ann",
        "is_active": True,
        "is_superuser": False,
        "created_at": ann["created_at"],
    }
    assert int(ann["id"]) > 2**53
    assert cluster.shard_of(int(ann["id"])) == 5
    assert client.get("/users/me", headers=headers).json() == ann

    for wrong in ({"email": email, "password": "wrong horse"}, {"email": "x@y", "password": PASSWORD}):
        assert client.post("/login", json=wrong).status_code == 401
    for token in ("", "Bearer x", f"{headers['Authorization']}x"):
        assert client.get("/users/me", headers={"Authorization": token}).status_code == 401
    assert client.get("/items").status_code == 401
    short = client.post("/signup", json={"email": "x@y", "password": "short"})
    assert short.status_code == 422
    assert client.post("/signup", json={"email": "nowhere", "password": PASSWORD}).status_code == 422


def test_an_address_may_change_and_the_user_stays(client: TestClient, cluster: Cluster) -> None:
    old, new = address(cluster, 1), address(cluster, 6)
    ann, headers = join(client, old)
    _, of_ben = join(client, address(cluster, 3))
    changed = client.patch("/users/me", json={"email": new, "full_name": "Ann"}, headers=headers)
    assert changed.json() == {**ann, "email": new, "full_name": "Ann"}
    assert client.post("/login", json={"email": old, "password": PASSWORD}).status_code == 401
    # Found where she is, not where the hash of her address points.
    assert client.get("/users/me", headers=logged_in(client, new)).json()["id"] == ann["id"]

    again = {"email": new, "password": PASSWORD}
    assert client.post("/signup", json=again).status_code == 409
    assert client.patch("/users/me", json={"email": new}, headers=of_ben).status_code == 409
    assert client.patch("/users/me", json={"email": new}, headers=headers).status_code == 200
    assert client.patch("/users/me", json={"email": None}, headers=headers).status_code == 422


def test_of_several_who_sign_up_with_one_address_one_succeeds(client: TestClient) -> None:
    wanted = {"email": "ann@example.com", "password": PASSWORD}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: client.post("/signup", json=wanted).status_code, range(6)))
    assert sorted(answers) == [201, 409, 409, 409, 409, 409]


def test_two_users_with_one_address_are_not_mixed_up(
    client: TestClient, cluster: Cluster, models: ModuleType
) -> None:
    email = address(cluster, 2)
    join(client, email)
    with cluster.session(shard=7) as session:  # As two changes at the same moment leave it.
        session.add(models.User(email=email, hashed_password="00:00"))
        session.commit()
    answer = client.post("/login", json={"email": email, "password": PASSWORD})
    assert (answer.status_code, answer.json()) == (
        409,
        {"detail": "several accounts have this e-mail address"},
    )


def test_items_live_with_their_owner(client: TestClient, cluster: Cluster) -> None:
    ann, headers = join(client, address(cluster, 2))
    made = [add(client, headers, f"no. {number}") for number in range(7)]
    assert {cluster.shard_of(int(one["id"])) for one in made} == {2}
    assert {one["owner_id"] for one in made} == {ann["id"]}

    pages = [client.get("/items", params={"limit": 3}, headers=headers).json()]
    while pages[-1]["after"]:
        assert isinstance(pages[-1]["after"], str)
        more = {"limit": 3, "after": pages[-1]["after"]}
        pages.append(client.get("/items", params=more, headers=headers).json())
    assert [len(page["data"]) for page in pages] == [3, 3, 1]
    assert {page["count"] for page in pages} == {7}
    assert [one for page in pages for one in page["data"]] == made[::-1]

    path = f"/items/{made[0]['id']}"
    changed = client.put(path, json={"description": "the first"}, headers=headers)
    assert changed.json() == {**made[0], "description": "the first"}
    assert client.get(path, headers=headers).json() == changed.json()
    assert client.put(path, json={"title": None}, headers=headers).status_code == 422
    assert client.delete(path, headers=headers).status_code == 204
    assert client.get(path, headers=headers).status_code == 404

    ids = [one["id"] for one in made[1:4]]
    assert client.post("/items/delete", json={"ids": ids}, headers=headers).json() == {"deleted": 3}
    assert client.get("/items", headers=headers).json()["count"] == 3


def test_who_goes_takes_the_items_along(client: TestClient, cluster: Cluster, models: ModuleType) -> None:
    _, headers = join(client, address(cluster, 2))
    add(client, headers, "one")
    other, of_other = join(client, address(cluster, 2, nth=1))
    kept = add(client, of_other, "another's")
    assert client.delete("/users/me", headers=headers).status_code == 204
    assert client.get("/users/me", headers=headers).status_code == 401
    with cluster.session(shard=2) as session:
        assert [str(item.id) for item in session.query(models.Item)] == [kept["id"]]
        assert [str(user.id) for user in session.query(models.User)] == [other["id"]]


def test_superusers_see_the_users_of_all_shards(
    client: TestClient, cluster: Cluster, models: ModuleType
) -> None:
    everybody = [join(client, address(cluster, shard))[0] for shard in range(8)]
    with cluster.session(id=int(everybody[3]["id"])) as session:
        session.get_one(models.User, int(everybody[3]["id"])).is_superuser = True
        session.commit()
    headers = logged_in(client, everybody[3]["email"])
    first = client.get("/users", params={"limit": 5}, headers=headers).json()
    rest = client.get("/users", params={"limit": 5, "after": first["after"]}, headers=headers).json()
    assert (first["count"], len(first["data"]), len(rest["data"]), rest["after"]) == (8, 5, 3, None)
    seen = [user["id"] for page in (first, rest) for user in page["data"]]
    assert seen == sorted((user["id"] for user in everybody), key=int, reverse=True)
    assert client.get(f"/users/{everybody[0]['id']}", headers=headers).json() == everybody[0]

    of_another = logged_in(client, everybody[0]["email"])
    assert client.get("/users", headers=of_another).status_code == 403
    assert client.get(f"/users/{everybody[0]['id']}", headers=of_another).status_code == 403


def test_ids_of_others_and_of_nobody(client: TestClient, cluster: Cluster) -> None:
    _, headers = join(client, address(cluster, 2))
    mine = add(client, headers, "mine")
    _, of_neighbour = join(client, address(cluster, 2, nth=1))
    _, of_stranger = join(client, address(cluster, 5))
    neighbours = add(client, of_neighbour, "in the same shard")
    strangers = add(client, of_stranger, "in another shard")
    nobodys = cluster.layout.encode(ms=1, shard=2)
    nowhere = cluster.layout.encode(ms=1, shard=8)

    for id_ in (neighbours["id"], strangers["id"], nobodys, nowhere, -1):
        path = f"/items/{id_}"
        assert client.get(path, headers=headers).status_code == 404
        assert client.put(path, json={"title": "taken"}, headers=headers).status_code == 404
        assert client.delete(path, headers=headers).status_code == 404
        several = {"ids": [mine["id"], str(id_)]}
        assert client.post("/items/delete", json=several, headers=headers).status_code == 404
    for no_id in ("x", "1.0", 2**63):
        assert client.get(f"/items/{no_id}", headers=headers).status_code == 422
    assert client.get(f"/items/{mine['id']}", headers=headers).json() == mine
    assert client.get(f"/items/{strangers['id']}", headers=of_stranger).json() == strangers


def test_an_id_that_a_browser_has_rounded_is_refused(client: TestClient, cluster: Cluster) -> None:
    _, headers = join(client, address(cluster, 2))
    mine = add(client, headers, "mine")
    for id_ in (int(mine["id"]), int(float(mine["id"])), 2**53):
        answer = client.post("/items/delete", json={"ids": [id_]}, headers=headers)
        assert answer.status_code == 422
        assert "send the ID as a string" in answer.json()["detail"][0]["msg"]
    assert client.get(f"/items/{mine['id']}", headers=headers).json() == mine


def test_the_schema_shows_ids_as_strings(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    shown = schema["components"]["schemas"]
    ids = [
        shown["UserPublic"]["properties"]["id"],
        shown["ItemPublic"]["properties"]["id"],
        shown["ItemPublic"]["properties"]["owner_id"],
        shown["ItemIds"]["properties"]["ids"]["items"],
        shown["ItemsPublic"]["properties"]["after"]["anyOf"][0],
        schema["paths"]["/items/{item_id}"]["get"]["parameters"][0]["schema"],
    ]
    for one in ids:
        assert (one["type"], one["pattern"]) == ("string", ids[0]["pattern"])
    assert "hashed_password" not in str(schema)
