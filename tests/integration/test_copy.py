"""Rows into shards by COPY: where they arrive, what they hold, and what is there when it ends early."""

from __future__ import annotations

import asyncio
import enum
from collections import namedtuple
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import repeat
from typing import Any
from uuid import UUID

import polars
import psycopg
import pyarrow
import pytest
from sqlalchemy import (
    ARRAY,
    JSON,
    Column,
    Date,
    DateTime,
    Enum,
    Float,
    ForeignKey,
    Integer,
    Interval,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    Uuid,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import INET, INT4RANGE, JSONB, Range
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator, UserDefinedType

from shardids import AsyncCluster, Cluster, primary_key, sharding_key
from shardids.client.copying import Copied
from shardids.client.copying.sources import CHUNK
from shardids.errors import BadArgument, ConnectionFailed, CopyFailed, ShardFenced
from tests.support import moves_by_hand
from tests.support.clusters import connected
from tests.support.moves_by_hand import SHARD, two_nodes
from tests.support.waiting import wait_for


class Base(DeclarativeBase):
    pass


class Sensor(Base):
    __tablename__ = "sensors"

    id: Mapped[int] = primary_key()
    name: Mapped[str] = sharding_key(name="called")


class Reading(Base):
    __tablename__ = "readings"

    id: Mapped[int] = primary_key()
    sensor_id: Mapped[int | None] = mapped_column(ForeignKey("sensors.id"))
    celsius: Mapped[float]
    unit: Mapped[str] = mapped_column(default="C")
    taken: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())


loose = Table(
    "loose",
    MetaData(),
    primary_key("id"),
    Column("owner", Text),
    Column("number", Integer, unique=True),
)


@pytest.fixture
def filled(cluster: Cluster) -> Cluster:
    """The cluster, with the tables in every shard."""
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection, checkfirst=False)
            loose.metadata.create_all(connection, checkfirst=False)
    return cluster


def everything(cluster: Cluster, table: Any) -> dict[int, list[Any]]:
    """All rows of a table, by shard and in the order of their IDs; without empty shards."""
    found = {}
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).engine.connect() as connection:
            rows = connection.execute(select(table).order_by(table.c.id)).all()
            if rows:
                found[shard] = [tuple(row) for row in rows]
    return found


def numbers(count: int, **more: Any) -> Iterator[dict[str, Any]]:
    return ({"owner": f"owner {n % 50}", "number": n, **more} for n in range(count))


def test_rows_arrive_in_the_shards_of_their_keys_with_ids_of_those(filled: Cluster) -> None:
    report = filled.copy(Sensor, ({"name": f"sensor {n}"} for n in range(5_000)))
    found = everything(filled, Sensor.__table__)
    assert report.rows == 5_000
    assert report.by_shard == {shard: len(rows) for shard, rows in found.items()}
    assert len(found) == 8
    for shard, rows in found.items():
        assert {filled.shard_of(id_) for id_, _ in rows} == {shard}
        assert [name for _, name in rows] == [
            name for n in range(5_000) if filled.shard_for(name := f"sensor {n}") == shard
        ]


def test_progress_tells_the_rows_and_their_ids(filled: Cluster) -> None:
    seen: list[Copied] = []
    filled.copy(loose, numbers(1_000), key="owner", rows_a_transaction=10, on_progress=seen.append)
    found = everything(filled, loose)
    told = {
        (copied.shard, id_, row - 1)
        for copied in seen
        for id_, row in zip(copied.ids or (), copied.rows, strict=True)
    }
    assert told == {(shard, id_, number) for shard, rows in found.items() for id_, _, number in rows}
    assert max(len(copied.rows) for copied in seen) == 10
    assert {copied.node for copied in seen} == {"a", "b"}


