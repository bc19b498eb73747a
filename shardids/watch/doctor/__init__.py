"""Examination of a cluster: ``ask`` gathers facts from all nodes at once, checks judge them.

Facts are plain records (``facts``). Each check is a pure function of them, in the module of its topic:
placement, nodes, generators, tables, leftovers, capture, citus, references, access, contents. :func:`examine`
changes nothing and installs nothing: the objects that it creates for the comparison of the engine are
temporary and rolled back, and it does not create them with a read-only catalog.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument
from shardids.watch.doctor import (
    access,
    capture,
    citus,
    contents,
    generators,
    leftovers,
    nodes,
    placement,
    references,
    tables,
)
from shardids.watch.doctor.findings import Check, Finding, Severity
from shardids.watch.facts.cluster import ClusterFacts
from shardids.watch.facts.examining import Wishes, ask
from shardids.watch.facts.rows import ShardingKey

CHECKS: Final = tuple(
    one
    for module in (
        placement,
        nodes,
        generators,
        tables,
        leftovers,
        capture,
        citus,
        references,
        access,
        contents,
    )
    for one in vars(module).values()
    if isinstance(one, Check)
)
"""All checks, by topic."""

AT_A_GLANCE: Final = (
    *(one for one in CHECKS if one in vars(placement).values() and one is not placement.shard_unregistered),
    leftovers.move_interrupted,
    leftovers.shard_lost,
    generators.clocks_apart,
    generators.years_left,
)
"""The checks that a reading of the console has the facts for."""

_WORST_FIRST = list(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The findings of an examination, the worst first.

    ``checks`` are the names of the checks that ran, ``skipped`` of those that would have had to write, or to
    read rows with rights to write; ``seconds`` is the time that the examination took.
    """

    facts: ClusterFacts
    checks: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float
    skipped: tuple[str, ...] = ()

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong: all findings are informational."""
        return all(finding.severity is Severity.INFO for finding in self.findings)


def glance(facts: ClusterFacts) -> list[Finding]:
    """Return the findings of :data:`AT_A_GLANCE` in a reading, the worst first."""
    found = [finding for check in AT_A_GLANCE for finding in check.findings(facts)]
    return sorted(found, key=lambda finding: _WORST_FIRST.index(finding.severity))


def examine(
    catalog: Catalog,
    names: Collection[str] | None = None,
    keys: Sequence[ShardingKey] = (),
    *,
    every_row: bool = False,
) -> Report:
    """Examine a cluster with all checks, or with those of the given names.

    ``keys`` are the sharding keys, whose hash places rows; with ``every_row`` all rows of their tables are
    read, not a sample. With a read-only catalog all transactions are, and ``engine-changed`` is skipped.

    Raises:
        BadArgument: a check or column does not exist, or the column's type cannot be hashed.
        ConnectionFailed, ClusterConflict: the catalog cannot be read. A node that cannot is a finding.
    """
    begun = time.monotonic()
    chosen = _chosen(names)
    skipped = [check for check in chosen if catalog.read_only and check is generators.engine_changed]
    checks = [check for check in chosen if check not in skipped]
    wishes = Wishes(
        rates=generators.tick_rate in checks, keys=keys, every_row=every_row, read_only=catalog.read_only
    )
    facts = ask(catalog, wishes)
    _require_found(keys, facts)
    findings = [finding for check in checks for finding in check.findings(facts)]
    if any(node.skips for node in facts.nodes.values()) or any(one.skips for one in facts.lookups):
        # What they found elsewhere stays; that they found no more says nothing.
        skipped += [check for check in checks if check.name in contents.OF_ROWS]
        checks = [check for check in checks if check not in skipped]
    findings.sort(key=lambda finding: _WORST_FIRST.index(finding.severity))
    return Report(
        facts=facts,
        checks=tuple(check.name for check in checks),
        findings=tuple(findings),
        seconds=time.monotonic() - begun,
        skipped=tuple(check.name for check in skipped),
    )


def _require_found(keys: Sequence[ShardingKey], facts: ClusterFacts) -> None:
    nodes = facts.nodes.values()
    sampled = {(s.table_name, s.column_name) for node in nodes for s in node.samples if s.said_by == "key"}
    unread = {table for node in nodes for table, _ in node.unread}
    for key in keys:
        if key.table_name in unread:
            continue
        if (key.table_name, key.column_name) not in sampled and all(node.error is None for node in nodes):
            raise BadArgument(f"no shard has a column {key.table_name}.{key.column_name} that may be read")


def _chosen(names: Collection[str] | None) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    if names is None:
        return list(CHECKS)
    for name in names:
        if name not in known:
            raise BadArgument(f"check {name!r} does not exist", hint="The checks are: " + ", ".join(known))
    return [check for check in CHECKS if check.name in names]
