"""Keeps objects that could not be told apart out of sessions over all shards."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from sqlalchemy import event, inspect
from sqlalchemy.orm import Mapper

from shardids.client.routing.models import facts_of, require_located


class Guarded:
    """A session that loads objects of several shards."""


_GUARDED: WeakSet[Mapper[Any]] = WeakSet()


def guard(mapper: Mapper[Any] | None) -> None:
    """Sees to it that no session over all shards loads objects which it could not tell apart.

    It looks at all models that are declared together with this one, for a join may load any of them.
    """
    if mapper is None or mapper in _GUARDED:
        return
    for model in mapper.registry.mappers:
        if model not in _GUARDED and not facts_of(model).located:
            event.listen(model, "load", _refuse)
        _GUARDED.add(model)


def _refuse(target: object, context: Any) -> None:
    if isinstance(context.session, Guarded):
        require_located(inspect(type(target)))