def test_rows_follow_the_rows_that_they_refer_to(filled: Cluster) -> None:
    filled.copy(Sensor, ({"name": f"sensor {n}"} for n in range(20)))
    ids = [id_ for rows in everything(filled, Sensor.__table__).values() for id_, _ in rows]
    # By the foreign key, which the model knows, or because it is named as what holds IDs.
    filled.copy(Reading, ((id_, 20.5) for id_ in ids), columns=("sensor_id", "celsius"))
    filled.copy(
        Reading, ((id_, 21.5) for id_ in ids), columns=(Reading.sensor_id, Reading.celsius), key="sensor_id"
    )
    for shard, rows in everything(filled, Reading.__table__).items():
        for id_, sensor_id, celsius, unit, taken in rows:
            assert filled.shard_of(id_) == filled.shard_of(sensor_id) == shard
            assert (celsius in (20.5, 21.5), unit) == (True, "C")
            assert datetime.now(UTC) - taken < timedelta(hours=1)


NamedRow = namedtuple("NamedRow", ("owner", "number"))
ROWS = [(f"owner {n}", n if n % 7 else None) for n in range(3_000)]
FRAME = polars.DataFrame(ROWS, schema=["owner", "number"], orient="row")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda: [{"number": n, "owner": owner} for owner, n in ROWS], id="mappings"),
        pytest.param(lambda: (NamedRow(*row) for row in ROWS), id="named tuples"),
        pytest.param(lambda: FRAME, id="polars"),
        pytest.param(FRAME.to_arrow, id="Arrow table"),
        pytest.param(lambda: FRAME.to_arrow().to_reader(max_chunksize=100), id="Arrow reader"),
        pytest.param(lambda: pyarrow.RecordBatch.from_pylist(FRAME.to_dicts()), id="Arrow record batch"),
    ],
)
def test_all_kinds_of_rows_arrive_alike(filled: Cluster, rows: Callable[[], Any]) -> None:
    filled.copy(loose, rows(), key="owner")
    found = {row[1:] for of_shard in everything(filled, loose).values() for row in of_shard}
    assert found == set(ROWS)


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Reversed(TypeDecorator[str]):
    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Any) -> str | None:
        return None if value is None else value[::-1]


TYPES = {
    "colour": Enum(Colour, name="colour"),
    "colours": ARRAY(Enum(Colour, name="colour")),
    "json_": JSON(),
    "json_or_null": JSON(none_as_null=True),
    "jsonb_": JSONB(),
    "numbers": ARRAY(Integer),
    "texts": ARRAY(Text),
    "grid": ARRAY(Integer, dimensions=2),
    "price": Numeric(12, 4),
    "ratio": Float(),
    "uuid_": Uuid(),
    "uuid_text": Uuid(as_uuid=False),
    "bytes_": LargeBinary(),
    "day": Date(),
    "at": DateTime(timezone=True),
    "lasts": Interval(),
    "address": INET(),
    "span": INT4RANGE(),
    "reversed": Reversed(),
    "words": Text(),
}
UUID_ONE = UUID("0d9b1d0a-9ae4-4c3c-8f7e-0a1f3c5d7e9b")
VALUES: list[dict[str, Any]] = [
    {
        "colour": Colour.RED,
        "colours": [Colour.RED, Colour.BLUE, None],
        "json_": {"a": [1, "\t\\N"]},
        "json_or_null": [None],
        "jsonb_": "just text",
        "numbers": [1, -2, None],
        "texts": ["a\tb", 'quo"te', "\\", "NULL", ""],
        "grid": [[1, 2], [3, 4]],
        "price": Decimal("-12.3400"),
        "ratio": float("inf"),
        "uuid_": UUID_ONE,
        "uuid_text": str(UUID_ONE),
        "bytes_": bytes(range(256)),
        "day": date(1, 1, 1),
        "at": datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC),
        "lasts": timedelta(days=-3, microseconds=7),
        "address": "10.0.0.0/8",
        "span": Range(1, 5),
        "reversed": "stressed",
        "words": "tab\tnew\nline\r\\back\\N \N{SNOWMAN}",
    },
    dict.fromkeys(TYPES),
]


