"""Pages by ID: each row once, in order, forwards and backwards, in one shard and merged over several."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Select, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, aliased, mapped_column

from shardids import Cluster, Page, PageQuery, ShardId, primary_key
from shardids.errors import BadArgument
from tests.conftest import BlankDatabases, found_cluster

SHARDS = range(3)
ROWS = 50


class Base(DeclarativeBase):
    pass


class Photo(Base):
    __tablename__ = "photos"

    key: Mapped[ShardId] = primary_key(name="photo_id")
    number: Mapped[int]
    other_id: Mapped[ShardId | None] = mapped_column()


@pytest.fixture(scope="module")
def cluster(databases: BlankDatabases) -> Iterator[Cluster]:
    """A cluster whose shards 0 to 2 hold photos, written in turns."""
    url: URL = databases.take()
    found_cluster(url, {"a": url}, 4)
    with Cluster.connect(url) as cluster:
        for shard in (*SHARDS, 3):
            with cluster.at(shard=shard).engine.begin() as connection:
                Base.metadata.create_all(connection)
        for number in range(ROWS):
            for shard in SHARDS:
                with cluster.session(shard=shard) as session, session.begin():
                    session.add(Photo(number=number))
        yield cluster
    databases.give_back(url)


def in_one_shard(cluster: Cluster, query: PageQuery) -> Page[Photo]:
    with cluster.session(shard=1) as session:
        return query.page(session.scalars(query.statement))


def merged(cluster: Cluster, query: PageQuery) -> Page[Photo]:
    """Over all shards: each sends its rows in order, with one row more than the page."""
    sessions = [cluster.session(shard=shard) for shard in SHARDS]
    try:
        answers = [session.scalars(query.statement).all() for session in sessions]
    finally:
        for session in sessions:
            session.close()
    falls = "DESC" in str(query.statement)
    return query.page(heapq.merge(*answers, key=by_key, reverse=falls))


def by_key(photo: Photo) -> int:
    return photo.key


def everything(cluster: Cluster, shards: range) -> list[int]:
    keys: list[int] = []
    for shard in shards:
        with cluster.session(shard=shard) as session:
            keys += session.scalars(select(Photo.key))
    return sorted(keys)


@pytest.mark.parametrize("limit", [3, 7, 10, 50, 149, 150, 10_000])
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("run", [in_one_shard, merged])
def test_pages_there_and_back(
    cluster: Cluster, run: Callable[..., Page[Photo]], newest_first: bool, limit: int
) -> None:
    rows = everything(cluster, range(1, 2) if run is in_one_shard else SHARDS)
    rows.sort(reverse=newest_first)
    wanted = [rows[start : start + limit] for start in range(0, len(rows), limit)]

    def page(**cursor: int | None) -> Page[Photo]:
        query = PageQuery(select(Photo), Photo.key, limit=limit, newest_first=newest_first, **cursor)
        return run(cluster, query)

    pages = [page()]
    assert pages[0].before is None
    while (after := pages[-1].after) is not None:
        pages.append(page(after=after))
    assert [[photo.key for photo in one.items] for one in pages] == wanted
    # Back from the end; what precedes a page is full, except for the first.
    back = [pages[-1]]
    while (before := back[-1].before) is not None:
        back.append(page(before=before))
    keys = [photo.key for one in reversed(back) for photo in one.items]
    assert keys == rows
    assert all(len(one.items) == limit for one in back[1:])
    for one in back[1:]:
        assert one.after == one.items[-1].key


def test_a_page_that_is_empty(cluster: Cluster) -> None:
    with cluster.session(shard=3) as session:
        for cursor in ({}, {"after": 5}, {"before": 5}):
            query = PageQuery(select(Photo), Photo.key, limit=5, **cursor)
            assert query.page(session.scalars(query.statement)) == Page(items=[], after=None, before=None)


def test_rows_that_come_and_go_between_pages(cluster: Cluster) -> None:
    with cluster.session(shard=3) as session:
        session.add_all([Photo(number=number) for number in range(10)])
        session.flush()

        def page(**cursor: int | None) -> Page[Photo]:
            query = PageQuery(select(Photo), Photo.key, limit=4, **cursor)
            return query.page(session.scalars(query.statement))

        first = page()
        session.delete(first.items[-1])
        session.delete(session.scalars(select(Photo).where(Photo.number == 5)).one())
        session.add(Photo(number=10))
        second = page(after=first.after)
        assert [photo.number for photo in second.items] == [4, 6, 7, 8]
        third = page(after=second.after)
        assert [photo.number for photo in third.items] == [9, 10]
        assert third.after is None
        assert [photo.number for photo in page(before=second.before).items] == [0, 1, 2]


def numbers(cluster: Cluster, statement: Select[Any], column: Any, **options: Any) -> list[int]:
    query = PageQuery(statement, column, limit=3, **options)
    with cluster.session(shard=1) as session:
        page = query.page(session.execute(query.statement))
    return [row.number for row in page.items]


def test_rows_of_columns_and_conditions_of_the_statement(cluster: Cluster) -> None:
    table, other = Photo.__table__, aliased(Photo)
    # What the statement had of order, limit and offset is replaced.
    columns = select(Photo.key, Photo.number).order_by(Photo.number.desc()).limit(1).offset(40)
    assert numbers(cluster, columns, Photo.key) == [0, 1, 2]
    assert numbers(cluster, select(table), table.c.photo_id, newest_first=True) == [49, 48, 47]
    evens = select(other.key, other.number).where(other.number % 2 == 0)
    assert numbers(cluster, evens, other.key) == [0, 2, 4]
    times = [cluster.decode(key).time for key in everything(cluster, range(1, 2))]
    start = cluster.layout.min_id(times[10])
    assert numbers(cluster, columns, Photo.key, after=start - 1)[0] == times.index(times[10])


def test_rows_that_do_not_make_pages_are_refused(cluster: Cluster) -> None:
    other = aliased(Photo)
    with cluster.session(shard=1) as session:
        joined = select(Photo.key, other.key.label("other")).join(other, other.number < 3)
        query = PageQuery(joined, Photo.key, limit=3)
        assert len(query.page(session.execute(query.statement)).items) == 3
        for limit, before in ((4, None), (4, 1 << 62)):
            query = PageQuery(joined, Photo.key, limit=limit, before=before)
            with pytest.raises(BadArgument, match="is several rows of the list, and the page ends between"):
                query.page(session.execute(query.statement))
        numbers = PageQuery(select(Photo.number), Photo.key, limit=3)
        with pytest.raises(BadArgument, match="a row of the list has no key") as caught:
            numbers.page(session.execute(numbers.statement))
        assert "among others, the column" in caught.value.hint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit": 0}, "limit must be from 1 to 10000, not 0"),
        ({"limit": 10_001}, "limit must be from 1 to 10000"),
        ({"limit": 5.0}, "limit must be an integer, not float"),
        ({"limit": 5, "after": 1, "before": 2}, "at most one of"),
        ({"limit": 5, "after": "1"}, "must be an integer, not str"),
        ({"limit": 5, "before": 2**63}, "must be from"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        PageQuery(select(Photo), Photo.key, **options)
