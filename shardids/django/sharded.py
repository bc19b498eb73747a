"""Sharded models: which they are, the names of their tables, and the system checks of their limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.state import ModelState, ProjectState, StateApps
from django.db.models import Field, ForeignKey, Model

from shardids.django.fields import ShardIdField


def is_sharded(model: type[Model]) -> bool:
    """Return whether a model's rows live in shards: its primary key is a ``ShardIdField`` or refers to one.

    The table that Django itself makes for a many-to-many relation lives beside the tables it joins. A model
    as a migration sees it lives where the application has that model today, whatever its key was.
    """
    options = model._meta
    if options.auto_created:
        return any(
            is_sharded(field.remote_field.model) for field in options.local_fields if field.remote_field
        )
    if isinstance(options.apps, StateApps):
        ends = _ends().get((options.app_label, str(options.model_name)), frozenset())
        if len(ends) == 1:
            return next(iter(ends))
    return isinstance(_final(options.pk), ShardIdField)


_Name = tuple[str, str]
"""An application's label, and a model's name in small letters."""


@cache
def _ends() -> dict[_Name, frozenset[bool]]:
    """Return where each model that migrations name ends, by name: in shards, or not.

    A name that belonged to several models can have both.
    """
    loader = MigrationLoader(None)
    graph: Any = loader.graph
    state = ProjectState(real_apps=loader.unmigrated_apps)
    names: dict[_Name, list[_Name]] = {}
    found: dict[_Name, set[bool]] = {}
    plan = dict.fromkeys(key for leaf in sorted(graph.leaf_nodes()) for key in graph.forwards_plan(leaf))
    for label, operation in ((key[0], one) for key in plan for one in graph.nodes[key].operations):
        before = dict(state.models)
        operation.state_forwards(label, state)
        gone, made = set(before) - set(state.models), set(state.models) - set(before)
        if len(gone) == len(made) == 1:  # It was renamed.
            (old,), (new,) = gone, made
            names[new] = [*names.pop(old, [old]), new]
            continue
        for key in gone:
            for name in names.pop(key, [key]):
                found.setdefault(name, set()).add(_has_shard_key(before, before[key]))
        names.update({key: [key] for key in made})
    for key, all_names in names.items():
        model = apps.all_models[key[0]].get(key[1])
        end = _has_shard_key(state.models, state.models[key]) if model is None else is_sharded(model)
        for name in all_names:
            found.setdefault(name, set()).add(end)
    return {key: frozenset(ends) for key, ends in found.items()}


def forget_ends() -> None:
    """Read the migrations again when they are next asked for."""
    _ends.cache_clear()


def _has_shard_key(models: dict[_Name, ModelState], model: ModelState) -> bool:
    keys: list[Any] = [field for field in model.fields.values() if getattr(field, "primary_key", False)]
    others = [str(key.remote_field.model) for key in keys if key.remote_field]
    if not keys:
        others = [base for base in model.bases if isinstance(base, str)]
    parents = [(label, name) for label, _, name in (other.lower().rpartition(".") for other in others)]
    return any(isinstance(key, ShardIdField) for key in keys) or any(
        _has_shard_key(models, models[parent]) for parent in parents if parent in models
    )


def leave_unconstrained(model: type[Model]) -> None:
    """Take the constraints off a migration's model that would tie shards to another database.

    Its references, and those to it. The check of models wants that of today's; older migrations had them.
    """
    if not isinstance(model._meta.apps, StateApps):
        return
    fields: list[Any] = list(model._meta.local_fields)
    for many in model._meta.local_many_to_many:
        through: Any = many.remote_field.through
        fields += through._meta.local_fields
    fields += [relation.field for relation in model._meta.related_objects]
    for field in fields:
        if isinstance(field, ForeignKey) and is_sharded(field.model) != is_sharded(field.remote_field.model):
            vars(field)["db_constraint"] = False


def has_sharded_models(label: str) -> bool:
    """Return whether an application has models in shards."""
    return any(_kinds(label))


def has_only_sharded_models(label: str) -> bool:
    """Return whether an application has models, and all of them in shards."""
    kinds = _kinds(label)
    return bool(kinds) and all(kinds)


def _kinds(label: str) -> list[bool]:
    found = apps.app_configs.get(label)
    models = () if found is None else found.get_models(include_auto_created=True)
    return [is_sharded(model) for model in models if not model._meta.proxy and model._meta.managed]


def _final(field: Field[object, object] | None) -> Field[object, object] | None:
    """Return the field that a foreign key takes its values from in the end."""
    while field is not None and field.remote_field is not None:
        field = getattr(field, "target_field", None)
    return field


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Names of the tables of all installed models."""

    sharded: frozenset[str]
    others: frozenset[str]


class _KnownTables:
    models: object = None
    tables: Tables = Tables(sharded=frozenset(), others=frozenset())


def tables() -> Tables:
    """Return the tables of the models that are installed now."""
    # Django keeps this list until a model is added.
    models = apps.get_models(include_auto_created=True)
    if models is not _KnownTables.models:
        sharded = {model._meta.db_table for model in models if is_sharded(model)}
        others = {model._meta.db_table for model in models} - sharded
        _KnownTables.tables = Tables(sharded=frozenset(sharded), others=frozenset(others))
        _KnownTables.models = models
    return _KnownTables.tables


def check_models(app_configs: Sequence[AppConfig] | None = None, **_options: Any) -> list[CheckMessage]:
    """Return the errors of all models, or of those of some applications."""
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