def test_values_are_stored_as_an_insert_stores_them(cluster: Cluster) -> None:
    metadata = MetaData()
    copied, inserted = (
        Table(name, metadata, primary_key("id"), *(Column(c, type_) for c, type_ in TYPES.items()))
        for name in ("copied", "inserted")
    )
    with cluster.at(shard=5).engine.begin() as connection:
        metadata.create_all(connection)
        for values in VALUES:
            connection.execute(insert(inserted).values(values))
    assert cluster.copy(copied, VALUES, shard=5).by_shard == {5: 2}
    with cluster.at(shard=5).engine.connect() as connection:
        columns = ", ".join(f"{name}::text" for name in TYPES)
        texts = [
            connection.execute(text(f"select {columns} from shard_0005.{table} order by id")).all()
            for table in ("copied", "inserted")
        ]
        assert texts[0] == texts[1]


class Wrapped(UserDefinedType[str]):
    def get_col_spec(self) -> str:
        return "text"

    def bind_expression(self, bindvalue: Any) -> Any:
        return func.lower(bindvalue)


ANN = {"owner": "ann", "number": 1}
SQL_DEFAULT = Table(
    "loose",
    MetaData(),
    primary_key("id"),
    Column("owner", Text),
    Column("number", Integer, default=func.now()),
)
WRAPPED = Table("loose", MetaData(), primary_key("id"), Column("owner", Wrapped()))
ELSEWHERE = Table("loose", MetaData(), primary_key("id"), Column("owner", Text), schema="other")


@pytest.mark.parametrize(
    ("table", "rows", "options", "message"),
    [
        (loose, [ANN], {}, "cannot determine the shards"),
        (loose, [("ann", 1)], {"key": "owner"}, "the rows have no column names"),
        (loose, [{"owners": "ann"}], {"key": "owner"}, "no column owners"),
        (loose, [{"number": 1}], {"key": "owner"}, "have no column owner"),
        (loose, [ANN], {"key": "owner", "shard": 5}, "at most one of"),
        (loose, [("a", "b")], {"columns": ("owner", loose.c.owner), "key": "owner"}, "the same column"),
        (loose, [7], {"key": "owner"}, "row 1 is of type int"),
        (loose, ANN, {"key": "owner"}, "of type dict"),
        (loose, [ANN], {"key": "owner", "columns": ("owner",)}, "these rows have names"),
        (loose, [ANN], {"shard": 8}, "shard 8 does not exist"),
        (Sensor, [{"name": "x"}], {"id": "name"}, "holds no IDs"),
        (SQL_DEFAULT, [{"owner": "ann"}], {"key": "owner"}, "is an SQL expression"),
        (WRAPPED, [{"owner": "ann"}], {"shard": 5}, "needs an SQL expression"),
        (ELSEWHERE, [ANN], {"shard": 5}, "has a schema"),
    ],
)
def test_what_can_not_be_copied_is_refused_before_it_begins(
    filled: Cluster, table: Any, rows: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadArgument, match=message):
        filled.copy(table, rows, **options)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"owner": None, "number": 1}, {"key": "owner"}, "row 2: owner.* is NULL"),
        ({"owner": "bob"}, {"key": "owner"}, "row 2 does not have the columns"),
        ({"owner": 5, "number": 1}, {"key": "owner"}, "is text, not int"),
        ({"owner": "bob", "number": "x"}, {"key": "owner"}, "row 2 of loose .*: invalid input syntax"),
        (
            {"owner": "bob", "number": object()},
            {"key": "owner"},
            "row 2 of loose .*cannot adapt type 'object'",
        ),
        (
            {"owner": "bob", "number": 1},
            {"shard": 5},
            r'row 2 of loose .* shard 5 \[node "b"\]: duplicate key',
        ),
    ],
)
def test_a_row_that_can_not_be_copied_is_named(
    filled: Cluster, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CopyFailed, match=message) as caught:
        filled.copy(loose, [ANN, row], **options)
    found = everything(filled, loose)
    assert caught.value.copied == {shard: len(rows) for shard, rows in found.items()}


