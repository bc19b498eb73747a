"""Checks of nodes beside their shards: settings, extensions, and objects that act on all tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from shardids.catalog.recorded import Contract, Thing
from shardids.pg.notation import named_nodes
from shardids.pg.queries import quoted
from shardids.watch.doctor.findings import Command, Found, Severity, check, in_shell, literal, on_node
from shardids.watch.facts.cluster import ClusterFacts

ACCEPT: Final = "shardids node accept-contract"
_STANDBYS: Final = ("setting", "synchronous_standby_names")
_KEEPS_ROWS: Final = frozenset({"fsync", "full_page_writes"})
"""Without them a crash of the machine loses rows."""
_AT_RESTART: Final = frozenset(
    {"wal_level", "max_prepared_transactions", "max_replication_slots", "max_wal_senders"}
)
_ALIKE: Final = frozenset({"wal_level", "max_prepared_transactions", "fsync", "full_page_writes"})
"""Settings that all nodes should share: shards move between them."""


@check(
    "node-contract",
    Severity.WARNING,
    remedy=f"Bring the node back to it; if the change is meant: `{ACCEPT} NAME`.",
)
def node_contract(facts: ClusterFacts) -> Iterator[Found]:
    """A node's settings, extensions or objects for all tables are not as recorded: an error for `fsync`."""
    for name, node in facts.nodes.items():
        recorded = facts.contracts.get(name)
        if recorded is None or node.contract is None:
            continue
        # First what statements that commit would wait for.
        for thing in sorted(recorded.keys() | node.contract.keys(), key=lambda one: (one != _STANDBYS, one)):
            wanted, found = recorded.get(thing), node.contract.get(thing)
            if wanted != found:
                yield Found(
                    what=f'node "{name}": {_difference(thing, wanted, found)}',
                    to_do=_to_do(name, thing, wanted),
                    commands=_remedies(name, thing, wanted),
                    nodes=(name,),
                    thing=" ".join(thing),
                    severity=Severity.ERROR if _is_dangerous(thing, found) else None,
                )


def _difference(thing: Thing, wanted: str | None, found: str | None) -> str:
    what = " ".join(thing)
    if found is None:
        return f"no {what}, which is recorded as {wanted or 'empty'}"
    if wanted is None:
        return f"{what} ({found or 'empty'}) is not recorded"
    return f"{what} is {found or 'empty'}, and {wanted or 'empty'} is recorded"


def _is_dangerous(thing: Thing, found: str | None) -> bool:
    """Return whether rows are lost by it, or foreign keys not checked, or writes or moves stopped."""
    kind, name = thing
    if kind == "setting" and name in _KEEPS_ROWS:
        return found == "off"
    if kind == "role setting":
        return found is not None and name.endswith(" session_replication_role")
    return thing in (_STANDBYS, ("setting", "wal_level"))


def _to_do(node: str, thing: Thing, wanted: str | None) -> str:
    kind, name = thing
    if kind == "setting" and name in _AT_RESTART:
        return (
            f"Set it to {wanted} and restart the server; if the change is meant, record it: {ACCEPT} {node}"
        )
    return f"Bring it back; if the change is meant, record it: {ACCEPT} {node}"


def _remedies(node: str, thing: Thing, wanted: str | None) -> tuple[Command, ...]:
    kind, name = thing
    if kind == "setting" and name in _KEEPS_ROWS and wanted == "off":
        return ()
    if kind == "setting" and name not in _AT_RESTART and wanted is not None:
        return on_node(node, f"alter system set {name} = {literal(wanted)};", "select pg_reload_conf();")
    if kind == "role setting":
        role, where, setting = name.rsplit(" ", 2)
        if where == "everywhere":
            change = f"alter role {'all' if role == 'all' else quoted(role)}"
        else:
            # The name of the database is the session's own.
            return on_node(node, _in_database(role, setting, wanted))
        return on_node(node, f"{change} {_set(setting, wanted)};")
    if kind == "event trigger" and wanted is not None and "disabled" not in wanted:
        return (
            on_node(node, f"alter event trigger {quoted(name)} enable;") if " enable " not in wanted else ()
        )
    return ()


def _set(setting: str, wanted: str | None) -> str:
    return f"reset {setting}" if wanted is None else f"set {setting} = {literal(wanted)}"


def _in_database(role: str, setting: str, wanted: str | None) -> str:
    change = f"alter database %I {_set(setting, wanted)}"
    if role != "all":
        change = f"alter role {quoted(role)} in database %I {_set(setting, wanted)}"
    return f"do $do$begin execute format({literal(change)}, current_database())\n;\nend$do$;"


@check("node-unrecorded", Severity.INFO, remedy=f"Look at it and record it: `{ACCEPT}`.")
def node_unrecorded(facts: ClusterFacts) -> Iterator[Found]:
    """A node without a recorded contract: a change of its settings is not detected."""
    names = [name for name, node in facts.nodes.items() if node.contract and name not in facts.contracts]
    if names:
        yield Found(
            what=f"no contract is recorded for {named_nodes(names)}: changes of settings and extensions are"
            " not detected",
            to_do="Check the settings and extensions, and record them",
            commands=in_shell(f"{ACCEPT} --dry-run"),
            nodes=tuple(names),
        )


@check("nodes-differ", Severity.WARNING, remedy="Bring the nodes to the same.")
def nodes_differ(facts: ClusterFacts) -> Iterator[Found]:
    """Nodes sort by other collations or locales than most; or, as information, have other settings."""
    contracts = {name: node.contract for name, node in facts.nodes.items() if node.contract is not None}
    things = {thing for one in contracts.values() for thing in one if _should_be_alike(thing)}
    for thing in sorted(things):
        by_value: dict[str | None, list[str]] = {}
        for name, contract in contracts.items():
            by_value.setdefault(contract.get(thing), []).append(name)
        if len(by_value) > 1:
            usual = max(by_value, key=lambda one: len(by_value[one]))
            others = {value: names for value, names in by_value.items() if value != usual}
            odd = tuple(sorted(name for names in others.values() for name in names))
            yield Found(
                what=f"{' '.join(thing)} is {_values(others)}, and {usual or 'absent'} on"
                f" {named_nodes(by_value[usual])}",
                to_do="Bring the nodes to the same: shards move between them",
                nodes=odd,
                thing=" ".join(thing),
                severity=None if thing[0] in ("collation", "locale") else Severity.INFO,
            )


def _should_be_alike(thing: Thing) -> bool:
    kind, name = thing
    return kind in ("extension", "collation", "locale") or (kind == "setting" and name in _ALIKE)


def _values(others: Mapping[str | None, list[str]]) -> str:
    return " and ".join(f"{value or 'absent'} on {named_nodes(names)}" for value, names in others.items())


@check("standby-missing", Severity.ERROR, remedy="Bring the standby back, or take it out of the setting.")
def standby_missing(facts: ClusterFacts) -> Iterator[Found]:
    """A node waits at each COMMIT for synchronous standbys that are not connected: writes hang."""
    for name, node in facts.nodes.items():
        if node.engine and node.engine.missing_standbys:
            contract: Contract = node.contract or {}
            names = contract.get(("setting", "synchronous_standby_names"), "")
            yield Found(
                what=f'node "{name}" waits for {node.engine.missing_standbys} synchronous standbys that are'
                f" not connected: synchronous_standby_names is {names}",
                to_do="Start the standby, or take it out of synchronous_standby_names: later commits"
                " are on this server only",
                nodes=(name,),
            )
