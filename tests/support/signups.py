"""An application whose e-mail addresses are unique over all shards, and what must be true of its claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, func, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, lookup_key, primary_key, sharding_key
from shardids.catalog.lookups import claims_name, shard_of_claim
from shardids.tables import lookups
from tests.conftest import found_cluster
from tests.support.clusters import catalog_at

EMAIL = "users.email"


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    email: Mapped[str] = lookup_key(unique=True)
    age: Mapped[int | None]
    photos: Mapped[list[Photo]] = relationship(back_populates="user")


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("users.id"))
    user: Mapped[User] = relationship(back_populates="photos")


def make_tables(cluster: Cluster) -> None:
    """Makes the models' tables in every shard."""
    for shard in cluster.placement.all_shards():
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection)


def open_signups(catalog: URL, nodes: Mapping[str, URL], shards: int) -> None:
    """Makes a cluster with the tables and the look-up, ready to be used."""
    found_cluster(catalog, nodes, shards)
    with Cluster.connect(catalog, listen=False) as cluster:
        make_tables(cluster)
    with catalog_at(catalog) as there:
        lookups.create(there, EMAIL)
        lookups.backfill(there, EMAIL)


def named(cluster: Cluster, shard: int) -> str:
    """A name of which the users are in a shard."""
    return next(name for n in range(1000) if cluster.shard_for(name := f"u{n}") == shard)


def emails(cluster: Cluster) -> Counter[str]:
    """How many rows of all shards have each e-mail address."""
    found: Counter[str] = Counter()
    for shard in cluster.placement.all_shards():
        with cluster.at(shard=shard).connection() as connection:
            found.update(connection.scalars(select(User.__table__.c.email)).all())
    return found


def claims(cluster: Cluster) -> dict[str, int]:
    """The shard that each address is claimed for."""
    found: dict[str, int] = {}
    name = claims_name("users", "email")
    for shard in cluster.placement.all_shards():
        schema = cluster.schema_of(shard)
        with cluster.at(shard=shard).connection() as connection:
            for value, of in connection.exec_driver_sql(f'select value, shard from "{schema}"."{name}"'):
                assert value not in found
                assert shard_of_claim(value, cluster.shard_count) == shard
                found[value] = of
    return found


def rows(cluster: Cluster) -> dict[str, int]:
    """The shard of the row with each address, of which there is one."""
    found: dict[str, int] = {}
    for shard in cluster.placement.all_shards():
        with cluster.at(shard=shard).connection() as connection:
            for email in connection.scalars(select(User.__table__.c.email)):
                assert email not in found, f"{email} is in shards {found[email]} and {shard}"
                found[email] = shard
    return found


def count(cluster: Cluster, shard: int) -> Any:
    """How many users a shard has."""
    with cluster.at(shard=shard).connection() as connection:
        return connection.scalar(select(func.count()).select_from(User.__table__))
