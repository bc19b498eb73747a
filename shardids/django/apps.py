"""The Django application: its checks."""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks


class ShardidsConfig(AppConfig):
    """``shardids.django`` in ``INSTALLED_APPS``."""

    name = "shardids.django"
    label = "shardids"
    verbose_name = "shardids"

    def ready(self) -> None:
        """Register the checks."""
        from shardids.django.sharded import check_models  # noqa: PLC0415 -- imports models

        checks.register(check_models, checks.Tags.models)
