"""Sessions on shards: a row by ID, a new row, the newest rows of all shards, memory for 1,024 shards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from heapq import merge
from itertools import cycle, islice
from pathlib import Path
from resource import getpagesize
from time import perf_counter, process_time
from typing import Any, Final

from sqlalchemy import BigInteger, Engine, Identity, create_engine, event, insert, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.report import Measure, Ratio, Section, interleaved, ratio
from shardids import Cluster, primary_key, sharding_key
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import Node
from shardids.client.routing.one_shard import refuse_statement
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_servers
from shardids.pg.urls import parse_url

SHARDS = 64
MANY_SHARDS = 1024
SHARD = 5
ROWS_A_SHARD = 200
NEWEST = 20
GETS = 20
COMMITS = 20
FAN_OUTS = 4
USERS = 500
KEYS = 1_000_000
MOST_MB = 5.0
NO_SETTINGS: Final[Mapping[str, str]] = {}
DURABLE = {"fsync": "on", "full_page_writes": "on"}


class Base(DeclarativeBase):
    """The tables."""


class Note(Base):
    """A row."""

    __tablename__ = "notes"

    id: Mapped[int] = primary_key()
    writer: Mapped[str] = sharding_key()
    words: Mapped[str]


class Plain(Base):
    """The same, on one table of a database."""

    __tablename__ = "plain_notes"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    writer: Mapped[str]
    words: Mapped[str]


NEWEST_NOTES = select(Note).order_by(Note.id.desc()).limit(NEWEST)


def run(rounds: int) -> Section:
    """Measure getting a row by its key, and the check of a statement."""
    with _cluster(SHARDS) as urls, Cluster.connect(urls[0]) as cluster:
        _fill(cluster, range(SHARDS))
        with (
            Session(cluster.engine(cluster.node_of(SHARD))) as one_table,
            Session(cluster.at(shard=SHARD).engine) as plain,
            cluster.session(shard=SHARD) as kept,
            cluster.sharded_session() as routed,
        ):
            one_table.execute(insert(Plain), [{"writer": "ann", "words": "x"} for _ in range(ROWS_A_SHARD)])
            plain_ids = one_table.scalars(select(Plain.id)).all()
            ids = plain.scalars(select(Note.id)).all()
            checks = _checks(cluster, ids[0], rounds)
            gets = {
                "get, a plain Session on one table": _gets(one_table, Plain, plain_ids),
                "get, a plain Session on the shard": _gets(plain, Note, ids),
                "get, cluster.session() on the shard": _gets(kept, Note, ids),
                "get, the session over all shards": _gets(routed, Note, ids),
            }
            all_ids = [id_ for shard in range(SHARDS) for id_ in _ids(cluster, shard)]
            some = all_ids[:: len(all_ids) // USERS][:USERS]
            wall = interleaved(
                {name: _repeated(get, GETS) for name, get in gets.items()}, rounds=rounds, unit="ms"
            )
            cpu = interleaved(
                {f"CPU of {name}": _repeated(get, GETS, process_time) for name, get in gets.items()},
                rounds=rounds,
                unit="ms",
            )
            statements = _count_statements(cluster, lambda: routed.scalars(_notes_of(some)).all())
    found, burnt = tuple(wall.values()), tuple(cpu.values())
    return Section(
        title="Routing",
        conditions=f"{SHARDS} shards with {ROWS_A_SHARD} rows each, on two servers on one machine,"
        f" {rounds} rounds of {GETS} gets; CPU of the client.",
        measures=(*found, *burnt, *checks),
        ratios=(
            *(ratio(one, found[1]) for one in found[2:]),
            *(ratio(one, burnt[1], at_most=1.1) for one in burnt[2:]),
            Ratio(
                name="cluster.session() above Session(), µs", value=_above(checks[1], checks[0]), at_most=5
            ),
            Ratio(name="the check of a statement on one shard, µs", value=checks[2].lowest, at_most=10),
            Ratio(name=f"statements per node for {USERS} rows by ID", value=statements / 2, at_most=1),
        ),
    )


def tenants(rounds: int) -> Section:
    """Measure routing by key with a million keys in the directory of keys, against none."""
    with _cluster(SHARDS) as urls, Cluster.connect(urls[0], listen=False) as without:
        _fill(without, range(1))
        with create_engine(parse_url(urls[0])).begin() as connection:
            for statement in _MANY_KEYS:
                connection.execute(text(statement))
        began = perf_counter()
        with Cluster.connect(urls[0], listen=False) as with_keys:
            read_s = perf_counter() - began
            pairs = {"no keys": without, f"{KEYS:,} keys": with_keys}
            assert with_keys.shard_for("tenant 7") == 7
            assert with_keys.shard_for("writer 7") == without.shard_for("writer 7")
            measures = _keyed(pairs, rounds)
            size = with_keys.homes.size_bytes / KEYS
    gets, named, bulk = (list(one.values()) for one in measures)
    return Section(
        title="Routing by key with a directory of keys",
        conditions=f"{KEYS:,} keys in the directory, {SHARDS} shards on two servers on one machine, {rounds}"
        " rounds. A session gets rows by a criterion on its key; a shard is named by a key; the shards of"
        f" {USERS} keys are found at once.",
        measures=(*gets, *named, *bulk),
        ratios=(
            ratio(gets[1], gets[0], at_most=1.05),
            ratio(named[1], named[0]),
            ratio(bulk[1], bulk[0]),
            Ratio(name="memory per key, bytes", value=size, at_most=32),
            Ratio(name="connecting, s", value=read_s),
        ),
    )


_MANY_KEYS: Final = (
    # Without the triggers of each row.
    "set local session_replication_role = replica",
    "update shardids_catalog.cluster set version = version + 1, homes_version = version + 1",
    "insert into shardids_catalog.key_home (kind, key, shard, version)"
    f" select 'text', 'tenant ' || n, n % {SHARDS}, 2 from generate_series(1, {KEYS}) n",
)


def _keyed(clusters: Mapping[str, Cluster], rounds: int) -> list[dict[str, Measure]]:
    """Measure a select by key, naming a shard by key, and finding the shards of many keys."""
    keys = [f"writer {n}" for n in range(USERS)]

    def selected(cluster: Cluster) -> Callable[[], float]:
        wanted = cycle(keys)

        def select_one() -> None:
            with cluster.session(key=(key := next(wanted))) as session:
                session.scalars(select(Note).where(Note.writer == key).limit(1)).all()

        return _repeated(select_one, GETS)

    def named(cluster: Cluster) -> Callable[[], float]:
        wanted = cycle(keys)
        return _repeated(lambda: cluster.at(key=next(wanted)), 1000, process_time)

    def found(cluster: Cluster) -> Callable[[], float]:
        return _repeated(lambda: cluster.homes.shards_for(keys, SHARDS), 10, process_time)

    whats = {
        "a session by key, one select": selected,
        "at(key=…)": named,
        f"the shards of {USERS} keys": found,
    }
    return [
        interleaved(
            {f"{what}, {name}": measured(cluster) for name, cluster in clusters.items()},
            rounds=rounds,
            unit="ms",
        )
        for what, measured in whats.items()
    ]


def newest(rounds: int) -> Section:
    """Measure the newest rows of all shards, against one UNION ALL per node written by hand."""
    measures: list[Measure] = []
    ratios: list[Ratio] = []
    for shards in (SHARDS, MANY_SHARDS):
        with _cluster(shards) as urls, Cluster.connect(urls[0], pool_size=8) as cluster:
            _fill(cluster, range(shards))
            with cluster.sharded_session() as routed, closing(_ByHand(cluster, shards)) as hand:
                assert hand.kept() == _newest(routed)
                pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
                    "in a kept session": (hand.kept, partial(_newest, routed)),
                    "in a new one": (hand.new, partial(_newest_anew, cluster, commits=False)),
                    "in a new one that commits": (
                        partial(hand.new, commits=True),
                        partial(_newest_anew, cluster, commits=True),
                    ),
                }
                # Each kind by itself: a ROLLBACK would take the prepared statements of the next kind.
                for kind, pair in pairs.items():
                    cases = {
                        f"{shards:,} shards, {kind}, {how}": _repeated(work, FAN_OUTS)
                        for how, work in zip(("by hand", "the session over all shards"), pair, strict=True)
                    }
                    few = rounds if shards == SHARDS else rounds // 4
                    theirs, ours = interleaved(cases, rounds=few, unit="ms").values()
                    measures += [theirs, ours]
                    # Of few ms by hand in 1,024 shards, so that Python's part weighs most.
                    most = 1.5 if kind == "in a new one that commits" else 1.3
                    ratios.append(ratio(ours, theirs, at_most=most))
    return Section(
        title=f"The {NEWEST} newest rows of all shards",
        conditions=f"{ROWS_A_SHARD} rows per shard, on two servers on one machine, {rounds} rounds of"
        f" {FAN_OUTS} for {SHARDS} shards, a quarter of them for {MANY_SHARDS:,}. By hand: one UNION ALL per"
        " node, the nodes asked at once by two threads, objects loaded with from_statement(), a session per"
        " node, and merged. Statements that repeat are prepared on both sides; psycopg forgets them at the"
        " ROLLBACK of a session that is closed without a COMMIT.",
        measures=tuple(measures),
        ratios=tuple(ratios),
    )


def one_row(rounds: int) -> Section:
    """Measure a session that inserts a row: opened, committed and closed."""
    with _cluster(SHARDS, settings=DURABLE) as urls, Cluster.connect(urls[0]) as cluster:
        shard = cluster.at(key="ann")
        node = cluster.engine(shard.node)

        def inserted(session: Session, model: type[Note | Plain]) -> None:
            with session:
                session.add(model(writer="ann", words="some words"))
                session.commit()

        ways: dict[str, Callable[[], object]] = {
            "a plain Session, one table, Identity()": lambda: inserted(Session(node), Plain),
            "a plain Session on the shard, primary_key()": lambda: inserted(Session(shard.engine), Note),
            "cluster.session()": lambda: inserted(cluster.session(key="ann"), Note),
            "the session over all shards": lambda: inserted(cluster.sharded_session(), Note),
        }
        wall = tuple(
            interleaved(
                {name: _repeated(way, COMMITS) for name, way in ways.items()}, rounds=rounds, unit="ms"
            ).values()
        )
        cpu = tuple(
            interleaved(
                {f"CPU of {name}": _repeated(way, COMMITS, process_time) for name, way in ways.items()},
                rounds=rounds,
                unit="ms",
            ).values()
        )
    return Section(
        title="One row in a session",
        conditions=f"A session is opened, adds a row, commits and is closed, {COMMITS} in a row, {rounds}"
        " rounds; fsync on, two servers on one machine; CPU of the client. The second way has the draw of the"
        " ID above the first; those after it have Python above the second.",
        measures=(*wall, *cpu),
        ratios=(
            *(ratio(one, wall[0], at_most=1.25) for one in wall[2:]),
            ratio(wall[1], wall[0]),
            *(ratio(one, wall[1]) for one in wall[2:]),
            *(ratio(one, cpu[1]) for one in cpu[2:]),
        ),
    )


def many_shards(_rounds: int) -> Section:
    """Measure what a process grows by when it reads from every one of many shards."""
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
            Ratio(name="connections per node", value=routed["connections"] / 2, at_most=1),
            Ratio(name="pools per node", value=routed["pools"] / 2, at_most=1),
        ),
    )


@contextmanager
def _cluster(shards: int, settings: Mapping[str, str] = NO_SETTINGS) -> Iterator[list[str]]:
    """Make a cluster with the tables on two servers; the first one has the catalog."""
    with temporary_servers(2, settings=settings) as servers:
        catalog = Catalog(servers[0].url())
        provision.init(catalog, DEFAULT, shards)
        for name, server in zip("ab", servers, strict=True):
            provision.add_node(catalog, name, server.url())
        provision.create_shards(catalog, range(shards))
        catalog.close()
        with Cluster.connect(servers[0].url()) as cluster:
            for node in cluster.placement.nodes.values():
                Base.metadata.create_all(cluster.engine(node), [Base.metadata.tables["plain_notes"]])
            for shard in range(shards):
                with cluster.at(shard=shard).engine.begin() as connection:
                    Base.metadata.create_all(connection, [Base.metadata.tables["notes"]], checkfirst=False)
        yield [server.url() for server in servers]


def _fill(cluster: Cluster, shards: Iterable[int]) -> None:
    for shard in shards:
        rows = [{"writer": f"writer {n}", "words": "some words"} for n in range(ROWS_A_SHARD)]
        with cluster.at(shard=shard).engine.begin() as connection:
            connection.execute(insert(Note), rows)
    for node in cluster.placement.nodes.values():
        with cluster.engine(node).connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("vacuum analyze"))


def _ids(cluster: Cluster, shard: int) -> Sequence[int]:
    with cluster.session(shard=shard) as session:
        return session.scalars(select(Note.id)).all()


def _notes_of(ids: Sequence[int]) -> Any:
    return select(Note).where(Note.id.in_(ids))


def _count_statements(cluster: Cluster, work: Callable[[], object]) -> int:
    sent: list[object] = []
    for node in cluster.placement.nodes.values():
        event.listen(cluster.engine(node), "before_cursor_execute", lambda *call: sent.append(call[2]))
    work()
    # The statement that the rows are loaded by reaches no server.
    return sum("UNION ALL" in str(statement) for statement in sent)


def _gets(session: Session, model: type[Note | Plain], ids: Sequence[int]) -> Callable[[], None]:
    wanted = cycle(ids)

    def get() -> None:
        session.expunge_all()
        session.get(model, next(wanted))

    return get


def _checks(cluster: Cluster, id_: int, rounds: int) -> tuple[Measure, ...]:
    """Measure what a session on one shard costs besides the trips to the server, in CPU time."""
    engine = cluster.at(shard=5).engine
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


def _newest_anew(cluster: Cluster, *, commits: bool) -> list[int]:
    with cluster.sharded_session() as session:
        ids = _newest(session)
        if commits:
            session.commit()
        return ids


class _ByHand:
    """Reads the newest notes by SQL that is written for each node, in a thread per node."""

    def __init__(self, cluster: Cluster, shards: int) -> None:
        self._pool = ThreadPoolExecutor(2)
        nodes: dict[Node, list[int]] = {}
        for shard in range(shards):
            nodes.setdefault(cluster.node_of(shard), []).append(shard)
        self._asked = []
        for node, there in nodes.items():
            branches = (
                f"(select id, writer, words from shard_{shard:04d}.notes order by id desc limit {NEWEST})"
                for shard in there
            )
            sql = f"{' union all '.join(branches)} order by id desc limit {NEWEST}"
            self._asked.append((cluster.engine(node), select(Note).from_statement(text(sql))))
        self._kept = [(Session(engine), statement) for engine, statement in self._asked]

    def kept(self) -> list[int]:
        """Read in the same sessions each time."""
        return self._merged(self._pool.map(self._read, self._kept))

    def new(self, *, commits: bool = False) -> list[int]:
        """Read in new sessions."""

        def read(engine_and_statement: tuple[Engine, Any]) -> list[Note]:
            engine, statement = engine_and_statement
            with Session(engine, expire_on_commit=False) as session:
                notes = self._read((session, statement))
                if commits:
                    session.commit()
                return notes

        return self._merged(self._pool.map(read, self._asked))

    def close(self) -> None:
        """Close the sessions."""
        self._pool.shutdown()
        for session, _ in self._kept:
            session.close()

    def _read(self, session_and_statement: tuple[Session, Any]) -> list[Note]:
        session, statement = session_and_statement
        session.expunge_all()
        return list(session.scalars(statement))

    def _merged(self, found: Iterable[list[Note]]) -> list[int]:
        merged = merge(*found, key=lambda note: -note.id)
        return [note.id for note in islice(merged, NEWEST)]


def _repeated(
    work: Callable[[], object], times: int, clock: Callable[[], float] = perf_counter
) -> Callable[[], float]:
    """Repeat the work many times; its figure is the ms that one repetition takes."""

    def repeated() -> float:
        began = clock()
        for _ in range(times):
            work()
        return (clock() - began) / times * 1000

    return repeated


def _growth(how: str, *urls: str) -> dict[str, float]:
    program = "from benchmarks.routing import read_all; read_all()"
    ran = subprocess.run(
        [sys.executable, "-c", program, how, *urls], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def read_all() -> None:
    """Read from every shard, and print what that took; run in a separate process."""
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
