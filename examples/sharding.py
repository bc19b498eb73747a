"""Weather by continent: the horizontal-sharding example of SQLAlchemy's documentation, on shardids.

That example needs four databases, a table of IDs that all of them wait for, and functions that choose a shard
for an object, an identity and a query. Here the models say it: a place lives where its continent's key says,
its reports live where the place is, and the ID of either tells where to look.

    SHARDIDS_CATALOG=… python examples/sharding.py
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from statistics import fmean

from sqlalchemy import ForeignKey, UniqueConstraint, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship, selectinload

from shardids import Cluster, primary_key, sharding_key

WEATHER = {
    ("Asia", "Tokyo"): [80.0, 75.0],
    ("North America", "New York"): [75.0],
    ("North America", "Toronto"): [85.0, 62.5],
    ("Europe", "London"): [65.0],
    ("Europe", "Dublin"): [55.0],
    ("South America", "Brasilia"): [80.0],
    ("South America", "Quito"): [70.0, 71.5],
}
"""Temperatures, in °F, of places by continent and city."""


class Base(DeclarativeBase):
    """The tables; each shard has both."""


class Place(Base):
    """Where the weather is measured: in the shard of its continent."""

    __tablename__ = "places"
    __table_args__ = (UniqueConstraint("continent", "city"),)

    id: Mapped[int] = primary_key()
    continent: Mapped[str] = sharding_key()
    city: Mapped[str]
    reports: Mapped[list[Report]] = relationship(back_populates="place", order_by="Report.id")


class Report(Base):
    """A measurement: in the shard of its place."""

    __tablename__ = "reports"

    id: Mapped[int] = primary_key()
    place_id: Mapped[int] = mapped_column(ForeignKey("places.id"), index=True)
    temperature: Mapped[float]
    measured_at: Mapped[datetime] = mapped_column(default=lambda: datetime.now(UTC).replace(tzinfo=None))
    place: Mapped[Place] = relationship(back_populates="reports")


def create_tables(cluster: Cluster) -> None:
    """Make the tables in every shard."""
    for shard in cluster.placement.node_of:
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection)


def write(cluster: Cluster) -> None:
    """Write all places with their reports, wherever each belongs, in one transaction a node."""
    with cluster.sharded_session() as session, session.begin():
        for (continent, city), temperatures in WEATHER.items():
            reports = [Report(temperature=temperature) for temperature in temperatures]
            session.add(Place(continent=continent, city=city, reports=reports))


def show(cluster: Cluster) -> None:
    """Read it again: one shard where the criteria name one, all of them where they don't."""
    with cluster.sharded_session() as session:
        query = select(Place).where(Place.continent.in_(["Europe", "Asia"])).order_by(Place.id)
        found = session.scalars(query.options(selectinload(Place.reports))).all()
        for place in sorted(found, key=lambda place: place.city):
            print(f"{place.city}: {[report.temperature for report in place.reports]}")

        hottest = select(Report).order_by(Report.temperature.desc()).limit(1)
        print(f"hottest of all: {session.scalars(hottest).one().place.city}")

        # The sum of floats depends on their order: nodes give the rows instead.
        temperatures = session.scalars(select(Report.temperature)).all()
        print(f"{len(temperatures)} reports, {fmean(temperatures):.1f} on average")

        quito = session.scalars(
            select(Place).where(Place.continent == "South America", Place.city == "Quito")
        ).one()
        session.expunge_all()
        print(f"by ID: {session.get_one(Place, quito.id).city}")  # the ID's shard, and no other


def main() -> None:
    """Make the tables of the cluster, write, and read."""
    with Cluster.connect(os.environ["SHARDIDS_CATALOG"]) as cluster:
        create_tables(cluster)
        write(cluster)
        show(cluster)


if __name__ == "__main__":
    main()
