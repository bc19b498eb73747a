"""What a role may do with shards: draw from those it was granted, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import URL

from tests.conftest import BlankDatabases, MakeRole, dsn
from tests.support.generator import (
    DEFAULT,
    advisory_locks,
    connect,
    distinct,
    draw,
    draw_block,
    increases,
    install,
    refused,
    reserve,
    row,
    run_ahead,
    scalar,
    ticks,
)

Db = psycopg.Connection[Any]

DENIED = "42501"


@pytest.fixture
def role(make_role: MakeRole) -> URL:
    return make_role("app")


@pytest.fixture
def url(role: URL, blank_database: Callable[[], URL]) -> URL:
    """A node with the shards 5 and 6; the role may draw from 5."""
    url = blank_database()
    install(url, shards=(5, 6))
    return url


@pytest.fixture
def owner(url: URL, role: URL) -> Iterator[Db]:
    with connect(dsn(url)) as connection:
        connection.execute("select shardids.grant_usage(array[5], %s)", [role.username])
        yield connection


@pytest.fixture
def app(owner: Db, url: URL, role: URL) -> Iterator[Db]:
    """A session of the role."""
    with connect(dsn(role.set(database=url.database))) as connection:
        yield connection


@pytest.fixture(scope="module")
def sessions(databases: BlankDatabases, make_role: MakeRole) -> Iterator[tuple[Db, Db]]:
    """Sessions of owner and role that stay for all tests that change nothing. The role has drawn."""
    url, role = databases.take(), make_role("app")
    install(url, shards=(5, 6))
    with connect(dsn(url)) as owner, connect(dsn(role.set(database=url.database))) as app:
        owner.execute("select shardids.grant_usage(array[5], %s)", [role.username])
        draw(app)
        yield owner, app
    databases.give_back(url)


def test_a_role_with_usage_draws_blocks_and_reserves_up_to_the_bound(app: Db) -> None:
    drawn = [draw(app, 1000), draw_block(app, 1000), draw(app, 10)]
    first, last = reserve(app, 4_194_304)
    assert last - first + 1 == 4_194_304
    assert ticks(drawn[-1][-1]) < first
    assert distinct(drawn)
    assert all(map(increases, drawn))
    with refused("SI007"):
        reserve(app, 4_194_305)


def test_a_role_with_usage_decodes(app: Db) -> None:
    id_ = int(draw(app)[0])
    decoded = DEFAULT.decode(id_)
    found = row(
        app,
        """select shardids.shard_of(id), shardids.sequence_of(id), shardids.time_of(id),
                  shardids.min_id(shardids.time_of(id)), shardids.max_id(shardids.time_of(id))
           from (select %s::bigint as id) given""",
        id_,
    )
    assert found[:3] == (5, decoded.sequence, decoded.time)
    assert found[3:] == (DEFAULT.min_id(decoded.time), DEFAULT.max_id(decoded.time))


def test_a_role_with_usage_inserts_through_a_column_default(owner: Db, app: Db, role: URL) -> None:
    owner.execute("create table shard_0005.item (id bigint default shard_0005.next_id(), n int)")
    owner.execute(
        sql.SQL("grant insert, select on shard_0005.item to {}").format(sql.Identifier(role.username or ""))
    )
    app.execute("insert into shard_0005.item (n) select generate_series(1, 1000)")
    with app.cursor().copy("copy shard_0005.item (n) from stdin") as copy:
        copy.write("1\n2\n3\n")
    assert row(app, "select count(*), count(distinct id) from shard_0005.item") == (1003, 1003)


def test_a_role_with_usage_has_the_clock_followed(app: Db) -> None:
    """The offset is raised by a function of the owner's: the role itself can't."""
    first = draw(app)[0]
    app.execute("select pg_sleep(0.05)")
    # The first may be a step of 16 ms ahead of the clock, the second 2 ms behind it.
    assert (ticks(draw(app)[0]) - ticks(first)) >> DEFAULT.sequence_bits >= 31


def test_a_role_with_usage_draws_far_ahead_of_the_clock(owner: Db, app: Db) -> None:
    last = run_ahead(owner, 70_000)
    assert ticks(draw(app)[0]) > last


def test_a_role_with_usage_draws_where_functions_are_not_public(
    make_role: MakeRole, blank_database: Callable[[], URL]
) -> None:
    """As of ALTER DEFAULT PRIVILEGES … REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC, before the engine came."""
    url, role = blank_database(), make_role("app")
    with connect(dsn(url)) as owner:
        owner.execute("alter default privileges revoke execute on functions from public")
        try:
            install(url)
        finally:
            owner.execute("alter default privileges grant execute on functions to public")
        owner.execute("select shardids.grant_usage(array[5], %s)", [role.username])
    with connect(dsn(role.set(database=url.database))) as app:
        assert increases(draw(app, 10))
        assert len(draw_block(app, 10)) == 10
        assert scalar(app, "select shardids.shard_of(shardids.max_id(clock_timestamp()))") == 4095
        # The condition of a trigger on reference tables.
        assert scalar(app, "select shardids.server_timeline() like shardids.server() || '/%'")


@pytest.mark.parametrize(
    "statement",
    [
        "select setval('shard_0005.id_offset', 1)",
        "select nextval('shard_0005.id_offset')",
        "select setval('shard_0005.id_counter', 1)",
        "select setval('shard_0005.id_counter', 1, false)",
        "alter sequence shard_0005.id_counter restart",
        "alter sequence shard_0005.id_counter cache 100",
        "alter sequence shard_0005.id_offset increment by -1",
        "drop sequence shard_0005.id_offset cascade",
        "select shardids.fence(5)",
        "select shardids.fence(5, 'b')",
        "select shardids.activate(5)",
        "select shardids.activate(5, 9223372036854775807)",
        "select shardids.stop(5, 'shard_0005.id_counter', 'shard_0005.id_offset')",
        "select shardids.grant_usage(array[6], current_user)",
        "select shardids.revoke_usage(array[5], current_user)",
        "select shardids.enter_shard(5)",
        "select shardids.enter_shard(7)",
        "update shardids.node set max_ahead = '10 years'",
        "update shardids.node set max_reserve = 16777216",
        "delete from shardids.node",
        "update shardids.shard set state = 'fenced'",
        "update shardids.shard set id_offset = 'shard_0005.id_counter'",
        "insert into shardids.shard (id, schema, id_counter, id_offset) values (7, 'x', '-', '-')",
        "select * from shardids.shard for update",
        "truncate shardids.shard",
        "do $$ begin lock table shardids.shard in share mode; end $$",
        "create function shardids.mine() returns int language sql return 1",
        "create or replace function shardids.epoch_ms() returns bigint language sql return 1::bigint",
        "create or replace function shard_0005.next_id() returns bigint language sql return 1::bigint",
        "create table shardids.mine (n int)",
        "create table shard_0005.mine (n int)",
        "select shard_0006.next_id()",
        "select shard_0006.next_ids(1)",
        "select shardids.reserve(6, 1)",
        "select shardids.advance(6, 'shard_0006.id_offset')",
        "select nextval('shard_0006.id_counter')",
    ],
)
def test_a_role_with_usage_may_not(statement: str, sessions: tuple[Db, Db]) -> None:
    owner, app = sessions
    before = shard_states(owner)
    try:
        # By OID, so that no lack of USAGE on a schema is what stops it.
        app.execute(with_oids(owner, statement))
    except psycopg.Error as error:
        denied = error.sqlstate
    else:
        denied = None
    assert denied == DENIED
    assert shard_states(owner) == before


def with_oids(owner: Db, statement: str) -> str:
    for name in ("shard_0006.id_offset", "shard_0006.id_counter"):
        if f"'{name}'" in statement:
            statement = statement.replace(f"'{name}'", f"{scalar(owner, 'select %s::regclass::oid', name)}")
    return statement


def shard_states(owner: Db) -> list[tuple[Any, ...]]:
    return owner.execute(
        """select shard.id, state, id_counter, id_offset, pg_sequence_last_value(id_offset),
                  case shard.id when 6 then pg_sequence_last_value(id_counter) end, max_ahead, max_reserve
           from shardids.shard, shardids.node order by shard.id"""
    ).fetchall()


def test_another_shards_offset_can_not_be_named_to_an_allowed_one(owner: Db, app: Db) -> None:
    draw(app)
    before = shard_states(owner)
    for oid in (scalar(owner, "select 'shard_0006.id_offset'::regclass::oid"), 0, 2**32 - 1):
        for call in ("set_aside_5(%s::oid::regclass, 10)", "late_id_5(%s::oid::regclass)"):
            with refused("SI004"):
                app.execute(f"select shard_0005.{call}", [oid])
    assert shard_states(owner) == before


@pytest.mark.parametrize(
    "statement",
    [
        "select shard_0006.set_aside_6('shard_0006.id_offset', 100)",
        "select shard_0006.late_id_6('shard_0006.id_offset')",
        "select shardids.reserve(6, 100)",
        "select shardids.advance(6, 'shard_0006.id_offset', 100)",
        "select shardids.set_aside('shard_0006.id_offset', 6, 100, null)",
        "select shardids.advance_past(6, shardids.max_id(clock_timestamp()) + 9999999999)",
        "select shardids.late_id('shard_0006.id_offset', 6)",
    ],
)
def test_a_role_draws_from_no_shard_that_its_session_drew_from_under_another_role(
    statement: str, owner: Db, url: URL, make_role: MakeRole
) -> None:
    """As in the session of a pool that sets a role for each of its clients."""
    allowed, other, pool = make_role("allowed"), make_role("other"), make_role("pool")
    names = [sql.Identifier(str(role.username)) for role in (allowed, other, pool)]
    owner.execute(sql.SQL("grant {0}, {1} to {2}").format(*names))
    owner.execute("select shardids.grant_usage(array[6], %s)", [allowed.username])
    owner.execute("select shardids.grant_usage(array[5], %s)", [other.username])
    with connect(dsn(pool.set(database=url.database))) as session:
        session.execute(sql.SQL("set role {}").format(names[0]))
        draw(session, 1, "shard_0006.next_id()")
        session.execute(sql.SQL("set role {}").format(names[1]))
        before = shard_states(owner)
        with refused(DENIED):
            session.execute(with_oids(owner, statement))
        assert shard_states(owner) == before


def test_a_function_of_a_role_that_may_draw_draws_for_one_that_may_not(
    owner: Db, app: Db, role: URL, url: URL, make_role: MakeRole
) -> None:
    owner.execute(sql.SQL("create schema api authorization {}").format(sql.Identifier(str(role.username))))
    app.execute("""create function api.draw() returns bigint language sql security definer
                   set search_path = pg_catalog, pg_temp as 'select shard_0005.next_id()'""")
    app.execute("grant usage on schema api to public")
    other = make_role("other")
    with connect(dsn(other.set(database=url.database))) as session:
        for _ in range(3):
            assert DEFAULT.decode(scalar(session, "select api.draw()")).shard == 5
            session.execute("select pg_sleep(0.01)")


def test_revoking_takes_back_draws_and_reservations(owner: Db, app: Db, role: URL, url: URL) -> None:
    draw(app, 10)
    owner.execute("select shardids.revoke_usage(array[5], %s)", [role.username])
    with connect(dsn(role.set(database=url.database))) as later:
        for session in (app, later):
            for statement in (
                "select shard_0005.next_id()",
                "select shard_0005.next_ids(1)",
                "select shardids.reserve(5, 1)",
                "select nextval('shard_0005.id_counter')",
            ):
                with refused(DENIED, "permission denied"):
                    session.execute(statement)
        with refused(DENIED):
            later.execute("select shard_0005.set_aside_5('shard_0005.id_offset', 10)")


def test_revoking_takes_back_what_a_prepared_insert_draws(owner: Db, app: Db, role: URL) -> None:
    owner.execute("create table shard_0005.item (id bigint default shard_0005.next_id(), n int)")
    owner.execute(
        sql.SQL("grant insert on shard_0005.item to {}").format(sql.Identifier(role.username or ""))
    )
    app.execute("prepare one as insert into shard_0005.item (n) values (1)")
    for _ in range(8):
        app.execute("execute one")
    owner.execute("select shardids.revoke_usage(array[5], %s)", [role.username])
    with refused(DENIED):
        app.execute("execute one")


def test_a_role_without_usage_is_denied(url: URL, make_role: MakeRole) -> None:
    stranger = make_role("stranger")
    with connect(dsn(stranger.set(database=url.database))) as session:
        for statement in (
            "select shard_0005.next_id()",
            "select shard_0005.next_ids(1)",
            "select shard_0005.set_aside_5(0, 1)",
            "select shard_0005.late_id_5(0)",
            "select shardids.reserve(5, 1)",
            "select shardids.shard_of(1)",
            "select shardids.advance(5, 0)",
            "select shardids.refuse('SI001', 5)",
            "select * from shardids.shard",
        ):
            with refused(DENIED, "permission denied for schema"):
                session.execute(statement)


def test_a_role_that_may_not_read_the_offset_is_denied_rather_than_kept_waiting(
    owner: Db, app: Db, role: URL
) -> None:
    name = sql.Identifier(role.username or "")
    owner.execute(sql.SQL("revoke select on shard_0005.id_offset from {}").format(name))
    app.execute("set statement_timeout = '2s'")
    with refused(DENIED):
        app.execute("select shard_0005.next_id()")


def test_a_role_can_not_drag_the_clock_past_the_limit(owner: Db, app: Db) -> None:
    owner.execute("update shardids.node set max_ahead = '2 minutes'")
    with refused("SI005", " ms ahead of the clock"):
        run_ahead(app, 180_000)
    with refused("SI005"):
        app.execute("select shardids.reserve(5, 4000000)")
    ahead_ms = scalar(
        owner,
        """select shardids.offset_ms(pg_sequence_last_value('shard_0005.id_offset'))
                  - shardids.ms_of(clock_timestamp())""",
    )
    assert ahead_ms < 120_000
    assert scalar(app, "select shardids.shard_of(shard_0005.next_id())") == 5


def test_a_huge_number_of_ticks_is_refused(owner: Db) -> None:
    draw(owner)
    before = shard_states(owner)
    for count in (10**12, 2**62, 2**63 - 1):
        with pytest.raises(psycopg.Error):
            owner.execute("select shardids.advance(5, 'shard_0005.id_offset', %s)", [count])
        assert shard_states(owner) == before
        assert advisory_locks(owner) == 0


# Names that a caller puts before pg_catalog's

FUNCTIONS = (
    ("nextval", "pg_catalog.regclass", "bigint"),
    ("nextval", "pg_catalog.text", "bigint"),
    ("currval", "pg_catalog.regclass", "bigint"),
    ("setval", "pg_catalog.regclass, bigint", "bigint"),
    ("pg_sequence_last_value", "pg_catalog.regclass", "bigint"),
    ("pg_advisory_xact_lock", "int, int", "void"),
    ("clock_timestamp", "", "timestamptz"),
    ("date_part", "pg_catalog.text, timestamptz", "double precision"),
    ("abs", "double precision", "double precision"),
    ("floor", "double precision", "double precision"),
    ("floor", "numeric", "numeric"),
    ("to_timestamp", "double precision", "timestamptz"),
    ("format", "pg_catalog.text, int, int, pg_catalog.text", "pg_catalog.text"),
    ("format", "pg_catalog.text, int", "pg_catalog.text"),
    ("format", "pg_catalog.text, variadic pg_catalog.text[]", "pg_catalog.text"),
    ("lpad", "pg_catalog.text, int, pg_catalog.text", "pg_catalog.text"),
    ("length", "pg_catalog.text", "int"),
    ("to_regnamespace", "pg_catalog.text", "pg_catalog.regnamespace"),
    ("quote_ident", "pg_catalog.text", "pg_catalog.text"),
    ("hashtextextended", "pg_catalog.text, bigint", "bigint"),
    ("pg_has_role", "name, pg_catalog.text, pg_catalog.text", "bool"),
    ("pg_postmaster_start_time", "", "timestamptz"),
    ("current_database", "", "name"),
    ("server", "", "pg_catalog.text"),
)
OPERATORS = (
    *((name, "bigint", "bigint", "bigint") for name in ("+", "-", "&", "*")),
    *((name, "int", "int", "int") for name in ("+", "-", "&")),
    *((name, "bigint", "int", "bigint") for name in ("+", "-", "<<", ">>")),
    *((name, "bigint", "bigint", "bool") for name in ("=", "<>", "<", ">", "<=", ">=")),
    *((name, "int", "int", "bool") for name in ("=", "<>", "<", ">", "<=", ">=")),
    *((name, "bigint", "int", "bool") for name in ("=", "<", ">", ">=")),
    *((name, "float8", "float8", "float8") for name in ("+", "-", "*", "/")),
    *((name, "float8", "float8", "bool") for name in ("<", ">", "=")),
    *((name, "pg_catalog.text", "pg_catalog.text", "bool") for name in ("=", "<>")),
    ("=", "oid", "oid", "bool"),
    ("<>", "oid", "oid", "bool"),
    ("||", "pg_catalog.text", "pg_catalog.text", "pg_catalog.text"),
    ("||", "pg_catalog.text", "anynonarray", "pg_catalog.text"),
    ("~", "", "bigint", "bigint"),
    ("-", "", "bigint", "bigint"),
    ("-", "", "float8", "float8"),
)
TYPES = ("text", "regclass", "int8", "int4", "bool", "numeric", "name", "record")


@pytest.fixture
def evil_app(owner: Db, app: Db, role: URL) -> Iterator[tuple[Db, list[str]]]:
    """A session that finds the names in a schema of its own before those in pg_catalog, and what that ran.

    What runs tells so by a notice, which no rollback takes back.
    """
    owner.execute(sql.SQL("create schema evil authorization {}").format(sql.Identifier(role.username or "")))
    ran: list[str] = []
    app.add_notice_handler(lambda notice: ran.append(notice.message_primary or ""))
    app.execute("""create function evil.tell(what text) returns void language plpgsql as
                   $$ begin raise notice '% ran as %', what, current_user; end $$""")
    for name, arguments, result in FUNCTIONS:
        app.execute(evil_function(name, arguments, result))
    for number, (name, left, right, result) in enumerate(OPERATORS):
        arguments = ", ".join(filter(None, (left, right)))
        app.execute(evil_function(f"operator_{number}", arguments, result))
        sides = f"leftarg = {left}, rightarg = {right}" if left else f"rightarg = {right}"
        app.execute(f"create operator evil.{name} (function = evil.operator_{number}, {sides})")
    app.execute("""create function evil.type_check(name text) returns bool language plpgsql as
                   $$ begin perform evil.tell(name); return true; end $$""")
    for name in TYPES[:-1]:
        app.execute(f"create domain evil.{name} as pg_catalog.{name} check (evil.type_check('{name}'))")
    app.execute("set search_path = evil, pg_catalog")
    yield app, ran
    app.execute("set search_path = pg_catalog")


def evil_function(name: str, arguments: str, result: str) -> str:
    ending = "return" if result == "void" else "return null"
    return f"""create function evil.{name}({arguments}) returns {result} language plpgsql as
               $$ begin perform evil.tell($told$ {name} $told$); {ending}; end $$"""


def test_the_names_of_the_trap_are_found_before_those_of_postgresql(evil_app: tuple[Db, list[str]]) -> None:
    app, ran = evil_app
    app.execute("select clock_timestamp(), 1::bigint + 2::bigint, 'x'::text")
    assert sorted(line.split()[0] for line in ran) == ["clock_timestamp", "operator_0", "text"]


def test_draws_run_none_of_the_names_that_a_caller_puts_first(evil_app: tuple[Db, list[str]]) -> None:
    app, ran = evil_app
    ids = []
    for _ in range(3):
        ids += [id_ for (id_,) in app.execute("select shard_0005.next_id()").fetchall()]
        ids += [id_ for (id_,) in app.execute("select shard_0005.next_ids(5)").fetchall()]
        app.execute("select pg_catalog.pg_sleep(0.005)")
    first, last = row(app, "select first_tick, last_tick from shardids.reserve(5, 3)")
    assert ran == []
    assert last - first == 2
    assert ids == sorted(set(ids))
    assert ticks(ids[-1]) < first


def test_decoding_runs_none_of_the_names_that_a_caller_puts_first(evil_app: tuple[Db, list[str]]) -> None:
    app, ran = evil_app
    app.execute(
        """select shardids.shard_of(id), shardids.sequence_of(id), shardids.time_of(id),
                  shardids.min_id(shardids.time_of(id)), shardids.max_id(shardids.time_of(id)),
                  shardids.id_of(id, 5), shardids.schema_of(5)
           from shard_0005.next_ids(3) as drawn (id)"""
    ).fetchall()
    assert ran == []


def test_refusals_run_none_of_the_names_that_a_caller_puts_first(
    owner: Db, evil_app: tuple[Db, list[str]]
) -> None:
    app, ran = evil_app
    for statement, sqlstate in (
        ("select shardids.reserve(5, 0)", "SI007"),
        ("select shardids.reserve(7, 1)", "SI001"),
        ("select shardids.advance(7, 0)", DENIED),
        ("select shardids.fence(5)", DENIED),
        ("select shardids.enter_shard(5)", DENIED),
    ):
        with refused(sqlstate):
            app.execute(statement)
    owner.execute("select shardids.fence(5, 'b')")
    for statement in ("select shard_0005.next_id()", "select shard_0005.next_ids(3)"):
        with refused("SI003"):
            app.execute(statement)
    assert ran == []


def test_temporary_names_of_a_caller_are_not_used(app: Db) -> None:
    app.execute("create temp table shard (id int, state text)")
    app.execute("create temp table node (name text)")
    app.execute("create temp sequence id_counter")
    app.execute("create temp sequence id_offset minvalue -10 start -1")
    app.execute("create type pg_temp.regclass as enum ('a')")
    app.execute("create domain pg_temp.text as pg_catalog.text check (false)")
    ids = [draw(app, 10), draw_block(app, 10), draw(app, 10)]
    assert distinct(ids)
    with refused("SI007"):
        reserve(app, 0)