def test_ids_that_are_given_stay_in_their_shards(filled: Cluster) -> None:
    ids = [id_ for shard in range(8) for id_ in filled.at(shard=shard).reserve(3)]
    assert filled.copy(loose, []).rows == 0
    with pytest.raises(CopyFailed, match="row 4: a row of loose would belong to two shards"):
        filled.copy(loose, ({"id": id_, "owner": "x"} for id_ in ids), shard=0)
    assert everything(filled, loose) == {}
    filled.copy(loose, ({"id": id_, "owner": "x"} for id_ in ids))
    assert sorted(row[0] for rows in everything(filled, loose).values() for row in rows) == sorted(ids)


def test_each_shard_has_the_first_of_its_rows_after_a_failure(filled: Cluster) -> None:
    rows = [*numbers(3_000), {"owner": "owner 7", "number": "seven"}, *numbers(3_000)]
    with pytest.raises(CopyFailed) as caught:
        filled.copy(loose, rows, key="owner", rows_a_transaction=100)
    error = caught.value
    assert (error.row, error.shard) == (3_001, filled.shard_for("owner 7"))
    assert error.node == filled.node_of(filled.shard_for("owner 7")).name
    found = everything(filled, loose)
    assert error.copied == {shard: len(there) for shard, there in found.items()}
    for shard, there in found.items():
        of_shard = [row["number"] for row in rows if filled.shard_for(row["owner"]) == shard]
        assert [number for _, _, number in there] == of_shard[: len(there)]


def test_a_failing_source_ends_the_copy_and_says_what_is_there(filled: Cluster) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from numbers(5_000)
        raise OSError("the disk is gone")

    with pytest.raises(CopyFailed, match="OSError: the disk is gone") as caught:
        filled.copy(loose, rows(), key="owner", rows_a_transaction=100)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.copied == {shard: len(there) for shard, there in everything(filled, loose).items()}


def test_only_so_many_rows_are_in_memory(filled: Cluster) -> None:
    read, done, most = 0, 0, 0

    def rows() -> Iterator[tuple[str, int]]:
        nonlocal read, most
        for read in range(1, 60_001):
            most = max(most, read - done)
            yield f"owner {read}", read

    def note(copied: Copied) -> None:
        nonlocal done
        done += len(copied.rows)

    filled.copy(
        loose, rows(), columns=("owner", "number"), key="owner", rows_a_transaction=500, on_progress=note
    )
    # Ten blocks, two under way in each of two lanes, and the chunk that is read.
    assert most <= 10 * 500 + 2 * 2 * 500 + 2 * 2_000
    assert done == 60_000


def test_a_shard_that_moves_meanwhile_gets_each_row_once(blank_database: Callable[[], URL]) -> None:
    nodes = two_nodes(blank_database)
    with Cluster.connect(nodes["catalog"], listen=False) as cluster:
        with cluster.at(shard=SHARD).engine.begin() as connection:
            loose.metadata.create_all(connection)

        def there() -> list[int]:
            with cluster.at(shard=SHARD).engine.connect() as connection:
                return list(connection.scalars(select(loose.c.number).order_by(loose.c.id)))

        def rows() -> Iterator[tuple[int]]:
            yield from ((n,) for n in range(CHUNK))
            # A move by hand has no write barrier.
            wait_for(lambda: len(there()) == CHUNK, "the first rows to be copied")
            moves_by_hand.move_shard(nodes["catalog"], SHARD, "b", loose.metadata)
            yield from ((n,) for n in range(CHUNK, 2 * CHUNK))

        seen: list[str] = []
        options: dict[str, Any] = {"columns": ("number",), "shard": SHARD, "rows_a_transaction": 100}
        cluster.copy(loose, rows(), **options, on_progress=lambda copied: seen.append(copied.node))
        assert seen == ["a"] * 20 + ["b"] * 20
        assert there() == list(range(2 * CHUNK))


def test_a_fenced_shard_takes_no_rows(filled: Cluster) -> None:
    with filled.engine(filled.node_of(5)).begin() as connection:
        connection.execute(text("select shardids.fence(5)"))
    with pytest.raises(CopyFailed, match=r'shard 5 \[node "b"\]') as caught:
        filled.copy(loose, numbers(10), shard=5)
    assert isinstance(caught.value.__cause__, ShardFenced)
    assert caught.value.copied == {}


