"""The photo application as an HTTP service: FastAPI on ``AsyncCluster``.

In this folder, with a cluster in which ``photos.create_tables`` has made the tables::

    SHARDIDS_CATALOG=postgresql://… uvicorn photos_api:app

A user's photos live in the user's shard. Writes go through ``run``: they are run again on the new
node when the shard has moved. IDs are JSON strings, because numbers above 2^53 are rounded in browsers.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from photos import Photo, User
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from shardids import AsyncCluster, ShardId
from shardids.errors import BadArgument, ConnectionFailed, ShardFenced


class NewUser(BaseModel):
    """What a user is made of."""

    name: str


class UserOut(BaseModel):
    """A user."""

    model_config = ConfigDict(from_attributes=True)

    id: ShardId
    name: str


class NewPhoto(BaseModel):
    """What a photo is made of."""

    caption: str


class PhotoOut(BaseModel):
    """A photo of a user."""

    model_config = ConfigDict(from_attributes=True)

    id: ShardId
    user_id: ShardId
    caption: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One cluster for the whole service: it holds one pool of connections a node."""
    async with await AsyncCluster.connect(os.environ["SHARDIDS_CATALOG"]) as cluster:
        app.state.cluster = cluster
        yield


app = FastAPI(title="Photos", lifespan=lifespan)


def _cluster(request: Request) -> AsyncCluster:
    cluster: AsyncCluster = request.app.state.cluster
    return cluster


Cluster = Annotated[AsyncCluster, Depends(_cluster)]


@app.post("/users", status_code=201)
async def sign_up(new: NewUser, cluster: Cluster) -> UserOut:
    """Make a user: the name is the key that decides the shard."""

    async def write(session: AsyncSession) -> User:
        user = User(name=new.name)
        session.add(user)
        await session.flush()
        return user

    try:
        user = await cluster.at(key=new.name).run(write)
    except IntegrityError:
        raise HTTPException(409, f"the name {new.name!r} is taken") from None
    return UserOut.model_validate(user)


@app.get("/users")
async def find_user(name: str, cluster: Cluster) -> UserOut:
    """Find a user by name: one shard is asked."""
    async with cluster.session(key=name) as session:
        return _found(await session.scalar(select(User).where(User.name == name)))


@app.get("/users/{user_id}")
async def read_user(user_id: ShardId, cluster: Cluster) -> UserOut:
    """Read a user: the ID names the shard."""
    async with cluster.session(id=user_id) as session:
        return _found(await session.get(User, user_id))


def _found(user: User | None) -> UserOut:
    if user is None:
        raise HTTPException(404, "there is no such user")
    return UserOut.model_validate(user)


@app.post("/users/{user_id}/photos", status_code=201)
async def add_photo(user_id: ShardId, new: NewPhoto, cluster: Cluster) -> PhotoOut:
    """Add a photo, in its user's shard."""

    async def write(session: AsyncSession) -> Photo:
        _found(await session.get(User, user_id))
        photo = Photo(user_id=user_id, caption=new.caption)
        session.add(photo)
        await session.flush()
        return photo

    return PhotoOut.model_validate(await cluster.at(id=user_id).run(write))


@app.get("/users/{user_id}/photos")
async def list_photos(
    user_id: ShardId, cluster: Cluster, after: ShardId = 0, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> list[PhotoOut]:
    """A user's photos, oldest first, from the one after an ID on: the order of IDs is that of time."""
    query = select(Photo).where(Photo.user_id == user_id, Photo.id > after).order_by(Photo.id).limit(limit)
    async with cluster.session(id=user_id) as session:
        return [PhotoOut.model_validate(photo) for photo in await session.scalars(query)]


@app.exception_handler(BadArgument)
async def no_such_id(_request: Request, error: BadArgument) -> JSONResponse:
    """An ID that no shard of this cluster can have issued."""
    return JSONResponse({"detail": error.message}, 404)


@app.exception_handler(ConnectionFailed)
@app.exception_handler(ShardFenced)
async def try_again(_request: Request, _error: ConnectionFailed | ShardFenced) -> JSONResponse:
    """The shard is on its way to another node, or its node is down."""
    return JSONResponse({"detail": "try again"}, 503, {"Retry-After": "1"})
