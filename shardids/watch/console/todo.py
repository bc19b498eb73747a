"""The list of faults and remedies, the worst first: of the last reading, examination and hour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from shardids.errors import ConnectionFailed, ShardidsError
from shardids.pg.notation import shown_shards
from shardids.watch import doctor
from shardids.watch.console.figures import host_of
from shardids.watch.console.watching import Seen
from shardids.watch.doctor.findings import Finding, Severity
from shardids.watch.doctor.placement import node_unreachable
from shardids.watch.facts.glance import at_a_glance
from shardids.watch.facts.reading import NodeAnswer

MOST: Final = 100
"""How many entries the page gets."""
_MOST_SHARDS: Final = 256
_RANKS: Final = {str(severity): rank for rank, severity in enumerate(Severity)}
_GLANCED: Final = frozenset(check.name for check in doctor.AT_A_GLANCE)

Values = dict[str, Any]
Key = tuple[str, tuple[str, ...], tuple[int, ...]]


class ToDo:
    """Findings of the readings: each is listed once two in a row have it, a dead node at once.

    Between the answers of the catalog and of a node, a shard may have gone elsewhere.

    Attributes:
        checked_at: when the last reading was judged, in seconds since 1970.
    """

    def __init__(self, catalog_url: str) -> None:
        self._catalog = host_of(catalog_url)
        self._before: frozenset[Key] = frozenset()
        self._listed: list[Values] = []
        self.checked_at: float | None = None

    def look(self, seen: Seen) -> None:
        """Judge a reading."""
        self.checked_at = seen.at
        listed: list[Values] = []
        if seen.catalog_error is not None:
            listed.append(_of_catalog(self._catalog, seen.catalog_error))
        found = [] if seen.known is None else doctor.glance(at_a_glance(seen.known, _answers(seen), seen.at))
        keys = frozenset(map(_key, found))
        listed += [
            finding_values(one)
            for one in found
            if one.check == node_unreachable.name or _key(one) in self._before
        ]
        self._before, self._listed = keys, listed

    def values(
        self,
        examined: Iterable[Finding],
        examined_at: float | None,
        unusual: Values,
        commands: Callable[[Values], list[Values]] = lambda _one: [],
    ) -> Values:
        """Return the list, and the age of its parts; ``source`` of an entry is the part that it is of.

        ``commands`` returns those against an unusual rate.
        """
        entries = [one | {"source": "reading"} for one in self._listed]
        # The newest reading is right about all that readings show.
        entries += [
            finding_values(one) | {"source": "examination"} for one in examined if one.check not in _GLANCED
        ]
        entries += [_of_rates(one) | {"do": commands(one)} for one in unusual["found"]]
        entries.sort(key=lambda one: _RANKS[one["severity"]])
        return {
            "entries": entries[:MOST],
            "more": max(0, len(entries) - MOST),
            "checks": len(_GLANCED),
            "checked_at": self.checked_at,
            "examined_at": examined_at,
            "looked_s": unusual["looked_s"],
        }


def finding_values(finding: Finding) -> Values:
    """Return a finding of the doctor for the page."""
    where = [f'node "{node}"' for node in finding.nodes]
    where += [f"shards {shown_shards(finding.shards)}"] if finding.shards else []
    where += [finding.thing] if finding.thing else []
    return {
        "severity": str(finding.severity),
        "check": finding.check,
        "where": ", ".join(where),
        "nodes": finding.nodes,
        "shards": finding.shards[:_MOST_SHARDS],
        "says": finding.what,
        "to_do": finding.to_do,
        "do": [
            {"place": command.place, "text": command.text, "step": command.step}
            for command in finding.commands
        ],
    }


def _key(finding: Finding) -> Key:
    return finding.check, finding.nodes, finding.shards


def _answers(seen: Seen) -> Mapping[str, NodeAnswer]:
    return {
        name: node.answer if node.up and node.answer is not None else NodeAnswer(seconds=0, error=node.error)
        for name, node in seen.nodes.items()
    }


def _of_catalog(catalog: Mapping[str, Any], error: ShardidsError) -> Values:
    is_refused = not isinstance(error, ConnectionFailed) or error.has_answered
    return {
        "severity": str(Severity.ERROR),
        "check": "catalog-unreachable",
        "where": f"{catalog['host']}/{catalog['dbname']}",
        "nodes": (),
        "shards": (),
        "says": error.message,
        "to_do": error.hint if is_refused else _CATALOG_LOST,
        "do": [] if is_refused else [_step(says, line) for says, line in _OTHER_CATALOG],
    }


_CATALOG_LOST: Final = (
    "Applications go on with the placement that they know; new processes, moves and migrations wait. If its"
    " server is only stopped, start it. If it is lost, keep it off the network and promote its standby; then"
    " follow these steps, with $STANDBY as the catalog's URL there"
)
_OTHER_CATALOG: Final = (
    ("Is the standby promoted? It answers f then", 'psql "$STANDBY" -Atc "select pg_is_in_recovery()"'),
    ("See whether it can be used", 'shardids doctor --catalog "$STANDBY" --before-deploy'),
    (
        "Give it to every process as the catalog; then examine the cluster",
        'shardids doctor --catalog "$STANDBY"',
    ),
)


def _step(says: str, line: str) -> Values:
    return {"place": "in a shell", "text": line, "step": says}


def _of_rates(one: Mapping[str, Any]) -> Values:
    return {
        "severity": str(Severity.WARNING),
        "check": one["kind"],
        "source": "rates",
        "where": "",
        "nodes": () if one["node"] is None else (one["node"],),
        "shards": () if one["shard"] is None else (one["shard"],),
        "of_shards": one["shards"],
        "start": one["start"],
        "end": one["end"],
        "says": one["says"],
        "to_do": one["to_do"],
    }
