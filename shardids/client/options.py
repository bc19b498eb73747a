"""What the sessions of a cluster pass on to SQLAlchemy's, as type checkers see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from sqlalchemy.orm import Query, Session


class SessionOptions(TypedDict, total=False):
    """The keywords of :class:`sqlalchemy.orm.Session`, but for ``bind`` and ``binds``: the cluster binds."""

    autobegin: bool
    autocommit: Literal[False]
    autoflush: bool
    close_resets_only: bool
    enable_baked_queries: bool
    execution_options: Mapping[str, Any]
    expire_on_commit: bool
    future: Literal[True]
    info: dict[Any, Any]
    join_transaction_mode: Literal[
        "conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"
    ]
    query_cls: type[Query[Any]]
    twophase: bool


class AsyncSessionOptions(SessionOptions, total=False):
    """The keywords of :class:`sqlalchemy.ext.asyncio.AsyncSession`, but for ``bind`` and ``binds``."""

    sync_session_class: type[Session]
