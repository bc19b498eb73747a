"""Which models are sharded, and what their tables are called."""

from __future__ import annotations

from dataclasses import dataclass

from django.apps import apps
from django.db.models import Field, Model

from shardids.django.fields import ShardIdField


def is_sharded(model: type[Model]) -> bool:
    """Returns whether a model's rows live in shards: its primary key is a ``ShardIdField`` or refers to one.

    The table that Django itself makes for a many-to-many relation lives where what it joins lives.
    """
    options = model._meta
    if isinstance(_final(options.pk), ShardIdField):
        return True
    return bool(options.auto_created) and any(
        isinstance(_final(field), ShardIdField) for field in options.local_fields if field.remote_field
    )


def has_sharded_models(label: str) -> bool:
    """Returns whether an application has models in shards."""
    return any(_kinds(label))


def has_only_sharded_models(label: str) -> bool:
    """Returns whether an application has models, and all of them in shards."""
    kinds = _kinds(label)
    return bool(kinds) and all(kinds)


def _kinds(label: str) -> list[bool]:
    found = apps.app_configs.get(label)
    models = () if found is None else found.get_models(include_auto_created=True)
    return [is_sharded(model) for model in models if not model._meta.proxy and model._meta.managed]


def _final(field: Field[object, object] | None) -> Field[object, object] | None:
    """Returns the field that a foreign key takes its values from in the end."""
    while field is not None and field.remote_field is not None:
        field = getattr(field, "target_field", None)
    return field


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Names of the tables of all installed models."""

    sharded: frozenset[str]
    others: frozenset[str]


class _Known:
    models: object = None
    tables: Tables = Tables(sharded=frozenset(), others=frozenset())


def tables() -> Tables:
    """Returns the tables of the models that are installed now."""
    # Django keeps this list until a model is added.
    models = apps.get_models(include_auto_created=True)
    if models is not _Known.models:
        sharded = {model._meta.db_table for model in models if is_sharded(model)}
        others = {model._meta.db_table for model in models} - sharded
        _Known.tables = Tables(sharded=frozenset(sharded), others=frozenset(others))
        _Known.models = models
    return _Known.tables
