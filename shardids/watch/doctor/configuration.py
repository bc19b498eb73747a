"""Validation of an application's configuration: the part before an examination."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from sqlalchemy import BigInteger, Column, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, Description
from shardids.errors import ClusterConflict, ShardidsError
from shardids.ids.layout import Layout
from shardids.migrate.environment import Environment
from shardids.migrate.scaffold import load_metadata
from shardids.models.columns import next_id
from shardids.pg.notation import counted

_CLUSTER_OF_NODE: Final = "select cluster::text from shardids.node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration to validate; ``None`` for parts that the application does not have.

    Attributes:
        layout: the layout that the application expects.
        migrations: the folder of migrations.
        models: the models, as ``package.module:Base``.
    """

    catalog: Catalog
    layout: Layout | None
    migrations: Path | None
    models: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """One part of the configuration: whether it can be used, the findings, and the next step if not."""

    part: str
    usable: bool
    what: str
    to_do: str = ""


def validate(configuration: Configuration) -> list[Validated]:
    """Return each configured part, in the order of their use; change nothing."""
    return list(_validated(configuration))


def _validated(configuration: Configuration) -> Iterator[Validated]:
    catalog = configuration.catalog
    found: list[Description] = []

    def ask_catalog() -> str:
        found.append(catalog.describe())
        return f"cluster {found[0].cluster}, {counted(found[0].shard_count, 'shard')}"

    yield _tried("catalog", ask_catalog)
    if found:
        yield _tried("layout", lambda: _layout(found[0].layout, configuration.layout))
        yield _tried("nodes", lambda: _nodes(catalog, found[0]))
    folder, models = configuration.migrations, configuration.models
    if folder is not None:
        yield _tried("migrations", lambda: _migrations(folder))
    if models is not None:
        yield _tried("models", lambda: _models(models))


def _tried(part: str, ask: Callable[[], str]) -> Validated:
    try:
        return Validated(part=part, usable=True, what=ask())
    except ShardidsError as error:
        return Validated(part=part, usable=False, what=error.message, to_do=error.hint)


def _layout(there: Layout, expected: Layout | None) -> str:
    if expected is not None and there != expected:
        raise ClusterConflict(
            f"the cluster has layout {there}, and {expected} is configured",
            hint="A cluster's layout is fixed for good: correct SHARDIDS_LAYOUT, or name another catalog.",
        )
    if there.last_time < datetime.now(UTC):
        raise ClusterConflict(f"layout {there} ended on {there.last_time:%Y-%m-%d}: no shard issues IDs")
    return f"{there}, until {there.last_time:%Y-%m-%d}"


def _nodes(catalog: Catalog, description: Description) -> str:
    def ask(name: str, engine: Engine) -> None:
        with engine.connect() as connection:
            cluster = connection.scalar(text(_CLUSTER_OF_NODE))
        if cluster != str(description.cluster):
            raise ClusterConflict(f'node "{name}" is one of cluster {cluster}', hint="See: shardids doctor")

    there = catalog.nodes()
    if not there:
        raise ClusterConflict("the cluster has no nodes", hint="Add the first: shardids node add")
    with Nodes(there, catalog.url) as nodes:
        answers = nodes.each(ask)
    silent = [str(answers.failures[name]) for name in sorted(answers.failures)]
    if silent:
        raise ClusterConflict("; ".join(silent), hint="See: shardids doctor")
    return f"{', '.join(sorted(there))}: all answer"


def _migrations(folder: Path) -> str:
    return f"{folder}, head {Environment.at(folder).head()}"


def _models(models: str) -> str:
    metadata = load_metadata(models)[0]
    if not metadata.tables:
        raise ClusterConflict(f"{models!r} has no tables", hint="Name the module that defines all models.")
    wrong = [
        str(column)
        for table in metadata.sorted_tables
        for column in table.columns
        if _holds_ids(column) and not isinstance(column.type, BigInteger)
    ]
    if wrong:
        raise ClusterConflict(
            f"IDs take 64 bits, and these columns are not bigint: {', '.join(wrong)}",
            hint="Give them the type BigInteger.",
        )
    return f"{models}, {counted(len(metadata.tables), 'table')}"


def _holds_ids(column: Column[object]) -> bool:
    """Return whether the column's default is ``next_id()``, or it refers to one whose default is."""
    if isinstance(getattr(column.server_default, "arg", None), next_id):
        return True
    return any(_holds_ids(key.column) for key in column.foreign_keys if key.column is not column)
