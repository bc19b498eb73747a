"""Lists of the counters of all shards, and of the values that were set by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, TypeVar

from sqlalchemy import Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog

Row = TypeVar("Row")

_COUNTERS = text("""
    select s.id as shard, c.of_tenant as tenant, c.of_kind as kind, c.per, c.period, c.highest
    from unnest(cast(:shards as integer[])) n join shardids.shard s on s.id = n,
         shardids.counters(s.id, :tenant, :kind, :whole) c""")
_CHANGES = text("""
    select s.id as shard, c.of_tenant as tenant, c.of_kind as kind, c.period, c.changed_at, c.changed_by,
           c.highest_before, c.next_number, c.reason
    from unnest(cast(:shards as integer[])) n join shardids.shard s on s.id = n,
         shardids.counter_changes(s.id, :tenant) c""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A counter: the numbers of one kind of a tenant in one period.

    Attributes:
        period: its first day; 0001-01-01 where numbers never begin again.
        highest: the highest number that was drawn, or skipped by hand.
    """

    shard: int
    tenant: str
    kind: str
    per: str
    period: date
    highest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a counter by hand."""

    shard: int
    tenant: str
    kind: str
    period: date
    changed_at: datetime
    changed_by: str
    highest_before: int
    next_number: int
    reason: str


def listed(
    catalog: Catalog,
    *,
    tenant: str | None = None,
    kind: str | None = None,
    whole: bool = False,
) -> list[Counter]:
    """Return the counters of all shards; with ``whole``, also those of older periods."""
    values = {"tenant": tenant, "kind": kind, "whole": whole}
    return _read(catalog, _COUNTERS, values, lambda row: Counter(**row))


def changes(catalog: Catalog, *, tenant: str | None = None) -> list[Change]:
    """Return how counters were set by hand, the oldest change of each shard first."""
    return _read(catalog, _CHANGES, {"tenant": tenant}, lambda row: Change(**row))


def _read(
    catalog: Catalog,
    query: Any,
    values: Mapping[str, object],
    of_row: Callable[[dict[str, Any]], Row],
) -> list[Row]:
    placement = catalog.placement()
    per_node = placement.by_node()

    def ask(name: str, engine: Engine) -> Sequence[Any]:
        with engine.connect() as connection:
            return connection.execute(query, {**values, "shards": list(per_node[name])}).all()

    with Nodes({name: placement.nodes[name] for name in per_node}, catalog.url) as nodes:
        answers = nodes.each(ask).all()
    rows = [row for name in sorted(answers) for row in answers[name]]
    return [of_row(row._asdict()) for row in sorted(rows, key=lambda row: row.shard)]
