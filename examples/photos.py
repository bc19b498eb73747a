"""A small photo-sharing application: a user's photos live in the user's shard.

``shardids demo`` runs it on two servers. What is shardids here: ``primary_key()`` in the models, and
``cluster.session(key=…)`` or ``cluster.session(id=…)`` where an ordinary application opens a session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime

from sqlalchemy import ForeignKey, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, primary_key


class Base(DeclarativeBase):
    """The application's tables; each shard has all of them."""


class User(Base):
    """Somebody who shares photos, sharded by name."""

    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = mapped_column(unique=True)
    photos: Mapped[list[Photo]] = relationship(back_populates="user")


class Photo(Base):
    """A photo, in the shard of its user."""

    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    caption: Mapped[str]
    user: Mapped[User] = relationship(back_populates="photos")


def create_tables(cluster: Cluster) -> None:
    """Make the tables in every shard."""
    for shard in cluster.placement.node_of:
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection, checkfirst=False)


def sign_up(cluster: Cluster, names: Iterable[str], photos_each: int) -> Iterator[int]:
    """Write users, each with some photos; yield the number of rows after each commit, one a shard."""
    by_shard: dict[int, list[str]] = defaultdict(list)
    for name in names:
        by_shard[cluster.shard_for(name)].append(name)
    for shard, members in by_shard.items():
        with cluster.session(shard=shard) as session, session.begin():
            for name in members:
                photos = [Photo(caption=f"{name}, no. {n}") for n in range(1, photos_each + 1)]
                session.add(User(name=name, photos=photos))
        yield len(members) * (1 + photos_each)


def find_user(cluster: Cluster, name: str) -> User:
    """The user of a name: the name is the key, so one shard is asked."""
    with cluster.session(key=name) as session:
        return session.scalars(select(User).where(User.name == name)).one()


def photos_of(cluster: Cluster, user_id: int) -> list[Photo]:
    """A user's photos, oldest first: the ID names the shard, and its order is that of time."""
    with cluster.session(id=user_id) as session:
        query = select(Photo).where(Photo.user_id == user_id).order_by(Photo.id)
        return list(session.scalars(query))


def photos_between(cluster: Cluster, shard: int, start: datetime, end: datetime) -> int:
    """How many photos of a shard were born in a time: the primary key answers, there is no date column."""
    bounds = cluster.layout.id_range(start, end, shard)
    with cluster.session(shard=shard) as session:
        query = select(func.count()).where(Photo.id.between(bounds.first, bounds.last))
        return session.execute(query).scalar_one()
