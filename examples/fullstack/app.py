"""The service. In the folder ``examples``, with a cluster in which ``models.create_tables`` has run::

    SHARDIDS_CATALOG=postgresql://… SECRET_KEY=… uvicorn fullstack.app:app

A request with a token opens one shard: that of the ID in the token. Signing up, logging in, changing an
address and listing users ask every node.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlmodel import Session

from fullstack import items, models, users
from fullstack.security import token_for, user_of
from shardids import Cluster, ShardId
from shardids.errors import BadArgument, CannotCombine, ConnectionFailed, FanOutRefused, ShardFenced


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """One cluster for the whole service: it holds one pool of connections a node."""
    app.state.secret = os.environ["SECRET_KEY"]
    with Cluster.connect(os.environ["SHARDIDS_CATALOG"]) as cluster:
        app.state.cluster = cluster
        yield


app = FastAPI(title="Items", lifespan=lifespan)


def _cluster(request: Request) -> Cluster:
    cluster: Cluster = request.app.state.cluster
    return cluster


Nodes = Annotated[Cluster, Depends(_cluster)]
Bearer = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def _caller(request: Request, bearer: Bearer) -> int:
    user_id = user_of(bearer.credentials, request.app.state.secret) if bearer else None
    if user_id is None:
        raise HTTPException(401, "log in first", {"WWW-Authenticate": "Bearer"})
    return user_id


Caller = Annotated[int, Depends(_caller)]


def _session(cluster: Nodes, caller: Caller) -> Iterator[Session]:
    with cluster.at(id=caller).session(class_=Session) as session:
        yield session


Shard = Annotated[Session, Depends(_session)]


def _user(session: Shard, caller: Caller) -> models.User:
    user = session.get(models.User, caller)
    if user is None or not user.is_active:
        raise HTTPException(401, "this account is gone", {"WWW-Authenticate": "Bearer"})
    return user


Me = Annotated[models.User, Depends(_user)]


def _superuser(user: Me) -> models.User:
    if not user.is_superuser:
        raise HTTPException(403, "only superusers may do this")
    return user


Limit = Annotated[int, Query(ge=1, le=100)]


@app.post("/signup", status_code=201)
def sign_up(new: models.SignUp, cluster: Nodes) -> models.UserPublic:
    """Make an account."""
    return users.sign_up(cluster, new)


@app.post("/login")
def log_in(who: models.LogIn, cluster: Nodes, request: Request) -> models.Token:
    """Get a token."""
    user = users.log_in(cluster, who)
    return models.Token(access_token=token_for(user.id, request.app.state.secret))


@app.get("/users", dependencies=[Depends(_superuser)])
def read_users(cluster: Nodes, limit: Limit = 100, after: ShardId | None = None) -> models.UsersPublic:
    """Users of all shards, newest first."""
    return users.page(cluster, limit, after)


@app.get("/users/me")
def read_me(me: Me) -> models.UserPublic:
    """Who the token is for."""
    return models.UserPublic.model_validate(me)


@app.patch("/users/me")
def change_me(wanted: models.UserChange, me: Me, session: Shard, cluster: Nodes) -> models.UserPublic:
    """Change name or address."""
    return users.change(cluster, session, me, wanted)


@app.delete("/users/me", status_code=204)
def delete_me(me: Me, session: Shard) -> None:
    """Delete the account, and its items with it."""
    session.delete(me)
    session.commit()


@app.get("/users/{user_id}", dependencies=[Depends(_superuser)])
def read_user(user_id: ShardId, cluster: Nodes) -> models.UserPublic:
    """A user, in the shard that the ID names."""
    with cluster.at(id=user_id).session(class_=Session) as session:
        user = session.get(models.User, user_id)
        if user is None:
            raise HTTPException(404, "there is no such user")
        return models.UserPublic.model_validate(user)


@app.get("/items")
def read_items(
    me: Me, session: Shard, limit: Limit = 100, after: ShardId | None = None
) -> models.ItemsPublic:
    """One's items, newest first; ``after`` is that of the page before."""
    return items.page(session, me, limit, after)


@app.post("/items", status_code=201)
def add_item(new: models.NewItem, me: Me, session: Shard) -> models.ItemPublic:
    """Make an item."""
    return items.add(session, me, new)


@app.post("/items/delete")
def delete_items(which: models.ItemIds, me: Me, session: Shard) -> dict[str, int]:
    """Delete several items, or none of them."""
    return {"deleted": items.delete(session, me, which.ids)}


@app.get("/items/{item_id}")
def read_item(item_id: ShardId, me: Me, session: Shard) -> models.ItemPublic:
    """One item."""
    return models.ItemPublic.model_validate(items.find(session, me, item_id))


@app.put("/items/{item_id}")
def change_item(item_id: ShardId, wanted: models.ItemChange, me: Me, session: Shard) -> models.ItemPublic:
    """Change an item."""
    return items.change(session, items.find(session, me, item_id), wanted)


@app.delete("/items/{item_id}", status_code=204)
def delete_item(item_id: ShardId, me: Me, session: Shard) -> None:
    """Delete an item."""
    items.delete(session, me, [item_id])


@app.exception_handler(BadArgument)
def no_such_row(_request: Request, error: BadArgument) -> JSONResponse:
    """An ID that no shard of this cluster can have issued, or one of another shard."""
    if isinstance(error, CannotCombine | FanOutRefused):
        raise error  # The program's own mistake.
    return JSONResponse({"detail": error.message}, 404)


@app.exception_handler(ConnectionFailed)
@app.exception_handler(ShardFenced)
def try_again(_request: Request, _error: ConnectionFailed | ShardFenced) -> JSONResponse:
    """The shard is on its way to another node, or its node is down."""
    return JSONResponse({"detail": "try again"}, 503, {"Retry-After": "1"})
