"""``manage.py loaddata``, which says which objects it left out."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import loaddata
from django.db import router
from django.db.models import Model

from shardids.django.management.elsewhere import say_elsewhere


class Command(loaddata.Command):
    """Django's own; models that the database does not have are named."""

    def handle(self, *fixture_labels: Any, **options: Any) -> None:
        """Run the command."""
        self.left_out: dict[type[Model], None] = {}
        super().handle(*fixture_labels, **options)
        say_elsewhere(self, list(self.left_out), options, must_be_there=False)

    def save_obj(self, obj: Any) -> bool:
        """Save an object if the database has its model."""
        inherited: Any = super()
        saved: bool = inherited.save_obj(obj)
        if not saved and not router.allow_migrate_model(self.using, type(obj.object)):
            self.left_out[type(obj.object)] = None
        return saved
