"""The Django application: its checks, its transactions, and the aliases that a command line names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from django.apps import AppConfig
from django.core import checks


class ShardidsConfig(AppConfig):
    """``shardids.django`` in ``INSTALLED_APPS``."""

    name = "shardids.django"
    label = "shardids"
    verbose_name = "shardids"

    def import_models(self) -> None:
        """Prepare transactions before other modules use them as decorators."""
        from shardids.django.choice import let_transactions_choose  # noqa: PLC0415 -- needs the settings

        let_transactions_choose()
        inherited: Any = super()
        inherited.import_models()

    def ready(self) -> None:
        """Register the checks, and make the aliases of shards that the command line names."""
        from shardids.django.sharded import check_models  # noqa: PLC0415 -- imports models

        checks.register(check_models, checks.Tags.models)
        _make_aliases(sys.argv)


def _make_aliases(words: Sequence[str]) -> None:
    """Make the aliases that ``--database`` names: Django's commands take only those that are there."""
    from shardids.django.aliases import shard_of_alias  # noqa: PLC0415 -- needs the settings

    named = [word for option, word in pairwise(words) if option == "--database"]
    named += [word.partition("=")[2] for word in words if word.startswith("--database=")]
    for alias in named:
        shard_of_alias(alias)
