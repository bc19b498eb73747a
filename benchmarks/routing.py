"""The session over all shards: get by ID, fan-out, and what 1,024 shards cost a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from heapq import merge
from itertools import cycle, islice
from pathlib import Path
from resource import getpagesize
from time import process_time
from typing import Any

from sqlalchemy import create_engine, insert, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session

from benchmarks.report import Measure, Ratio, Section, interleaved, ratio, seconds
from shardids import Cluster, primary_key, sharding_key
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.catalog.urls import parse_url
from shardids.client.routing.one_shard import refuse_statement
from shardids.dev.embedded import temporary_servers
from shardids.ids.layout import DEFAULT
from shardids.install import provision

SHARDS = 64
MANY_SHARDS = 1024
ROWS_A_SHARD = 200
NEWEST = 20
GETS = 20
FAN_OUTS = 4
MOST_MB = 5.0


class Base(DeclarativeBase):
    """The tables."""


class Note(Base):
    """A row."""

    __tablename__ = "notes"

    id: Mapped[int] = primary_key()
    writer: Mapped[str] = sharding_key()
    words: Mapped[str]


NEWEST_NOTES = select(Note).order_by(Note.id.desc()).limit(NEWEST)


def run(rounds: int) -> Section:
    """Measures getting a row, and the newest rows of all shards, each against what it is made of."""
    with _cluster(SHARDS) as urls, Cluster.connect(urls[0]) as cluster:
        _fill(cluster)
        with (
            Session(cluster.shard_engine(5)) as plain,
            cluster.session(shard=5) as kept,
            cluster.sharded_session() as routed,
        ):
            ids = plain.scalars(select(Note.id)).all()
            checks = _checks(cluster, ids[0], rounds)
            measures = interleaved(
                {
                    "get, a plain Session on the shard": _gets(plain, ids),
                    "get, cluster.session() on the shard": _gets(kept, ids),
                    "get, the session over all shards": _gets(routed, ids),
                },
                rounds=rounds,
                unit="ms",
            )
            gets = tuple(measures.values())
            by_hand, close = _newest_by_hand(cluster)
            assert by_hand() == [note.id for note in routed.scalars(NEWEST_NOTES)]
            measures = interleaved(
                {
                    "newest, one UNION ALL a node by hand": _repeated(by_hand, FAN_OUTS),
                    "newest, the session over all shards": _repeated(lambda: _newest(routed), FAN_OUTS),
                },
                rounds=rounds,
                unit="ms",
            )
            newest = tuple(measures.values())
            close()
    return Section(
        title="Routing",
        conditions=f"{SHARDS} shards with {ROWS_A_SHARD} rows each, on two servers on one machine,"
        f" {rounds} rounds of {GETS} gets or {FAN_OUTS} times the {NEWEST} newest rows. By hand: the nodes"
        " asked at once by two threads, objects loaded with from_statement(), a session a node, and merged.",
        measures=(*gets, *checks, *newest),
        ratios=(
            ratio(gets[1], gets[0], at_most=1.15),
            ratio(gets[2], gets[0], at_most=1.15),
            Ratio(
                name="cluster.session() above Session(), µs", value=_above(checks[1], checks[0]), at_most=5
            ),
            Ratio(name="the check of a statement on one shard, µs", value=checks[2].lowest, at_most=10),
            ratio(newest[1], newest[0], at_most=1.3),
        ),
    )


def many_shards(_rounds: int) -> Section:
    """Measures what a process grows by when it reads from every one of many shards."""
    with _cluster(MANY_SHARDS) as urls:
        plain, routed = _growth("plain", *urls), _growth("routed", urls[0])
    return Section(
        title=f"A process that reads from {MANY_SHARDS:,} shards",
        conditions="Two servers on one machine. What resident memory grows by after the imports: in a process"
        " that gets a row from each shard and then the newest of all, above one that gets as many rows from"
        " two plain engines.",
        measures=(),
        ratios=(
            Ratio(name="memory above plain engines, MB", value=routed["mb"] - plain["mb"], at_most=MOST_MB),
            Ratio(name="connections a node", value=routed["connections"] / 2, at_most=1),
            Ratio(name="pools a node", value=routed["pools"] / 2, at_most=1),
        ),
    )


@contextmanager
def _cluster(shards: int) -> Iterator[list[str]]:
    """Makes a cluster with the tables on two servers; the first one has the catalog."""
    with temporary_servers(2) as servers:
        catalog = Catalog(servers[0].url())
        provision.init(catalog, DEFAULT, shards)
        for name, server in zip("ab", servers, strict=True):
            provision.add_node(catalog, name, server.url())
        provision.create_shards(catalog, range(shards))
        catalog.close()
        with Cluster.connect(servers[0].url()) as cluster:
            for shard in range(shards):
                with cluster.shard_engine(shard).begin() as connection:
                    Base.metadata.create_all(connection, checkfirst=False)
        yield [server.url() for server in servers]


def _fill(cluster: Cluster) -> None:
    for shard in range(SHARDS):
        rows = [{"writer": f"writer {n}", "words": "some words"} for n in range(ROWS_A_SHARD)]
        with cluster.shard_engine(shard).begin() as connection:
            connection.execute(insert(Note), rows)
    for node in cluster.placement.nodes.values():
        with cluster.engine(node).connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("vacuum analyze"))


def _gets(session: Session, ids: Sequence[int]) -> Callable[[], float]:
    wanted = cycle(ids)

    def get() -> None:
        session.expunge_all()
        session.get(Note, next(wanted))

    return _repeated(get, GETS)


def _checks(cluster: Cluster, id_: int, rounds: int) -> tuple[Measure, ...]:
    """Measures what a session on one shard costs besides the trips to the server, in CPU time."""
    engine = cluster.shard_engine(5)
    statements = [select(Note).where(Note.id == id_, Note.words == "x") for _ in range(1000)]
    for statement in statements:
        statement._generate_cache_key()  # SQLAlchemy makes it in any case, and keeps it.

    def per_call(work: Callable[[], object], times: int = 1000) -> Callable[[], float]:
        def timed() -> float:
            began = process_time()
            for _ in range(times):
                work()
            return (process_time() - began) / times * 1e6

        return timed

    def check() -> None:
        for statement in statements:
            refuse_statement(statement, None, cluster, 5)

    checked = per_call(check, 1)
    made = {
        "Session()": per_call(lambda: Session(engine)),
        "cluster.session()": per_call(lambda: cluster.session(shard=5)),
        "the check of a statement": lambda: checked() / len(statements),
    }
    return tuple(interleaved(made, rounds=rounds, unit="µs").values())


def _above(one: Measure, other: Measure) -> float:
    return one.lowest - other.lowest


def _newest(session: Session) -> list[int]:
    session.expunge_all()
    return [note.id for note in session.scalars(NEWEST_NOTES)]


def _newest_by_hand(cluster: Cluster) -> tuple[Callable[[], list[int]], Callable[[], None]]:
    """Reads the newest notes by hand-written SQL; and what closes its sessions."""
    pool = ThreadPoolExecutor(2)
    nodes: dict[Node, list[int]] = {}
    for shard in range(SHARDS):
        nodes.setdefault(cluster.node_of(shard), []).append(shard)
    asked = []
    for node, shards in nodes.items():
        branches = (
            f"(select id, writer, words from shard_{shard:04d}.notes order by id desc limit {NEWEST})"
            for shard in shards
        )
        sql = f"{' union all '.join(branches)} order by id desc limit {NEWEST}"
        asked.append((Session(cluster.engine(node)), select(Note).from_statement(text(sql))))

    def read(session_and_statement: tuple[Session, Any]) -> list[Note]:
        session, statement = session_and_statement
        session.expunge_all()
        return list(session.scalars(statement))

    def newest() -> list[int]:
        merged = merge(*pool.map(read, asked), key=lambda note: -note.id)
        return [note.id for note in islice(merged, NEWEST)]

    def close() -> None:
        pool.shutdown()
        for session, _ in asked:
            session.close()

    return newest, close


def _repeated(work: Callable[[], object], times: int) -> Callable[[], float]:
    """Repeats the work many times; its figure is the ms that one repetition takes."""

    def repeat() -> None:
        for _ in range(times):
            work()

    return lambda: seconds(repeat) / times * 1000


def _growth(how: str, *urls: str) -> dict[str, float]:
    program = "from benchmarks.routing import read_all; read_all()"
    ran = subprocess.run(
        [sys.executable, "-c", program, how, *urls], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def read_all() -> None:
    """Reads from every shard, and prints what that took; runs in a separate process."""
    how, *urls = sys.argv[1:]
    before = _resident_mb()
    ids = [DEFAULT.encode(ms=1, shard=shard) for shard in range(MANY_SHARDS)]
    if how == "plain":
        engines = [create_engine(parse_url(url)) for url in urls]
        for number, engine in enumerate(engines):
            place = {None: f"shard_{number * MANY_SHARDS // 2:04d}"}
            with Session(engine.execution_options(schema_translate_map=place)) as session:
                for id_ in ids[: MANY_SHARDS // 2]:
                    session.get(Note, id_)
                session.scalars(NEWEST_NOTES).all()
        print(json.dumps({"mb": _resident_mb() - before}))
        return
    with Cluster.connect(urls[0]) as cluster, cluster.sharded_session() as routed:
        for id_ in ids:
            routed.get(Note, id_)
        routed.scalars(NEWEST_NOTES).all()
        pools = {cluster.engine(cluster.node_of(shard)).pool for shard in range(MANY_SHARDS)}
        connections = sum(pool.checkedin() + pool.checkedout() for pool in pools)  # type: ignore[attr-defined]  # QueuePool's
        growth = _resident_mb() - before
    print(json.dumps({"mb": growth, "pools": len(pools), "connections": connections}))


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * getpagesize() / 1e6
