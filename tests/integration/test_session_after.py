"""Sessions with ``after``: what they write sorts after the rows that it answers, whatever clocks show."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import ForeignKey, event, insert, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from shardids import AsyncCluster, Cluster, primary_key
from shardids.client.blocks import next_ids
from shardids.errors import BadArgument, ShardFenced, TooFarAhead
from tests.conftest import dsn


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = primary_key()
    answers: Mapped[int | None]


class Mark(Base):
    __tablename__ = "marks"
    note_id: Mapped[int] = mapped_column(ForeignKey(Note.id), primary_key=True)


HERE, THERE = 1, 6
"""Shards on two nodes; the clock of the second is ahead, as far as its IDs tell."""
AHEAD_MS = 2_500


@pytest.fixture
def question(cluster: Cluster) -> int:
    """The ID of a row of a node whose clock is ahead."""
    for shard in (HERE, THERE):
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection)
    ms = cluster.decode(cluster.at(shard=HERE).reserve(1)[0]).ms
    asked = cluster.layout.encode(ms=ms + AHEAD_MS, shard=THERE, sequence=3)
    with cluster.session(shard=THERE, after=asked) as session:
        note = Note()
        session.add(note)
        session.commit()
        return note.id


def by_flush(session: Session) -> list[int]:
    notes = [Note() for _ in range(3)]
    session.add_all(notes)
    session.flush()
    return [note.id for note in notes]


def by_insert(session: Session) -> list[int]:
    return list(session.scalars(insert(Note).values([{"answers": 1}, {"answers": 2}]).returning(Note.id)))


def by_mappings(session: Session) -> list[int]:
    session.bulk_insert_mappings(Note, [{"answers": 1}, {"answers": 2}])  # type: ignore[arg-type]  # takes a class
    return list(session.scalars(select(Note.id)))


def by_core(session: Session) -> list[int]:
    return list(
        session.connection().execute(insert(Note.__table__).returning(Note.id), {"answers": 1}).scalars()
    )  # type: ignore[arg-type]  # a table


def by_sql(session: Session) -> list[int]:
    return list(session.execute(text("insert into shard_0001.notes default values returning id")).scalars())


def by_next_ids(session: Session) -> list[int]:
    return [*next_ids(session.connection(), HERE, 5), *next_ids(session.connection(), HERE, 500)]


WAYS: list[Callable[[Session], list[int]]] = [
    by_flush,
    by_insert,
    by_mappings,
    by_core,
    by_sql,
    by_next_ids,
]


def test_rows_sort_after_those_that_they_answer(cluster: Cluster, question: int) -> None:
    for way in WAYS:
        with cluster.session(shard=HERE) as session:
            assert max(way(session)) < question
            session.rollback()
    for way in WAYS:
        question += 1_000 << (cluster.layout.shard_bits + cluster.layout.sequence_bits)
        with cluster.session(shard=HERE, after=question) as session:
            assert min(way(session)) > question
            session.rollback()
            assert min(way(session)) > question
            session.rollback()


def test_run_and_reserve_take_it_too(cluster: Cluster, question: int) -> None:
    block = cluster.at(shard=HERE, after=[question - 5, question]).reserve(100)
    assert block[0] > question
    later = cluster.at(shard=HERE, after=block).run(by_flush)
    assert later[0] > block[-1]


def test_a_session_over_all_shards_calls_the_function_itself(cluster: Cluster, question: int) -> None:
    here = {"bind_arguments": {"shard_id": HERE}}
    with cluster.sharded_session() as session:
        assert session.scalars(insert(Note).returning(Note.id), **here).one() < question
        session.connection(**here).execute(
            text("select shardids.advance_past(:shard, :id)"), {"shard": HERE, "id": question}
        )
        assert session.scalars(insert(Note).returning(Note.id), **here).one() > question
        session.rollback()


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_two_phases_take_it_too(cluster: Cluster, cluster_url: Any, question: int, end: str) -> None:
    """Those of SQLAlchemy: a prepared transaction, in doubt or not, holds nothing of its shard's clock."""
    with cluster.at(shard=HERE, after=question).session(twophase=True) as session:
        assert min(by_flush(session)) > question
        session.rollback()
        first = by_flush(session)
        session.commit()
        assert first[0] > question
        in_doubt = by_flush(session)
        session.prepare()
        # The client is lost.
        session.invalidate()
    with psycopg.connect(dsn(cluster_url), autocommit=True) as connection:
        ((gid,),) = connection.execute(
            "select gid from pg_prepared_xacts where database = current_database()"
        )
        try:
            # Others are raised past its IDs, and draw.
            answered = cluster.at(shard=HERE, after=in_doubt).run(by_flush)
            further = in_doubt[-1] + (1_000 << cluster.layout.shard_bits + cluster.layout.sequence_bits)
            raised = cluster.at(shard=HERE, after=further).run(by_flush)
            assert sorted([*first, *in_doubt, *answered, further, *raised]) == [
                *first, *in_doubt, *answered, further, *raised
            ]  # fmt: skip
        finally:
            connection.execute(f"{end} PREPARED '{gid}'".encode())
    with cluster.session(shard=HERE) as session:
        ids = session.scalars(select(Note.id).order_by(Note.id)).all()
        assert ids == [*first, *(in_doubt if end == "COMMIT" else []), *answered, *raised]
        # The raise outlives the transaction that is rolled back.
        assert by_flush(session)[0] > raised[-1]