def test_rows_of_a_shard_without_a_node_are_refused_by_name(blank_database: Callable[[], URL]) -> None:
    nodes = two_nodes(blank_database)
    with connected(nodes["catalog"]) as connection:
        connection.execute("delete from shardids_catalog.placement where shard = 3")
    with Cluster.connect(nodes["catalog"], listen=False) as cluster:
        with pytest.raises(CopyFailed, match=r"row 1 of loose .*: no node holds shard 3") as caught:
            cluster.copy(loose, [ANN], shard=3)
        assert caught.value.copied == {}


def test_a_lost_connection_leaves_whole_blocks(filled: Cluster) -> None:
    with filled.engine(filled.node_of(5)).begin() as connection:
        connection.execute(
            text(
                """create function shard_0005.lose() returns trigger language plpgsql as
                   $$ begin perform pg_terminate_backend(pg_backend_pid()); return new; end $$"""
            )
        )
        connection.execute(
            text(
                """create trigger lose before insert on shard_0005.loose
                   for each row when (new.number = 250) execute function shard_0005.lose()"""
            )
        )
    with pytest.raises(CopyFailed, match=r'shard 5 \[node "b"\]: node "b" can\'t be reached') as caught:
        filled.copy(loose, numbers(1_000), shard=5, rows_a_transaction=100)
    assert isinstance(caught.value.__cause__, ConnectionFailed)
    assert caught.value.copied == {5: 200}
    assert len(everything(filled, loose)[5]) == 200


def test_it_works_with_asyncio(filled: Cluster, cluster_url: URL) -> None:
    async def rows() -> AsyncIterator[dict[str, Any]]:
        for row in numbers(3_000):
            yield row

    async def main() -> None:
        seen: list[Copied] = []
        async with await AsyncCluster.connect(cluster_url) as cluster:
            report = await cluster.copy(loose, rows(), key="owner", on_progress=seen.append)
            assert report.rows == sum(len(copied.rows) for copied in seen) == 3_000
            with pytest.raises(BadArgument, match="cannot determine the shards"):
                await cluster.copy(loose, rows())
            with pytest.raises(CopyFailed, match="row 1 of loose"):
                await cluster.copy(loose, [{"owner": "x", "number": "y"}], key="owner")

    asyncio.run(main())
    assert sum(map(len, everything(filled, loose).values())) == 3_000


def test_a_cancelled_copy_ends_and_leaves_whole_blocks(filled: Cluster, cluster_url: URL) -> None:
    async def main() -> None:
        begun = asyncio.Event()
        rows = repeat(("someone", None))
        async with await AsyncCluster.connect(cluster_url) as cluster:
            copying = asyncio.ensure_future(
                cluster.copy(
                    loose,
                    rows,
                    columns=("owner", "number"),
                    key="owner",
                    rows_a_transaction=100,
                    on_progress=lambda _: begun.set(),
                )
            )
            await begun.wait()
            copying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await copying

    asyncio.run(main())
    ((_, there),) = everything(filled, loose).items()
    assert len(there) % 100 == 0


def test_a_role_that_may_only_insert_can_copy(filled: Cluster, cluster_url: URL, make_role: Any) -> None:
    from shardids.catalog.rows import Catalog
    from shardids.migrate.install import provision

    role = make_role()
    catalog = Catalog(cluster_url)
    try:
        provision.grant(catalog, str(role.username))
    finally:
        catalog.close()
    for node in filled.placement.nodes.values():
        with psycopg.connect(node.url, autocommit=True) as connection:
            for shard, name in filled.placement.node_of.items():
                if name == node.name:
                    connection.execute(f'grant insert on shard_{shard:04d}.loose to "{role.username}"')
    url = cluster_url.set(username=role.username, password=role.password)
    with Cluster.connect(url) as theirs:
        assert theirs.copy(loose, numbers(100), key="owner").rows == 100
