"""The catalog's table ``adoption``, which records each step of an adoption before it is taken."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal, Self
from uuid import UUID

from sqlalchemy import Connection, text

from shardids.adopt.plan.document import Plan, parse_plan, plan_text
from shardids.catalog.leases import ADOPTION, Leases
from shardids.catalog.old_ids import OldIdRule, forget_old_ids, write_old_ids
from shardids.catalog.rows import Catalog
from shardids.errors import AdoptionFailed, ClusterConflict, ConnectionFailed
from shardids.pg.locks import AdvisoryLock
from shardids.replication.barrier import HeldLock

FOLLOW: Final = "follow"
"""The step at which an adoption stays until the switch: the nodes follow the source."""
KEPT: Final = "kept"
"""The step at which an adoption with a way back stays: the source follows the shards."""
HANDED_BACK: Final = "sequences"
"""The first step after the source has taken over again."""
RETURNED: Final = "returned"
"""The step at which it stays then: the shards are fenced, with their rows."""
FINISH: Final = "finish"
"""The step that gives the way back up."""

Outcome = Literal["adopted", "aborted", "returned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """An adoption as the journal records it: see the comments of ``shardids_catalog.adoption``.

    ``shapes`` has the shape of each table of the source, by its name. ``compared`` has the tables that were
    last found to be the same, each with the version of its storage at the source and the timelines of the
    servers before it was compared.
    """

    id: int
    source: str
    plan: Plan
    shapes: Mapping[str, str]
    step: str
    is_paused: bool
    keeps_back: bool
    compared: Mapping[str, tuple[str, str]]
    compared_at: datetime | None
    switched_at: datetime | None
    started_at: datetime
    ended_at: datetime | None
    outcome: Outcome | None

    def session_name(self, cluster: UUID) -> str:
        """Return the name of the adoption's sessions, the prefix of the names of its slots."""
        return f"shardids_adopt_{cluster.hex[:8]}_{self.id}"


def adoptions(catalog: Catalog) -> list[Adoption]:
    """Return all adoptions, oldest first."""
    with catalog.engine.connect() as connection:
        return _read(connection)


def open_adoption(catalog: Catalog) -> Adoption | None:
    """Return the adoption that is not over, if there is one."""
    with catalog.engine.connect() as connection:
        return next(iter(_read(connection, only_open=True)), None)


def _read(connection: Connection, *, only_open: bool = False) -> list[Adoption]:
    rows = connection.execute(
        text("select * from shardids_catalog.adoption where ended_at is null or not :open order by id"),
        {"open": only_open},
    )
    return [_adoption(row._asdict()) for row in rows]


def _adoption(row: dict[str, Any]) -> Adoption:
    compared = {name: tuple(one) for name, one in row["compared"].items()}
    return Adoption(**row | {"plan": parse_plan(row["plan"], "the catalog's plan"), "compared": compared})


