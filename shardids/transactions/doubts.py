"""Lists the prepared transactions of a cluster, and what was decided on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.prepared import Prepared, all_of, read_prepared
from shardids.catalog.rows import Catalog
from shardids.errors import ShardidsError

APPLICATION_NAME = "shardids transaction"


class Decision(StrEnum):
    """What the decider's node says of a transaction."""

    COMMIT = "commit"
    ROLL_BACK = "roll back"
    NONE = "none yet"
    UNKNOWN = "unknown"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A prepared transaction, and the decision on it.

    ``decision`` is ``foreign`` if it is not of this cluster's sessions, ``unknown`` if the decider's node
    cannot be asked, and ``none yet`` while its client may still commit it.
    """

    prepared: Prepared
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What is prepared; ``failures`` has the nodes that could not be asked, and why."""

    doubts: Sequence[Doubt]
    failures: Mapping[str, ShardidsError]


def open_nodes(catalog: Catalog) -> Nodes:
    """Opens the nodes for this package: each statement is a transaction, and waits briefly for locks."""
    return Nodes(
        catalog.nodes(),
        catalog.url,
        application_name=APPLICATION_NAME,
        durable=True,
        autocommit=True,
        settings={"lock_timeout": "2s"},
    )


def listed(catalog: Catalog) -> Listing:
    """Lists the prepared transactions of all nodes, the oldest first. Changes nothing.

    Raises:
        ConnectionFailed, ClusterConflict: the catalog cannot be read. A node that cannot is in ``failures``.
    """
    cluster = catalog.describe().cluster
    with open_nodes(catalog) as nodes:
        answers = read_prepared(nodes, cluster)
        found = all_of(answers.results.values())
        decisions, failures = read_decisions(nodes, found)
    return Listing(
        doubts=[
            Doubt(prepared=one, decision=_decision(one, decisions))
            for one in sorted(found, key=lambda one: -one.age_s)
        ],
        failures={**answers.failures, **failures},
    )


def by_decider(found: Iterable[Prepared]) -> dict[str, set[UUID]]:
    """Returns the transactions of this cluster by the node that decides on them."""
    transactions: dict[str, set[UUID]] = {}
    for one in found:
        if one.gid is not None:
            transactions.setdefault(one.gid.decider, set()).add(one.gid.transaction)
    return transactions


def read_decisions(
    nodes: Nodes, found: Sequence[Prepared]
) -> tuple[dict[tuple[str, UUID], Decision], Mapping[str, ShardidsError]]:
    """Reads what the deciders say of prepared transactions.

    Returns the decisions by decider and transaction, without those of nodes that could not be asked, and why
    they could not. Those that are being made are not there yet.
    """
    there = set(nodes)
    wanted = {name: names for name, names in by_decider(found).items() if name in there}

    def ask(name: str, engine: Engine) -> list[Any]:
        with engine.connect() as connection:
            return list(
                connection.execute(
                    text("""select transaction, committed from shardids.decision
                            where transaction = any (:names)"""),
                    {"names": sorted(wanted[name])},
                )
            )

    answers = nodes.each(ask, wanted)
    decisions = {(name, one): Decision.NONE for name in answers.results for one in wanted[name]}
    for name, made in answers.results.items():
        for row in made:
            decisions[name, row.transaction] = Decision.COMMIT if row.committed else Decision.ROLL_BACK
    return decisions, answers.failures


def _decision(one: Prepared, decisions: Mapping[tuple[str, UUID], Decision]) -> Decision:
    if one.gid is None:
        return Decision.FOREIGN
    return decisions.get((one.gid.decider, one.gid.transaction), Decision.UNKNOWN)
