"""IDs in models of pydantic and in FastAPI: strings in JSON, integers in Python."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Annotated, Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shardids import ShardId, primary_key
from shardids.ids.text import CANONICAL_DECIMAL

ID = 382529960780272642
HIGHEST, LOWEST = 2**63 - 1, -(2**63)
IN_JSON = {"type": "string", "pattern": CANONICAL_DECIMAL, "examples": [str(ID)]}


class User(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: ShardId
    parent_id: ShardId | None = None
    friends: list[ShardId] = []
    names: dict[ShardId, str] = {}


class Base(DeclarativeBase):
    pass


class Row(Base):
    __tablename__ = "rows"

    id: Mapped[ShardId] = primary_key()
    other_id: Mapped[ShardId] = mapped_column(ForeignKey("rows.id"))
    maybe_id: Mapped[ShardId | None]


@pytest.mark.parametrize("id_", [ID, 0, HIGHEST, LOWEST, -1])
def test_an_id_is_an_integer_in_python_and_a_string_in_json(id_: int) -> None:
    user = User(id=id_, parent_id=id_, friends=[id_], names={id_: "x"})
    values = {"id": id_, "parent_id": id_, "friends": [id_], "names": {id_: "x"}}
    text = str(id_)
    in_json = {"id": text, "parent_id": text, "friends": [text], "names": {text: "x"}}
    assert user.model_dump() == values
    assert user.model_dump(mode="json") == in_json
    assert json.loads(user.model_dump_json()) == in_json
    assert User.model_validate_json(user.model_dump_json()) == user
    assert User.model_validate(in_json) == user
    assert User.model_validate({**values, "id": np.int64(id_)}) == user
    assert User.model_validate_json(json.dumps({"id": id_})).id == id_
    assert type(User.model_validate_json(user.model_dump_json()).id) is int


def test_strict_models_read_strings_too() -> None:
    class Strict(BaseModel):
        model_config = ConfigDict(strict=True)

        id: ShardId

    assert Strict.model_validate({"id": str(ID)}).id == ID
    assert Strict.model_validate_json(f'{{"id": "{ID}"}}').id == ID


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "not an ID in decimal digits"),
        ("ann", "not an ID in decimal digits"),
        (" 5", "not an ID in decimal digits"),
        ("5\n", "not an ID in decimal digits"),
        ("0x10", "not an ID in decimal digits"),
        ("\u0665", "not an ID in decimal digits"),
        ("0AKR4Z3Y41502", "not an ID in decimal digits"),
        (str(HIGHEST + 1), "from -9223372036854775808 to 9223372036854775807"),
        (HIGHEST + 1, "from -9223372036854775808 to 9223372036854775807"),
        (LOWEST - 1, "from -9223372036854775808 to 9223372036854775807"),
        (True, "not bool"),
        (5.0, "not float"),
        (None, "not NoneType"),
        (b"5", "not bytes"),
    ],
)
def test_what_is_no_id_is_refused(value: object, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        User.model_validate({"id": value})
    (error,) = refused.value.errors()
    assert (error["type"], error["loc"]) == ("value_error", ("id",))


def test_the_json_schema_says_string() -> None:
    for mode in ("validation", "serialization"):
        properties = User.model_json_schema(mode=mode)["properties"]
        assert properties["id"] == {**IN_JSON, "title": "Id"}
        assert properties["friends"]["items"] == IN_JSON
        assert properties["parent_id"]["anyOf"] == [IN_JSON, {"type": "null"}]
    assert TypeAdapter(ShardId).json_schema() == IN_JSON


def test_a_row_becomes_a_model() -> None:
    user = User.model_validate(Row(id=ID, other_id=1))
    assert user.model_dump_json(include={"id"}) == f'{{"id":"{ID}"}}'


def test_columns_are_bigint() -> None:
    table = Row.__table__
    assert all(isinstance(column.type, BigInteger) for column in table.columns)
    assert [column.nullable for column in table.columns] == [False, False, True]
    assert [column.primary_key for column in table.columns] == [True, False, False]


def test_fastapi() -> None:
    app = FastAPI()

    @app.get("/users/{user_id}")
    def user(user_id: ShardId, friend: Annotated[list[ShardId] | None, Query()] = None) -> User:
        assert type(user_id) is int
        return User(id=user_id, friends=friend or [])

    @app.post("/users")
    def make(user: User) -> dict[str, Any]:
        return {"sum": str(user.id + 1)}

    async def use() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://photos") as client:
            answer = await client.get(f"/users/{ID}", params={"friend": [str(HIGHEST), "0"]})
            assert answer.json() == User(id=ID, friends=[HIGHEST, 0]).model_dump(mode="json")
            for body in ({"id": str(ID)}, {"id": ID}):
                assert (await client.post("/users", json=body)).json() == {"sum": str(ID + 1)}
            beyond = {"id": str(HIGHEST + 1)}
            for refused in (await client.get("/users/ann"), await client.post("/users", json=beyond)):
                assert refused.status_code == 422
                assert refused.json()["detail"][0]["type"] == "value_error"
            return (await client.get("/openapi.json")).json()

    described = asyncio.run(use())
    (path, query) = described["paths"]["/users/{user_id}"]["get"]["parameters"]
    assert path["schema"] == {**IN_JSON, "title": "User Id"}
    assert query["schema"]["anyOf"][0]["items"] == IN_JSON
    assert described["components"]["schemas"]["User"]["properties"]["id"] == {**IN_JSON, "title": "Id"}


def test_shardids_imports_without_pydantic() -> None:
    script = "import sys, shardids; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
