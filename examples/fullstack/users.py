"""Users: those found by ID are asked for in one shard, those found by address in all of them."""

from __future__ import annotations

from fastapi import HTTPException
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, col, func, select

from fullstack.models import LogIn, SignUp, User, UserChange, UserPublic, UsersPublic
from fullstack.security import hashed, is_right
from shardids import Cluster, PageQuery

_TAKEN = HTTPException(409, "another account has this e-mail address")


def with_email(cluster: Cluster, email: str) -> list[User]:
    """The users of an address. Nothing tells their shard, so every node is asked."""
    with cluster.sharded_session(class_=Session) as session:
        return list(session.exec(select(User).where(User.email == email)).all())


def sign_up(cluster: Cluster, new: SignUp) -> UserPublic:
    """Make a user, in the shard of the address: of two who sign up with one, the shard refuses the second."""
    if with_email(cluster, new.email):
        raise _TAKEN
    user = User(email=new.email, full_name=new.full_name, hashed_password=hashed(new.password))
    with cluster.at(key=new.email).session(class_=Session) as session:
        session.add(user)
        return _committed(session, user)


def log_in(cluster: Cluster, who: LogIn) -> User:
    """The user who has this address and password."""
    found = with_email(cluster, who.email)
    if len(found) > 1:
        raise HTTPException(409, "several accounts have this e-mail address")
    user = found[0] if found else None
    known = is_right(who.password, user.hashed_password if user else None)
    if user is None or not known or not user.is_active:
        raise HTTPException(401, "wrong e-mail address or password")
    return user


def change(cluster: Cluster, session: Session, user: User, wanted: UserChange) -> UserPublic:
    """Change a user, who stays in the same shard.

    A unique constraint holds within a shard. Two users of different shards who take the same address at the
    same moment both get it; ``log_in`` refuses them then.
    """
    changes = wanted.model_dump(exclude_unset=True)
    if "email" in changes:
        if wanted.email is None:
            raise HTTPException(422, "an account has an e-mail address")
        if any(other.id != user.id for other in with_email(cluster, wanted.email)):
            raise _TAKEN
    user.sqlmodel_update(changes)
    return _committed(session, user)


def page(cluster: Cluster, limit: int, after: int | None) -> UsersPublic:
    """Users of all shards, newest first: each node is asked, and the answers are merged by ID."""
    query = PageQuery(select(User), col(User.id), limit=limit, after=after, newest_first=True)
    with cluster.sharded_session(class_=Session) as session:
        found = query.page(session.scalars(query.statement).unique())
        count = session.exec(select(func.count()).select_from(User)).one()
        public = [UserPublic.model_validate(user) for user in found.items]
    return UsersPublic(data=public, count=count, after=found.after)


def _committed(session: Session, user: User) -> UserPublic:
    try:
        session.commit()
    except IntegrityError:
        raise _TAKEN from None
    return UserPublic.model_validate(user, from_attributes=True)