class Journal:
    """The journal of the cluster's adoption, open for writing: no other process works at it meanwhile.

    :meth:`opened` makes it.

    Attributes:
        leases: those of the shards, which an open adoption keeps.
    """

    def __init__(self, catalog: Catalog, held: HeldLock) -> None:
        self._catalog = catalog
        self._held = held
        self.leases = Leases(catalog, ADOPTION)
        self._adoption: Adoption | None = None
        self.step = ""

    @classmethod
    @contextmanager
    def opened(cls, catalog: Catalog) -> Iterator[Self]:
        """Yield the journal, and close it afterwards.

        Raises:
            ClusterConflict: another process works at an adoption.
        """
        taken = ClusterConflict(
            "another process works at the adoption",
            hint="To see how far it is: shardids adopt status. To stop it, interrupt that process.",
        )
        lost = ConnectionFailed(
            "the journal of the adoption was lost, with the connection to the catalog",
            hint="When the catalog answers again: shardids adopt run --resume",
        )
        with HeldLock.taken(catalog, AdvisoryLock.ADOPT, 0, taken=taken, lost=lost) as held:
            journal = cls(catalog, held)
            with held.transaction() as connection:
                lives = {"class": int(AdvisoryLock.LEASE_HOLDER), "key": journal.leases.key}
                connection.execute(text("select pg_advisory_lock(:class, :key)"), lives)
                found = _read(connection, only_open=True)
            for adoption in found:
                journal._set(adoption)
            yield journal

    @property
    def adoption(self) -> Adoption:
        """Returns the adoption that is not over.

        Raises:
            ClusterConflict: no adoption is under way.
        """
        if self._adoption is None:
            raise ClusterConflict("no adoption is under way", hint="To begin one: shardids adopt run PLAN")
        return self._adoption

    @property
    def is_open(self) -> bool:
        """Returns whether an adoption is not over."""
        return self._adoption is not None

    def refuse_open(self) -> None:
        """Refuse if an adoption is not over.

        Raises:
            ClusterConflict: one was begun and has neither ended nor been aborted.
        """
        if self._adoption is not None:
            raise ClusterConflict(
                f'the adoption of {self._adoption.source} is at step "{self.step}"',
                hint="To go on with it: shardids adopt run --resume; to undo it: shardids adopt abort",
            )

    def require_lock(self) -> None:
        """Require that no other process works at the adoption.

        Raises:
            ConnectionFailed: the catalog has ended the session that holds the lock.
        """
        self._held.require()

    def enter(self, plan: Plan, source: str, shapes: Mapping[str, str], first_step: str) -> Adoption:
        """Record a new adoption."""
        with self._held.transaction() as connection:
            row = connection.execute(
                text("""
                    insert into shardids_catalog.adoption (source, plan, shapes, step)
                    values (:source, :plan, cast(:shapes as jsonb), :step) returning *"""),
                {
                    "source": source,
                    "plan": plan_text(plan),
                    "shapes": json.dumps(dict(shapes)),
                    "step": first_step,
                },
            ).one()
        self._set(_adoption(row._asdict()))
        return self.adoption

    def begin_step(self, step: str) -> None:
        """Record the step that is taken next."""
        self._update("step = :step", step=step)
        self.step = step

    def pause(self, *, is_paused: bool) -> None:
        """Record whether the nodes are to follow the source."""
        self._update("is_paused = :is_paused", is_paused=is_paused)

    def note_compared(self, table: str, versions: tuple[str, str]) -> None:
        """Record that the rows of a table were found to be the same, with their storage and the timelines."""
        compared = {**self.adoption.compared, table: versions}
        self._update("compared = cast(:compared as jsonb)", compared=json.dumps(compared))
        self._adoption = replace(self.adoption, compared=compared)

    def forget_compared(self) -> None:
        """Record that no table is known to be the same."""
        self._update("compared = '{}'")
        self._adoption = replace(self.adoption, compared={})

    def note_comparison(self) -> None:
        """Record that all rows were found to be the same now."""
        self._update("compared_at = clock_timestamp()")

    def keep_back(self, step: str, *, is_kept: bool) -> None:
        """Record whether the switch keeps a way back, and with it the step that is taken next."""
        self._update("step = :step, keeps_back = :is_kept", step=step, is_kept=is_kept)
        self._adoption = replace(self.adoption, keeps_back=is_kept)
        self.step = step

    def switch(self, rules: Iterable[OldIdRule], first: str) -> None:
        """Record that the shards take over, and the rules for old IDs, in one transaction.

        ``first`` is the step that is taken then.
        """
        adoption = self.adoption
        with self._held.transaction() as connection:
            write_old_ids(connection, rules=rules)
            connection.execute(
                text("""
                    update shardids_catalog.adoption set step = :step, switched_at = clock_timestamp()
                    where id = :id and ended_at is null"""),
                {"step": first, "id": adoption.id},
            )
        self.step = first

    def forget_old_ids(self, tables: Iterable[str]) -> None:
        """Delete the rules of tables for old IDs."""
        with self._held.transaction() as connection:
            forget_old_ids(connection, tables)

    def is_past(self, step: str, error: BaseException) -> bool:
        """Return whether a step that failed with ``error`` is over: its end is recorded.

        If the entry may have got no answer, it asks the catalog. If the session of the lock is lost, it is
        ended first, and with it the lock.

        Raises:
            ConnectionFailed: the catalog stays out of reach.
        """
        # An interrupt may have come before the answer to the COMMIT.
        if isinstance(error, ConnectionFailed) or not isinstance(error, Exception):
            return self._held.settled(self._catalog, self._recorded_step) != step
        return self.step != step

    def _recorded_step(self, connection: Connection) -> str:
        found = text("select step from shardids_catalog.adoption where id = :id")
        step: str = connection.execute(found, {"id": self.adoption.id}).scalar_one()
        return step

    def end(self, outcome: Outcome) -> None:
        """Record how the adoption ended."""
        self._update("ended_at = clock_timestamp(), outcome = :outcome", outcome=outcome)
        self._adoption = None

    def _set(self, adoption: Adoption) -> None:
        self._adoption, self.step = adoption, adoption.step

    def _update(self, change: str, **values: object) -> None:
        with self._held.transaction() as connection:
            changed = connection.execute(
                text(f"update shardids_catalog.adoption set {change} where id = :id and ended_at is null"),  # noqa: S608 -- constants
                values | {"id": self.adoption.id},
            ).rowcount
        if changed != 1:
            raise AdoptionFailed("the journal's entry of the adoption was closed by another process")
