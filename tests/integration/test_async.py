"""The same cluster for asyncio: routing, sessions, errors, moved shards; the event loop never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from sqlalchemy import event, func, insert, select, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from shardids import AsyncCluster, Cluster
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    CommitUncertain,
    ConnectionFailed,
    ShardFenced,
    ShardMoved,
    UnknownShard,
)
from shardids.ids.layout import DEFAULT
from tests.conftest import dsn
from tests.integration.test_listener import LISTENING
from tests.support import moves_by_hand
from tests.support.clusters import connected, sessions
from tests.support.moves_by_hand import SHARD, Base, Note, draw_at_commit, two_nodes, words_on
from tests.support.waiting import wait_for


@pytest.fixture
def nodes(blank_database: Callable[[], URL]) -> dict[str, URL]:
    return two_nodes(blank_database)


Test = Callable[[AsyncCluster], Coroutine[Any, Any, None]]


@pytest.fixture
def run(nodes: dict[str, URL]) -> Callable[..., None]:
    """Runs a coroutine function on the cluster, which does not listen."""

    def run(test: Test, **options: Any) -> None:
        async def main() -> None:
            async with await AsyncCluster.connect(nodes["catalog"], listen=False, **options) as cluster:
                await test(cluster)

        asyncio.run(main())

    return run


def test_routing_is_that_of_the_cluster(nodes: dict[str, URL]) -> None:
    async def main(other: Cluster) -> None:
        cluster = await AsyncCluster.connect(nodes["catalog"])
        assert (cluster.layout, cluster.shard_count) == (other.layout, other.shard_count)
        assert cluster.placement == other.placement
        assert [cluster.shard_for(key) for key in ("ann", b"ann", 7)] == [
            other.shard_for(key) for key in ("ann", b"ann", 7)
        ]
        block = await cluster.at(shard=SHARD).reserve(3000)
        assert len(set(block)) == 3000
        assert all(one < next_one for one, next_one in pairwise(block))
        assert {cluster.shard_of(one) for one in block} == {SHARD}
        assert cluster.decode(block[0]) == other.decode(block[0])
        assert (cluster.node_of(SHARD).name, cluster.schema_of(SHARD)) == ("a", "shard_0002")
        await cluster.close()
        await cluster.close()

    with Cluster.connect(nodes["catalog"]) as other:
        asyncio.run(main(other))


def test_sessions_and_connections_lie_in_their_shard(
    run: Callable[[Test], None], nodes: dict[str, URL]
) -> None:
    async def test(cluster: AsyncCluster) -> None:
        async with cluster.session(shard=SHARD) as session, session.begin():
            note = Note(words="one")
            session.add(note)
            await session.flush()
            made = note.id
        assert cluster.shard_of(made) == SHARD
        async with cluster.at(id=made).session(expire_on_commit=False) as session:
            session.add_all([Note(words="two"), Note(words="three")])
            await session.commit()
        key = next(key for key in range(100) if cluster.shard_for(key) == SHARD)
        async with cluster.at(key=key).session(sync_session_class=Session) as session:
            found = await session.stream_scalars(select(Note.words).order_by(Note.id))
            assert [words async for words in found] == ["one", "two", "three"]
        async with cluster.at(shard=SHARD).connection() as connection:
            assert await connection.scalar(select(func.count()).select_from(Note)) == 3
        async with cluster.session(shard=0) as session:
            assert (await session.scalars(select(Note))).all() == []

    run(test)
    assert words_on(nodes["a"]) == ["one", "two", "three"]


def test_what_is_refused_is_refused_as_in_the_cluster(run: Callable[[Test], None]) -> None:
    async def test(cluster: AsyncCluster) -> None:
        for wrong in ({}, {"shard": 1, "key": 1}, {"shard": 4}, {"id": -1}):
            with pytest.raises(BadArgument):
                cluster.session(**wrong)
            with pytest.raises(BadArgument):
                await cluster.at(**wrong).run(AsyncSession.flush)
        for shard, count in ((4, 1), (0, 0), (0, 4194305), (True, 1)):
            with pytest.raises(BadArgument):
                await cluster.at(shard=shard).reserve(count)
        with pytest.raises(BadArgument):
            cluster.at(shard=-1).connection()

    run(test)


def test_a_connect_that_fails(blank_database: Callable[[], URL], admin: psycopg.Connection) -> None:
    url = blank_database()
    with pytest.raises(ClusterConflict, match="holds no shardids catalog"):
        asyncio.run(AsyncCluster.connect(url))
    with pytest.raises(ConnectionFailed, match="the catalog"):
        asyncio.run(AsyncCluster.connect("postgresql://127.0.0.1:1/none"))
    wait_for(lambda: not sessions(admin, url), "the session ends")


def test_many_tasks_share_one_pool_a_node(
    nodes: dict[str, URL], run: Callable[..., None], admin: psycopg.Connection
) -> None:
    async def write(cluster: AsyncCluster, number: int) -> int:
        async with cluster.session(shard=number % 4) as session, session.begin():
            note = Note(words=f"task {number}")
            session.add(note)
            await session.flush()
            await session.execute(text("select pg_sleep(0.01)"))
            return note.id

    async def test(cluster: AsyncCluster) -> None:
        made = await asyncio.gather(*(write(cluster, number) for number in range(60)))
        assert len(set(made)) == 60
        assert [cluster.shard_of(one) for one in made] == [number % 4 for number in range(60)]
        assert sessions(admin, nodes["a"]) == 3

    run(test, pool_size=3, max_overflow=0)
    wait_for(lambda: not sessions(admin, nodes["a"]), "no session is left")


def test_no_session_setting_is_ever_sent(run: Callable[[Test], None]) -> None:
    sent: list[str] = []

    async def test(cluster: AsyncCluster) -> None:
        engine = cluster.engine(cluster.node_of(SHARD)).sync_engine
        event.listen(engine, "before_cursor_execute", lambda _1, _2, statement, *_: sent.append(statement))
        async with cluster.session(shard=SHARD) as session:
            for _ in range(10):
                await session.scalars(select(Note))

    run(test)
    assert len(sent) == 10
    assert "set " not in "\n".join(sent).lower()


async def commit_late(session: AsyncSession) -> None:
    await session.execute(insert(Note), [{"id": DEFAULT.encode(ms=1, shard=SHARD), "words": "at commit"}])
    await session.commit()


async def stream(session: AsyncSession) -> None:
    drawing = text("select shard_0002.next_id() from generate_series(1, 10)")
    async for _ in await session.stream(drawing):
        pass


async def flush(session: AsyncSession, count: int) -> None:
    session.add_all(Note(words=f"{number}") for number in range(count))
    await session.flush()


async def commit(session: AsyncSession) -> None:
    session.add(Note(words="1"))
    await session.commit()


async def core(session: AsyncSession) -> None:
    connection = await session.connection()
    await connection.execute(insert(Note).values(words="1"))


DRAWS: dict[str, Callable[[AsyncSession], Awaitable[object]]] = {
    "flush of one": lambda session: flush(session, 1),
    "flush of many": lambda session: flush(session, 9),
    "flush in commit": commit,
    "trigger in commit": commit_late,
    "core": core,
    "text": lambda session: session.execute(text("select shard_0002.next_ids(3)")),
    "stream": stream,
    "run_sync": lambda session: session.run_sync(
        lambda sync: sync.execute(insert(Note), [{"words": "1"}, {"words": "2"}])
    ),
}


@pytest.mark.parametrize(("moved_to", "kind"), [(None, ShardFenced), ("b", ShardMoved)])
def test_every_way_to_draw_says_that_the_shard_is_stopped(
    run: Callable[[Test], None], nodes: dict[str, URL], moved_to: str | None, kind: type[ShardFenced]
) -> None:
    async def test(cluster: AsyncCluster) -> None:
        for way, draw in DRAWS.items():
            async with cluster.session(shard=SHARD) as session:
                with pytest.raises(ShardFenced) as caught:
                    await draw(session)
                assert type(caught.value) is kind, way
                assert f"shard {SHARD} " in caught.value.message, way
                await session.rollback()
                assert (await session.scalars(select(Note))).all() == [], way
        with pytest.raises(kind):
            await cluster.at(shard=SHARD).reserve(5)
        with pytest.raises(kind):
            await cluster.at(shard=SHARD).run(lambda session: flush(session, 1), patience_s=0)

    draw_at_commit(nodes["a"])
    moves_by_hand.fence(nodes["catalog"], SHARD, moved_to)
    run(test)


class Write:
    """Writes a note and counts its calls."""

    def __init__(self, words: str) -> None:
        self.words = words
        self.calls = 0

    async def __call__(self, session: AsyncSession) -> Note:
        self.calls += 1
        note = Note(words=self.words)
        session.add(note)
        await session.flush()
        return note


def test_run_goes_to_the_new_node(run: Callable[[Test], None], nodes: dict[str, URL]) -> None:
    async def test(cluster: AsyncCluster) -> None:
        before = await cluster.at(shard=SHARD).run(Write("before"))
        with pytest.raises(IntegrityError):
            await cluster.at(shard=SHARD).run(Write("before"))
        await asyncio.to_thread(moves_by_hand.move_shard, nodes["catalog"], SHARD, "b", Base.metadata)
        write = Write("after")
        after = await cluster.at(id=before.id).run(write)
        assert (write.calls, after.words) == (2, "after")
        assert after.id > before.id
        assert cluster.node_of(SHARD).name == "b"

    run(test)
    assert words_on(nodes["a"]) == ["before"]
    assert words_on(nodes["b"]) == ["before", "after"]


def test_it_listens_from_connect_on(nodes: dict[str, URL], admin: psycopg.Connection) -> None:
    async def main() -> None:
        async with await AsyncCluster.connect(nodes["catalog"]) as cluster:
            assert admin.execute(LISTENING, [nodes["catalog"].database]).fetchone() == (1,)
            assert cluster.node_of(SHARD).name == "a"

    asyncio.run(main())


def test_a_kept_snapshot_is_not_asked_about_a_shard_that_has_moved_since(
    run: Callable[..., None], nodes: dict[str, URL]
) -> None:
    async def test(cluster: AsyncCluster) -> None:
        async with cluster.sharded_session() as session:
            assert (await session.scalars(select(Note.words))).all() == []
            moves_by_hand.place(nodes["catalog"], SHARD, "b")
            assert await cluster.refresh()
            for _ in range(2):
                with pytest.raises(ShardMoved, match=f'shard {SHARD} moved from node "a" to node "b" after'):
                    await session.scalars(select(Note.words))

    run(test, isolation_level="REPEATABLE READ")


@pytest.mark.parametrize("listen", [True, False])
def test_run_waits_for_the_new_place(nodes: dict[str, URL], listen: bool) -> None:
    async def main() -> None:
        tick = moves_by_hand.fence(nodes["catalog"], SHARD, "b")
        moves_by_hand.copy(nodes["catalog"], SHARD, "b", Base.metadata, tick)
        async with await AsyncCluster.connect(nodes["catalog"], listen=listen) as cluster:
            with pytest.raises(ShardMoved, match=r"the catalog did not record that within 0\.1 s"):
                await cluster.at(shard=SHARD).run(Write("too early"), patience_s=0.1)
            write = Write("in the end")
            writing = asyncio.create_task(cluster.at(shard=SHARD).run(write))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(moves_by_hand.place, nodes["catalog"], SHARD, "b")
            await writing
            assert 1 < write.calls < 10

    asyncio.run(main())
    assert words_on(nodes["b"]) == ["in the end"]


def test_run_finds_a_shard_that_was_made_meanwhile(
    run: Callable[[Test], None], nodes: dict[str, URL]
) -> None:
    async def test(cluster: AsyncCluster) -> None:
        with pytest.raises(UnknownShard):
            await cluster.at(shard=0).run(Write("too early"))
        direct.execute("insert into shardids_catalog.placement values (0, 'a', 'active')")
        await cluster.at(shard=0).run(Write("in time"))

    with connected(nodes["catalog"]) as direct:
        direct.execute("delete from shardids_catalog.placement where shard = 0")
        run(test)


def test_run_does_not_repeat_what_may_be_committed(
    run: Callable[[Test], None], nodes: dict[str, URL], admin: psycopg.Connection
) -> None:
    calls = []

    async def lose(session: AsyncSession) -> None:
        calls.append(session)
        await flush(session, 1)
        pid = await session.scalar(text("select pg_backend_pid()"))
        moves_by_hand.move_shard(nodes["catalog"], SHARD, "b", Base.metadata)
        admin.execute("select pg_terminate_backend(%s, 5000)", [pid])

    async def test(cluster: AsyncCluster) -> None:
        with pytest.raises(CommitUncertain):
            await cluster.at(shard=SHARD).run(lose)
        assert len(calls) == 1

    run(test)


def test_a_change_is_heard(nodes: dict[str, URL]) -> None:
    async def main() -> None:
        async with await AsyncCluster.connect(nodes["catalog"]) as cluster, asyncio.timeout(10):
            assert cluster.node_of(SHARD).name == "a"
            await asyncio.to_thread(moves_by_hand.place, nodes["catalog"], SHARD, "b")
            while cluster.node_of(SHARD).name != "b":
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_the_event_loop_goes_on_while_the_catalog_is_slow(
    run: Callable[[Test], None], nodes: dict[str, URL]
) -> None:
    async def test(cluster: AsyncCluster) -> None:
        with psycopg.connect(dsn(nodes["catalog"])) as blocking:
            blocking.execute("lock table shardids_catalog.cluster in access exclusive mode")
            failing = asyncio.create_task(cluster.at(shard=SHARD).run(Write("refused")))
            longest_s = await longest_pause_s(0.5)
            assert not failing.done()
            blocking.rollback()
        with pytest.raises(ShardFenced):
            await failing
        assert longest_s < 0.2

    moves_by_hand.fence(nodes["catalog"], SHARD, None)
    run(test)


async def longest_pause_s(seconds: float) -> float:
    loop = asyncio.get_running_loop()
    began = last = loop.time()
    longest_s = 0.0
    while last < began + seconds:
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, loop.time() - last)
        last = loop.time()
    return longest_s
