"""What roles that can connect, or create objects, cannot do: stop others, or have them run theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.engine import URL

from shardids.catalog.objects import read_objects
from shardids.errors import BadArgument, MissingPrivilege
from shardids.ids.layout import DEFAULT, Layout
from shardids.migrate.install import provision
from shardids.pg.connections import open_engine
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at
from tests.support.generator import connect, refused, scalar

Db = psycopg.Connection[Any]

GENERATOR_LOCK = 1936220516
SCHEMA_LOCK = 1936220517


def as_role(url: URL, role: URL) -> URL:
    return role.set(database=url.database)


def quoted(role: URL) -> sql.Identifier:
    return sql.Identifier(str(role.username))


# Locks


@pytest.mark.parametrize(
    "statement",
    [
        "select pg_sleep(0.2), shard_0005.next_id()",
        "select shard_0005.next_ids(100)",
        "select shardids.fence(5)",
    ],
)
def test_a_held_generator_lock_is_waited_for_no_longer_than_allowed_and_its_holder_is_named(
    statement: str, node: str
) -> None:
    with connect(node) as holder, connect(node) as drawing:
        drawing.execute("select shard_0005.next_id()")
        holder.execute("select pg_advisory_lock(%s, 5)", [GENERATOR_LOCK])
        pid = holder.info.backend_pid
        drawing.execute("set lock_timeout = '300ms'")
        begun = time.monotonic()
        with refused("55P03", "shard 5", f"process {pid} of role"):
            drawing.execute(statement)
        assert time.monotonic() - begun < 5
        assert scalar(drawing, "show lock_timeout") == "300ms"
        holder.execute("select pg_advisory_unlock_all()")
        drawing.execute(statement)


@pytest.mark.long
def test_the_wait_for_a_held_lock_ends_without_a_lock_timeout(node: str) -> None:
    with connect(node) as holder, connect(node) as drawing:
        holder.execute("select pg_advisory_lock(%s, 5)", [SCHEMA_LOCK])
        drawing.execute("set statement_timeout = '30s'")
        with refused("55P03", "shard 5", f"process {holder.info.backend_pid} of role"):
            drawing.execute("select shardids.enter_shard(5)")


# Schemas that belong to others


@pytest.fixture
def stranger(make_role: MakeRole) -> URL:
    return make_role("stranger")


def test_no_engine_is_installed_in_a_schema_of_another_role(
    blank_database: Callable[[], URL], stranger: URL
) -> None:
    url, other = blank_database(), blank_database()
    with connect(dsn(url)) as owner:
        owner.execute(sql.SQL("create schema shardids authorization {}").format(quoted(stranger)))
    with connect(dsn(other)) as owner:
        owner.execute(sql.SQL("create schema shardids_catalog authorization {}").format(quoted(stranger)))
    with catalog_at(other) as catalog, pytest.raises(MissingPrivilege, match=r"shardids_catalog.*stranger"):
        provision.init(catalog, DEFAULT, 4)
    with catalog_at(url) as catalog:
        provision.init(catalog, DEFAULT, 4)
        with pytest.raises(MissingPrivilege, match=r"schema shardids exists.*stranger"):
            provision.add_node(catalog, "a", dsn(url))
        assert catalog.nodes() == {}
    with connect(dsn(url)) as owner:
        assert (
            scalar(owner, "select count(*) from pg_class where relnamespace = 'shardids'::regnamespace") == 0
        )


def test_no_shard_is_made_in_a_schema_of_another_role(
    blank_database: Callable[[], URL], stranger: URL
) -> None:
    url = blank_database()
    with connect(dsn(url)) as owner:
        owner.execute(sql.SQL("create schema shard_0001 authorization {}").format(quoted(stranger)))
        with pytest.raises(MissingPrivilege, match=r"shard_0001 exists.*stranger"):
            found_cluster(url, {"a": url}, 4)
        assert (
            scalar(owner, "select count(*) from pg_class where relnamespace = 'shard_0001'::regnamespace")
            == 0
        )
        owner.execute("alter schema shard_0001 owner to current_user")
    found_cluster(url, {"a": url}, 4)


# Names


def test_sessions_of_administrators_run_nothing_that_others_put_into_public(
    blank_database: Callable[[], URL], stranger: URL
) -> None:
    url = blank_database()
    plant(url, stranger, "public")
    engine = open_engine(url, what="node", administrative=True)
    try:
        with engine.begin() as connection:
            assert connection.scalar(text("select format('%s', 1)")) == "1"
            assert connection.scalar(text("select 1::oid = 'int4'::regtype")) is False
        autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        with autocommit.connect() as connection:
            assert connection.scalar(text("select format('%s', 1)")) == "1"
            assert connection.scalar(text("show search_path")) == "pg_catalog, pg_temp"
    finally:
        engine.dispose()


def test_reading_objects_and_revisions_runs_nothing_that_was_put_into_a_shard(
    blank_database: Callable[[], URL], stranger: URL
) -> None:
    url = blank_database()
    found_cluster(url, {"a": url}, 4)
    plant(url, stranger, "shard_0001")
    with connect(dsn(as_role(url, stranger))) as session:
        session.execute("""
            create type shard_0001.word as (word text);
            create function shard_0001.spell(shard_0001.word) returns text language plpgsql as
              $$ begin raise 'ran as %', current_user; end $$;
            create cast (shard_0001.word as text) with function shard_0001.spell(shard_0001.word);
            create table shard_0001.alembic_version (version_num shard_0001.word);
            insert into shard_0001.alembic_version values (row('x'));
            create table shard_0001.item (id bigint default 1, name text check (name <> ''));
            create function shard_0001.spell(shard_0001.item) returns text language plpgsql as
              $$ begin raise 'ran as %', current_user; end $$;
            create cast (shard_0001.item as text) with function shard_0001.spell(shard_0001.item);
            insert into shard_0001.item values (1, 'x')""")
    engine = open_engine(url, what="node", administrative=True)
    try:
        with engine.connect() as connection:
            objects = read_objects(connection, [1])
    finally:
        engine.dispose()
    assert ("column", "item.id", "bigint default 1") in {(o.kind, o.name, o.definition) for o in objects}
    with connect(dsn(url)) as owner:
        with refused("42501", "belongs to role"):
            owner.execute("select shardids.enter_revision(1, 'alembic_version', null)")
        owner.execute("drop table shard_0001.alembic_version")
        owner.execute(
            "create view shard_0001.alembic_version as"
            " select shard_0001.spell(row('x')::shard_0001.word) as version_num"
        )
        with refused("42809", "not a table"):
            owner.execute("select shardids.enter_revision(1, 'alembic_version', null)")


def plant(url: URL, role: URL, schema: str) -> None:
    """Lets a role create functions and operators that win against PostgreSQL's own where they are found."""
    with connect(dsn(url)) as owner:
        owner.execute(
            sql.SQL("grant usage, create on schema {} to {}").format(sql.Identifier(schema), quoted(role))
        )
    body = "language plpgsql as $$ begin raise 'ran as %', current_user; end $$"
    with connect(dsn(as_role(url, role))) as session:
        for signature in ("format(text, integer)", "format(text, name)", "format(text, text, name)"):
            session.execute(f"create function {schema}.{signature} returns text {body}".encode())
        session.execute(
            f"create function {schema}.format(text, name, name, text) returns text {body}".encode()
        )
        for number, (left, right) in enumerate((("oid", "regtype"), ("name", "varchar"), ("name", "name[]"))):
            session.execute(
                f"create function {schema}.same_{number}({left}, {right}) returns bool {body}".encode()
            )
            session.execute(
                f"create operator {schema}.= (function = {schema}.same_{number},"
                f" leftarg = {left}, rightarg = {right})".encode()
            )


# Layouts


def test_a_layout_whose_time_has_ended_makes_no_cluster(blank_database: Callable[[], URL]) -> None:
    with catalog_at(blank_database()) as catalog:
        for layout in ("36-16-10", "30-16-16"):
            with pytest.raises(BadArgument, match="ended at"):
                provision.init(catalog, Layout.parse(layout), 4)
