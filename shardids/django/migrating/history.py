"""The migrations that shards run: those of the applications with sharded models, as the code has them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from sys import modules
from typing import Any

from django.apps import apps
from django.db.migrations import Migration
from django.db.migrations.executor import MigrationExecutor

from shardids.django.fields import ShardIdField
from shardids.django.sharded import forget_ends, has_sharded_models
from shardids.errors import BadArgument, ClusterConflict
from shardids.migrate.environment import hash_of_file
from shardids.migrate.plan import Heads, Route, Start


class ShardHistory:
    """All migrations of the code, and what of them is left for a shard.

    A shard records every migration that it has run, as Django does: ``polls.0001_initial``. A squashed
    migration counts as run when all that it replaces have been; it is then recorded in their place.

    Raises:
        BadArgument: an application with sharded models has no migrations, or two that nothing follows.
    """

    def __init__(self) -> None:
        forget_ends()
        without_database: Any = None
        executor = MigrationExecutor(without_database)
        self.loader = executor.loader
        self._installed = {config.label for config in apps.get_app_configs()}
        labels = {label for label in self._installed if has_sharded_models(label)}
        if missing := sorted(labels & self.loader.unmigrated_apps):
            raise BadArgument(
                f"{', '.join(missing)} has sharded models and no migrations",
                hint=f"To write the first: manage.py makemigrations {' '.join(missing)}",
            )
        for label, names in self.loader.detect_conflicts().items():
            raise BadArgument(
                f"{label} has {len(names)} migrations that nothing follows: {', '.join(sorted(names))}",
                hint="Merge them: manage.py makemigrations --merge",
            )
        # An application that has none any more still has what its migrations did, and undid.
        labels |= {one.app_label for one in self.loader.disk_migrations.values() if is_for_shards(one)}
        leaves = self.loader.graph.leaf_nodes()
        self.order = [migration for migration, _ in executor.migration_plan(leaves, clean_start=True)]
        """All migrations, also those of other applications, each after its dependencies."""
        self.of_shards = {str(one): one for one in self.order if one.app_label in labels}
        self._replaced = {
            str(one): {".".join(old) for old in one.replaces} for one in self.loader.replacements.values()
        }

    def targets(self, label: str | None, prefix: str | None) -> frozenset[str] | None:
        """Return the migrations that lead to an application's newest, or to the one that is named.

        Returns ``None`` for all applications.

        Raises:
            BadArgument: the application or migration does not exist, or the prefix fits several.
        """
        if label is None:
            return None
        if prefix is None:
            self._of(label)
            keys = self.loader.graph.leaf_nodes(label)
        else:
            keys = [(label, self.named(label, prefix).partition(".")[2])]
        return frozenset(
            ".".join(each) for key in keys for each in self.loader.graph.forwards_plan(key)
        ) & frozenset(self.of_shards)

    def named(self, label: str, prefix: str) -> str:
        """Return the name of an application's only migration that begins so. Raises as :meth:`targets`."""
        names = [name for name in self._of(label) if name.partition(".")[2].startswith(prefix)]
        names = [name for name in names if name == f"{label}.{prefix}"] or names
        if len(names) != 1:
            raise BadArgument(f"{len(names)} migrations of {label} begin with {prefix!r}")
        return names[0]

    def _of(self, label: str) -> list[str]:
        names = [name for name, one in self.of_shards.items() if one.app_label == label]
        if not names:
            raise BadArgument(f"no application {label!r} has sharded models and migrations")
        return names

    def check_known(self, shard: int, node: str, heads: Start) -> None:
        """Refuse a shard with migrations that the code lacks, or with a part of what one replaces.

        Raises:
            ClusterConflict: it has them.
        """
        known = {str(one) for one in self.order}.union(*self._replaced.values())
        foreign = sorted(
            name for name in set(heads or ()) - known if not self._is_of_an_application_that_left(name)
        )
        if foreign:
            raise ClusterConflict(
                f'shard {shard} has run {", ".join(foreign)}, which this code does not have [node "{node}"]',
                hint="Use the code that migrated it.",
            )
        for name, replaced in self._replaced.items():
            there = replaced & set(heads or ())
            if there and name not in (heads or ()) and there != replaced:
                raise ClusterConflict(
                    f"shard {shard} has run {', '.join(sorted(there))}, a part of what {name} replaces"
                    f' [node "{node}"]',
                    hint="Run the others first, with the code from before it.",
                )

    def _is_of_an_application_that_left(self, name: str) -> bool:
        # Revisions of Alembic are not called so.
        named = re.fullmatch(r"([^\W\d]\w*)\.\d{4}_\w+", name)
        return named is not None and named[1] not in self._installed

    def route(self, start: Start, targets: Collection[str] | None) -> Route:
        """Return a shard's pending migrations, in order; ``targets`` are those wanted (default: all)."""
        applied = set(start or ())
        pending = [
            name for name in self.of_shards if name not in applied and (targets is None or name in targets)
        ]
        end = applied
        for name in pending:
            end = self.after(name, end)
        return Route(
            start=start,
            end=tuple(sorted(end)),
            target=pending[-1] if pending else "",
            revisions=tuple(pending),
        )

    def after(self, name: str, applied: Collection[str]) -> set[str]:
        """Return the records of a shard that has run a migration."""
        return (set(applied) - self._replaced.get(name, set())) | {name}

    def is_only_recorded(self, name: str, applied: Collection[str]) -> bool:
        """Return whether a migration replaces others that have run, so that nothing is to be run."""
        replaced = self._replaced.get(name)
        return replaced is not None and replaced <= set(applied)

    def having_run(self, applied: Collection[str]) -> set[str]:
        """Return the migrations of the code whose effect is there, among them squashed ones."""
        return {name for name in self.of_shards if name in applied or self.is_only_recorded(name, applied)}

    def hash_of(self, name: str) -> str | None:
        """Return the hash of a migration's source, ``None`` without a source."""
        file = getattr(modules[type(self.of_shards[name]).__module__], "__file__", None)
        return None if file is None else hash_of_file(Path(file))

    def __iter__(self) -> Iterator[Migration]:
        return iter(self.order)


def is_for_shards(migration: Migration) -> bool:
    """Return whether an operation of a migration names a ``ShardIdField``, or say that it is for shards."""
    return any(_is_for_shards(operation) for operation in migration.operations)


def _is_for_shards(operation: Any) -> bool:
    fields = [field for _, field in getattr(operation, "fields", ())] + [getattr(operation, "field", None)]
    return (
        any(isinstance(field, ShardIdField) for field in fields)
        or bool(getattr(operation, "hints", {}).get("shards"))
        or any(_is_for_shards(inner) for inner in getattr(operation, "database_operations", ()))
    )


def shown(heads: Heads) -> str:
    """Return the history of a shard, as messages show it: the newest migration of each application."""
    newest = {name.split(".")[0]: name for name in sorted(heads)}
    return ", ".join(newest.values()) or "nothing"
