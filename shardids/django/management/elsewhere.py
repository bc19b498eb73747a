"""Tells which models of a command are not in its database."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError
from django.db import router
from django.db.models import Model

from shardids.django.sharded import is_sharded


def named_models(labels: Collection[str]) -> list[type[Model]]:
    """Return the models that labels name, ``polls`` or ``polls.Question``; without any, the sharded ones."""
    if not labels:
        return [model for model in apps.get_models() if is_sharded(model)]
    found = list[type[Model]]()
    for label in labels:
        application, _, name = label.partition(".")
        config = apps.app_configs.get(application)
        if config is not None:
            found += [
                model for model in config.get_models() if name.lower() in ("", str(model._meta.model_name))
            ]
    return found


def say_elsewhere(
    command: BaseCommand, models: Sequence[type[Model]], options: Mapping[str, Any], *, must_be_there: bool
) -> None:
    """Name the models that a database does not have.

    Raises:
        CommandError: it has none of them, and ``must_be_there`` is set.
    """
    alias = options["database"]
    absent = [model for model in models if not router.allow_migrate_model(alias, model)]
    in_shards = [model for model in absent if is_sharded(model)]
    said = list[str]()
    if in_shards:
        said.append(f"{_shown(in_shards)}: in shards, as --database shard_0000 is")
    if others := [model for model in absent if not is_sharded(model)]:
        said.append(f"{_shown(others)}: not in {alias}")
    if not said:
        return
    if must_be_there and len(absent) == len(models):
        raise CommandError("; ".join(said))
    if options["verbosity"] > 0:
        command.stderr.write("; ".join(said))


def _shown(models: Sequence[type[Model]]) -> str:
    return ", ".join(model._meta.label for model in models)
