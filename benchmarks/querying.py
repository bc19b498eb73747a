"""GROUP BY over 1,024 shards by the query node, against the same SQL written by hand for each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, LiteralString

import psycopg
from sqlalchemy import func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped

from benchmarks.report import Section, figure, interleaved, ratio, seconds
from shardids import Cluster, primary_key
from shardids.catalog.rows import Catalog
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_server
from shardids.tables import views

SHARDS = 1024
NODES = ("a", "b", "c", "d")
ROWS_A_SHARD = 400
MOST_PLANNING_MS = 50.0
MOST_TIMES = 1.3


class Base(DeclarativeBase):
    """The tables."""


class Photo(Base):
    """A row."""

    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    likes: Mapped[int]
    size: Mapped[int]


_TABLES = """
do $$
declare
  schema text;
begin
  for schema in select s.schema from shardids.shard s loop
    execute format(
      'create table %1$I.photos (id bigint primary key default %1$I.next_id(), likes integer not null,'
      ' size integer not null); insert into %1$I.photos (likes, size)'
      ' select mod(n, 17), n from generate_series(1, ROWS) n', schema);
    -- The locks of a transaction are limited.
    commit;
  end loop;
end
$$
"""
GROUPED = select(Photo.likes, func.count(), func.sum(Photo.size)).group_by(Photo.likes)
NODES_FIRST = """
    select likes, sum(number)::bigint, sum(total)::bigint
    from (select shardids_node, likes, count(*) as number, sum(size) as total
          from shardids_nodes.photos group by shardids_node, likes) nodes
    group by likes"""
IN_VIEWS = "select likes, count(*), sum(size) from shardids_query.photos group by likes"


def run(rounds: int) -> Section:
    """Measure one GROUP BY of all rows, in four ways."""
    with (
        _cluster() as (url, query_node),
        Cluster.connect(url, listen=False) as cluster,
        psycopg.connect(query_node, autocommit=True) as there,
        _by_hand(cluster) as by_hand,
    ):
        expected = by_hand()

        there.execute("set enable_partitionwise_aggregate = on")

        def of_views(query: LiteralString) -> dict[int, tuple[int, int]]:
            return {likes: (number, total) for likes, number, total in there.execute(query)}

        def of_session() -> dict[int, tuple[int, int]]:
            with cluster.sharded_session() as session:
                return {likes: (number, total) for likes, number, total in session.execute(GROUPED)}

        ways: dict[str, Callable[[], object]] = {
            "by hand, a statement per node": by_hand,
            "views, grouped by node first": partial(of_views, NODES_FIRST),
            "a session": of_session,
            "views, all rows fetched": partial(of_views, IN_VIEWS),
        }
        for way in ways.values():
            assert way() == expected
        timed = {name: partial(_milliseconds, way) for name, way in ways.items()}
        measures = interleaved(timed, rounds=rounds, unit="ms")
        planning = interleaved({"planning": partial(_planning_ms, there)}, rounds=rounds, unit="ms")[
            "planning"
        ]
    hand, first, session, fetched = measures.values()
    return Section(
        title=f"A GROUP BY of {SHARDS * ROWS_A_SHARD:,} rows in {SHARDS:,} shards on four nodes",
        conditions=f"Four databases of one server and one for the query node, fsync off, {rounds} rounds."
        " By hand: a UNION ALL of its shards for each node, the nodes at once, added up in Python.",
        measures=(*measures.values(), planning),
        ratios=(
            ratio(first, hand, at_most=MOST_TIMES),
            ratio(session, hand, at_most=MOST_TIMES),
            ratio(fetched, hand),
            figure("planning on the query node, ms", planning.median, at_most=MOST_PLANNING_MS),
        ),
    )


def _milliseconds(work: Callable[[], object]) -> float:
    return seconds(work) * 1000


def _planning_ms(connection: psycopg.Connection[Any]) -> float:
    (found,) = connection.execute(f"explain (summary, format json) {IN_VIEWS}".encode()).fetchall()
    return float(found[0][0]["Planning Time"])


@contextmanager
def _by_hand(cluster: Cluster) -> Iterator[Callable[[], dict[int, tuple[int, int]]]]:
    asked = []
    for name, shards in cluster.placement.by_node().items():
        branches = " union all ".join(
            f"select likes, size from {cluster.schema_of(shard)}.photos" for shard in shards
        )
        statement = text(f"select likes, count(*), sum(size) from ({branches}) one group by likes")
        asked.append((cluster.engine(cluster.placement.nodes[name]).connect(), statement))
    with ThreadPoolExecutor(len(asked)) as pool:

        def ask() -> dict[int, tuple[int, int]]:
            numbers: Counter[int] = Counter()
            totals: Counter[int] = Counter()
            for rows in pool.map(lambda one: one[0].execute(one[1]).all(), asked):
                for likes, number, total in rows:
                    numbers[likes] += number
                    totals[likes] += total
            return {likes: (numbers[likes], totals[likes]) for likes in numbers}

        yield ask
    for connection, _ in asked:
        connection.close()


@contextmanager
def _cluster() -> Iterator[tuple[str, str]]:
    """Make the cluster and its query node; yield the catalog's URL and the query node's."""
    settings = {"max_locks_per_transaction": "1024", "shared_buffers": "512MB"}
    with temporary_server(settings=settings) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            for name in (*NODES, "query"):
                connection.execute(f"create database {name}".encode())
        urls = {name: server.url(name) for name in (*NODES, "query")}
        catalog = Catalog(urls["a"])
        provision.init(catalog, DEFAULT, SHARDS)
        for name in NODES:
            provision.add_node(catalog, name, urls[name])
        provision.create_shards(catalog, range(SHARDS))
        for name in NODES:
            with psycopg.connect(urls[name], autocommit=True) as connection:
                connection.execute(_TABLES.replace("ROWS", str(ROWS_A_SHARD)).encode())
                connection.execute("vacuum analyze")
        views.create_query_node(catalog, url=urls["query"], store_password=True)
        catalog.close()
        yield urls["a"], urls["query"]
