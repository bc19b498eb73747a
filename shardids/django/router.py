"""Django's database router: sharded models go to shards, all others where they went before."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.models import ForeignKey, Model

from shardids.django.aliases import alias_for, get_cluster, shard_of_alias
from shardids.django.choice import chosen_shard
from shardids.django.sharded import (
    has_only_sharded_models,
    has_sharded_models,
    is_sharded,
    leave_unconstrained,
)
from shardids.errors import BadArgument, FanOutRefused, WrongShard

REHEARSAL: Final = "shardids_rehearsal"
"""The alias of no shard, but of what stands for all of them while their migrations are turned into SQL."""


class ShardRouter:
    """Chooses the shard of a sharded model's statement.

    It is the shard that the object at hand was loaded from or written to; for a new object that of its
    parents, by its foreign keys; else that of the innermost :func:`shardids.django.in_shard` block. Without
    any, the statement is refused. Other models are left to the routers after this one, and to ``default``.
    """

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        """Return the alias for a statement that reads.

        Raises:
            FanOutRefused: a sharded model, and no shard is chosen.
            WrongShard: an object's parents are in different shards.
        """
        return self._alias("db_for_read", model, hints)

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        """Return the alias for a statement that writes. Raises as :meth:`db_for_read`."""
        return self._alias("db_for_write", model, hints)

    def _alias(self, action: str, model: type[Model], hints: dict[str, Any]) -> str | None:
        instance: Model | None = hints.get("instance")
        of_instance = None if instance is None else _shard_of(instance)
        if not is_sharded(model):
            return None if of_instance is None else self._by_others(action, model, hints)
        shard = chosen_shard() if of_instance is None else of_instance
        if shard is None:
            raise FanOutRefused(
                f"{model._meta.label} is sharded, and no shard is chosen",
                hint="with in_shard(key=…), in_shard(id=…) or in_shard(shard=…); or using(alias_for(shard))",
            )
        return alias_for(shard)

    def _by_others(self, action: str, model: type[Model], hints: dict[str, Any]) -> str:
        """Return the answer of the later routers about an unsharded model that a sharded object refers to.

        When none of them says anything, Django takes the database of that object, which is a shard.
        """
        routers = router.routers
        for other in routers[routers.index(self) + 1 :] if self in routers else ():
            ask = getattr(other, action, None)
            if ask is not None and (found := ask(model, **hints)):
                return str(found)
        return DEFAULT_DB_ALIAS

    def allow_relation(self, obj1: Model, obj2: Model, **_hints: Any) -> bool | None:
        """Return whether one object may refer to the other: in shards only within one shard."""
        if is_sharded(type(obj1)) != is_sharded(type(obj2)):
            # Across databases: a reference without a constraint, as a check demands.
            return True
        if not is_sharded(type(obj1)):
            return None
        first, second = _shard_of(obj1), _shard_of(obj2)
        return first is None or second is None or first == second

    def allow_migrate(
        self, db: str, app_label: str, model_name: str | None = None, **hints: Any
    ) -> bool | None:
        """Return whether a table, or an operation without a model, belongs into a database.

        Raises:
            BadArgument: ``migrate_shards`` asks for an operation that doesn't say where it runs.
        """
        if (model := hints.get("model")) is not None:
            leave_unconstrained(model)
        if db == REHEARSAL:
            found = runs_in_shards(app_label, model_name, **hints)
            rehearsal: Any = connections[REHEARSAL]
            rehearsal.answers.append(found)
            return found
        is_of_shards = _belongs_to_shards(app_label, model_name, hints)
        if shard_of_alias(db) is not None:
            return is_of_shards is True
        return False if is_of_shards else None


def runs_in_shards(app_label: str, model_name: str | None = None, **hints: Any) -> bool:
    """Return whether an operation of a migration is for shards: by its model, or by the hint ``shards``.

    Without either, it is where all models of its application are.

    Raises:
        BadArgument: the application has or had sharded models, and others or none.
    """
    found = _belongs_to_shards(app_label, model_name, hints)
    is_told = "shards" in hints or model_name is not None or hints.get("model") is not None
    if found is None or not (found or is_told):
        raise BadArgument(
            f"{app_label} has sharded and unsharded models, and the operation doesn't say which it is for",
            hint="Give it hints={'shards': True} or {'shards': False}.",
        )
    return found


def _belongs_to_shards(app_label: str, model_name: str | None, hints: Mapping[str, Any]) -> bool | None:
    """Return whether it is for shards; ``None`` if that isn't known."""
    if "shards" in hints:
        return bool(hints["shards"])
    model: type[Model] | None = hints.get("model")
    if model is None and model_name is not None:
        with suppress(LookupError):
            model = apps.get_model(app_label, model_name)
    if model is not None:
        return is_sharded(model)
    if has_only_sharded_models(app_label):
        return True
    return None if has_sharded_models(app_label) else False


def _shard_of(instance: Model) -> int | None:
    """Return the shard of an object: where it is, or where a new one's parents are."""
    if not is_sharded(type(instance)):
        return None
    known = shard_of_alias(instance._state.db)
    if known is not None:
        return known
    parents = {
        field.name: shard
        for field in instance._meta.concrete_fields
        if isinstance(field, ForeignKey) and (shard := _shard_of_parent(instance, field)) is not None
    }
    if len(set(parents.values())) > 1:
        shown = ", ".join(f"{name} in shard {shard}" for name, shard in parents.items())
        raise WrongShard(f"{instance._meta.label} has parents in several shards: {shown}")
    return next(iter(parents.values()), None)


def _shard_of_parent(instance: Model, field: Any) -> int | None:
    if not is_sharded(field.remote_field.model):
        return None
    if field.is_cached(instance):
        parent = field.get_cached_value(instance)
        return None if parent is None else _shard_of(parent)
    value = getattr(instance, field.attname)
    if value is None or field.target_field.name != field.remote_field.model._meta.pk.name:
        return None
    return get_cluster().shard_of(value, of=field.remote_field.model._meta.db_table)
