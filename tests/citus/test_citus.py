"""A cluster on Citus: who issues IDs, where rows are, and what its commands do there."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import ForeignKey, func, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from shardids import Cluster, primary_key
from shardids.beside.citus.workers import Worker, placed_on
from shardids.catalog.rows import Catalog
from shardids.errors import StatementFailed
from shardids.watch import doctor
from tests.support.citus import Citus, running_citus
from tests.support.clusters import catalog_at, command_here
from tests.support.standbys import standby_of
from tests.support.waiting import wait_for

SHARDS = 8
CLIENTS = 16
IDS = 1_000_000
TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text not null);
    create table {s}.photos (id bigint primary key default {s}.next_id(),
                             user_id bigint not null references {s}.users, caption text)"""


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str]
    photos: Mapped[list[Photo]] = relationship(back_populates="user")


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    caption: Mapped[str | None]
    user: Mapped[User] = relationship(back_populates="photos")


def schema(shard: int) -> str:
    return f"shard_{shard:04}"


def run(citus: Citus, *words: str) -> tuple[int, str, str]:
    ran = command_here(*words, SHARDIDS_CATALOG=citus.url())
    return ran.returncode, ran.stdout, ran.stderr


def done(citus: Citus, *words: str) -> str:
    code, out, err = run(citus, *words)
    assert code == 0, (out, err)
    return out


def make_cluster(citus: Citus) -> None:
    done(citus, "init", "--engine", "citus", "--shards", str(SHARDS))
    done(citus, "shard", "create", "all")
    with citus.connect() as db:
        for shard in range(SHARDS):
            for statement in TABLES.replace("{s}", schema(shard)).split(";"):
                db.execute(statement)


@pytest.fixture(scope="module")
def cluster(citus: Citus) -> Citus:
    make_cluster(citus)
    return citus


@pytest.fixture
def catalog(cluster: Citus) -> Iterator[Catalog]:
    with catalog_at(cluster.url()) as catalog:
        yield catalog


def test_only_a_coordinator_takes_a_cluster_on_citus(citus: Citus) -> None:
    code, _, err = run(
        citus, "init", "--shards", "8", "--engine", "citus", "--catalog", citus.url(citus.workers[0])
    )
    assert code == 1
    assert "is a worker of Citus, not its coordinator" in err
    with citus.connect() as db:
        db.execute("create database plain")
    plain = citus.url().replace("/postgres?", "/plain?")
    code, _, err = run(citus, "init", "--shards", "8", "--engine", "citus", "--catalog", plain)
    assert (code, "does not have the extension citus" in err) == (1, True)
    done(citus, "init", "--shards", "8", "--catalog", plain)
    code, _, err = run(citus, "node", "add", "a", "--url", citus.url(), "--catalog", plain)
    assert (code, "shardids init --engine citus" in err) == (1, True), err


def test_each_shard_is_a_distributed_schema_on_a_worker(cluster: Citus, catalog: Catalog) -> None:
    workers = {Worker("127.0.0.1", server.port) for server in cluster.workers}
    placed = placed_on(catalog)
    assert set(placed) == set(range(SHARDS))
    assert set(placed.values()) == workers
    listed = done(cluster, "shard", "list")
    assert all(str(worker) in listed for worker in workers)
    again = done(cluster, "shard", "create", "all")
    assert "Nothing to do" in again
    done(cluster, "init", "--engine", "citus", "--shards", str(SHARDS))
    code, _, err = run(cluster, "init", "--shards", str(SHARDS))
    assert (code, "whose engine is citus, not postgresql" in err) == (1, True)


def test_workers_refuse_to_draw(cluster: Citus) -> None:
    for worker in cluster.workers:
        with cluster.connect(worker) as db:
            for statement in (
                f"select {schema(3)}.next_id()",
                f"insert into {schema(3)}.users (name) values ('a worker''s')",
            ):
                with pytest.raises(
                    psycopg.Error, match="shard 3 issues IDs on the coordinator of Citus only"
                ) as refused:
                    db.execute(statement)
                assert refused.value.sqlstate == "SI001"
            (name,) = db.execute(
                f"select count(*) from {schema(3)}.users where name like 'a worker%'"
            ).fetchone()
            assert name == 0


