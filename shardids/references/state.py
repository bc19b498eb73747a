"""How far each node has followed the writer, what differs, and how it is repaired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.nodes import Nodes
from shardids.catalog.reader import Refused, reading_as_reader
from shardids.catalog.references import (
    AWAIT,
    MARK,
    REFERENCE_SCHEMA,
    WITHIN_S,
    reference_digests,
    references_of,
    slots_of,
)
from shardids.catalog.rows import Catalog
from shardids.client.references import followers_behind
from shardids.errors import ConnectionFailed, ReferencesBehind
from shardids.mover.sides import Side
from shardids.references.following import definitions, run
from shardids.references.work import LOCK_TIMEOUT, Work

_CATCH_UP_S: Final = 5.0
_NO_WORKER: Final = "its worker does not run; the node's log says why"
REFUSES: Final = "refuses writes: its server was promoted, restored or upgraded"
"""The state of a writer that has to be given the right to write again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A reference table: ``creating``, ``active`` or ``dropping``, and the node that it is written to on."""

    name: str
    state: str
    writer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How a node follows the writer.

    Attributes:
        node: its name.
        role: ``writer`` or ``reader``.
        state: ``follows``, or what is wrong; of the writer ``is written to``, or why not.
        lag_bytes: how much of the writer's log it has not confirmed; ``None`` if that is unknown.
        kept_bytes: how much of its log the writer keeps for it.
    """

    node: str
    role: str
    state: str
    lag_bytes: int | None = None
    kept_bytes: int | None = None


def tables(catalog: Catalog) -> list[Table]:
    """Returns the reference tables, as the catalog has them."""
    known = references_of(catalog)
    return [Table(name=name, state=state, writer=str(known.writer)) for name, state in known.states.items()]


_SLOTS = text("""
    select slot_name::text as name, active, coalesce(wal_status, '') = 'lost' as is_lost,
           greatest(pg_current_wal_lsn() - confirmed_flush_lsn, 0)::bigint as lag_bytes,
           (pg_current_wal_lsn() - restart_lsn)::bigint as kept_bytes
    from pg_replication_slots where slot_name = any(:names)""")

_SUBSCRIPTION = text("""
    select s.subenabled as is_enabled, exists (
             select from pg_stat_subscription t where t.subid = s.oid and t.pid is not null) as is_working
    from pg_subscription s where s.subname = :name and s.subdbid = shardids.database()""")


def status(catalog: Catalog) -> list[Followed]:
    """Returns how each node follows the writer; changes nothing, and waits for nobody.

    Raises:
        ConnectionFailed: the writer does not answer. A reader that does not is in the answer.
    """
    known, placement = references_of(catalog), catalog.placement()
    if known.writer is None:
        return []
    names = {
        node: slot
        for slot, node in slots_of(catalog.describe().cluster, placement.nodes, known.writer).items()
    }
    with Nodes(placement.nodes, catalog.url, autocommit=True) as nodes:
        with nodes[known.writer].connect() as connection:
            slots = {row.name: row for row in connection.execute(_SLOTS, {"names": list(names.values())})}
            active = [name for name, state in known.states.items() if state == "active"]
            is_open = taking_writes(connection, active) == set(active)
        answers = nodes.each(lambda name, engine: _subscribed(engine.connect(), names[name]), names)
    state = "is written to" if is_open else REFUSES
    if known.successor is not None:
        state = f'takes no writes while node "{known.successor}" becomes the writer'
    found = [Followed(node=known.writer, role="writer", state=state)]
    for node, name in sorted(names.items()):
        slot = slots.get(name)
        failure = answers.failures.get(node)
        wrong = str(failure.message) if failure is not None else answers.results[node] or wrong_slot(slot)
        found.append(
            Followed(
                node=node,
                role="reader",
                state=wrong or "follows",
                lag_bytes=None if slot is None else slot.lag_bytes,
                kept_bytes=None if slot is None else slot.kept_bytes,
            )
        )
    return found


def taking_writes(connection: Connection, names: Sequence[str]) -> set[str]:
    """Returns the tables that take writes on a node as on their writer."""
    asked = text("""select name::text from unnest(cast(:names as name[])) name
                    where shardids.takes_reference_writes(name)""")
    return set(connection.scalars(asked, {"names": list(names)}))


def _subscribed(connection: Connection, name: str) -> str | None:
    with connection:
        return wrong_subscription(connection, name)


