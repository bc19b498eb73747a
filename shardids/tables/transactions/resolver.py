"""The end of transactions on several nodes whose clients died, and their list.

In this order, it reads the prepared parts. On each decider it reads the decision, or makes it, so that a
client that wakes up can't make another. It reads the prepared parts again, for the client may have prepared
more meanwhile, and ends them. It deletes decisions that have no prepared part after they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.prepared import Prepared, all_of, read_prepared
from shardids.catalog.rows import Catalog
from shardids.errors import MissingPrivilege, ShardidsError
from shardids.pg.gids import lock_of
from shardids.pg.locks import holders_of_key, holders_of_tables

APPLICATION_NAME = "shardids transaction"


class Decision(StrEnum):
    """The record of a transaction on its decider's node."""

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
    """Prepared transactions; ``failures`` has the nodes that could not be asked, and why."""

    doubts: Sequence[Doubt]
    failures: Mapping[str, ShardidsError]


def open_nodes(catalog: Catalog) -> Nodes:
    """Open the nodes for this package: each statement is a transaction, and wait briefly for locks."""
    return Nodes(
        catalog.nodes(),
        catalog.url,
        application_name=APPLICATION_NAME,
        durable=True,
        autocommit=True,
        settings={"lock_timeout": "2s"},
    )


def listed(catalog: Catalog) -> Listing:
    """List the prepared transactions of all nodes, the oldest first. Changes nothing.

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
    """Return the transactions of this cluster by the node that decides on them."""
    transactions: dict[str, set[UUID]] = {}
    for one in found:
        if one.gid is not None:
            transactions.setdefault(one.gid.decider, set()).add(one.gid.transaction)
    return transactions


def read_decisions(
    nodes: Nodes, found: Sequence[Prepared]
) -> tuple[dict[tuple[str, UUID], Decision], Mapping[str, ShardidsError]]:
    """Read the deciders' records of prepared transactions.

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


OLDER_THAN_S: Final = 5.0
"""The time that a client has to end its prepared transactions, before they are ended for it."""

_LOCK_NOT_AVAILABLE, _UNDEFINED_OBJECT, _IN_USE = "55P03", "42704", "55000"
_MOST_FORGOTTEN: Final = 10_000