def test_two_phases_on_two_nodes_call_the_function(cluster: Cluster, question: int) -> None:
    later = question + (1_000 << cluster.layout.shard_bits + cluster.layout.sequence_bits)
    with cluster.sharded_session(twophase=True) as session:
        for shard in (HERE, THERE):
            session.connection(bind_arguments={"shard_id": shard}).execute(
                text("select shardids.advance_past(:shard, :id)"), {"shard": shard, "id": later}
            )
        ids = [
            session.scalars(insert(Note).returning(Note.id), bind_arguments={"shard_id": shard}).one()
            for shard in (HERE, THERE)
        ]
        session.commit()
    assert min(ids) > later
    with cluster.sharded_session() as session:
        assert [session.get_one(Note, one).id for one in ids] == ids


def test_asyncio_takes_it_too(cluster_url: Any, cluster: Cluster, question: int) -> None:
    async def answer() -> list[int]:
        async with await AsyncCluster.connect(cluster_url) as there:
            first = (await there.at(shard=HERE, after=question).reserve(10))[0]
            async with there.session(shard=HERE, after=first) as session:
                second = (await session.run_sync(by_flush))[0]
                await session.commit()
            third = await there.at(shard=HERE, after=second).run(lambda session: session.run_sync(by_flush))
        return [question, first, second, third[0]]

    ids = asyncio.run(answer())
    assert ids == sorted(ids)
    assert len(set(ids)) == 4


def test_a_transaction_asks_once_and_one_without_it_not_at_all(cluster: Cluster, question: int) -> None:
    sent: list[str] = []
    engine = cluster.engine(cluster.node_of(HERE))
    event.listen(engine, "before_cursor_execute", lambda _1, _2, statement, *_: sent.append(statement))
    with cluster.session(shard=HERE, after=question) as session:
        for _ in range(2):
            by_flush(session)
            with session.begin_nested():
                by_insert(session)
            session.commit()
        assert sum("advance_past" in statement for statement in sent) == 2
        sent.clear()
    with cluster.session(shard=HERE, after=()) as session:
        by_flush(session)
    with cluster.session(shard=HERE) as session:
        by_flush(session)
    assert not [statement for statement in sent if "advance_past" in statement]


def test_ids_that_were_set_aside_before_are_refused(cluster: Cluster, question: int) -> None:
    block = cluster.at(shard=HERE).reserve(10)
    early = block[5]
    writes: list[Callable[[Session], object]] = [
        lambda session: session.add(Note(id=early)),
        lambda session: session.bulk_save_objects([Note(id=early)]),
        lambda session: session.bulk_insert_mappings(Note, [{"id": early}]),  # type: ignore[arg-type]  # takes a class
        lambda session: session.execute(insert(Note), [{"id": early}]),
        lambda session: session.execute(insert(Note).values(id=early)),
        lambda session: session.execute(insert(Note).values([{"id": early}, {"id": early + 1}])),
        lambda session: session.execute(insert(Note.__table__).values(id=early)),  # type: ignore[arg-type]  # a table
    ]
    for write in writes:
        with cluster.session(shard=HERE, after=question) as session:
            refused = f"id {early} of a new row of .* does not sort after {question}"
            with pytest.raises(BadArgument, match=refused):
                flushed(session, write)
            session.rollback()
            assert session.scalars(select(Note.id)).all() == []
    # What of a block sorts after it can be used.
    later = cluster.at(shard=HERE, after=question).reserve(10)
    kept = later[bisect_right(later, question) :]
    assert len(kept) == 10
    with cluster.session(shard=HERE, after=question) as session:
        session.add(Note(id=kept[0]))
        session.flush()
        session.add(Mark(note_id=kept[0]))
        session.execute(insert(Note), [{"id": kept[1]}])
        session.commit()


