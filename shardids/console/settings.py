"""How a console is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shardids.console.guard import Access
from shardids.console.prometheus import Prometheus
from shardids.console.watching import INTERVAL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a console is served.

    Attributes:
        catalog_url: the catalog; its user logs in to the nodes, too.
        access: who may ask.
        interval_s: how far apart readings are, at least.
        allow_actions: whether moves, rebalances and fences can be begun.
        prometheus: where the rates of the last hour come from, if not from memory.
        report: a report of ``shardids compare``.
    """

    catalog_url: str = field(repr=False)
    access: Access
    interval_s: float = INTERVAL_S
    allow_actions: bool = False
    prometheus: Prometheus | None = None
    report: Path | None = None
