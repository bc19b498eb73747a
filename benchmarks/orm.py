"""What SQLAlchemy's inserts cost with keys that the shard draws, against ``Identity()``."""

from __future__ import annotations

import gc
from functools import partial

from sqlalchemy import BigInteger, Engine, Identity, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.report import Ratio, Section, Timed, interleaved, ratio, seconds
from shardids import Cluster, primary_key
from shardids.pg.embedded import temporary_server
from shardids.testing.devcluster import create_cluster

OBJECTS = 10_000
COMMITS = 50
SHARD = 5
DURABLE = {"fsync": "on", "full_page_writes": "on"}


class _Base(DeclarativeBase):
    pass


class _Sharded(_Base):
    __tablename__ = "sharded"

    id: Mapped[int] = primary_key()
    name: Mapped[str]


class _Identity(_Base):
    __tablename__ = "by_identity"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str]


_MODELS: dict[str, type[_Sharded | _Identity]] = {"primary_key()": _Sharded, "Identity()": _Identity}


def run(rounds: int) -> Section:
    """Measure a flush of many objects, and objects committed one by one."""
    with (
        temporary_server(settings=DURABLE) as server,
        Cluster.connect(create_cluster([server], 8)) as cluster,
    ):
        engine = cluster.at(shard=SHARD).engine
        with engine.begin() as connection:
            _Base.metadata.create_all(connection)
            version = str(connection.exec_driver_sql("show server_version").scalar_one())
        flushes = interleaved(_flushes(engine), rounds=rounds, unit="s")
        commits = interleaved(_commits(engine), rounds=4 * rounds, unit="ms")
        statements = _count_statements(engine)
    many, many_by_identity = flushes.values()
    single, single_by_identity = commits.values()
    return Section(
        title="SQLAlchemy, one session",
        conditions=f"PostgreSQL {version}, fsync on, {OBJECTS:,} objects a flush, {COMMITS} commits one after"
        f" another, {rounds} rounds (commits: {4 * rounds}).",
        measures=(*flushes.values(), *commits.values()),
        ratios=(
            ratio(many, many_by_identity, at_most=1.15),
            ratio(single, single_by_identity, at_most=1.1),
            Ratio(name=f"statements for {OBJECTS:,} objects", value=statements, at_most=12),
        ),
    )


def _flushes(engine: Engine) -> dict[str, Timed]:
    def timed(model: type[_Sharded | _Identity]) -> float:
        with Session(engine) as session:
            session.connection()
            session.add_all(model(name=f"name {number}") for number in range(OBJECTS))
            # What the last flush left is not to be collected during this one.
            gc.collect()
            return seconds(session.flush)

    return {f"flush, {name}": partial(timed, model) for name, model in _MODELS.items()}


def _commits(engine: Engine) -> dict[str, Timed]:
    def commit(model: type[_Sharded | _Identity]) -> None:
        for _ in range(COMMITS):
            with Session(engine) as session, session.begin():
                session.add(model(name="name"))

    def timed(model: type[_Sharded | _Identity]) -> float:
        return seconds(lambda: commit(model)) / COMMITS * 1000

    return {f"insert and commit, {name}": partial(timed, model) for name, model in _MODELS.items()}


def _count_statements(engine: Engine) -> int:
    sent: list[object] = []
    with Session(engine) as session:
        session.connection()
        event.listen(engine.engine, "before_cursor_execute", lambda *call: sent.append(call))
        session.add_all(_Sharded(name=f"name {number}") for number in range(OBJECTS))
        session.flush()
    return len(sent)
