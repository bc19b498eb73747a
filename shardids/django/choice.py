"""The shard that a block of code works on, and transactions on it, also while it moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar, Unpack, overload
from uuid import UUID

import psycopg
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction
from sqlalchemy.exc import DBAPIError

from shardids.client.placement import PATIENCE_S, Attempts
from shardids.client.routing.models import Key
from shardids.client.shard import ById, ByKey, ByNumber
from shardids.django.aliases import alias_for, get_cluster
from shardids.errors import CommitUncertain, ConnectionFailed, ShardidsError
from shardids.pg.connections import may_have_moved, translate
from shardids.pg.urls import parse_url

_chosen: ContextVar[int | None] = ContextVar("shardids_shard", default=None)
_after: ContextVar[Mapping[int, int]] = ContextVar("shardids_after", default=MappingProxyType({}))


def chosen_shard() -> int | None:
    """Return the shard of the innermost :func:`in_shard` block of this thread or task, or ``None``."""
    return _chosen.get()


def _chosen_connection(using: str | None = None) -> Any:
    shard = chosen_shard()
    if using is None:
        using = DEFAULT_DB_ALIAS if shard is None else alias_for(shard)
    return connections[using]


class _ChosenAtomic(transaction.Atomic):
    """A transaction on the chosen shard, or on ``default``: it ends where it began."""

    def __init__(self, savepoint: bool, durable: bool) -> None:
        super().__init__(None, savepoint, durable)
        self._durable = durable
        self._begun: list[transaction.Atomic] = []

    def __enter__(self) -> None:
        one = transaction.Atomic(_chosen_connection().alias, self.savepoint, self._durable)
        one.__enter__()
        self._begun.append(one)

    def __exit__(self, *error: Any) -> None:
        self._begun.pop().__exit__(*error)

    def _recreate_cm(self) -> _ChosenAtomic:
        # A decorator's calls may run in several threads at once.
        return _ChosenAtomic(self.savepoint, self._durable)


def _atomic(using: Any = None, savepoint: bool = True, durable: bool = False) -> Any:
    if callable(using):
        return _ChosenAtomic(savepoint, durable)(using)
    return (
        _ChosenAtomic(savepoint, durable) if using is None else transaction.Atomic(using, savepoint, durable)
    )


def let_transactions_choose() -> None:
    """Let ``transaction.atomic()`` and similar calls that name no database mean the chosen shard.

    Django has no setting for it. Outside of :func:`in_shard` they mean ``default``, as ever.
    """
    module: Any = transaction
    module.get_connection = _chosen_connection
    module.atomic = _atomic


def written_after() -> Mapping[int, int]:
    """Return the IDs that new keys are to sort after in this thread or task, by shard."""
    return _after.get()


@contextmanager
def writing_after(shard: int, latest: int) -> Iterator[None]:
    """Add a shard to :func:`written_after` for a block."""
    token = _after.set({**_after.get(), shard: latest})
    try:
        yield
    finally:
        _after.reset(token)


@contextmanager
def in_shard(
    *,
    key: Key | None = None,
    region: str | None = None,
    id: int | UUID | None = None,  # noqa: A002 -- the field's word for it
    of: str | None = None,
    shard: int | None = None,
) -> Iterator[str]:
    """Choose the shard of sharded models for a block: of a key, of an ID's origin, or by number::

        with in_shard(key=user_name) as alias:
            Question.objects.create(…)

    Yields the shard's alias. Blocks nest; other threads and tasks are not affected. ``of`` names the table
    of an ID that was issued before the cluster: see :meth:`shardids.Cluster.shard_of`. ``region`` says that
    a key is among that region's shards: see :meth:`shardids.Cluster.shard_for`. A queryset that is
    made in the block and evaluated after it needs the block's alias: ``using(alias)``. In the block
    ``transaction.atomic()``, ``transaction.on_commit()`` and similar calls mean the shard if they name no
    other database. A generator that yields in the block leaves the choice to its caller until it goes on.

    Raises:
        BadArgument: not exactly one of ``key``, ``id`` and ``shard``, or one out of range, or no such region.
        UnknownId: an old ID that no row had.
    """
    at: Any = get_cluster().at
    number: int = at(key=key, region=region, id=id, of=of, shard=shard).number
    alias = alias_for(number)
    token = _chosen.set(number)
    try:
        yield alias
    finally:
        _chosen.reset(token)


T = TypeVar("T")


@overload
def run_in_shard(fn: Callable[[], T], *, patience_s: float = ..., **where: Unpack[ByKey]) -> T: ...
@overload
def run_in_shard(fn: Callable[[], T], *, patience_s: float = ..., **where: Unpack[ById]) -> T: ...
@overload
def run_in_shard(fn: Callable[[], T], *, patience_s: float = ..., **where: Unpack[ByNumber]) -> T: ...


def run_in_shard(fn: Callable[[], T], *, patience_s: float = PATIENCE_S, **where: Any) -> T:
    """Call ``fn`` in a transaction of a shard, and again on the shard's new node if it has moved meanwhile.

    The shard is named as in :meth:`shardids.Cluster.at`, and chosen for the whole of ``fn``, which may run
    several times: do not send mail in it, but with ``transaction.on_commit``. It can't be
    used within another transaction on the shard. For how long it waits for a shard that is being moved, see
    :meth:`shardids.Shard.run`.

    ``after`` is an ID, or several: the keys of what ``fn`` writes sort after them. New objects of the shard
    that bring an earlier one are refused, in ``save``, ``create`` and ``bulk_create``; not so what SQL text,
    fixtures or ``QuerySet.update`` write.

    Raises:
        BadArgument: ``after`` is no ID of this cluster, or an old one; or a new object's key is earlier.
        django.db.Error: ``after`` leads the node's clock by more than ``max_past``.
        ShardFenced, ShardMoved, KeyMoved, ConnectionFailed: another attempt can't help.
        CommitUncertain: the connection was lost during COMMIT; nothing is repeated.
        ShardLost, UnknownShard: no node has the shard.
        RuntimeError: a transaction is open on the shard.
    """
    cluster = get_cluster()
    shard = cluster.at(**where)
    number, latest = shard.number, shard.after
    attempts = shard._attempts(patience_s)
    with cluster._kinds.running(number, attempts):
        return _attempted(fn, attempts, latest)


def _attempted(fn: Callable[[], T], attempts: Attempts, latest: int | None) -> T:
    while True:
        node = attempts.next_node()
        number = attempts.shard
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
    """Return how long to wait for the next attempt; raise Django's own error if it tells of no move."""
    if ours is not None and may_have_moved(ours):
        return attempts.pause_after(ours)
    try:
        return attempts.pause_after(DBAPIError("", None, cause))
    except DBAPIError:
        raise error from cause