def wrong_subscription(connection: Connection, name: str) -> str | None:
    """Returns what is wrong with a node's subscription; ``None`` if nothing is."""
    found = connection.execute(_SUBSCRIPTION, {"name": name}).one_or_none()
    if found is None:
        return "has no subscription"
    if not found.is_enabled:
        return "its subscription is disabled"
    return None if found.is_working else _NO_WORKER


def wrong_slot(slot: Any) -> str | None:
    """Returns what is wrong with a node's slot on the writer; ``None`` if nothing is."""
    if slot is None:
        return "the writer has no replication slot for it"
    return "the writer has given up its replication slot" if slot.is_lost else None


def has_arrived(work: Work, reader: Side) -> bool:
    """Waits some seconds until a node has what the writer has committed; returns whether it has."""
    return not followers_behind(work.writer.engine, {work.slot(reader): reader.name}, _CATCH_UP_S)


def await_all(work: Work, what: str, within_s: float = WITHIN_S) -> None:
    """Waits until all nodes have what the writer has committed; ``what`` the message begins with.

    Raises:
        ReferencesBehind: some have not in time.
    """
    followers = {work.slot(reader): name for name, reader in work.readers.items()}
    if behind := followers_behind(work.writer.engine, followers, within_s):
        raise ReferencesBehind(
            f"{what} node {behind} within {within_s:g} s",
            hint="Repeat the command when the node follows again. See: shardids reference status",
        )


def differing(work: Work, names: Sequence[str]) -> Mapping[str, str]:
    """Returns the nodes that are not as the writer, and why. Writers of reference tables wait meanwhile."""
    wrong: dict[str, str] = {}
    followers = {work.slot(reader): name for name, reader in work.readers.items()}
    with work.writer.autocommit() as connection:
        slots = {row.name: row for row in connection.execute(_SLOTS, {"names": list(followers)})}
    for name, reader in work.readers.items():
        try:
            with reader.autocommit() as connection:
                found = wrong_subscription(connection, work.slot(reader)) or wrong_slot(
                    slots.get(work.slot(reader))
                )
                if taken := sorted(taking_writes(connection, names)):
                    found = f"takes writes to {taken[0]} as the writer does"
        except ConnectionFailed as error:
            found = error.message
        if found not in (None, _NO_WORKER):
            wrong[name] = found
    rest = {slot: name for slot, name in followers.items() if name not in wrong}
    if not rest or not names:
        return wrong
    with ExitStack() as stack:
        locking, other = (
            stack.enter_context(work.writer.begin()),
            stack.enter_context(work.writer.autocommit()),
        )
        _lock(locking, names)
        wanted = other.scalar(MARK)
        asked = {"slots": list(rest), "wanted": wanted, "patience_s": _CATCH_UP_S}
        wrong |= {rest[slot]: "does not follow; its log says why" for slot in other.scalars(AWAIT, asked)}
        original = digests(work.writer, names)
        for name in rest.values():
            if name not in wrong and (
                table := _first_difference(original, digests(work.readers[name], names))
            ):
                wrong[name] = f"its rows of {table} differ"
    return wrong


def _lock(connection: Connection, names: Sequence[str]) -> None:
    connection.execute(text("select set_config('lock_timeout', :timeout, true)"), {"timeout": LOCK_TIMEOUT})
    listed = sql.SQL(", ").join(sql.Identifier(REFERENCE_SCHEMA, name) for name in sorted(names))
    run(connection, sql.SQL("lock table {} in share mode").format(listed))


def digests(side: Side, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
    """Returns the number of rows, their hash and the columns of each table.

    Raises:
        MissingPrivilege, StatementFailed: rows can't be read there.
    """
    columns = definitions(side, names)
    there = [name for name in names if columns[name] is not None]
    with reading_as_reader(side.engine, f'node "{side.name}"') as reader:
        found = reference_digests(reader, there)
        for name, answer in found.items():
            if isinstance(answer, Refused):
                raise reader.error(answer, f"{REFERENCE_SCHEMA}.{name}")
    return {name: (found.get(name), columns[name]) for name in names}


def differs(one: Side, other: Side, names: Sequence[str]) -> str | None:
    """Returns a table whose rows or columns differ between two nodes; ``None`` if none does."""
    return _first_difference(digests(one, names), digests(other, names))


def _first_difference(one: Mapping[str, object], other: Mapping[str, object]) -> str | None:
    return next((table for table in sorted(one) if one[table] != other.get(table)), None)
