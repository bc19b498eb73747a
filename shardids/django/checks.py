"""System checks: what a sharded model can't have. ``manage.py check`` and every other command run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error
from django.db.models import ForeignKey, Model

from shardids.django.fields import ShardIdField
from shardids.django.sharded import is_sharded, tables


def check_models(app_configs: Sequence[AppConfig] | None = None, **_options: Any) -> list[CheckMessage]:
    """Returns the errors of all models, or of those of some applications."""
    chosen = {config.label for config in app_configs or apps.get_app_configs()}
    models = apps.get_models(include_auto_created=True)
    columns = {field.column for model in models if is_sharded(model) for field in model._meta.local_fields}
    return [
        error
        for model in models
        if model._meta.app_label in chosen
        for error in (*_names(model, columns), *_foreign_keys(model), *_joining_tables(model))
    ]


def _names(model: type[Model], columns: set[str | None]) -> Iterator[Error]:
    table = model._meta.db_table
    if is_sharded(model) and (table in columns or '"' in table or table in tables().others):
        yield Error(
            f"the table {table!r} of a sharded model is called as a column or another table is, or is quoted",
            hint="Name it otherwise: Meta.db_table",
            obj=model,
            id="shardids.E001",
        )


def _foreign_keys(model: type[Model]) -> Iterator[Error]:
    for field in model._meta.local_fields:
        if not (isinstance(field, ForeignKey) and vars(field)["db_constraint"]):
            continue
        other = field.remote_field.model
        if is_sharded(model) != is_sharded(other):
            yield Error(
                f"{model._meta.label} and {other._meta.label} are in different databases: one is sharded",
                hint="Set db_constraint=False (and on_delete=DO_NOTHING), or shard both.",
                obj=field,
                id="shardids.E002",
            )


def _joining_tables(model: type[Model]) -> Iterator[Error]:
    if model._meta.auto_created and is_sharded(model) and not isinstance(model._meta.pk, ShardIdField):
        yield Error(
            f"the many-to-many relation {model._meta.label} has a table whose keys no shard issues",
            hint="Make ShardIdField the DEFAULT_AUTO_FIELD of the application, or name a model with one:"
            " ManyToManyField(through=…)",
            obj=model._meta.auto_created,
            id="shardids.E003",
        )