def flushed(session: Session, write: Callable[[Session], object]) -> None:
    write(session)
    session.flush()


def test_rows_that_are_there_are_read_and_changed(cluster: Cluster, question: int) -> None:
    with cluster.session(shard=HERE) as session:
        (note, *_) = by_flush(session)
        session.commit()
    with cluster.session(shard=HERE, after=question) as session:
        # Its key is a reference to a row, which may be older.
        session.add(Mark(note_id=note))
        session.get_one(Note, note).answers = 7
        session.flush()
        session.bulk_update_mappings(Note, [{"id": note, "answers": 8}])  # type: ignore[arg-type]  # takes a class
        session.commit()
        assert session.get_one(Note, note).answers == 8


def test_connections_do_not_keep_what_sorts_after(cluster: Cluster, question: int) -> None:
    shard = cluster.at(shard=HERE, after=[question - 5, question])
    assert (shard.number, shard.after, shard.node) == (HERE, question, cluster.node_of(HERE))
    for connect in (shard.connection, lambda: shard.engine):
        with pytest.raises(BadArgument, match="after= applies to session") as caught:
            connect()
        assert f"cluster.at(shard={HERE}, after={question}).reserve(1)" in caught.value.hint


def test_what_is_no_id_is_refused_before_anything_is_asked(cluster: Cluster, question: int) -> None:
    no_ids: list[Any] = [-1, 1 << 63, "12", 1.5, True, [5, None]]
    for bad in no_ids:
        with pytest.raises(BadArgument):
            cluster.session(shard=HERE, after=bad)
        with pytest.raises(BadArgument):
            cluster.at(shard=HERE, after=bad).reserve(1)
        with pytest.raises(BadArgument):
            cluster.at(shard=HERE, after=bad).run(by_flush)
    stranger = cluster.layout.encode(ms=cluster.decode(question).ms, shard=77, sequence=0)
    with pytest.raises(BadArgument, match="shard 77 does not exist in this cluster"):
        cluster.session(shard=HERE, after=stranger)


def test_an_id_beyond_64_bits_is_called_out_of_range(cluster: Cluster) -> None:
    for bad in (1 << 63, -1 << 64):
        with pytest.raises(BadArgument, match=rf"an ID must be from -\d+ to \d+, not {bad}"):
            cluster.session(shard=HERE, after=bad)


def test_a_read_only_transaction_can_only_ask(cluster: Cluster, question: int) -> None:
    read_only = {"postgresql_readonly": True}
    with cluster.session(shard=HERE, after=question) as session:
        refused = f"shard {HERE} is not past ID {question} yet, and neither a read-only transaction"
        with pytest.raises(BadArgument, match=refused) as caught:
            session.connection(execution_options=read_only)
        assert f"cluster.at(shard={HERE}, after={question}).reserve(1)" in caught.value.hint
        assert "CONTEXT" not in str(caught.value)
        session.rollback()
        cluster.at(shard=HERE, after=question).reserve(1)
        session.connection(execution_options=read_only)
        assert session.scalars(select(Note.id)).all() == []


def test_an_id_from_the_future_is_refused_by_the_node(cluster: Cluster, question: int) -> None:
    hours = cluster.layout.encode(ms=cluster.decode(question).ms + 7_200_000, shard=THERE, sequence=0)
    with (
        cluster.session(shard=HERE, after=hours) as session,
        pytest.raises(TooFarAhead, match=rf'shard 1 can.t go past ID {hours}, which is 7\d+ ms ahead.*"a"'),
    ):
        by_flush(session)
    with pytest.raises(TooFarAhead):
        cluster.at(shard=HERE, after=hours).run(by_flush)
    assert cluster.at(shard=HERE).run(by_flush)[0] < question


def test_a_shard_that_issues_no_ids_is_told(cluster: Cluster, question: int) -> None:
    with cluster.engine(cluster.node_of(HERE)).begin() as connection:
        connection.execute(text("select shardids.fence(:shard)"), {"shard": HERE})
    with pytest.raises(ShardFenced):
        cluster.at(shard=HERE, after=question).run(by_flush, patience_s=0)
