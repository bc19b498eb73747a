"""What the catalog keeps of old IDs: which they are, each table's rule, and directories."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from shardids.catalog.old_ids import (
    OldIdRule,
    fill_directory,
    fill_from,
    forget_old_ids,
    read_directory,
    write_old_ids,
)
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument, ClusterConflict, MissingPrivilege, StatementFailed
from shardids.ids.layout import DEFAULT, Layout
from shardids.migrate.install import provision

RULES = [
    OldIdRule(table="users", column="id", rule="key"),
    OldIdRule(table="Orders of 2024", column="Number", rule="directory"),
    OldIdRule(table="events", column="id", rule="fan-out"),
]


@pytest.fixture
def catalog(blank_database: object) -> Iterator[Catalog]:
    """A catalog of 300 shards, and no node."""
    url: URL = blank_database()  # type: ignore[operator]  # a function
    catalog = Catalog(url)
    provision.init(catalog, DEFAULT, 300)
    yield catalog
    catalog.close()


@pytest.fixture
def connection(catalog: Catalog) -> Iterator[Connection]:
    with catalog.engine.connect() as connection:
        yield connection


def found(connection: Connection, table: str, id_: int) -> int | None:
    return read_directory(connection, table, [id_]).get(id_)


def test_the_placement_has_the_rules_as_they_were_committed(catalog: Catalog, connection: Connection) -> None:
    before = catalog.placement()
    assert before.old_ids is None
    below = write_old_ids(connection, rules=RULES)
    connection.commit()
    after = catalog.placement()
    assert after.version > before.version
    assert after.old_ids is not None
    assert after.old_ids.below == below
    assert dict(after.old_ids.of_table) == {rule.table: rule for rule in RULES}
    forget_old_ids(connection, ["users", "events"])
    connection.commit()
    assert list(catalog.placement().old_ids.of_table) == ["Orders of 2024"]  # type: ignore[union-attr]  # it is there
    forget_old_ids(connection)
    connection.commit()
    assert catalog.placement().old_ids is None


def test_rules_are_replaced_and_what_is_old_is_not(connection: Connection) -> None:
    assert write_old_ids(connection, rules=[RULES[1]], below=1 << 40) == 1 << 40
    fill_directory(connection, RULES[1].table, [(1, 2)])
    assert write_old_ids(connection, rules=RULES) == 1 << 40
    assert found(connection, RULES[1].table, 1) == 2
    write_old_ids(connection, rules=[OldIdRule(table=RULES[1].table, column="Number", rule="key")])
    assert found(connection, RULES[1].table, 1) is None
    with pytest.raises(ClusterConflict, match=r"IDs below 1099511627776 are old .* not those below 17"):
        write_old_ids(connection, rules=RULES, below=17)
    assert write_old_ids(connection, rules=[]) == 1 << 40


def test_ids_that_the_cluster_may_have_issued_are_not_old(catalog: Catalog, connection: Connection) -> None:
    default = write_old_ids(connection, rules=RULES)
    connection.rollback()
    made = DEFAULT.decode(default).time
    with catalog.engine.connect() as other:
        created = other.scalar(text("select created_at from shardids_catalog.cluster"))
    assert 86399 < (created - made).total_seconds() < 86402
    for below in (0, -1, default + 1, 1 << 63):
        with pytest.raises(BadArgument, match="the number below which IDs are old must be"):
            write_old_ids(connection, rules=RULES, below=below)


def test_a_cluster_whose_ids_begin_at_nothing_takes_no_old_ones(catalog: Catalog) -> None:
    with catalog.engine.connect() as connection:
        connection.execute(
            text(
                "update shardids_catalog.cluster"
                " set epoch_ms = (extract(epoch from created_at) * 1000)::bigint - 10"
            )
        )
        with pytest.raises(BadArgument, match="epoch is so late"):
            write_old_ids(connection, rules=RULES)


def test_a_directory_holds_what_was_put_into_it_in_any_order(connection: Connection) -> None:
    table = RULES[1].table
    write_old_ids(connection, rules=RULES)
    draw = random.Random(5)
    ids = {draw.choice((draw.randrange(20_000), draw.randrange(-9000, 10**15))): None for _ in range(3000)}
    pairs = [(id_, draw.randrange(300)) for id_ in ids]
    assert fill_directory(connection, table, pairs[:2000]) == 2000
    assert fill_directory(connection, table, iter(pairs[1000:])) == len(pairs) - 1000
    assert read_directory(connection, table, [*ids, *range(30_000)]) == dict(pairs)
    assert fill_directory(connection, table, []) == 0


def test_ids_that_carry_a_time_take_little_room(catalog: Catalog, connection: Connection) -> None:
    table = RULES[1].table
    write_old_ids(connection, rules=RULES)
    draw = random.Random(7)
    ids = sorted(
        {(1_500_000_000_000 + draw.randrange(10**9) << 16) + draw.randrange(1 << 16) for _ in range(20_000)}
    )
    pairs = [(id_, draw.randrange(300)) for id_ in (*range(1, 5000), *ids)]
    fill_directory(connection, table, pairs[::2])
    fill_directory(connection, table, pairs)
    assert read_directory(connection, table, [id_ for id_, _ in pairs]) == dict(pairs)
    connection.commit()
    with catalog.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as tidy:
        tidy.execute(text("vacuum full shardids_catalog.old_id_list"))
        stored = tidy.scalar(text("select pg_total_relation_size('shardids_catalog.old_id_list')"))
    chunks = connection.scalar(text("select count(*) from shardids_catalog.old_id_directory"))
    assert chunks == 2
    assert stored / len(ids) <= 24


def test_a_directory_goes_on_where_its_filling_ended(catalog: Catalog, connection: Connection) -> None:
    table, count = RULES[1].table, 450_000
    rules = [OldIdRule(table=table, column="Number", rule="fan-out")]
    write_old_ids(connection, rules=rules)
    connection.commit()
    asked: list[int | None] = []

    def ids(after: int | None) -> Iterator[tuple[int, int]]:
        asked.append(after)
        for id_ in range((after or 0) + 1, count + 1):
            if id_ == 430_000 and len(asked) == 1:
                raise KeyboardInterrupt
            yield id_, id_ % 300

    with pytest.raises(KeyboardInterrupt):
        fill_from(catalog.engine, table, "a", ids)
    fill_from(catalog.engine, table, "a", ids)
    fill_from(catalog.engine, table, "b", lambda _after: [(10**15, 7)])
    assert asked == [None, 400_000]
    write_old_ids(connection, rules=RULES)
    wanted = [1, 399_999, 400_001, count, 10**15]
    assert read_directory(connection, table, wanted) == {
        id_: 7 if id_ == 10**15 else id_ % 300 for id_ in wanted
    }
    assert connection.scalar(text("select count(*) from shardids_catalog.old_id_filling")) == 0


def test_what_a_directory_refuses_leaves_it_as_it_was(connection: Connection) -> None:
    table = RULES[1].table
    below = write_old_ids(connection, rules=RULES)
    fill_directory(connection, table, [(17, 5), (4095, 299), (4096, 0)])
    connection.commit()
    for pairs in ([(17, 6)], [(1, 5), (1, 6)], [(4096, 299)]):
        with pytest.raises(ClusterConflict, match=r"Orders of 2024: ID \d+ would be in two shards"):
            fill_directory(connection, table, pairs)
        connection.rollback()
    for pair in ((below, 5), (1, 300), (1, -1)):
        with pytest.raises(BadArgument, match="can't be in a directory"):
            fill_directory(connection, table, [pair])
        connection.rollback()
    for other in ("users", "nothing"):
        with pytest.raises(ClusterConflict, match=f"table {other} has no directory"):
            fill_directory(connection, other, [(1, 1)])
        connection.rollback()
    assert [found(connection, table, id_) for id_ in (1, 17, 4095, 4096)] == [None, 5, 299, 0]


def test_negative_ids_are_new_where_the_layout_uses_the_sign(blank_database: object) -> None:
    catalog = Catalog(blank_database())  # type: ignore[operator]  # a function
    provision.init(catalog, Layout.preset("discord"), 8)
    with catalog.engine.connect() as connection:
        write_old_ids(connection, rules=RULES)
        with pytest.raises(BadArgument, match="can't be in a directory"):
            fill_directory(connection, RULES[1].table, [(-1, 1)])
        connection.commit()
    rules = catalog.placement().old_ids
    assert rules is not None
    assert (rules.has(-1), rules.has(0)) == (False, True)
    catalog.close()


def test_a_rule_that_is_none_is_refused(connection: Connection) -> None:
    with pytest.raises(BadArgument, match="'guess' is not a rule for old IDs"):
        OldIdRule(table="users", column="id", rule="guess")
    with pytest.raises((DBAPIError, StatementFailed)):
        connection.execute(text("insert into shardids_catalog.old_id_rule values ('users', 'id', 'guess')"))


def test_a_role_that_may_route_may_read_directories(connection: Connection, make_role: object) -> None:
    role = make_role()  # type: ignore[operator]  # a function
    connection.execute(text("select shardids_catalog.grant_usage(:r)"), {"r": role.username})
    write_old_ids(connection, rules=RULES)
    fill_directory(connection, RULES[1].table, [(17, 5)])
    connection.commit()
    catalog = Catalog(role.set(database=connection.engine.url.database))
    try:
        assert catalog.placement().old_ids is not None
        with catalog.engine.connect() as theirs:
            assert found(theirs, RULES[1].table, 17) == 5
            with pytest.raises(MissingPrivilege):
                theirs.execute(text("delete from shardids_catalog.old_id_rule"))
    finally:
        catalog.close()
        with connection.begin():
            connection.execute(text(f'drop owned by "{role.username}"'))