Key = tuple[str, UUID]
"""The decider and the name of a transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a prepared transaction.

    Attributes:
        prepared: the transaction.
        result: ``committed``, ``rolled back`` or ``left``; in a dry run, the expected one.
        reason: why it was left, or which session of a stopped client holds rows on.
        error: the reason why it was left; ``None`` if that is as it should be.
    """

    prepared: Prepared
    result: str
    reason: str = ""
    error: ShardidsError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The result of :func:`resolve`.

    Attributes:
        outcomes: what became of each prepared transaction that it saw, the oldest first.
        failures: the nodes that could not be asked, and why.
        forgotten: how many decisions it deleted which nobody needs any more.
    """

    outcomes: Sequence[Outcome]
    failures: Mapping[str, ShardidsError]
    forgotten: int = 0


def resolve(catalog: Catalog, *, older_than_s: float = OLDER_THAN_S, dry_run: bool = False) -> Resolution:
    """Commit or roll back transactions that clients left prepared on the nodes. Calls are idempotent.

    A decided transaction ends as it was decided. An undecided one that was prepared more than
    ``older_than_s`` seconds ago is rolled back; its client gets :class:`~shardids.errors.TransactionEnded`.
    Prepared transactions of other applications stay.

    Raises:
        ConnectionFailed, ClusterConflict: the catalog cannot be read. A node that cannot is in ``failures``,
            and its transactions are left.
    """
    cluster = catalog.describe().cluster
    with open_nodes(catalog) as nodes:
        answers = read_prepared(nodes, cluster)
        found = all_of(answers.results.values())
        decisions, failures = read_decisions(nodes, found)
        failures = {**answers.failures, **failures}
        left = _settle(nodes, found, decisions, older_than_s, dry_run=dry_run)
        holders = _holders(nodes, decisions)
        if dry_run:
            outcomes = [_outcome(one, decisions, left) for one in found]
        else:
            # Only what was read above has a decision here; of that, all parts that are there by now.
            again = read_prepared(nodes, cluster)
            outcomes = _end_all(nodes, all_of(again.results.values()), decisions, left)
            failures.update(again.failures)
        outcomes = [_with_holder(outcome, holders) for outcome in outcomes]
        forgotten = 0 if dry_run or failures else _forget(nodes, cluster)
    outcomes.sort(key=lambda outcome: -outcome.prepared.age_s)
    return Resolution(outcomes=outcomes, failures=failures, forgotten=forgotten)


def _settle(
    nodes: Nodes,
    found: Sequence[Prepared],
    decisions: dict[Key, Decision],
    older_than_s: float,
    *,
    dry_run: bool,
) -> dict[Key, tuple[str, ShardidsError | None]]:
    """Decide on old transactions; return why the rest is left, and enter decisions in ``decisions``."""
    left: dict[Key, tuple[str, ShardidsError | None]] = {}
    youngest: dict[Key, float] = {}
    for one in found:
        if one.gid is not None:
            key = one.gid.decider, one.gid.transaction
            youngest[key] = min(one.age_s, youngest.get(key, one.age_s))
    for key, age_s in youngest.items():
        if key not in decisions:
            left[key] = (f'node "{key[0]}", which decides, cannot be asked', _unknown(nodes, key[0]))
        elif decisions[key] is Decision.NONE and age_s < older_than_s:
            left[key] = (f"prepared {age_s:.1f} s ago; its client may be about to commit", None)
        elif decisions[key] is Decision.NONE and dry_run:
            decisions[key] = Decision.ROLL_BACK
        elif decisions[key] is Decision.NONE:
            try:
                decisions[key] = _settle_one(nodes[key[0]], key[1])
            except ShardidsError as error:
                is_busy = error.sqlstate == _LOCK_NOT_AVAILABLE
                left[key] = (_who_decides(nodes, key[0]), None) if is_busy else (error.message, error)
    return left


def _unknown(nodes: Nodes, decider: str) -> ShardidsError:
    hint = "Bring the node back, or replace it: shardids node replace"
    if decider not in set(nodes):
        hint = "The node is not in the catalog. Find its database: only that has the decision."
    return ShardidsError(f'node "{decider}" cannot be asked', hint=hint)


def _settle_one(engine: Engine, transaction: UUID) -> Decision:
    with engine.connect() as connection:
        committed = connection.scalar(text("select shardids.settle(:name)"), {"name": transaction})
    return Decision.COMMIT if committed else Decision.ROLL_BACK


def _who_decides(nodes: Nodes, decider: str) -> str:
    """Return why a transaction is left whose decision is entered and not committed yet."""
    with nodes[decider].connect() as connection:
        deciding = holders_of_tables(connection, ["shardids.decision"], ["RowExclusiveLock"])
    pids = sorted({one.pid for one in deciding if one.pid is not None})
    sessions = ", ".join(map(str, pids)) or "none any more"
    return f'its client is deciding on node "{decider}" (sessions that decide there: {sessions})'


def _holders(nodes: Nodes, decisions: Mapping[Key, Decision]) -> dict[Key, str]:
    """Return the sessions of clients that are stopped: their own part is open on the node that decides."""
    wanted = [key for key, decision in decisions.items() if decision is Decision.ROLL_BACK]
    holders: dict[Key, str] = {}
    for decider, name in wanted:
        with suppress(ShardidsError), nodes[decider].connect() as connection:
            pids = [one.pid for one in holders_of_key(connection, lock_of(name)) if one.pid is not None]
            if pids:
                holders[decider, name] = (
                    f'its client\'s session, process {pids[0]} on node "{decider}", holds the rows that it'
                    f" wrote there until it ends: select pg_terminate_backend({pids[0]})"
                )
    return holders


def _with_holder(outcome: Outcome, holders: Mapping[Key, str]) -> Outcome:
    gid = outcome.prepared.gid
    reason = None if gid is None else holders.get((gid.decider, gid.transaction))
    return outcome if reason is None or outcome.reason else replace(outcome, reason=reason)


def _outcome(
    one: Prepared,
    decisions: Mapping[Key, Decision],
    left: Mapping[Key, tuple[str, ShardidsError | None]],
) -> Outcome:
    if one.gid is None:
        return Outcome(prepared=one, result="left", reason="foreign: not of this cluster's sessions")
    key = one.gid.decider, one.gid.transaction
    if key in left:
        reason, error = left[key]
        return Outcome(prepared=one, result="left", reason=reason, error=error)
    decision = decisions.get(key, Decision.NONE)
    if decision is Decision.NONE:
        return Outcome(prepared=one, result="left", reason="prepared just now")
    return Outcome(prepared=one, result="committed" if decision is Decision.COMMIT else "rolled back")


def end_decided(nodes: Nodes, found: Sequence[Prepared], decisions: Mapping[Key, Decision]) -> list[Outcome]:
    """End prepared transactions of this cluster as was decided on each."""
    return _end_all(nodes, found, decisions, {})


def _end_all(
    nodes: Nodes,
    found: Sequence[Prepared],
    decisions: Mapping[Key, Decision],
    left: Mapping[Key, tuple[str, ShardidsError | None]],
) -> list[Outcome]:
    outcomes = [_outcome(one, decisions, left) for one in found]
    per_node: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.result != "left":
            per_node.setdefault(outcome.prepared.node, []).append(outcome)

    def end(name: str, engine: Engine) -> list[Outcome]:
        with engine.connect() as connection:
            return [_end(connection, outcome) for outcome in per_node[name]]

    answers = nodes.each(end, per_node)
    ended = [outcome for done in answers.results.values() for outcome in done]
    for name, error in answers.failures.items():
        ended += [replace(o, result="left", reason=error.message, error=error) for o in per_node[name]]
    return [outcome for outcome in outcomes if outcome.result == "left"] + ended


def _end(connection: Connection, outcome: Outcome) -> Outcome:
    one = outcome.prepared
    verb = "commit" if outcome.result == "committed" else "rollback"
    try:
        with _acting_as(connection, one):
            connection.exec_driver_sql(f"{verb} prepared '{one.gid}'")
    except ShardidsError as error:
        if error.sqlstate == _UNDEFINED_OBJECT:
            return outcome  # Its client was quicker.
        if error.sqlstate == _IN_USE:
            return replace(outcome, result="left", reason="another session is ending it")
        return replace(outcome, result="left", reason=error.message, error=error)
    return outcome


@contextmanager
def _acting_as(connection: Connection, one: Prepared) -> Iterator[None]:
    """Become the role that prepared a transaction: only it and superusers may end that."""
    if one.is_own:
        yield
        return
    role = connection.dialect.identifier_preparer.quote_identifier(one.owner)
    try:
        connection.exec_driver_sql(f"set role {role}")
    except MissingPrivilege as error:
        raise MissingPrivilege(
            error.message, hint=f"Run it as a superuser, or first: GRANT {role} TO …"
        ) from error
    try:
        yield
    finally:
        connection.exec_driver_sql("reset role")


def _forget(nodes: Nodes, cluster: UUID) -> int:
    """Delete decisions on transactions that had no prepared part any more after they were read."""
    decided = nodes.each(_read_names)
    prepared = read_prepared(nodes, cluster)
    if decided.failures or prepared.failures:
        return 0
    needed = by_decider(all_of(prepared.results.values()))

    def forget(name: str, engine: Engine) -> int:
        names = sorted(set(decided.results[name]) - needed.get(name, set()))
        if not names:
            return 0
        with engine.connect() as connection:
            return int(
                connection.scalar(text("select shardids.forget_decisions(:names)"), {"names": names}) or 0
            )

    return sum(nodes.each(forget).results.values())


def _read_names(_name: str, engine: Engine) -> list[UUID]:
    with engine.connect() as connection:
        return list(
            connection.scalars(
                text("select transaction from shardids.decision order by decided_at limit :most"),
                {"most": _MOST_FORGOTTEN},
            )
        )
