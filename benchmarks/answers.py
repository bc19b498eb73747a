"""What a session costs that sorts after the rows that it answers, against one that does not."""

from __future__ import annotations

from functools import partial

from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session

from benchmarks.report import Section, Timed, interleaved, ratio, seconds
from shardids import Cluster, primary_key
from shardids.pg.embedded import temporary_server
from shardids.testing.devcluster import create_cluster

COMMITS = 100
CALLS = 20_000
SHARD = 5
DURABLE = {"fsync": "on", "full_page_writes": "on"}


class _Base(DeclarativeBase):
    pass


class _Note(_Base):
    __tablename__ = "notes"

    id: Mapped[int] = primary_key()
    text: Mapped[str]


def run(rounds: int) -> Section:
    """Measure rows that are committed one by one, with and without ``after``, and the function alone."""
    with (
        temporary_server(settings=DURABLE) as server,
        Cluster.connect(create_cluster([server], 8)) as cluster,
    ):
        with cluster.at(shard=SHARD).engine.begin() as connection:
            _Base.metadata.create_all(connection)
            version = str(connection.exec_driver_sql("show server_version").scalar_one())
        commits = interleaved(
            {
                "a row, no after": partial(_commits, cluster, "none"),
                "a row, after an ID that the shard is past": partial(_commits, cluster, "past"),
                "a row, after an ID 2 ms ahead of the shard": partial(_commits, cluster, "ahead"),
            },
            rounds=rounds,
            unit="µs",
        )
        calls: dict[str, Timed] = {"advance_past, shard past the ID": partial(_calls, cluster)}
        alone = interleaved(calls, rounds=rounds, unit="µs")
    plain, past, ahead = commits.values()
    return Section(
        title="Answers: sessions with after=",
        conditions=f"PostgreSQL {version}, fsync on; a session, an INSERT, a COMMIT, {COMMITS} in a row;"
        f" only the function {CALLS:,} times in a statement. {rounds} rounds.",
        measures=(*commits.values(), *alone.values()),
        ratios=(ratio(past, plain, at_most=1.35), ratio(ahead, plain)),
    )


def _commits(cluster: Cluster, case: str) -> float:
    latest = cluster.at(shard=SHARD).run(_inserted)
    two_ms = 2 << (cluster.layout.shard_bits + cluster.layout.sequence_bits)

    def commit() -> None:
        nonlocal latest
        for _ in range(COMMITS):
            after = {"none": None, "past": latest, "ahead": latest + two_ms}[case]
            with cluster.session(shard=SHARD, after=after) as session:
                note = _Note(text="so do I")
                session.add(note)
                session.flush()
                latest = note.id
                session.commit()

    return seconds(commit) / COMMITS * 1e6


def _inserted(session: Session) -> int:
    note = _Note(text="first")
    session.add(note)
    session.flush()
    return note.id


def _calls(cluster: Cluster) -> float:
    (past,) = cluster.at(shard=SHARD).reserve(1)
    with cluster.engine(cluster.node_of(SHARD)).begin() as connection:
        many = text(
            "select count(shardids.advance_past(:shard, :id + 0 * n)) from generate_series(1, :calls) n"
        )
        return (
            seconds(lambda: connection.execute(many, {"shard": SHARD, "id": past, "calls": CALLS}))
            / CALLS
            * 1e6
        )
