"""The commands that a cluster on Citus refuses, each with the way that takes its place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_WORKERS = "Citus adds and removes its workers itself: citus_add_node, citus_drain_node, citus_remove_node."
_COPIES = "Citus moves a shard as a whole: no copy of it stays behind."
_REGIONS = "Citus chooses among all of its workers."
_PINS = "Citus moves shards by its own rules: see citus_set_node_property(…, 'shouldhaveshards', false)."
_QUERY = "The coordinator answers statements over several shards: select … union all select …"
_REFERENCES = "Make one in a revision for nodes: select create_reference_table('countries')"
_LOOKUPS = "A look-up takes triggers on the tables of shards, which Citus does not have."
_COUNTERS = "A counter keeps its numbers in tables of the shard, which would be on a worker."
_CAPTURE = "The rows are on the workers: see citus.enable_change_data_capture in Citus's documentation."
_ADOPTION = "Load rows by COPY through the coordinator: shardids adopts into plain servers."
_TENANTS = "A shard moves as a whole: shardids shard move. A key's rows stay in the shard of its hash."
_LOAD = "COPY … FROM through the coordinator draws an ID for each row."

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("node add", "node remove", "node replace"), _WORKERS),
        **dict.fromkeys(("shard place", "shard purge"), _COPIES),
        **dict.fromkeys(("shard pin", "shard unpin", "tenant pin", "tenant unpin"), _PINS),
        **dict.fromkeys(("region create", "region assign", "region drop"), _REGIONS),
        **dict.fromkeys(
            ("query-node create", "query-node status", "query-node refresh", "query-node drop"), _QUERY
        ),
        **dict.fromkeys(
            (
                "reference create",
                "reference list",
                "reference delete",
                "reference drop",
                "reference move",
                "reference repair",
            ),
            _REFERENCES,
        ),
        **dict.fromkeys(
            ("lookup create", "lookup list", "lookup backfill", "lookup sweep", "lookup drop"), _LOOKUPS
        ),
        **dict.fromkeys(("counter define", "counter show", "counter set", "counter zone"), _COUNTERS),
        **dict.fromkeys(("cdc create", "cdc status", "cdc drop"), _CAPTURE),
        **dict.fromkeys(
            (
                "adopt prepare",
                "adopt run",
                "adopt abort",
                "adopt switch",
                "adopt back",
                "adopt finish",
                "adopt status",
                "key adopt",
                "key function",
            ),
            _ADOPTION,
        ),
        **dict.fromkeys(("tenant move", "tenant list", "tenant show", "tenant top", "tenant sync"), _TENANTS),
        "load": _LOAD,
        "shard activate": "There is one copy. On the coordinator: select shardids.activate(SHARD)",
        "restore-point": "select citus_create_restore_point(NAME)",
    }
)
"""By the words of a command: the way that takes its place."""
