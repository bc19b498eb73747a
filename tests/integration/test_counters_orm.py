"""Numbers for people in models and migrations, and by commands."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import pytest
from alembic.autogenerate import compare_metadata, produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, MetaData, Table, Text, event, insert, select
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from shardids import Cluster, ShardId, counter, primary_key, sharding_key
from shardids.errors import BadArgument, NumbersExhausted
from shardids.migrate.models import compare_defaults, comparison
from shardids.models import RowNumber
from tests.conftest import dsn
from tests.integration.test_cli import Run, refused, run  # noqa: F401 # a fixture
from tests.support.clusters import connected


class Base(DeclarativeBase):
    pass


class Numbered:
    number: Mapped[str] = counter("document", per="never", prefix="D", tenant="customer", padding=3)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[ShardId] = primary_key()
    customer: Mapped[str] = sharding_key()
    number: Mapped[str] = counter("order", per="day", unique=True)
    note: Mapped[str | None]


class Letter(Numbered, Base):
    __tablename__ = "letters"
    id: Mapped[ShardId] = primary_key()
    customer: Mapped[str]


NoteNumber = Annotated[
    str, counter("note", per="month", tenant="customer", gapless=False, prefix="100%:{period}/")
]


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[ShardId] = primary_key()
    customer: Mapped[int]
    number: Mapped[NoteNumber]


CORE = Table(
    "tickets",
    Base.metadata,
    primary_key("id"),
    Column("shop", Text, nullable=False),
    Column("number", Text, RowNumber("ticket", tenant="shop", per="never"), nullable=False),
)


def create_all(cluster: Cluster) -> None:
    for shard in range(cluster.shard_count):
        with cluster.at(shard=shard).engine.begin() as connection:
            Base.metadata.create_all(connection)
            Base.metadata.create_all(connection)


def test_objects_are_numbered(cluster: Cluster) -> None:
    create_all(cluster)
    day = datetime.now(UTC)
    with cluster.session(key="ann") as session:
        orders = [Order(customer="ann") for _ in range(3)]
        session.add_all(orders)
        session.commit()
        numbers = [order.number for order in orders]
    assert numbers in (
        [f"ann-{moment:%Y-%m-%d}-000{n}" for n in (1, 2, 3)] for moment in (day, datetime.now(UTC))
    )
    with cluster.session(shard=3) as session:
        session.add_all([Letter(customer="bob"), Note(customer=7, number="mine"), Note(customer=7)])
        session.flush()
        assert session.scalars(select(Letter.number)).one() == "D001"
        assert sorted(session.scalars(select(Note.number)))[0] == f"100%:{day:%Y-%m}/0001"
        assert (
            session.execute(insert(CORE).values(shop="x").returning(CORE.c.number)).scalar_one() == "x-0001"
        )
        session.commit()
    with cluster.sharded_session() as many:
        many.add_all([Order(customer=name) for name in ("ann", "eve")])
        many.commit()
        found = many.scalars(select(Order.number).where(Order.customer.in_(["ann", "eve"]))).all()
    assert sorted(text[:3] + text[-5:] for text in found) == [
        *("ann-0001", "ann-0002", "ann-0003", "ann-0004"),
        "eve-0001",
    ]


@pytest.mark.long
def test_many_objects_are_numbered_in_one_statement(cluster: Cluster) -> None:
    create_all(cluster)
    with cluster.session(key="ann") as session:
        statements: list[str] = []
        event.listen(
            session.get_bind().engine,
            "before_cursor_execute",
            lambda _c, _cursor, statement, *_rest: statements.append(statement),
        )
        orders = [Order(customer="ann", note=str(number)) for number in range(1, 1001)]
        session.add_all(orders)
        session.commit()
        assert len([one for one in statements if one.startswith("INSERT")]) <= 2
        assert [int(order.number[-4:]) for order in orders] == list(range(1, 1001))
        session.add_all([Order(customer="ann") for _ in range(8999)])
        session.flush()
        session.add(Order(customer="ann"))
        with pytest.raises(NumbersExhausted, match="number 10000 of kind 'order' of tenant 'ann' needs more"):
            session.flush()
        session.rollback()


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("order", {"per": "day"}, 'table "bad" does not have a sharding key'),
        ("order", {"per": "day", "tenant": "shop"}, 'does not have a column "shop"'),
        (
            "order",
            {"per": "day", "tenant": "customer", "zone": "Europe/Berln"},
            "no time zone 'Europe/Berln'",
        ),
        ("order", {"per": "week", "tenant": "customer"}, "per day, month, year or never, not per 'week'"),
        ("order", {"per": "never", "tenant": "customer", "prefix": "{period}"}, "can't have a {period}"),
        ("order", {"per": "day", "tenant": "customer", "prefix": "{shop}"}, "another placeholder"),
        ("order", {"per": "day", "tenant": "customer", "padding": 19}, "0 to 18 digits"),
        ("order", {"per": "day", "tenant": "customer", "keep_days": 0}, "1 to 100000 days"),
        ("", {"per": "day", "tenant": "customer"}, "1 to 100 characters"),
    ],
)
def test_a_model_that_can_not_be_numbered(kind: str, given: dict[str, Any], words: str) -> None:
    class Other(DeclarativeBase):
        pass

    with pytest.raises(BadArgument, match=words.replace("{", r"\{").replace("}", r"\}")):

        class Bad(Other):
            __tablename__ = "bad"
            id: Mapped[ShardId] = primary_key()
            customer: Mapped[str] = mapped_column()
            number: Mapped[str] = counter(kind, **given)


def test_tables_that_share_a_kind_define_it_alike() -> None:
    metadata = MetaData()

    def table(name: str, **given: Any) -> Table:
        number = RowNumber("order", tenant="shop", **{"per": "day", **given})
        return Table(name, metadata, primary_key("id"), Column("shop", Text), Column("n", Text, number))

    table("a")
    table("b")
    for given in ({"gapless": False}, {"per": "month"}, {"padding": 6}):
        with pytest.raises(
            BadArgument, match=r'tables "a" and "c" define numbers of kind "order" differently'
        ):
            table("c", **given)
    assert sorted(metadata.tables) == ["a", "b"]


def test_autogenerate_writes_the_numbers_into_the_revision(cluster: Cluster) -> None:
    def ours(name: str | None, kind: str, _parents: object) -> bool:
        return not (kind == "table" and name == "shardids_version")

    options = comparison({"compare_type": True, "include_name": ours})
    with cluster.engine(cluster.node_of(7)).begin() as connection:
        connection.exec_driver_sql("set local search_path = shard_0007")
        context = MigrationContext.configure(connection, opts=options)
        compare_defaults(context, True)
        script = produce_migrations(context, Base.metadata)
        assert script.upgrade_ops is not None
        code = render_python_code(script.upgrade_ops, render_item=options["render_item"])
        assert "shardids.models.RowNumber('order', per='day', tenant='customer'" in code
        names: dict[str, Any] = {}
        exec("import sqlalchemy as sa\nimport shardids.models\ndef upgrade(op):\n" + code, names)
        names["upgrade"](Operations(context))
        assert compare_metadata(context, Base.metadata) == []
    with cluster.session(shard=7) as session:
        session.add(Order(customer="ann"))
        session.flush()
        assert session.scalars(select(Order.number)).one().endswith("-0001")


def test_a_copy_of_the_metadata_is_numbered_too(cluster: Cluster) -> None:
    metadata = MetaData()
    copy = CORE.to_metadata(metadata)
    with cluster.at(shard=2).engine.begin() as connection:
        metadata.create_all(connection)
        assert (
            connection.execute(insert(copy).values(shop="x").returning(copy.c.number)).scalar_one()
            == "x-0001"
        )


# Commands.


def test_counters_by_commands(run: Run, cluster_url: URL) -> None:  # noqa: F811
    at = ("--catalog", dsn(cluster_url))
    words = ("counter", "define", "order", "--per", "month", "--zone", "Europe/Berlin", *at)
    assert run(*words, "--dry-run").out == 'Numbers of kind "order" would be defined in 8 shards\n'
    assert run("counter", "show", *at).err == "There are no such counters.\n"
    assert run(*words).out == 'Numbers of kind "order" are defined in 8 shards\n'
    assert run(*words).code == 0
    with connected(cluster_url) as db:
        db.execute("select shard_0002.next_number('ann', 'order', '2026-11-22Z') from generate_series(1, 7)")
    (row,) = run("counter", "show", "--tenant", "ann", "--json", *at).json
    assert row == {
        "shard": 2,
        "tenant": "ann",
        "kind": "order",
        "per": "month",
        "period": "2026-11",
        "highest": 7,
    }
    by_hand = (*at, "--reason", "a test", "--period", "2026-11-05")
    set_to = ("counter", "set", "ann", "order")
    assert "would be 20; the highest so far is 7" in run(*set_to, "20", *by_hand, "--dry-run").out
    assert "is 20; the highest so far is 7" in run(*set_to, "20", *by_hand).out
    refused(run(*set_to, "3", *by_hand), 2, "numbers 3 to 19", "--again")
    refused(run(*set_to, "3", *by_hand, "--again"), 2, "may come twice", "--yes")
    assert "is 30; the highest so far is 19" in run(*set_to, "+10", *by_hand).out
    refused(run(*set_to, "+10", *by_hand, "--again"), 2, "--again does not apply to +COUNT")
    anew = (*set_to, "1", "--again", *by_hand)
    refused(run(*anew), 2, "no terminal", "--yes")
    assert "would be 1;" in run(*anew, "--dry-run").out
    assert "is 1; the highest so far is 29" in run(*anew, "--yes").out
    changes = run("counter", "show", "--changes", "--json", *at).json
    assert [(one["highest_before"], one["next_number"]) for one in changes] == [(7, 20), (19, 30), (29, 1)]
    assert changes[0]["period"] == "2026-11-01"
    zone = ("counter", "zone", "ann", "Asia/Tokyo", *at)
    assert run(*zone, "--dry-run").out == 'Tenant "ann", shard 2: would count days in Asia/Tokyo\n'
    assert run(*zone).out == 'Tenant "ann", shard 2: counts days in Asia/Tokyo\n'
    marked = run("counter", "define", "[/x]", "--per", "never", *at)
    assert marked.out == 'Numbers of kind "[/x]" are defined in 8 shards\n'
    marked = run("counter", "zone", "[/x]", "UTC", "--shard", "3", *at)
    assert marked.out == 'Tenant "[/x]", shard 3: counts days in UTC\n'


def test_commands_on_counters_that_are_refused(run: Run, cluster_url: URL) -> None:  # noqa: F811
    at = ("--catalog", dsn(cluster_url))
    refused(run("counter", "define", "x", "--per", "week", *at), 2, "--per", "never")
    refused(
        run("counter", "define", "x", "--per", "day", "--zone", "Nowhere", *at), 2, "no time zone 'Nowhere'"
    )
    why = ("--reason", "a test", *at)
    refused(
        run("counter", "set", "ann", "x", "5", *why),
        2,
        'tenant "ann" has numbers in no shard yet',
        "--shard N",
    )
    refused(
        run("counter", "set", "ann", "x", "5", "--shard", "3", *why),
        2,
        "shard has no counters [shard 3",
        "define",
    )
    refused(run("counter", "set", "ann", "x", "+5", "--period", "today", *why), 2, "'today' is not a day")
    assert run("counter", "define", "x", "--per", "never", *at).code == 0
    assert "is 5" in run("counter", "set", "ann", "x", "5", "--shard", "3", *why).out
    refused(run("counter", "define", "x", "--per", "day", *at), 2, "numbers of kind 'x' are defined already")
    refused(run("counter", "set", "ann", "x", "few", *why), 2, "'few' is not a number")
    refused(run("counter", "show", "--changes", "--all", *at), 2, "--all does not apply to --changes")
    refused(run("counter", "zone", "ann", "Nowhere", *at), 2, "no time zone")
