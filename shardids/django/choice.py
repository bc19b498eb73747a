"""The shard that a block of code works on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from uuid import UUID

from shardids.client.routing import Key
from shardids.django.aliases import alias_for, get_cluster

_chosen: ContextVar[int | None] = ContextVar("shardids_shard", default=None)
_after: ContextVar[Mapping[int, int]] = ContextVar("shardids_after", default=MappingProxyType({}))


def chosen_shard() -> int | None:
    """Returns the shard of the innermost :func:`in_shard` block of this thread or task, or ``None``."""
    return _chosen.get()


def written_after() -> Mapping[int, int]:
    """Returns the IDs that new keys are to sort after in this thread or task, by shard."""
    return _after.get()


@contextmanager
def writing_after(shard: int, latest: int) -> Iterator[None]:
    """Adds a shard to :func:`written_after` for a block."""
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
    """Chooses the shard of sharded models for a block: of a key, of an ID's origin, or by number::

        with in_shard(key=user_name) as alias:
            Question.objects.create(…)

    Yields the shard's alias. Blocks nest; other threads and tasks are not affected. ``of`` names the table
    of an ID that was issued before the cluster: see :meth:`shardids.Cluster.shard_of`. ``region`` says that
    a key is among that region's shards: see :meth:`shardids.Cluster.shard_for`. A queryset that is
    made in the block and evaluated after it needs the block's alias: ``using(alias)``. So do
    ``transaction.atomic`` and ``transaction.on_commit``, which otherwise mean ``default``. A generator that
    yields in the block leaves the choice to its caller until it goes on.

    Raises:
        BadArgument: not exactly one of ``key``, ``id`` and ``shard``, or one out of range, or no such region.
        UnknownId: an old ID that no row had.
    """
    number = get_cluster()._pick(key, id, shard, of, region=region)
    alias = alias_for(number)
    token = _chosen.set(number)
    try:
        yield alias
    finally:
        _chosen.reset(token)
