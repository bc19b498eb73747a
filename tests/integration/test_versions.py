"""What differs between the supported versions of PostgreSQL: docs/reference/postgresql-versions.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.conftest import MakeRole, dsn
from tests.support.generator import connect, scalar

Db = psycopg.Connection[Any]


@pytest.fixture
def version(db: Db) -> int:
    """Such as 18."""
    return db.info.server_version // 10000


@pytest.fixture
def stranger(db: Db, make_role: MakeRole) -> Iterator[Db]:
    """A session of a role that may look into the shard's schema and no more."""
    role = make_role()
    db.execute(f'grant usage on schema shard_0005 to "{role.username}"')
    with connect(dsn(role.set(database=db.info.dbname))) as session:
        yield session


def test_what_a_role_without_privileges_reads_of_a_sequence(version: int, stranger: Db) -> None:
    query = "select pg_sequence_last_value('shard_0005.id_offset')"
    if version >= 18:
        assert scalar(stranger, query) is None
        return
    with pytest.raises(
        psycopg.errors.InsufficientPrivilege, match="permission denied for sequence id_offset"
    ):
        stranger.execute(query)


def test_whether_every_role_may_create_in_schema_public(version: int, stranger: Db) -> None:
    assert scalar(stranger, "select has_schema_privilege('public', 'create')") is (version < 15)


def test_whether_there_is_uuidv7(version: int, db: Db) -> None:
    assert scalar(db, "select to_regprocedure('uuidv7()') is not null") is (version >= 18)


def test_whether_a_dump_may_name_transaction_timeout(version: int, db: Db) -> None:
    known = scalar(db, "select count(*) from pg_settings where name = 'transaction_timeout'")
    assert known == (version >= 17)
