"""``manage.py dumpdata``, which says which models are elsewhere."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import dumpdata

from shardids.django.management.elsewhere import named_models, say_elsewhere


class Command(dumpdata.Command):
    """Django's own; models that the database does not have are named, or refused if there are no others."""

    def handle(self, *app_labels: Any, **options: Any) -> None:
        """Run the command."""
        say_elsewhere(self, named_models(app_labels), options, must_be_there=bool(app_labels))
        super().handle(*app_labels, **options)