def test_rows_get_ids_by_every_way_through_the_coordinator(cluster: Citus) -> None:
    s = schema(1)
    with cluster.connect() as db:
        (one,) = db.execute(f"insert into {s}.users (name) values ('one') returning id").fetchone()
        db.execute(f"insert into {s}.users (name) values ('two'), ('three'), ('four')")
        db.execute(f"insert into {s}.users (name) select 'n' || n from generate_series(1, 500) n")
        db.execute(f"create temporary table chosen as select name from {s}.users where name like 'n%'")
        db.execute(f"insert into {s}.users (name) select name from chosen")
        db.execute(f"insert into {schema(2)}.users (name) values ('of another shard')")
        for source in (s, schema(2)):
            with pytest.raises(psycopg.Error, match="on the coordinator of Citus only") as refused:
                db.execute(f"insert into {s}.users (name) select name from {source}.users")
            assert "through a temporary table" in (refused.value.diag.message_hint or "")
        with db.cursor().copy(f"copy {s}.users (name) from stdin") as copy:
            for number in range(500):
                copy.write_row([f"c{number}"])
        db.execute("prepare another as insert into " + s + ".users (name) values ($1)")
        for number in range(20):
            db.execute(f"execute another ('p{number}')")
        found = db.execute(
            f"select count(*), count(distinct id), min(shardids.shard_of(id)), max(shardids.shard_of(id))"
            f" from (select id from {s}.users offset 0) i"
        ).fetchone()
        assert found == (1 + 3 + 500 + 500 + 500 + 20, 1524, 1, 1)
        (decoded,) = db.execute("select shardids.shard_of(%s)", [one]).fetchone()
        assert decoded == 1


def test_sessions_of_the_orm_work_as_on_plain_servers(cluster: Citus) -> None:
    with Cluster.connect(cluster.url()) as there:
        with there.session(shard=4) as session, session.begin():
            users = [User(name=f"u{n}", photos=[Photo(caption="first"), Photo()]) for n in range(300)]
            session.add_all(users)
        with there.session(shard=5) as session, session.begin():
            session.execute(insert(User), [{"name": f"b{n}"} for n in range(500)])
            session.add(User(name="u299"))
        ids = there.at(shard=6).reserve(1000)
        assert len(set(ids)) == 1000
        with there.sharded_session() as session:
            named = session.scalars(select(User).where(User.name == "u299").order_by(User.id)).all()
            assert len(named) == 2
            assert sum(len(user.photos) for user in named) == 2
            assert session.get(User, named[0].id) is named[0]
            (count,) = session.scalars(select(func.count(User.id)).where(User.name.like("b%")))
            assert count == 500
            session.add(Photo(user=named[0], caption="later"))
            session.commit()
        with there.session(shard=4) as session:
            assert session.scalar(select(func.count(Photo.id))) in (600, 601)


