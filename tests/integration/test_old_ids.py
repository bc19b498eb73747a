"""IDs from before the adoption of their tables: each finds its row, or is refused, and none is guessed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Uuid,
    and_,
    delete,
    event,
    func,
    insert,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError, NoResultFound
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    joinedload,
    mapped_column,
    selectinload,
)

from shardids import AsyncCluster, Cluster, PageQuery, sharding_key
from shardids.catalog.old_ids import OldIdRule, forget_old_ids, write_old_ids
from shardids.catalog.topology import shard_for_key
from shardids.cli import app
from shardids.errors import BadArgument, CannotCombine, ClusterConflict, CopyFailed, UnknownId, WrongShard
from shardids.ids.layout import DEFAULT
from shardids.tables import views
from shardids.watch import doctor
from shardids.watch.doctor.findings import Finding
from shardids.watch.facts.rows import ShardingKey
from tests.conftest import BlankDatabases, dsn, found_cluster
from tests.support.adopted import (
    EVENTS,
    MODELS,
    SHARDS,
    USERS,
    Event,
    Item,
    Like,
    Order,
    Shop,
    User,
    adopted_shop,
)
from tests.support.clusters import catalog_at
from tests.support.waiting import wait_for

NEW = 382529960780272642 + (1 << 61)
"""A new ID, of another shard than 5, and of years to come: no cluster of today takes it for an old one."""


@pytest.fixture(scope="module")
def shop(databases: BlankDatabases) -> Iterator[Shop]:
    with adopted_shop(databases) as shop:
        yield shop


@pytest.fixture
def cluster(shop: Shop) -> Cluster:
    return shop.cluster


def one_of(shop: Shop, model: type[Any], shard: int | None = None) -> int:
    """The ID of an old row."""
    return next(n for (m, n), s in shop.shard_of.items() if m is model and shard in (None, s))


def all_ids(shop: Shop, model: type[Any]) -> list[int]:
    with Session(shop.plain) as session:
        return list(session.scalars(select(model.id).order_by(model.id)))


# One ID.


def test_every_old_row_is_found_by_its_id_and_its_table(shop: Shop, cluster: Cluster) -> None:
    for (model, id_), shard in shop.shard_of.items():
        assert cluster.shard_of(id_, of=model) == shard
        assert cluster.shard_of(id_, of=model.__table__) == shard
        assert cluster.shard_of(id_, of=model.__tablename__) == shard
    for model in (User, Order, Item, Event):
        id_ = one_of(shop, model)
        with cluster.session(id=id_, of=model) as session:
            found = session.get_one(model, id_)
            assert found.id == id_
        assert cluster.at(id=id_, of=model).run(lambda s, m=model, i=id_: s.get_one(m, i).id) == id_


def test_new_ids_tell_their_shards_with_and_without_their_table(shop: Shop, cluster: Cluster) -> None:
    for model in MODELS:
        new = [id_ for id_ in all_ids(shop, model) if (model, id_) not in shop.shard_of]
        assert len(new) >= SHARDS
        for id_ in new:
            assert cluster.shard_of(id_) == cluster.shard_of(id_, of=model) == cluster.decode(id_).shard
            with cluster.session(id=id_, of=model) as session:
                assert session.get(model, id_) is not None


def test_an_old_id_without_its_table_is_refused(cluster: Cluster) -> None:
    for ask in (
        lambda: cluster.shard_of(17),
        lambda: cluster.session(id=17),
        lambda: cluster.at(id=17).run(lambda session: session),
        lambda: cluster.shard_of(-17),
    ):
        with pytest.raises(BadArgument, match="issued before this cluster") as refused:
            ask()
        assert "of=User" in refused.value.hint
        assert "100% events, Orders, 100% old, items, users" in refused.value.hint
    with pytest.raises(BadArgument, match="contains no time and no shard"):
        cluster.decode(17)


def test_what_is_no_old_id_is_refused_as_before(cluster: Cluster) -> None:
    beyond = cluster.layout.encode(ms=10**11, shard=SHARDS, sequence=0)
    for of in (None, User, "users"):
        with pytest.raises(BadArgument, match="shard 8 does not exist"):
            cluster.shard_of(beyond, of=of)
        for wrong in ("17", 17.0, True, b"17"):
            with pytest.raises(BadArgument, match="must be an integer"):
                cluster.shard_of(wrong, of=of)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(BadArgument, match="an ID must be from"):
            cluster.shard_of(1 << 70, of=of)
    for of in (17, object(), Session):
        with pytest.raises(BadArgument, match=r"is not a mapped class, a Table or the name of a table"):
            cluster.shard_of(17, of=of)
    for options in ({"shard": 3}, {"key": "ann"}):
        with pytest.raises(BadArgument, match="of= names the table of an ID"):
            cluster.session(of=User, **options)  # type: ignore[arg-type]  # mixed


def test_tables_without_a_rule_have_no_old_ids(cluster: Cluster) -> None:
    for of in (Like, "likes", "nothing"):
        with pytest.raises(BadArgument, match=r"(likes|nothing) has no rule for such IDs"):
            cluster.shard_of(17, of=of)
    with cluster.sharded_session() as session, pytest.raises(BadArgument, match="likes has no rule"):
        session.get(Like, 17)


@pytest.mark.parametrize(
    ("model", "id_"), [(Order, 8_999_999), (Item, 10**12), (Event, EVENTS + 5), (Order, -3)]
)
def test_an_old_id_that_no_row_had_finds_nothing(cluster: Cluster, model: type[Any], id_: int) -> None:
    with pytest.raises(UnknownId, match=f"no row of .* has the ID {id_}"):
        cluster.shard_of(id_, of=model)
    with pytest.raises(UnknownId):
        cluster.session(id=id_, of=model)
    with cluster.sharded_session(fan_out="named") as session:
        assert session.get(model, id_) is None
        with pytest.raises(NoResultFound):
            session.get_one(model, id_)
        assert session.scalars(select(model).where(model.id == id_)).all() == []
        assert session.scalars(select(model).where(model.id.in_([id_, id_ - 1]))).all() == []
        assert session.scalar(select(func.count()).where(model.id == id_)) == 0
        changed = session.execute(delete(model).where(model.id == id_))
        assert changed.rowcount == 0


# Statements, compared with one database.


def answer(session: Session, statement: Any) -> list[tuple[Any, ...]]:
    rows = session.execute(statement).unique().all()
    return sorted(
        (
            tuple(
                value.id if isinstance(value, User | Order | Item | Event | Like) else value for value in row
            )
            for row in rows
        ),
        key=repr,
    )


def statements(shop: Shop, draw: random.Random) -> Iterator[Any]:
    """Statements that name IDs, old and new, of rows that are there and of some that are not."""
    ids = {model: all_ids(shop, model) for model in MODELS}
    absent = {User: [7777], Order: [9001, 123_456_789], Item: [5555], Event: [4444], Like: []}

    def some(model: type[Any], count: int) -> list[int]:
        return [*draw.sample(ids[model], count), *draw.choice([[], absent[model]])]

    column = draw.choice(
        [User.id, Order.id, Item.id, Event.id, Order.user_id, Item.order_id, Event.user_id, Like.user_id]
    )
    model = column.class_
    named = {"user_id": User, "order_id": Order}.get(column.key, model)
    one = draw.choice(some(named, 3))
    yield select(model).where(column == one)
    yield select(model).where(column.in_(some(named, 6)))
    yield select(model.id, column).where(or_(column == one, column.in_(some(named, 2))))
    yield select(func.count(), func.min(model.id), func.max(column)).where(column.in_(some(named, 5)))
    yield select(model).where(column.between(one, one + 3))
    yield select(model).where(column > one - 2, column < one + 2, model.id != one)
    yield select(model).where(and_(column == one, model.id.in_(some(model, 4))))
    yield select(model).order_by(model.id).limit(7).offset(3)
    yield select(User, Order).join(Order.user).where(User.id.in_(some(User, 5)))
    yield select(Order.id, Item.amount).join(Item.order).where(Order.id.in_(some(Order, 4)))
    yield (
        select(User.id, Item.id)
        .join(User.orders)
        .join(Order.items)
        .where(Item.id == draw.choice(some(Item, 2)))
    )
    yield select(User).where(User.orders.any(Order.id == draw.choice(some(Order, 2))))
    yield select(Order).where(Order.items.any(Item.id.in_(some(Item, 3))))
    yield (
        select(Order)
        .join(Event, Event.user_id == Order.user_id)
        .where(Event.id == draw.choice(some(Event, 2)))
    )
    yield (
        select(Order.user_id, func.sum(Order.total))
        .where(Order.user_id.in_(some(User, 5)))
        .group_by(Order.user_id)
    )
    yield select(User.id).where(User.id.in_(select(Order.user_id).where(Order.id.in_(some(Order, 3)))))
    # IDs of two tables that happen to be the same.
    yield select(User.id, Order.id).join(Order, Order.id == User.id)
    yield select(Event.id).where(Event.id.in_(select(Item.id)))
    yield select(Event.id).where(Event.id == one, select(Item.id).where(Item.id == Event.id).exists())


@pytest.mark.long
def test_statements_are_answered_as_by_one_database_or_refused(shop: Shop, cluster: Cluster) -> None:
    draw = random.Random(int(os.environ.get("SHARDIDS_FUZZ_SEED", "4711")))
    refused = merged = 0
    for _ in range(int(os.environ.get("SHARDIDS_FUZZ_STATEMENTS", "200")) // 16):
        for statement in statements(shop, draw):
            with Session(shop.plain) as plain, cluster.sharded_session() as sharded:
                expected = answer(plain, statement)
                try:
                    found = answer(sharded, statement)
                except CannotCombine:
                    refused += 1
                    continue
                assert found == expected, statement.compile(compile_kwargs={"literal_binds": True})
                merged += 1
    assert merged > 3 * refused > 0


def test_what_each_shard_has_is_found_in_a_session_on_it(shop: Shop, cluster: Cluster) -> None:
    for shard in range(SHARDS):
        ids = {model: one_of(shop, model, shard) for model in (User, Order, Item, Event)}
        others = {model: one_of(shop, model, (shard + 1) % SHARDS) for model in ids}
        with cluster.session(shard=shard) as session:
            for model, id_ in ids.items():
                assert session.get(model, id_) is not None
                assert session.scalars(select(model).where(model.id.in_([id_]))).one().id == id_
            for model in (User, Order):
                with pytest.raises(WrongShard, match=f"criteria name shard {(shard + 1) % SHARDS}"):
                    session.get(model, others[model])
            # The others are looked for nowhere else.
            assert session.get(Event, others[Event]) is None
            assert session.get(Item, others[Item]) is None


def test_a_session_on_one_shard_asks_no_other(shop: Shop, cluster: Cluster) -> None:
    sent: list[str] = []
    fresh = Cluster.connect(shop.urls[0], listen=False)
    try:
        with fresh.session(shard=3) as session:
            nodes = [fresh.engine(node) for node in fresh.placement.nodes.values()]
            for engine in nodes:
                event.listen(engine, "before_cursor_execute", lambda *call: sent.append(call[2]))
            event_id = one_of(shop, Event, 3)
            found = session.get_one(Event, event_id)
            found.kind = "changed"
            session.flush()
            session.rollback()
        assert len([one for one in sent if "100%" in one]) == 2, sent
        assert not fresh._old_ids._engines.made()
    finally:
        fresh.close()


def test_pages_begin_with_old_rows(shop: Shop, cluster: Cluster) -> None:
    seen: list[int] = []
    cursor = None
    while True:
        query = PageQuery(select(Order), Order.id, limit=50, after=cursor)
        with cluster.sharded_session() as session:
            page = query.page(session.scalars(query.statement))
        seen += [row.id for row in page.items]
        cursor = page.after
        if cursor is None:
            break
    assert seen == all_ids(shop, Order)
    assert seen == sorted(seen)


# Objects.


def test_relationships_lead_from_old_rows_to_theirs(shop: Shop, cluster: Cluster) -> None:
    with Session(shop.plain) as session:
        users = session.scalars(select(User).options(selectinload(User.orders).selectinload(Order.items)))
        expected = {u.id: {o.id: [i.id for i in o.items] for o in u.orders} for u in users}
    for options in ([], [selectinload(User.orders).selectinload(Order.items)], [joinedload(User.orders)]):
        with cluster.sharded_session() as session:
            found = session.scalars(select(User).options(*options)).unique().all()
            assert {u.id: {o.id: [i.id for i in o.items] for o in u.orders} for u in found} == expected
    with cluster.sharded_session(fan_out="named") as session:
        item = session.get_one(Item, one_of(shop, Item))
        assert item in item.order.items
        assert item.order.user.id == item.order.user_id
        session.expire_all()
        assert item.order_id is not None


def test_objects_are_changed_where_they_are(shop: Shop, cluster: Cluster) -> None:
    for model, attribute in ((User, "name"), (Order, "total"), (Item, "amount"), (Event, "kind")):
        id_ = one_of(shop, model, 5)
        new = "changed" if attribute in ("name", "kind") else 77
        with cluster.sharded_session(fan_out="named") as session:
            found = session.get_one(model, id_)
            setattr(found, attribute, new)
            session.flush()
            session.expire(found)
            assert getattr(found, attribute) == new
            session.refresh(found)
            assert session.merge(model(**{"id": id_, attribute: new})) is found
            session.delete(found) if model in (Item, Event) else None
            session.flush()
            with cluster.session(shard=5) as other:
                assert other.get(model, id_) is not None
            session.rollback()
        with cluster.sharded_session(fan_out="named") as session:
            changed = session.execute(update(model).where(model.id == id_).values(**{attribute: new}))
            assert changed.rowcount == 1
            session.bulk_update_mappings(model, [{"id": id_, attribute: new}])
            session.rollback()


def test_children_of_old_rows_are_written_into_their_shards(shop: Shop, cluster: Cluster) -> None:
    user, order = one_of(shop, User, 6), one_of(shop, Order, 2)
    with cluster.sharded_session() as session:
        orders = [Order(user_id=user, total=1), Order(user=session.get_one(User, user), total=2)]
        session.add_all(orders)
        session.flush()
        assert {cluster.shard_of(one.id) for one in orders} == {6}
        session.execute(
            insert(Item),
            [{"order_id": order, "amount": 9}, {"order_id": one_of(shop, Order, 7), "amount": 9}],
        )
        shards = {cluster.shard_of(n) for n in session.scalars(select(Item.id).where(Item.amount == 9))}
        assert shards == {2, 7}
        session.rollback()
        session.add(Item(order=session.get_one(Order, order), order_id=one_of(shop, Order, 7), amount=1))
        session.add(Event(id=one_of(shop, Event, 1), user_id=user))
        with pytest.raises((WrongShard, IntegrityError)):
            session.flush()


def test_an_old_id_cant_be_issued_again(shop: Shop, cluster: Cluster) -> None:
    user = one_of(shop, User, 4)
    with cluster.sharded_session() as session:
        for model, row in ((Order, {"user_id": user, "total": 1}), (Event, {"user_id": user})):
            session.add(model(id=8_888_888, **row))
            with pytest.raises(UnknownId, match="has the ID 8888888"):
                session.flush()
            session.rollback()
            with pytest.raises(UnknownId, match="has the ID 8888888"):
                session.execute(insert(model), [{"id": 8_888_888, **row}])
            session.rollback()
            with pytest.raises(CopyFailed, match=r"row 1: .*has the ID 8888888"):
                cluster.copy(model, [{"id": 8_888_888, **row}])
        # Those that are there are refused by their shard.
        session.add(User(id=user, name="another"))
        with pytest.raises(IntegrityError):
            session.flush()


def test_rows_are_copied_to_the_shards_of_old_ids(shop: Shop, cluster: Cluster) -> None:
    orders = [n for (m, n) in shop.shard_of if m is Order]
    try:
        report = cluster.copy(Item, ({"order_id": n, "amount": 1234} for n in orders))
        assert report.rows == len(orders)
        for shard in range(SHARDS):
            assert report.by_shard[shard] == sum(shop.shard_of[Order, n] == shard for n in orders)
        with pytest.raises(CopyFailed, match="several tables may have it"):
            cluster.copy(Item, [{"order_id": orders[0], "amount": 3}], id="amount")
    finally:
        with cluster.sharded_session() as session, session.begin():
            session.execute(delete(Item).where(Item.amount == 1234))


# What is remembered, and what is asked.


def test_each_chunk_and_each_id_is_asked_for_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster.connect(shop.urls[0], listen=False) as cluster:
        asked: list[str] = []
        old = cluster._old_ids
        for name in ("_in_directory", "_in_all_shards"):
            real = getattr(old, name)
            monkeypatch.setattr(
                old, name, lambda *call, name=name, real=real: asked.append(name) or real(*call)
            )
        orders = sorted(n for (m, n) in shop.shard_of if m is Order)
        events = [n for (m, n) in shop.shard_of if m is Event]
        with cluster.sharded_session() as session:
            session.scalars(select(Order).where(Order.id.in_(orders))).all()
            session.scalars(select(Event).where(Event.id.in_(events))).all()
            assert asked == ["_in_directory", "_in_all_shards"]
            for n in orders:
                session.get(Order, n)
            for n in events:
                session.get(Event, n)
            session.get(User, 1)
        assert asked == ["_in_directory", "_in_all_shards"]
        for _ in range(2):
            with pytest.raises(UnknownId):
                cluster.shard_of(8998, of=Order)
        assert len(asked) == 4


def test_a_client_learns_of_rules_that_are_written_while_it_runs(databases: BlankDatabases) -> None:
    url = databases.take()
    found_cluster(url, {"a": url}, 4)
    with Cluster.connect(url) as cluster:
        assert cluster.old_ids is None
        assert cluster.shard_of(17) == cluster.shard_of(17, of="users") == 0
        assert cluster.decode(17).sequence == 17
        assert cluster.placement.version > 0
        with cluster._catalog.engine.begin() as connection:
            write_old_ids(
                connection, rules=[OldIdRule(table="users", column="id", rule="key")], below=1 << 40
            )
        wait_for(lambda: cluster.old_ids is not None, what="the rules")
        assert cluster.old_ids is not None
        assert cluster.old_ids.rules.below == 1 << 40
        assert cluster.shard_of(17, of="users") == shard_for_key(17, 4)
        assert cluster.shard_of(1 << 40) == cluster.layout.shard_of(1 << 40)
        rules = cluster.old_ids.rules
        with cluster._catalog.engine.begin() as connection:
            connection.execute(text("update shardids_catalog.node set added_at = now()"))
        cluster.refresh()
        assert cluster.old_ids.rules is rules
        with cluster._catalog.engine.begin() as connection:
            forget_old_ids(connection)
        wait_for(lambda: cluster.old_ids is None, what="that there are no rules")
        assert cluster.shard_of(17) == 0
    databases.give_back(url)


def test_an_id_that_two_shards_have_is_refused(shop: Shop, cluster: Cluster) -> None:
    id_ = 30_000
    for shard in (2, 6):
        with cluster.at(shard=shard).connection() as connection, connection.begin():
            connection.execute(insert(Event), {"id": id_, "user_id": one_of(shop, User, shard)})
    try:
        with pytest.raises(
            ClusterConflict, match=r"100% events: shards 2 and 6 both have a row with ID 30000"
        ):
            cluster.shard_of(id_, of=Event)
    finally:
        for shard in (2, 6):
            with cluster.at(shard=shard).connection() as connection, connection.begin():
                connection.execute(delete(Event).where(Event.id == id_))


def test_a_pool_of_one_connection_is_enough(shop: Shop) -> None:
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 3}
    with (
        Cluster.connect(shop.urls[0], listen=False, **options) as cluster,
        cluster.sharded_session() as session,
    ):
        session.scalars(select(User).limit(1)).all()
        for n in (one_of(shop, Event), one_of(shop, Item)):
            assert session.get(Event, n) or session.get(Item, n)
        session.execute(select(Order.id).where(Order.id == one_of(shop, Order))).one()


def test_threads_ask_at_the_same_time(shop: Shop) -> None:
    failures: list[BaseException] = []
    with Cluster.connect(shop.urls[0], listen=False) as cluster:

        def ask(number: int) -> None:
            try:
                draw = random.Random(number)
                for (model, id_), shard in draw.sample(sorted(shop.shard_of.items(), key=repr), 60):
                    assert cluster.shard_of(id_, of=model) == shard
            except BaseException as error:  # noqa: BLE001 -- raised below
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


# What DBAs are told.


def misplaced(shop: Shop, *keys: str, every_row: bool = True) -> list[Finding]:
    with catalog_at(shop.urls[0]) as catalog:
        names = ["row-in-wrong-shard", "key-in-wrong-shard"]
        wanted = [ShardingKey.parse(key) for key in keys]
        return list(doctor.examine(catalog, names, wanted, every_row=every_row and bool(keys)).findings)


def test_doctor_takes_no_adopted_row_for_a_misplaced_one(shop: Shop) -> None:
    assert misplaced(shop) == []
    order = f"{Order.__tablename__}.user_id"
    assert misplaced(shop, "users.id", order, "likes.user_id", f"{Event.__tablename__}.user_id") == []
    assert misplaced(shop, "items.order_id", "items.id", every_row=False) == []


@pytest.mark.parametrize(
    ("model", "row", "said"),
    [
        (User, {"id": 555}, f"which says shard {shard_for_key(555, SHARDS)}"),
        (Order, {"id": 9002}, "which no directory has"),
        (User, {"id": NEW}, f"which says shard {DEFAULT.shard_of(NEW)}"),
    ],
)
def test_doctor_finds_misplaced_rows(shop: Shop, model: type[Any], row: dict[str, Any], said: str) -> None:
    shard = 5
    assert shard_for_key(555, SHARDS) != shard
    rest = {"name": "x"} if model is User else {"user_id": one_of(shop, User, shard), "total": 1}
    with shop.cluster.at(shard=shard).connection() as connection, connection.begin():
        connection.execute(insert(model), row | rest)
    try:
        (found,) = misplaced(shop)
        assert found.shards == (shard,)
        assert said in found.what
        assert str(row["id"]) in found.what
        if model is User:
            keyed = misplaced(shop, "users.id")
            assert {one.check for one in keyed} == {"row-in-wrong-shard", "key-in-wrong-shard"}
            assert all(said in one.what for one in keyed)
    finally:
        with shop.cluster.at(shard=shard).connection() as connection, connection.begin():
            connection.execute(delete(model).where(model.id == row["id"]))


def test_id_decode_says_where_each_table_would_have_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    order = one_of(shop, Order, 6)

    def run(*words: str) -> str:
        capsys.readouterr()
        app(["id", "decode", *words, "--catalog", dsn(shop.urls[0])], standalone_mode=False)
        return capsys.readouterr().out

    said = run(str(order), str(NEW)).splitlines()
    shard = shard_for_key(order, SHARDS)
    node = shop.cluster.placement.node_of
    assert said[:5] == [
        f"{order}   issued before this cluster",
        "  100% events.The ID: any shard; all are asked",
        f'  Orders, 100% old.id: shard 6 by the directory, on node "{node[6]}" now',
        "  items.id: any shard; all are asked",
        f'  users.id: shard {shard} by its key, on node "{node[shard]}" now',
    ]
    assert str(NEW) in said[6]
    old, new = json.loads(run("8998", str(NEW), "--json"))
    assert old["tables"][1] == {
        "table": "Orders, 100% old",
        "column": "id",
        "rule": "directory",
        "shard": None,
        "node": None,
        "region": None,
    }
    assert (old["id"], old["old"], new["shard"]) == ("8998", True, DEFAULT.shard_of(NEW))
    assert "no row had it, by the directory" in run("8998")


def test_the_query_node_needs_no_ids(shop: Shop) -> None:
    with catalog_at(shop.urls[0]) as catalog, Session(shop.plain) as plain:
        views.create_query_node(catalog, node="b", store_password=True)
        try:
            old, orders = one_of(shop, User, 7), select(Order.id, Order.user_id).where(Order.total > 3)
            shop.cluster.refresh()
            with shop.cluster.sharded_session() as session:
                for statement in (
                    select(User.id, func.count(Order.id)).join(Order, Order.id == User.id).group_by(User.id),
                    select(Event.id).where(Event.id.in_(select(Item.id).where(Item.amount == 3))),
                    select(func.rank().over(order_by=Order.id), Order.id).where(Order.user_id > old),
                    select(func.count()).select_from(orders.subquery()),
                ):
                    assert answer(session, statement) == answer(plain, statement)
            with shop.cluster.at(shard=7).connection() as connection:
                shards = "select shardids_shard from shardids_nodes.users where id = :id"
                assert connection.scalar(text(shards), {"id": old}) == 7
        finally:
            views.drop_query_node(catalog)


# asyncio.


def test_old_ids_with_asyncio(shop: Shop) -> None:
    async def ask() -> None:
        async with await AsyncCluster.connect(shop.urls[0], listen=False) as cluster:
            user, order, event_ = (one_of(shop, model) for model in (User, Order, Event))
            async with cluster.session(id=user, of=User) as session:
                assert await session.get(User, user) is not None
            for model, id_ in ((Order, order), (Event, event_)):
                with pytest.raises(BadArgument, match="has to be awaited"):
                    cluster.session(id=id_, of=model)
                shard = await asyncio.to_thread(cluster.shard_of, id_, of=model)
                assert shard == shop.shard_of[model, id_]
                # Now it is known.
                assert cluster.shard_of(id_, of=model) == shard
            order, event_ = (
                sorted(n for (m, n) in shop.shard_of if m is model)[-1] for model in (Order, Event)
            )
            for model, id_ in ((Order, order), (Event, event_)):

                async def get(session: Any, model: Any = model, id_: int = id_) -> Any:
                    return await session.get_one(model, id_)

                assert (await cluster.at(id=id_, of=model).run(get)).id == id_
                assert (await cluster.at(id=id_, of=model)).number == shop.shard_of[model, id_]
            async with cluster.sharded_session(fan_out="named") as session:
                items = [n for (m, n) in shop.shard_of if m is Item][:9]
                found = (await session.scalars(select(Item).where(Item.id.in_(items)))).all()
                assert sorted(item.id for item in found) == items
                found[0].amount += 1
                await session.flush()
                assert await session.get(Order, 8_998) is None
                await session.rollback()

    asyncio.run(ask())


# UUIDs.


class UuidBase(DeclarativeBase):
    pass


class Account(UuidBase):
    """The root: its UUID is the sharding key."""

    __tablename__ = "accounts"

    id: Mapped[UUID] = sharding_key(Uuid, primary_key=True)
    name: Mapped[str]


class Transfer(UuidBase):
    """Its own UUID tells nothing; the account's, part of the primary key, does."""

    __tablename__ = "transfers"

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True)
    account_id: Mapped[UUID] = mapped_column(ForeignKey(Account.id), primary_key=True)
    amount: Mapped[int] = mapped_column(BigInteger)


