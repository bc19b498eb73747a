"""The directory of keys: written and refused, followed by clients, copied to nodes, asked in SQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any
from uuid import UUID

import psycopg
import pytest
from click.testing import Result
from sqlalchemy import Connection, ForeignKey, event, insert, select, text
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from typer.testing import CliRunner

from shardids import AsyncCluster, Cluster, primary_key, sharding_key
from shardids.catalog.keys import homes as directory
from shardids.catalog.keys.copies import bring_homes
from shardids.catalog.keys.homes import drop_home, home_of, homes, put_home
from shardids.catalog.keys.known import Departures, KnownHomes, digest_of, key_text, kind_of, parse_key
from shardids.catalog.keys.moved_ids import keys_of_ids, list_ids, move_old_ids
from shardids.catalog.old_ids import fill_directory, write_old_ids
from shardids.catalog.region_changes import create_region, drop_region
from shardids.catalog.regions import Region
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import OldIdRule, shard_for_key
from shardids.cli import app
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    ConnectionFailed,
    KeyMoved,
    UnsupportedKey,
    WrongShard,
)
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.watch import doctor
from shardids.watch.facts.rows import ShardingKey
from tests.conftest import dsn
from tests.support.clusters import catalog_at, connected
from tests.support.waiting import wait_for

ANN = shard_for_key("ann", 8)
ELSEWHERE = (ANN + 3) % 8
KEYS: list[Any] = [
    "ann",
    "",
    "Ann",
    "a\u0301nn",
    "á",
    "日本",
    5,
    -(1 << 63),
    "5",
    b"",
    b"\0\xff",
    UUID(int=7),
]


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key()


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))


@pytest.fixture
def catalog(cluster_url: URL) -> Iterator[Catalog]:
    with catalog_at(cluster_url) as catalog:
        yield catalog


@pytest.fixture
def cluster(cluster_url: URL) -> Iterator[Cluster]:
    with Cluster.connect(cluster_url) as cluster:
        for shard in range(8):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
        yield cluster


def refused_on(cluster: Cluster, shard: int, then: str) -> None:
    """Let a shard refuse rows of ann, as a move leaves it."""
    function = f"""
        create function shard_{shard:04d}.refuse_key() returns trigger language plpgsql as $$
        begin
          raise exception using errcode = 'SI017', message = 'key ann has moved', detail = '{then}';
        end $$;
        create trigger refuse_key before insert on shard_{shard:04d}.users
        for each row when (new.name = 'ann') execute function shard_{shard:04d}.refuse_key()"""
    with cluster.engine(cluster.node_of(shard)).begin() as connection:
        connection.execute(text(function))


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_python_and_sql_agree_on_every_key(catalog: Catalog, cluster_url: URL, key: Any) -> None:
    kind, words = kind_of(key), key_text(key)
    assert parse_key(words, kind) == key
    there = shard_for_key(key, 8)
    home = put_home(catalog, kind, key, (there + 1) % 8)
    assert home is not None
    assert (home.kind, home.key, home.shard) == (kind, words, (there + 1) % 8)
    with Cluster.connect(cluster_url, listen=False) as cluster:
        assert cluster.shard_for(key) == cluster.at(key=key).number == (there + 1) % 8
    assert bring_homes(catalog).all() == {"a": 1, "b": 1}
    with connected(cluster_url) as connection:
        found = connection.execute("select shardids.home_of(%s, %s)", [kind, words]).fetchone()
        assert found == ((there + 1) % 8,)
        digest = connection.execute("select digest from shardids_catalog.key_home").fetchone()
        assert digest == (digest_of(key)[:16],)
    assert put_home(catalog, kind, words, there) is None
    assert homes(catalog) == []


def test_the_directory_is_written_and_read_in_pages(catalog: Catalog) -> None:
    for number in range(5):
        key = f"key {number}"
        put_home(catalog, "text", key, (shard_for_key(key, 8) + 1) % 8)
    put_home(catalog, "bigint", 5, (shard_for_key(5, 8) + 1) % 8)
    assert [home.key for home in homes(catalog, kind="text", limit=2)] == ["key 0", "key 1"]
    assert [home.key for home in homes(catalog, after=("text", "key 1"), limit=2)] == ["key 2", "key 3"]
    assert [home.key for home in homes(catalog)] == ["5", *(f"key {number}" for number in range(5))]
    first = homes(catalog, kind="text")[0]
    assert first in homes(catalog, shard=first.shard)
    assert home_of(catalog, "text", "key 0") == first
    # Again, it stays as it is.
    assert put_home(catalog, "text", "key 0", first.shard) == first
    assert drop_home(catalog, "text", "key 0")
    assert not drop_home(catalog, "text", "key 0")
    assert home_of(catalog, "text", "key 0") is None


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        (("text", "a\0b", 1), BadArgument, "NUL"),
        (("text", "a" * 10_000_000, 1), BadArgument, "10000000 bytes"),
        (("text", "é" * 513, 1), BadArgument, "1026 bytes"),
        (("text", "\ud800", 1), BadArgument, "UTF-8"),
        (("bigint", 1 << 63, 1), BadArgument, "64 bits"),
        (("bigint", "five", 1), BadArgument, "'five' is not a key of kind bigint"),
        (("bigint", "1_0", 1), BadArgument, "'1_0' is not a key of kind bigint"),
        (("text", 5, 1), BadArgument, "5 is a key of kind bigint, not text"),
        (("float", "1.5", 1), BadArgument, "'float' is not a kind"),
        (("text", True, 1), UnsupportedKey, "bool"),
        (("text@eu", "ann", 1), BadArgument, 'no region "eu"'),
        (("text", "ann", 8), BadArgument, "shard 8 does not exist"),
        (("text", "ann", -1), BadArgument, "shard -1 does not exist"),
    ],
)
def test_what_the_directory_can_not_hold_changes_nothing(
    catalog: Catalog, what: tuple[str, Any, int], error: type[Exception], message: str
) -> None:
    before = catalog.placement().version
    with pytest.raises(error, match=message):
        put_home(catalog, *what)
    assert catalog.placement().version == before


def test_a_shard_that_is_not_active_takes_no_key(catalog: Catalog, cluster_url: URL) -> None:
    with connected(cluster_url) as connection:
        connection.execute(
            "update shardids_catalog.placement set state = 'lost' where shard = %s", [ELSEWHERE]
        )
        with pytest.raises(ClusterConflict, match=f"shard {ELSEWHERE} was lost"):
            put_home(catalog, "text", "ann", ELSEWHERE)
        with pytest.raises(psycopg.errors.ForeignKeyViolation, match="key_home_shard"):
            connection.execute(
                "insert into shardids_catalog.key_home (kind, key, shard) values ('text', 'x', 9)"
            )
        for kind, key, constraint in (
            ("words", "x", "kind"),
            ("bigint", "05", "key"),
            ("uuid", "x", "key"),
            ("text", "x" * 1025, "length"),
        ):
            with pytest.raises(
                psycopg.errors.DatabaseError, match=rf"key_home_({constraint})|digest|invalid input"
            ):
                connection.execute(
                    "insert into shardids_catalog.key_home (kind, key, shard) values (%s, %s, 1)", [kind, key]
                )


def test_two_puts_at_once_have_one_winner(catalog: Catalog, cluster_url: URL) -> None:
    def put(shard: int) -> int | str:
        with catalog_at(cluster_url) as mine:
            try:
                put_home(mine, "text", "ann", shard, source=ANN)
            except ClusterConflict as error:
                return error.message
            return shard

    others = [shard for shard in range(8) if shard != ANN]
    with ThreadPoolExecutor(7) as pool:
        found = list(pool.map(put, others))
    home = home_of(catalog, "text", "ann")
    assert home is not None
    assert [one for one in found if isinstance(one, int)] == [home.shard]
    assert found.count(f"key 'ann' lives in shard {home.shard}, not in shard {ANN}") == 6


def test_a_region_keeps_its_keys(catalog: Catalog, cluster_url: URL) -> None:
    create_region(catalog, Region(name="eu", first_shard=0, last_shard=3), ["a"])
    with Cluster.connect(cluster_url, listen=False) as cluster:
        there = cluster.shard_for("ann", region="eu")
        other = (there + 1) % 4
        with pytest.raises(ClusterConflict, match='shard 5 is not of region "eu"'):
            put_home(catalog, "text@eu", "ann", 5)
        put_home(catalog, "text@eu", "ann", other)
        assert cluster.refresh()
        # The key of the region is not the key of all shards.
        assert cluster.shard_for("ann", region="eu") == other
        assert cluster.shard_for("ann") == ANN
        with connected(cluster_url) as connection:
            asked = (
                "select shardids_catalog.shard_for_key('ann', 'eu'), shardids_catalog.shard_for_key('ann')"
            )
            assert connection.execute(asked).fetchone() == (other, ANN)
        with pytest.raises(ClusterConflict, match='region "eu" has 1 key'):
            drop_region(catalog, "eu")
        put_home(catalog, "text@eu", "ann", there)
        drop_region(catalog, "eu")


def test_clients_follow_the_directory(catalog: Catalog, cluster: Cluster) -> None:
    assert cluster.shard_for("ann") == ANN
    put_home(catalog, "text", "ann", ELSEWHERE)
    wait_for(lambda: cluster.shard_for("ann") == ELSEWHERE, "the directory")
    assert cluster.homes.shards_for(["ann", "bob"], 8) == [ELSEWHERE, shard_for_key("bob", 8)]
    with cluster.sharded_session() as session:
        session.add(User(name="ann"))
        session.add(User(name="bob"))
        session.commit()
        statement = select(User).where(User.name.in_(["ann", "bob"]))
        assert {one.name for one in session.scalars(statement)} == {"ann", "bob"}
        assert session.scalars(select(User).where(User.name == "ann")).one().name == "ann"
    with cluster.session(shard=ELSEWHERE) as session:
        ann = session.scalars(select(User)).one()
        assert DEFAULT.shard_of(ann.id) == ELSEWHERE
    with cluster.session(shard=ANN) as session, pytest.raises(WrongShard, match=f"shard {ELSEWHERE}"):
        session.execute(select(User).where(User.name == "ann"))
    cluster.copy(User, [{"name": "ann"}], key="name")
    with cluster.session(key="ann") as session:
        assert len(session.scalars(select(User)).all()) == 2
    drop_home(catalog, "text", "ann")
    wait_for(lambda: cluster.shard_for("ann") == ANN, "the directory")


def test_changes_are_read_alone_or_all_together(
    catalog: Catalog, cluster_url: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(before: KnownHomes) -> KnownHomes:
        return directory.read_known(catalog.engine, before)

    moved = {f"key {n}": (shard_for_key(f"key {n}", 8) + 1) % 8 for n in range(50)}
    for key, shard in moved.items():
        put_home(catalog, "text", key, shard)
    whole = known(KnownHomes())
    assert whole.changes == 0
    assert {key: whole.shard_of(digest_of(key)) for key in moved} == moved
    drop_home(catalog, "text", "key 7")
    put_home(catalog, "text", "key 8", (moved["key 8"] + 1) % 8)
    later = known(whole)
    assert later.changes == 2
    assert later.shard_of(digest_of("key 7")) is None
    assert later.shard_of(digest_of("key 8")) == (moved["key 8"] + 1) % 8
    assert later.shard_of(digest_of("key 9")) == moved["key 9"]
    assert whole.shard_of(digest_of("key 7")) == moved["key 7"]
    with connected(cluster_url) as connection:
        connection.execute("update shardids_catalog.key_home set key = 'key 7' where key = 'key 9'")
        renamed = known(later)
        assert renamed.shard_of(digest_of("key 9")) is None
        assert renamed.shard_of(digest_of("key 7")) == moved["key 9"]
        assert known(renamed) is renamed
        monkeypatch.setattr(directory, "MOST_CHANGES", 3)
        put_home(catalog, "text", "key 10", (moved["key 10"] + 1) % 8)
        again = known(renamed)
        assert again.changes == 0
        assert again.shard_of(digest_of("key 9")) is None
        bring_homes(catalog).all()
        connection.execute("truncate shardids_catalog.key_home")
        assert not known(again)
        bring_homes(catalog).all()
        assert connection.execute("select count(*) from shardids.key_home").fetchone() == (0,)


def test_a_switch_while_the_directory_is_read_is_not_missed(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = catalog.describe().layout.encode(ms=1_000_000, shard=ANN)
    there, then = (ANN + 1) % 8, (ANN + 2) % 8
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", [id_], shard=ANN)
    put_home(catalog, "text", "ann", there)
    before = directory.read_known(catalog.engine)
    put_home(catalog, "text", "bob", (shard_for_key("bob", 8) + 1) % 8)
    real = directory._departures

    def slow(connection: Connection) -> dict[int, Departures]:
        found = real(connection)
        monkeypatch.setattr(directory, "_departures", real)
        put_home(catalog, "text", "ann", then)
        return found

    monkeypatch.setattr(directory, "_departures", slow)
    later = directory.read_known(catalog.engine, before)
    assert (later.shard_of(digest_of("ann")), list(later.departures[ANN].shards)) == (there, [there])
    now = directory.read_known(catalog.engine, later)
    assert (now.shard_of(digest_of("ann")), list(now.departures[ANN].shards)) == (then, [then])


def test_a_new_node_gets_the_directory(catalog: Catalog, blank_database: Callable[[], URL]) -> None:
    put_home(catalog, "text", "ann", ELSEWHERE)
    url = blank_database()
    provision.add_node(catalog, "c", dsn(url))
    with connected(url) as connection:
        assert connection.execute("select shardids.home_of('text', 'ann')").fetchone() == (ELSEWHERE,)
        assert connection.execute("select shardids.home_of('text', 'bob')").fetchone() == (None,)


def test_run_follows_a_key_that_is_refused(catalog: Catalog, cluster_url: URL, cluster: Cluster) -> None:
    """The client does not listen; the catalog shows the new shard after the old one refuses."""
    tried: list[int] = []

    def write(session: Session) -> int:
        tried.append(session.shard)  # type: ignore[attr-defined]  # a ShardSession
        user = User(name="ann")
        session.add(user)
        session.flush()
        return user.id

    with Cluster.connect(cluster_url, listen=False) as stale:
        shard = stale.at(key="ann")
        refused_on(cluster, ANN, f"shard {ELSEWHERE}")
        with stale.session(key="ann") as session:
            session.add(User(name="ann"))
            with pytest.raises(KeyMoved, match="key ann") as caught:
                session.commit()
        assert caught.value.shard == ELSEWHERE
        with pytest.raises(KeyMoved, match=r"record that within 0\.2 s\n.*: shardids tenant move --list"):
            shard.run(write, patience_s=0.2)
        with pytest.raises(KeyMoved, match="key ann has moved"):
            stale.at(shard=ANN).run(write)
        tried.clear()
        later = Timer(0.3, put_home, (catalog, "text", "ann", ELSEWHERE))
        later.start()
        assert DEFAULT.shard_of(shard.run(write)) == ELSEWHERE
        later.join()
        assert tried[-1] == ELSEWHERE
        assert set(tried[:-1]) == {ANN}
        # One that was found before goes to the new shard at once.
        tried.clear()
        shard.run(write)
        assert tried == [ELSEWHERE]


def test_run_follows_a_key_in_an_event_loop(catalog: Catalog, cluster_url: URL, cluster: Cluster) -> None:
    refused_on(cluster, ANN, f"shard {ELSEWHERE}")

    async def write(session: AsyncSession) -> int:
        user = User(name="ann")
        session.add(user)
        await session.flush()
        return user.id

    async def main() -> int:
        stale = await AsyncCluster.connect(cluster_url, listen=False)
        shard = stale.at(key="ann")
        await asyncio.to_thread(put_home, catalog, "text", "ann", ELSEWHERE)
        found = await shard.run(write)
        await stale.close()
        return found

    assert DEFAULT.shard_of(asyncio.run(main())) == ELSEWHERE


def test_ids_of_moved_rows_are_found(catalog: Catalog, cluster: Cluster, cluster_url: URL) -> None:
    """A key moves with 3,000 rows, gets new ones, and returns; other rows of its shard stay."""
    with cluster.session(shard=ANN) as session:
        ids = [*session.execute(text(f"select shard_{ANN:04d}.next_ids(4000)")).scalars()]
    theirs, others = ids[:4000:2], ids[1:4000:2]
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", theirs[:700], shard=ANN)
        list_ids(connection, "text", "ann", theirs[700:], shard=ANN)
    assert cluster.refresh()
    assert cluster.shard_of(theirs[0]) == ANN
    put_home(catalog, "text", "ann", ELSEWHERE)
    wait_for(lambda: cluster.shard_of(theirs[0]) == ELSEWHERE, "the directory")
    assert cluster.at(id=theirs[-1]).number == ELSEWHERE
    cluster.moved_ids.learn(ids, DEFAULT)
    asked: list[object] = []
    catalog_of_cluster = cluster._catalog.engine
    event.listen(catalog_of_cluster, "before_cursor_execute", lambda *call: asked.append(call[2]))
    assert {cluster.shard_of(one) for one in theirs} == {ELSEWHERE}
    assert {cluster.shard_of(one) for one in others} == {ANN}
    assert asked == []
    with catalog.engine.connect() as connection:
        found = keys_of_ids(connection, [theirs[5], others[5]])
    assert {id_: (one.key, one.origin, one.shard) for id_, one in found.items()} == {
        theirs[5]: ("ann", ANN, ELSEWHERE)
    }
    # New rows of other keys cost nothing: no moved ID is higher.
    with cluster.session(shard=ANN) as session:
        new = session.execute(text(f"select shard_{ANN:04d}.next_id()")).scalar_one()
    assert cluster.shard_of(new) == ANN
    assert asked == []
    # What is listed after the move leads there, too.
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", [new], shard=ELSEWHERE)
    wait_for(lambda: cluster.shard_of(new) == ELSEWHERE, "the directory")
    with cluster.session(shard=ELSEWHERE) as session:
        born = session.execute(text(f"select shard_{ELSEWHERE:04d}.next_id()")).scalar_one()
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", [born], shard=ELSEWHERE)
    assert put_home(catalog, "text", "ann", ANN) is None
    wait_for(lambda: cluster.shard_of(born) == ANN, "the directory")
    assert {cluster.shard_of(one) for one in (*theirs, *others)} == {ANN}


def test_ids_of_two_keys_are_listed_at_once(catalog: Catalog, cluster_url: URL) -> None:
    """Both merge into the same rows of the list."""
    first = DEFAULT.encode(ms=1_000, shard=ANN)
    step = DEFAULT.encode(ms=1_001, shard=ANN) - first

    def listed(key: str, offset: int) -> None:
        with catalog_at(cluster_url) as mine:
            for start in range(0, 2000, 200):
                ids = [first + (start + n) * step * 2 + offset for n in range(200)]
                with mine.engine.begin() as connection:
                    list_ids(connection, "text", key, ids, shard=ANN)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(listed, ["ann", "bob"], [0, step]))
    every = [first + n * step for n in range(4000)]
    with catalog.engine.connect() as connection:
        found = keys_of_ids(connection, every)
    assert [found[id_].key for id_ in every] == ["ann", "bob"] * 2000


def test_sessions_know_moved_ids(catalog: Catalog, cluster: Cluster) -> None:
    with cluster.session(shard=ANN) as session:
        user_id, photo_id = session.execute(
            text(f"select shard_{ANN:04d}.next_id(), shard_{ANN:04d}.next_id()")
        ).one()
    with cluster.engine(cluster.node_of(ELSEWHERE)).begin() as connection:
        there = f"shard_{ELSEWHERE:04d}"
        connection.execute(text(f"insert into {there}.users values ({user_id}, 'ann')"))
        connection.execute(text(f"insert into {there}.photos values ({photo_id}, {user_id})"))
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", [user_id, photo_id], shard=ANN)
        directory.write_home(connection, "text", "ann", ELSEWHERE, source=ANN)
    wait_for(lambda: cluster.shard_for("ann") == ELSEWHERE, "the directory")
    with cluster.session(id=user_id) as session:
        assert session.get_one(User, user_id).name == "ann"
        session.add(Photo(user_id=user_id))
        session.commit()
    with cluster.sharded_session() as session:
        assert session.get_one(User, user_id).name == "ann"
        assert len(session.scalars(select(Photo).where(Photo.user_id == user_id)).all()) == 2
        assert len(session.scalars(select(Photo).where(Photo.id.in_([photo_id, photo_id + 1]))).all()) == 1
        session.add(Photo(user_id=user_id))
        session.commit()
    with cluster.session(shard=ANN) as session, pytest.raises(WrongShard, match=f"shard {ELSEWHERE}"):
        session.execute(insert(Photo).values(user_id=user_id))


def test_a_catalog_that_is_down_leaves_what_is_known(
    catalog: Catalog, cluster_url: URL, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.session(shard=ANN) as session:
        ids = [*session.execute(text(f"select shard_{ANN:04d}.next_ids(3000)")).scalars()]
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", ids, shard=ANN)
        directory.write_home(connection, "text", "ann", ELSEWHERE)
    with Cluster.connect(cluster_url, listen=False) as client:
        assert client.shard_of(ids[0]) == ELSEWHERE

        def down() -> None:
            raise ConnectionFailed("the catalog can't be reached")

        monkeypatch.setattr(client._catalog.engine, "connect", down)
        assert not client.refresh()
        assert client.shard_for("ann") == ELSEWHERE
        assert client.shard_of(ids[1]) == ELSEWHERE
        with pytest.raises(ConnectionFailed):
            client.shard_of(ids[-1])


@pytest.fixture
def run(cluster_url: URL) -> Callable[..., Result]:
    def run(*words: str, code: int = 0) -> Result:
        environment = {"SHARDIDS_CATALOG": dsn(cluster_url), "COLUMNS": "200"}
        ran = CliRunner().invoke(app, [*words], env=environment, prog_name="shardids")
        assert ran.exit_code == code, ran.output
        return ran

    return run


def test_the_command_line_shows_tenants(
    catalog: Catalog, cluster: Cluster, run: Callable[..., Result]
) -> None:
    assert "Every key lives in the shard of its hash" in run("tenant", "list").stderr
    put_home(catalog, "text", "ann", ELSEWHERE)
    wait_for(lambda: cluster.shard_for("ann") == ELSEWHERE, "the directory")
    with cluster.sharded_session() as session:
        users = [User(name="ann"), User(name="ann"), User(name="bob")]
        session.add_all(users)
        session.flush()
        session.add_all([Photo(user_id=users[0].id) for _ in range(5)])
        session.commit()
        ann_id = users[0].id
    (listed,) = json.loads(run("tenant", "list", "--json").stdout)
    assert (listed["key"], listed["kind"], listed["shard"]) == ("ann", "text", ELSEWHERE)
    assert run("tenant", "list", "--shard", str(ANN)).stderr == "No such key in the directory.\n"
    assert run("tenant", "list", "--kind", "uuid").stderr == "No such key in the directory.\n"
    assert "'foo' is not a kind of keys" in run("tenant", "list", "--kind", "foo", code=2).stderr
    assert "region" in run("tenant", "list", "--kind", "text@eu", code=2).stderr
    assert "shard 900 does not exist" in run("tenant", "list", "--shard", "900", code=2).stderr
    shown = run("tenant", "show", "ann", "--key", "users.name").stdout
    assert f"ann: lives in shard {ELSEWHERE} since" in shown
    assert "7 rows" in shown
    found = json.loads(run("tenant", "show", "ann", "--key", "users.name", "--json").stdout)
    assert {one["table"]: one["rows"] for one in found["tables"]} == {"photos": 5, "users": 2}
    assert (
        f"bob: lives in shard {shard_for_key('bob', 8)}, by its hash" in run("tenant", "show", "bob").stdout
    )
    (busy,) = json.loads(run("tenant", "top", str(ELSEWHERE), "--key", "users.name", "--json").stdout)
    assert (busy["key"], busy["rows"], busy["share"], busy["table"]) == ("ann", 7, 1.0, "photos")
    assert "no table of" in run("tenant", "show", "ann", "--key", "users.nothing", code=2).stderr
    assert "which columns hold the keys" in run("tenant", "top", "1", code=2).stderr
    assert (
        "'five' is not a key of kind bigint"
        in run("tenant", "show", "five", "--kind", "bigint", code=2).stderr
    )
    # An ID that was born elsewhere.
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", [ann_id], shard=ELSEWHERE)
    other = (ELSEWHERE + 1) % 8
    put_home(catalog, "text", "ann", other)
    decoded = run("id", "decode", str(ann_id)).stdout
    assert f"born in {ELSEWHERE}; its tenant ann lives in {other}, on node" in decoded
    (told,) = json.loads(run("id", "decode", str(ann_id), "--json").stdout)
    assert told["shard"] == ELSEWHERE
    assert told["lives"]["shard"] == other
    assert f"also born in shard {ELSEWHERE}" in run("tenant", "show", "ann").stdout


def test_the_doctor_names_old_copies_and_homeless_keys(
    catalog: Catalog, cluster: Cluster, cluster_urls: dict[str, URL], run: Callable[..., Result]
) -> None:
    def found(*checks: str) -> set[tuple[str, tuple[str, ...]]]:
        report = doctor.examine(catalog, checks or None)
        return {(one.check, one.nodes) for one in report.findings}

    put_home(catalog, "text", "ann", ELSEWHERE)
    assert found("directory-copy", "key-homeless") == {("directory-copy", ("a",)), ("directory-copy", ("b",))}
    assert json.loads(run("tenant", "sync", "--dry-run", "--json").stdout) == {"a": 1, "b": 1}
    assert json.loads(run("tenant", "sync", "--json").stdout) == {"a": 1, "b": 1}
    assert found("directory-copy", "key-homeless") == set()
    with connected(cluster_urls["b"]) as connection:
        connection.execute("update shardids.key_home set shard = shard + 1")
    assert found("directory-copy") == {("directory-copy", ("b",))}
    assert json.loads(run("tenant", "sync", "--json").stdout) == {"a": 0, "b": 1}
    assert found("directory-copy") == set()
    with connected(cluster_urls["a"]) as connection:
        connection.execute(
            "update shardids_catalog.placement set state = 'lost' where shard = %s", [ELSEWHERE]
        )
        assert found("key-homeless") == {("key-homeless", ())}
        connection.execute(
            "update shardids_catalog.placement set state = 'active' where shard = %s", [ELSEWHERE]
        )


def test_the_doctor_knows_rows_that_came_with_their_key(catalog: Catalog, cluster: Cluster) -> None:
    there = f"shard_{ELSEWHERE:04d}"
    with cluster.session(shard=ANN) as session:
        theirs, stray = session.execute(
            text(f"select shard_{ANN:04d}.next_id(), shard_{ANN:04d}.next_id()")
        ).one()
    with cluster.engine(cluster.node_of(ELSEWHERE)).begin() as connection:
        connection.execute(text(f"insert into {there}.users values ({theirs}, 'ann')"))
    keys = [ShardingKey(table_name="users", column_name="name")]
    checks = ["row-in-wrong-shard", "key-in-wrong-shard"]
    before = {one.check for one in doctor.examine(catalog, checks, keys).findings}
    assert before == {"row-in-wrong-shard", "key-in-wrong-shard"}
    with catalog.engine.begin() as connection:
        list_ids(connection, "text", "ann", [theirs], shard=ANN)
        directory.write_home(connection, "text", "ann", ELSEWHERE)
    bring_homes(catalog).all()
    assert doctor.examine(catalog, checks, keys).findings == ()
    with cluster.engine(cluster.node_of(ELSEWHERE)).begin() as connection:
        connection.execute(text(f"insert into {there}.users values ({stray}, 'ann')"))
    (finding,) = doctor.examine(catalog, checks, keys).findings
    assert f"1 of 2 rows read in shard {ELSEWHERE}" in finding.what
    assert str(stray) in finding.what


def test_old_ids_follow_their_key(catalog: Catalog, cluster_url: URL) -> None:
    with catalog.engine.begin() as connection:
        write_old_ids(
            connection,
            rules=[
                OldIdRule(table="users", column="id", rule="key"),
                OldIdRule(table="photos", column="id", rule="directory"),
            ],
        )
        fill_directory(connection, "photos", [*((id_, 1) for id_ in range(100)), (70_000, 1)])
    with Cluster.connect(cluster_url) as cluster:
        there = cluster.at(id=5, of="users").number
        assert there == shard_for_key(5, 8)
        assert [cluster.shard_of(id_, of="photos") for id_ in (7, 8, 70_000)] == [1, 1, 1]
        with catalog.engine.begin() as connection:
            move_old_ids(connection, "photos", {7: 3, 70_000: 3})
            move_old_ids(connection, "users", {5: 3})
            directory.write_home(connection, "bigint", 5, (there + 1) % 8)
        wait_for(lambda: cluster.at(id=5, of="users").number == (there + 1) % 8, "the directory")
        assert [cluster.shard_of(id_, of="photos") for id_ in (7, 8, 70_000)] == [3, 1, 3]
        with (
            catalog.engine.begin() as connection,
            pytest.raises(BadArgument, match="can't be in a directory"),
        ):
            move_old_ids(connection, "photos", {7: 8})