def test_a_role_draws_that_was_granted_it(cluster: Citus) -> None:
    with cluster.connect() as db:
        # The file of passwords, by which Citus logs in to its workers, has one for all roles.
        db.execute(f"create role clerk login password '{cluster.password}'")
        for shard in range(SHARDS):
            db.execute(f"grant insert, select on {schema(shard)}.users to clerk")
    done(cluster, "grant", "clerk")
    with cluster.connect() as db:
        db.execute("set role clerk")
        db.execute(f"select {schema(6)}.next_id()")
        db.execute(f"insert into {schema(6)}.users (name) values ('by the clerk')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute(f"select setval('{schema(6)}.id_offset', 1)")


REVISION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "one", None


def upgrade():
    op.create_table(
        "notes",
        sa.Column("id", sa.BigInteger, primary_key=True, server_default=sa.text("next_id()")),
        sa.Column("country", sa.Text, sa.ForeignKey("public.countries.code"), nullable=False),
    )


def downgrade():
    op.drop_table("notes")
"""


def test_revisions_make_tables_on_the_workers(
    cluster: Citus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a shard refer to a reference table of Citus."""
    with cluster.connect() as db:
        db.execute("create table public.countries (code text primary key)")
        db.execute("select create_reference_table('public.countries')")
        db.execute("insert into public.countries values ('FR')")
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text("from shardids.migrate import run_environment\n\nrun_environment()\n")
    (tmp_path / "versions" / "one.py").write_text(REVISION)
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path))
    done(cluster, "migrate", "up")
    with cluster.connect() as db:
        made = db.execute(
            "select count(*) from citus_tables"
            " where table_name::text ~ '[.]notes$' and citus_table_type = 'schema'"
        ).fetchone()
        assert made == (SHARDS,)
        (id_,) = db.execute("insert into shard_0003.notes (country) values ('FR') returning id").fetchone()
        assert db.execute("select shardids.shard_of(%s)", [id_]).fetchone() == (3,)
        with pytest.raises(psycopg.errors.ForeignKeyViolation):
            db.execute("insert into shard_0003.notes (country) values ('XX')")
    assert "at the target" in done(cluster, "migrate", "up")
    done(cluster, "migrate", "down", "base", "--yes")
    with cluster.connect() as db:
        for shard in range(SHARDS):
            db.execute(f"drop table if exists {schema(shard)}.alembic_version")
        db.execute("drop table public.countries")


def test_moves_are_citus_own(cluster: Citus, catalog: Catalog) -> None:
    source = placed_on(catalog)[2]
    target = next(Worker("127.0.0.1", one.port) for one in cluster.workers if one.port != source.port)
    planned = done(cluster, "shard", "move", "2", "--to", str(target), "--dry-run")
    assert str(source) in planned
    assert placed_on(catalog)[2] == source
    with writing(cluster, 2) as written:
        done(cluster, "shard", "move", "2", "--to", str(target))
        done(cluster, "shard", "move", "2", "--to", str(source))
        done(cluster, "shard", "move", "2", "--to", str(target))
    assert placed_on(catalog)[2] == target
    with cluster.connect() as db:
        rows = Counter(id_ for (id_,) in db.execute(f"select id from {schema(2)}.users where name = 'w'"))
    assert rows == Counter(written)
    assert "Nothing to move" in run(cluster, "shard", "move", "2", "--to", str(target))[2]
    for words, message in (
        (["shard", "move", "2", "--to", "127.0.0.1:1"], "is not a worker of Citus that takes shards"),
        (["shard", "move", "2", "--to", "b"], "does not name a worker of Citus"),
        (
            ["shard", "move", "2", "--to", str(source), "--offline", "--verify"],
            "--offline, --verify do not apply",
        ),
        (["shard", "move", "2", "--back"], "--back does not apply to a cluster on Citus"),
        (["rebalance", "--drain", str(source)], "--drain does not apply to a cluster on Citus"),
    ):
        code, _, err = run(cluster, *words)
        assert code != 0
        assert message in " ".join(err.split()), err


