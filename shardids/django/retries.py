"""Runs a transaction where its shard is, also while the shard moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar
from uuid import UUID

import psycopg
from django.db import DatabaseError, connections, transaction
from sqlalchemy.exc import DBAPIError

from shardids.catalog.connections import may_have_moved, translate
from shardids.catalog.urls import parse_url
from shardids.client.retries import PATIENCE_S, Attempts
from shardids.client.routing import After, Key
from shardids.django.aliases import alias_for, get_cluster
from shardids.django.choice import in_shard, writing_after
from shardids.errors import CommitUncertain, ConnectionFailed, ShardidsError

T = TypeVar("T")


def run_in_shard(
    fn: Callable[[], T],
    *,
    key: Key | None = None,
    region: str | None = None,
    id: int | UUID | None = None,  # noqa: A002 -- the field's word for it
    of: str | None = None,
    shard: int | None = None,
    after: After | None = None,
    patience_s: float = PATIENCE_S,
) -> T:
    """Calls ``fn`` in a transaction of a shard, and again on the shard's new node if it has moved meanwhile.

    The shard is chosen as by :func:`shardids.django.in_shard`, for the whole of ``fn``, which may run several
    times: do not send mail in it, but with ``transaction.on_commit(…, using=alias)``. It can't be used
    within another transaction on the shard. How long it waits for a shard that is being moved is told of
    :meth:`shardids.Cluster.run`.

    ``after`` is an ID, or several: the keys of what ``fn`` writes sort after them, as in
    :meth:`shardids.Cluster.session`. New objects of the shard that bring an earlier one are refused, in
    ``save``, ``create`` and ``bulk_create``; not so what SQL text, fixtures or ``QuerySet.update`` write.

    Raises:
        BadArgument: ``after`` is no ID of this cluster, or an old one; or a new object's key is earlier.
        django.db.Error: ``after`` leads the node's clock by more than ``max_past``.
        ShardFenced, ShardMoved, ConnectionFailed: another attempt can't help.
        CommitUncertain: the connection was lost during COMMIT; nothing is repeated.
        ShardLost, UnknownShard: no node has the shard.
        RuntimeError: a transaction is open on the shard.
    """
    cluster = get_cluster()
    number = cluster._pick(key, id, shard, of, region=region)
    latest = cluster._latest(after)
    attempts = Attempts(cluster._followed, number, patience_s)
    while True:
        node = attempts.next_node()
        has_returned = False
        try:
            with ExitStack() as stack:
                stack.enter_context(in_shard(shard=number))
                stack.enter_context(transaction.atomic(using=alias_for(number), durable=True))
                if latest is not None:
                    _advance_past(number, latest)
                    stack.enter_context(writing_after(number, latest))
                result = fn()
                has_returned = True
            return result
        except DatabaseError as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.Error):
                raise
            what, url = f'node "{node.name}"', parse_url(node.url)
            ours = translate(cause, what=what, url=url)
            if has_returned and isinstance(ours, ConnectionFailed):
                raise CommitUncertain(
                    f"shard {number}: the connection to {what} was lost during COMMIT",
                    hint="Check whether the transaction was committed before you repeat it.",
                ) from error
            pause_s = _pause_after(attempts, ours, cause, error)
        attempts.wait(pause_s)


def _advance_past(shard: int, latest: int) -> None:
    with connections[alias_for(shard)].cursor() as cursor:
        cursor.execute("select shardids.advance_past(%s, %s)", [shard, latest])


def _pause_after(
    attempts: Attempts, ours: ShardidsError | None, cause: psycopg.Error, error: DatabaseError
) -> float:
    """Returns how long to wait for the next attempt; raises Django's own error if it tells of no move."""
    if ours is not None and may_have_moved(ours):
        return attempts.pause_after(ours)
    try:
        return attempts.pause_after(DBAPIError("", None, cause))
    except DBAPIError:
        raise error from cause
