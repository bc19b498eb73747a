"""A cluster with reference tables: models, nodes that are databases of a server, and what may not dangle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import ForeignKey, String
from sqlalchemy.engine import URL, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, primary_key, reference_table, sharding_key
from shardids.catalog.rows import Catalog
from shardids.pg.embedded import EmbeddedServer
from shardids.tables import references
from tests.conftest import dsn, found_cluster

SHARDS = 6


class Base(DeclarativeBase):
    pass


class Currency(Base):
    __tablename__ = "currencies"
    __table_args__ = reference_table()
    code: Mapped[str] = mapped_column(String(3), primary_key=True)


class Country(Base):
    __tablename__ = "countries"
    __table_args__ = reference_table()
    code: Mapped[str] = mapped_column(String(2), primary_key=True)
    name: Mapped[str]
    currency: Mapped[str | None] = mapped_column(ForeignKey("shardids_ref.currencies.code"))


class User(Base):
    __tablename__ = "users"
    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()
    country_code: Mapped[str | None] = mapped_column(ForeignKey("shardids_ref.countries.code"))
    country: Mapped[Country | None] = relationship()


@dataclass
class Nodes:
    """Nodes of which a is the writer; shards of users on all of them."""

    urls: dict[str, URL]
    catalog: Catalog
    cluster: Cluster

    @property
    def environment(self) -> dict[str, str]:
        return {"SHARDIDS_CATALOG": dsn(self.urls["a"])}

    @contextmanager
    def connected(self, node: str) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(dsn(self.urls[node]), autocommit=True) as connection:
            yield connection

    def codes(self, node: str, table: str = "countries") -> list[str]:
        with self.connected(node) as connection:
            found = connection.execute(f"select code from shardids_ref.{table} order by 1")
            return [code for (code,) in found]

    def write(self, *objects: object) -> None:
        with self.cluster.reference_session(wait=True) as session:
            for one in objects:
                session.merge(one)
            session.commit()

    def shard_on(self, node: str) -> int:
        owners = self.cluster.placement.node_of
        return next(shard for shard, owner in sorted(owners.items()) if owner == node)

    def following(self) -> list[tuple[str, int]]:
        """The subscriptions of the nodes, each with its object ID: another one follows by a new slot."""
        found = []
        for node in self.urls:
            with self.connected(node) as connection:
                rows = connection.execute(
                    """select subname::text, oid::bigint from pg_subscription
                       where subdbid = (select oid from pg_database where datname = current_database())"""
                )
                found += rows.fetchall()
        return found

    def dangling(self) -> list[tuple[str, str]]:
        """Rows of shards whose row in the reference table is missing on their node."""
        found = []
        for shard, node in self.catalog.placement().node_of.items():
            with self.connected(node) as connection:
                rows = connection.execute(
                    f"""select u.name from shard_{shard:04}.users u
                        where u.country_code is not null and not exists (
                          select from shardids_ref.countries c where c.code = u.country_code)"""
                )
                found += [(node, name) for (name,) in rows]
        return found


def database(server: EmbeddedServer, name: str) -> URL:
    """A new database of a server."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return make_url(server.url(name)).set(drivername="postgresql")


@contextmanager
def nodes_at(urls: dict[str, URL]) -> Iterator[Nodes]:
    """A cluster at databases, with currencies, countries, and users in each shard."""
    found_cluster(urls["a"], urls, SHARDS)
    catalog = Catalog(dsn(urls["a"]))
    references.create_table(catalog, "currencies", writer="a", models=Base.metadata)
    references.create_table(catalog, "countries", models=Base.metadata)
    with Cluster.connect(dsn(urls["a"])) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
        nodes = Nodes(urls, catalog, cluster)
        nodes.write(Currency(code="EUR"))
        nodes.write(Country(code="DE", name="Germany", currency="EUR"), Country(code="FR", name="France"))
        yield nodes
    catalog.close()