def test_a_rebalance_makes_the_moves_that_citus_plans(cluster: Citus, catalog: Catalog) -> None:
    crowded = Worker("127.0.0.1", cluster.workers[0].port)
    done(cluster, "shard", "move", "all", "--to", str(crowded))
    assert set(placed_on(catalog).values()) == {crowded}
    planned = done(cluster, "rebalance", "--dry-run")
    assert str(crowded) in planned
    done(cluster, "rebalance")
    counts = Counter(placed_on(catalog).values())
    assert sorted(counts.values()) == [SHARDS // 2, SHARDS // 2]
    assert "Nothing to move" in run(cluster, "rebalance")[2]


@pytest.mark.parametrize(
    ("words", "next_step"),
    [
        (["node", "add", "b", "--url", "postgresql://127.0.0.1/b"], "citus_add_node"),
        (["node", "replace", "coordinator", "--url", "postgresql://127.0.0.1/b"], "citus_add_node"),
        (["shard", "purge", "1", "--yes"], "no copy of it stays behind"),
        (["region", "create", "eu", "--shards", "0-3"], "all of its workers"),
        (["query-node", "create", "--on", "coordinator"], "The coordinator answers statements"),
        (["reference", "create", "countries"], "create_reference_table"),
        (["lookup", "create", "users.name"], "triggers"),
        (["counter", "show"], "tables of the shard"),
        (["cdc", "create"], "on the workers"),
        (["adopt", "status"], "COPY through the coordinator"),
    ],
)
def test_what_citus_does_itself_is_refused_by_name(cluster: Citus, words: list[str], next_step: str) -> None:
    code, _, err = run(cluster, *words)
    assert (code, next_step in " ".join(err.split())) == (1, True), err
    assert "this cluster is on Citus, where shardids" in err


def test_clients_of_the_catalog_are_refused_too(cluster: Citus, catalog: Catalog) -> None:
    from shardids import mover

    with (
        pytest.raises(StatementFailed, match="can't be done in a cluster on Citus"),
        catalog.engine.begin() as db,
    ):
        db.exec_driver_sql("insert into shardids_catalog.node (name, url) values ('b', 'postgresql:///b')")
    with pytest.raises(Exception, match="node"):
        mover.move(catalog, 1, "b")


def test_the_doctor_finds_a_cluster_well_and_names_what_is_not(cluster: Citus, catalog: Catalog) -> None:
    found = [(one.check, one.what) for one in doctor.examine(catalog).findings if one.severity != "info"]
    assert found == []
    worker = cluster.workers[1]
    with cluster.connect(worker) as there, cluster.connect() as db:
        there.execute("set citus.enable_ddl_propagation = off")
        there.execute(f"create sequence {schema(5)}.id_offset")
        db.execute(f"do $$ begin create table {schema(6)}.stray (n integer primary key); end $$")
        try:
            named = {one.check: one for one in doctor.examine(catalog).findings}
            assert f"worker 127.0.0.1:{worker.port}" in named["citus-second-issuer"].what
            assert "stray" in named["citus-shard-local"].what
        finally:
            there.execute(f"drop sequence {schema(5)}.id_offset")
            db.execute(f"drop table {schema(6)}.stray")


def test_the_console_s_doctor_reads_in_read_only_transactions(cluster: Citus) -> None:
    with closing(Catalog(cluster.url(), read_only=True)) as catalog:
        assert [one for one in doctor.examine(catalog).findings if one.severity != "info"] == []


def test_a_fenced_shard_is_activated_again(cluster: Citus) -> None:
    with cluster.connect() as db:
        (before,) = db.execute(f"select {schema(7)}.next_id()").fetchone()
        db.execute("select shardids.fence(7)")
        with pytest.raises(psycopg.Error, match="is fenced") as refused:
            db.execute(f"insert into {schema(7)}.users (name) values ('refused')")
        assert refused.value.sqlstate == "SI002"
    assert "select shardids.activate" in " ".join(run(cluster, "shard", "activate", "7", "--yes")[2].split())
    with cluster.connect() as db:
        db.execute("select shardids.activate(7)")
        (after,) = db.execute(f"insert into {schema(7)}.users (name) values ('on') returning id").fetchone()
        assert after > before


def test_a_worker_that_is_away_is_a_finding(cluster: Citus, catalog: Catalog) -> None:
    worker = cluster.workers[1]
    worker.stop()
    try:
        named = {one.check: one for one in doctor.examine(catalog, ["citus-worker-away"]).findings}
        assert f"127.0.0.1:{worker.port}" in named["citus-worker-away"].what
    finally:
        worker.start(attached=True)


class Client:
    """Inserts in turn one row, several, a SELECT's and COPY's, and keeps the IDs that it was given."""

    def __init__(self, url: Callable[[], str], number: int) -> None:
        self.url, self.number = url, number
        self.ids: list[int] = []
        self.reconnects = 0

    def run(self, stop: threading.Event) -> None:
        turn = 0
        while not stop.is_set():
            try:
                with psycopg.connect(self.url(), autocommit=True) as db:
                    while not stop.is_set():
                        turn += 1
                        self.ids += self.batch(db, schema(turn % SHARDS), turn)
            except (psycopg.OperationalError, psycopg.InternalError):
                # Citus calls the end of its postmaster an internal error.
                self.reconnects += 1
                stop.wait(0.2)

    def batch(self, db: psycopg.Connection, s: str, turn: int) -> list[int]:
        name = f"{self.number}/{turn}"
        match turn % 8:
            case 0:
                query = f"insert into {s}.users (name) values (%s) returning id"
            case 1 | 2:
                query = f"insert into {s}.users (name) values {', '.join(['(%s)'] * 40)} returning id"
                return [id_ for (id_,) in db.execute(query, [name] * 40)]
            case 3:
                with db.cursor().copy(f"copy {s}.users (name) from stdin") as copy:
                    for _ in range(1000):
                        copy.write_row([name])
                query = f"select id from {s}.users where name = %s"
            case 4 | 5:
                return [id_ for (id_,) in db.execute(f"select {s}.next_ids(1000)")]
            case _:
                query = f"insert into {s}.users (name) select %s from generate_series(1, 1000) returning id"
        return [id_ for (id_,) in db.execute(query, [name])]


@contextmanager
def clients(url: Callable[[], str]) -> Iterator[list[Client]]:
    stop = threading.Event()
    running = [Client(url, number) for number in range(CLIENTS)]
    failures: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            client.run(stop)
        except BaseException as error:  # noqa: BLE001 -- raised below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in running]
    for thread in threads:
        thread.start()
    try:
        yield running
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    if failures:
        raise failures[0]


@contextmanager
def writing(citus: Citus, shard: int) -> Iterator[list[int]]:
    """Writers of single rows, whose IDs are yielded as they are acknowledged."""
    stop, ids, failures = threading.Event(), list[int](), list[BaseException]()

    def work() -> None:
        try:
            with citus.connect() as db:
                while not stop.is_set():
                    query = f"insert into {schema(shard)}.users (name) values ('w') returning id"
                    ids.append(db.execute(query).fetchone()[0])
        except BaseException as error:  # noqa: BLE001 -- raised below
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: failures or len(ids) > 20, "all write")
        yield ids
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    if failures:
        raise failures[0]


