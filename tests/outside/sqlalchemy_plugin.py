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
from shardids.client.routing import ShardSession

SHARD = 3


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    from sqlalchemy.orm import Session
    from sqlalchemy.testing import config, fixtures
    from sqlalchemy.testing.fixtures import orm

    cluster = Cluster.connect(os.environ["SHARDIDS_CATALOG"], listen=False)
    config.db.update_execution_options(schema_translate_map={None: cluster.schema_of(SHARD)})

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
