"""Statements over shards whose answers were once wrong without an error: what one database answers."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import (
    REAL,
    Date,
    Double,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, aliased, joinedload, mapped_column, relationship
from sqlalchemy.schema import ForeignKey

from shardids import Cluster, primary_key, sharding_key
from shardids.errors import BadArgument, WrongShard
from shardids.tables import views
from tests.conftest import BlankDatabases, found_cluster
from tests.support.clusters import catalog_at
from tests.support.column_types import Negated, Reversed

SHARDS = 4


class Base(DeclarativeBase):
    pass


class Job(Base):
    __tablename__ = "jobs"

    id: Mapped[int] = primary_key()
    slug: Mapped[str] = sharding_key()
    backup: Mapped[str]
    due: Mapped[int]
    day: Mapped[date] = mapped_column(Date, deferred=True)
    weight: Mapped[float] = mapped_column(Double)
    part: Mapped[float] = mapped_column(REAL)
    code: Mapped[str] = mapped_column(Reversed(collation="C"))
    debt: Mapped[int] = mapped_column(Negated)
    steps: Mapped[list[Step]] = relationship(order_by="Step.id")


class Step(Base):
    __tablename__ = "steps"

    id: Mapped[int] = primary_key()
    job_id: Mapped[int] = mapped_column(ForeignKey(Job.id))


class Note(Base):
    """A row with a key of its own, which has a default."""

    __tablename__ = "notes"

    id: Mapped[int] = primary_key()
    job_id: Mapped[int] = mapped_column(ForeignKey(Job.id))
    token: Mapped[str] = sharding_key(default="none")


COUNT = 30


@pytest.fixture(scope="module")
def cluster(databases: BlankDatabases) -> Iterator[Cluster]:
    """30 jobs with two steps each in 4 shards on two nodes, of which b is the query node."""
    urls = databases.take(), databases.take()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, SHARDS)
    with Cluster.connect(urls[0], listen=False) as cluster:
        for shard in range(SHARDS):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection, checkfirst=False)
        with cluster.sharded_session() as session, session.begin():
            for n in range(COUNT):
                job = Job(slug=f"job {n}", backup=f"job {n + 1}", due=n % 5, code=f"{n % 10}{9 - n % 10}")
                job.weight = [0.5, math.nan, math.inf, -1.5, 2.0][n % 5]
                job.part, job.debt = 0.1, n
                job.day = date(2020, 1, n + 1) if n % 7 else text("'infinity'::date")  # type: ignore[assignment]  # SQL
                job.steps = [Step(), Step()]
                session.add(job)
        with catalog_at(urls[0]) as catalog:
            views.create_query_node(catalog, node="b", store_password=True)
        yield cluster
    for url in urls:
        databases.give_back(url)


def test_equal_rows_are_all_locked_and_returned(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        due = session.scalars(select(Job.due).with_for_update()).all()
        assert sorted(due) == sorted(n % 5 for n in range(COUNT))


def test_a_parameter_in_two_places_has_all_its_values_in_both(cluster: Cluster) -> None:
    some = bindparam("b", expanding=True)
    where = (Job.slug.in_(some), Job.backup.not_in(some))
    values = {"b": [f"job {n}" for n in range(10)]}
    with cluster.sharded_session() as session:
        found = session.scalars(select(Job.slug).where(*where), values).all()
        assert found == ["job 9"]
        assert session.execute(update(Job).where(*where).values(due=7), values).rowcount == 1  # type: ignore[attr-defined]  # of a CursorResult


def test_offset_without_limit_counts_objects_not_rows(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        jobs = select(Job).options(joinedload(Job.steps)).order_by(Job.id)
        ids = session.scalars(select(Job.id).order_by(Job.id)).all()
        found = session.scalars(jobs.offset(24)).unique().all()
        assert [job.id for job in found] == ids[24:]
        assert [len(job.steps) for job in found] == [2] * 6
        found = session.scalars(jobs.offset(3).limit(4)).unique().all()
        assert [job.id for job in found] == ids[3:7]


def test_an_alias_and_a_column_stay_together(cluster: Cluster) -> None:
    one: Any = aliased(Job)
    rows = select(one, one.due, one.id).order_by(one.id)
    with cluster.sharded_session() as session:
        for statement in (
            rows.with_for_update(),
            rows.limit(5).with_for_update(),
            rows.options(joinedload(one.steps)).limit(5),
        ):
            found = session.execute(statement).unique().all()
            assert len(found) in (5, COUNT)
            assert all((job.due, job.id) == (due, id_) for job, due, id_ in found)


@pytest.mark.parametrize("is_locked", [False, True])
def test_order_is_that_of_stored_values(cluster: Cluster, is_locked: bool) -> None:
    with cluster.sharded_session() as session:
        for column, key in (
            (Job.code, lambda n: f"{9 - n % 10}{n % 10}"),
            (Job.debt, lambda n: n),
            (Job.day, lambda n: (n % 7 == 0, n)),
            (Job.weight, lambda n: [1, 4, 3, 0, 2][n % 5]),
        ):
            statement = select(Job.slug).order_by(column, Job.debt)
            statement = statement.with_for_update() if is_locked else statement
            expected = sorted(range(COUNT), key=lambda n: (key(n), n))
            assert session.scalars(statement).all() == [f"job {n}" for n in expected], column
            backwards = statement.order_by(None).order_by(column.desc(), Job.debt.desc()).limit(7)
            assert session.scalars(backwards).all() == [f"job {n}" for n in reversed(expected)][:7], column


def test_extremes_are_postgresqls(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        lowest, highest = session.execute(select(func.min(Job.weight), func.max(Job.weight))).one()
        assert lowest == -1.5
        assert math.isnan(highest)
        # The smallest, and then its sign.
        assert session.scalar(select(func.min(Job.debt))) == 0
        assert session.scalar(select(func.max(Job.debt))) == 1 - COUNT
        assert session.scalar(select(func.min(Job.day))) == date(2020, 1, 2)
        assert session.scalar(select(func.sum(Job.part))) == pytest.approx(3.0, rel=1e-6)
        assert session.scalar(select(func.avg(Job.due))) == Decimal(2)


def test_an_aggregate_of_the_rows_around_is_computed_over_all(cluster: Cluster) -> None:
    one = aliased(Step)
    inside = select(func.count(Job.id)).where(one.id < 0).correlate(Job).scalar_subquery()
    with cluster.sharded_session() as session:
        assert len(session.execute(select(inside).select_from(Job)).all()) == 1
        total = select(select(func.count(literal_column("1"))).scalar_subquery())
        assert session.scalars(total).all() == [1]


def test_labels_of_any_name(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        found = session.execute(
            select(Job.due.label("shardids_key_0"), Job.debt.label("shardids_key_1")).order_by(Job.id.desc())
        ).all()
        ids = session.execute(select(Job.due, Job.debt).order_by(Job.id.desc())).all()
        assert [tuple(row) for row in found] == [tuple(row) for row in ids]


def test_two_workers_take_jobs_without_holding_more(cluster: Cluster) -> None:
    """SKIP LOCKED with LIMIT locks the rows that it returns, and no others, in any shard."""
    next_one = select(Job).order_by(Job.due, Job.id).limit(1).with_for_update(skip_locked=True)
    with cluster.sharded_session() as first, cluster.sharded_session() as second:
        taken = {first.scalars(next_one).one().id}
        others = second.scalars(select(Job.id).with_for_update(skip_locked=True)).all()
        assert set(others) | taken == set(second.scalars(select(Job.id)))
        assert len(others) == COUNT - 1
        second.rollback()
        after = second.scalars(next_one.limit(3)).all()
        assert len(after) == 3
        assert taken.isdisjoint(job.id for job in after)
        assert [job.due for job in after] == [0, 0, 0]


def test_statements_that_lock_on_all_nodes_do_not_wait_for_each_other_for_ever(cluster: Cluster) -> None:
    done: list[int] = []

    def lock() -> None:
        for _ in range(5):
            with cluster.sharded_session() as session, session.begin():
                done.append(len(session.scalars(select(Job.id).order_by(Job.id).with_for_update()).all()))

    threads = [threading.Thread(target=lock) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [COUNT] * 15


def test_many_rows_by_key_are_one_statement_per_node(cluster: Cluster) -> None:
    from tests.integration.test_routing import statements

    with cluster.sharded_session() as session:
        ids = list(session.scalars(select(Job.id)))
        with statements(cluster) as sent:
            assert len(session.scalars(select(Job).where(Job.id.in_(ids))).all()) == COUNT
            assert len(sent) == 2
        session.execute(delete(Step).where(Step.job_id.in_(ids)))
        session.execute(insert(Step), [{"job_id": id_} for id_ in ids])
        assert session.scalar(select(func.count()).select_from(Step)) == COUNT


def written(id_: int, slug: Any) -> dict[str, Any]:
    """Returns the values of a row with an ID of one shard, whatever shard its key names."""
    numbers = dict.fromkeys(("due", "weight", "part", "debt"), 0)
    return {"id": id_, "slug": slug, "backup": "", "code": "", "day": date(2020, 1, 1), **numbers}


def test_a_key_that_sql_computes_does_not_come_to_a_shard_where_nobody_looks_for_it(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        job = session.scalars(select(Job).order_by(Job.id).limit(1)).one()
        low, computed = cluster.at(id=job.id).reserve(1)[0], func.lower("ELSEWHERE")
        writes: list[Any] = [
            lambda: session.execute(insert(Job).values(written(low, computed))),
            lambda: session.execute(insert(Job.__table__).values(written(low, computed))),
            lambda: session.flush(session.add(Job(**written(low, computed)))),  # type: ignore[func-returns-value]  # None
            lambda: session.flush(setattr(session.get(Job, job.id), "slug", computed)),  # type: ignore[func-returns-value]  # None
            lambda: session.bulk_save_objects([Job(**written(low, computed))]),
        ]
        for write in writes:
            with pytest.raises(BadArgument, match=r"the sharding key slug of .* is an SQL expression"):
                write()
            session.rollback()
        # Where the shard is named nothing is checked.
        beside = {"shard_id": cluster.shard_of(low)}
        session.execute(insert(Job).values(written(low, computed)), bind_arguments=beside)
        session.rollback()


def test_a_conflict_leaves_a_key_to_its_shard(cluster: Cluster) -> None:
    with cluster.sharded_session() as session:
        job = session.scalars(select(Job).order_by(Job.id).limit(1)).one()
        here = cluster.shard_of(job.id)
        slugs = [f"other {n}" for n in range(99)]
        there = next(slug for slug in slugs if cluster.shard_for(slug) != here)
        near = next(slug for slug in slugs if cluster.shard_for(slug) == here)
        given = postgresql.insert(Job).values(written(job.id, near))
        for right in (given.excluded.slug, near, Job.slug, job.slug):
            session.execute(given.on_conflict_do_update(index_elements=[Job.id], set_={"slug": right}))
        for wrong, error in (
            (there, WrongShard),
            (func.lower(near), BadArgument),
            (given.excluded.backup, BadArgument),
            (bindparam("named", near), BadArgument),
        ):
            with pytest.raises(error, match="slug"):
                session.execute(given.on_conflict_do_update(index_elements=[Job.id], set_={"slug": wrong}))
        session.rollback()


def test_selected_rows_do_not_all_get_one_key(cluster: Cluster) -> None:
    with (
        cluster.sharded_session() as session,
        pytest.raises(BadArgument, match="would give one token to the rows of all shards"),
    ):
        session.execute(insert(Note).from_select(["job_id"], select(Job.id)))
