"""Reference tables: what COMMIT costs when it waits for all nodes, and a join beside one within the shard."""

from __future__ import annotations

from itertools import count

from sqlalchemy import Connection, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.report import Section, Timed, interleaved, ratio, seconds
from shardids import Cluster, reference_table
from shardids.catalog.rows import Catalog
from shardids.pg.embedded import temporary_servers
from shardids.tables import references
from shardids.testing.devcluster import create_cluster

WRITES = 20
JOINS = 20
COUNTRIES = 200
USERS = 5000
SHARD = 0


class Base(DeclarativeBase):
    """The tables."""


class Country(Base):
    """A row."""

    __tablename__ = "countries"
    __table_args__ = reference_table()

    code: Mapped[str] = mapped_column(String(8), primary_key=True)
    name: Mapped[str]


def run(rounds: int) -> Section:
    """Measure writes with and without waiting for two other nodes, and join with both kinds of table."""
    with temporary_servers(3, settings={"fsync": "on", "synchronous_commit": "on"}) as servers:
        url = create_cluster(servers, 6)
        catalog = Catalog(url)
        references.create_table(catalog, "countries", writer="a", models=Base.metadata)
        catalog.close()
        with Cluster.connect(url) as cluster:
            _fill(cluster)
            with (
                cluster.reference_session() as plain,
                cluster.reference_session(wait=True) as waiting,
                cluster.at(shard=SHARD).connection() as connection,
            ):
                writes = interleaved(
                    {
                        "write, COMMIT on the writer": _writes(plain),
                        "write, COMMIT waits for two other nodes": _writes(waiting),
                    },
                    rounds=rounds,
                    unit="ms",
                )
                joins = interleaved(
                    {
                        "join, a table of the shard": _joins(connection, "shard_0000"),
                        "join, the reference table": _joins(connection, "shardids_ref"),
                    },
                    rounds=rounds,
                    unit="ms",
                )
    write, join = list(writes.values()), list(joins.values())
    return Section(
        title="Reference tables: a write that waits, and a join",
        conditions=f"three servers of this machine, fsync on, one client; {WRITES} times SELECT, UPDATE of a"
        f" row and COMMIT a round; joins of {USERS:,} rows of a shard with {COUNTRIES}; {rounds} rounds.",
        measures=(*write, *join),
        ratios=(ratio(write[1], write[0]), ratio(join[1], join[0])),
    )


def _fill(cluster: Cluster) -> None:
    with cluster.reference_session(wait=True) as session, session.begin():
        session.add_all([Country(code=f"{n}", name=f"country {n}") for n in range(COUNTRIES)])
    with cluster.at(shard=SHARD).engine.begin() as connection:
        connection.execute(text("create table shard_0000.countries (code text primary key, name text)"))
        connection.execute(text("insert into shard_0000.countries select * from shardids_ref.countries"))
        connection.execute(text("create table shard_0000.users (id int primary key, country text)"))
        filling = (
            "insert into shard_0000.users select n, (n % :countries)::text from generate_series(1, :users) n"
        )
        connection.execute(
            text(filling),
            {"countries": COUNTRIES, "users": USERS},
        )
        connection.execute(text("analyze"))


def _writes(session: Session) -> Timed:
    numbers = count()

    def write() -> None:
        for _ in range(WRITES):
            one = session.get_one(Country, "1")
            one.name = f"renamed {next(numbers)}"
            session.commit()

    return lambda: seconds(write) / WRITES * 1000


def _joins(connection: Connection, schema: str) -> Timed:
    query = text(f"""
        select count(*), max(c.name)
        from shard_0000.users u join {schema}.countries c on c.code = u.country""")

    def join() -> None:
        for _ in range(JOINS):
            connection.execute(query).one()

    return lambda: seconds(join) / JOINS * 1000
