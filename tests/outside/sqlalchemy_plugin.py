"""Makes SQLAlchemy's own tests use sessions on one shard: a plugin of the pytest that runs them.

``config.db`` becomes the engine of a node as seen from a shard, so tables are made and read in its schema.
``fixture_session()`` gives a session as :meth:`shardids.Cluster.session` does. With ``SHARDIDS_PLAIN=1`` the
sessions are SQLAlchemy's own, in the same schema: a test that fails there fails without shardids.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from shardids import Cluster
from shardids.client.routing.one_shard import ShardSession

SHARD = 3


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    from sqlalchemy import inspect
    from sqlalchemy.orm import Session
    from sqlalchemy.sql.ddl import sort_tables_and_constraints
    from sqlalchemy.testing import config, fixtures, provision
    from sqlalchemy.testing.assertsql import CompiledSQL
    from sqlalchemy.testing.fixtures import orm

    cluster = Cluster.connect(os.environ["SHARDIDS_CATALOG"], listen=False)
    schema = cluster.schema_of(SHARD)
    config.db.update_execution_options(schema_translate_map={None: schema})
    received_statement = CompiledSQL._received_statement

    # SQLAlchemy's own looks for the tables in the default schema, and leaves their rows.
    @provision.delete_from_all_tables.for_db("postgresql")
    def delete_from_all_tables(connection: Any, _config: Any, metadata: Any) -> None:
        inspector = inspect(connection)
        for table, _ in reversed(sort_tables_and_constraints(metadata.tables.values())):
            if table is not None and inspector.has_table(table.name, schema=table.schema or schema):
                with connection.begin_nested():
                    connection.execute(table.delete())

    def received(self: Any, observed: Any) -> tuple[str, Any]:
        statement, parameters = received_statement(self, observed)
        return statement.replace("__[SCHEMA__none].", ""), parameters

    CompiledSQL._received_statement = received  # what is expected names no schema

    def fixture_session(**options: Any) -> Session:
        options = {"autoflush": True, "expire_on_commit": True} | options
        bind = options.pop("bind", config.db)
        is_plain = bool(os.environ.get("SHARDIDS_PLAIN"))
        ours = {} if is_plain else {"finder": cluster, "claims": cluster.claims, "shard": SHARD}
        made: Any = Session if is_plain else ShardSession
        session: Session = made(bind, **ours, **options)
        orm._fixture_sessions.add(session)
        return session

    for module in (fixtures, orm):
        module.fixture_session = fixture_session  # type: ignore[attr-defined]  # Session's own helper