@pytest.mark.long
def test_a_million_ids_come_once_over_moves_a_restart_and_a_failover(
    bindir: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setenv("SHARDIDS_PG_BIN", str(bindir))
    with running_citus(bindir) as citus:
        make_cluster(citus)
        address = [citus.url()]
        with (
            standby_of(citus.coordinator, {"PGPASSFILE": str(citus.passwords)}) as standby,
            clients(lambda: address[0]) as running,
        ):

            def drawn() -> int:
                return sum(len(one.ids) for one in running)

            wait_for(lambda: drawn() > IDS // 10, "they draw")
            with catalog_at(citus.url()) as catalog:
                workers = [Worker("127.0.0.1", one.port) for one in citus.workers]
                for shard in (1, 2, 3):
                    source = placed_on(catalog)[shard]
                    (target,) = (one for one in workers if one != source)
                    done(citus, "shard", "move", str(shard), "--to", str(target))
            citus.coordinator.restart("immediate")
            before = drawn()
            wait_for(lambda: drawn() > before + IDS // 10, "they draw after the restart", 120)
            citus.coordinator.kill()
            with psycopg.connect(standby.url(), autocommit=True) as db:
                db.execute("select pg_promote()")
                db.execute(
                    "select citus_update_node(nodeid, '127.0.0.1', %s) from pg_dist_node where groupid = 0",
                    [standby.port],
                )
            address[0] = citus.url(port=standby.port)
            before = drawn()
            wait_for(lambda: drawn() > max(IDS, before + IDS // 10), "they draw from the promoted one", 300)
        seen = Counter(id_ for one in running for id_ in one.ids)
        record_property("IDs", sum(seen.values()))
        assert sum(seen.values()) >= IDS
        assert {id_: times for id_, times in seen.items() if times > 1} == {}
        assert sum(one.reconnects for one in running) >= 2 * CLIENTS