def test_tables_keep_their_uuids_with_a_column_that_routes(databases: BlankDatabases) -> None:
    url = databases.take()
    found_cluster(url, {"a": url}, 4)
    with Cluster.connect(url, listen=False) as cluster:
        for shard in range(4):
            with cluster.at(shard=shard).engine.begin() as connection:
                UuidBase.metadata.create_all(connection, checkfirst=False)
        with cluster._catalog.engine.begin() as connection:
            write_old_ids(connection, rules=[OldIdRule(table="accounts", column="id", rule="key")])
        cluster.refresh()
        accounts = [uuid4() for _ in range(12)]
        with cluster.sharded_session() as session, session.begin():
            session.add_all(Account(id=one, name=str(one)) for one in accounts)
            session.flush()
            session.add_all(Transfer(id=uuid4(), account_id=one, amount=1) for one in accounts)
        for one in accounts:
            assert cluster.shard_of(one, of=Account) == cluster.shard_for(one) == shard_for_key(one, 4)
            with cluster.session(id=one, of=Account) as session:
                assert session.get_one(Account, one).name == str(one)
                transfer = session.scalars(select(Transfer)).first()
                assert transfer is not None
        with cluster.sharded_session(fan_out="named") as session:
            assert session.get(Transfer, (transfer.id, transfer.account_id)) is not None
            later = aliased(Transfer)
            found = session.scalars(select(later).where(later.account_id == accounts[0])).one()
            assert found.account_id == accounts[0]
        with pytest.raises(BadArgument, match="must be an integer, not UUID"):
            cluster.session(id=accounts[0])
    databases.give_back(url)


def test_users_are_as_many_as_before(shop: Shop, cluster: Cluster) -> None:
    """No test above left anything behind."""
    with cluster.sharded_session() as session, Session(shop.plain) as plain:
        for model in MODELS:
            count = select(func.count()).select_from(model)
            assert session.scalar(count) == plain.scalar(count)
        assert session.scalar(select(func.count()).where(User.id <= USERS)) == USERS
