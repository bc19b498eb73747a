"""Actions that the page offers with ``--allow-actions``: planned, confirmed, then carried out in a thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any, Final, Literal

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.catalog.shards import read_shard
from shardids.errors import BadArgument, ClusterConflict, MoveFailed, ShardidsError, UnknownShard
from shardids.logs import logger
from shardids.mover.journal import alone
from shardids.pg.notation import counted
from shardids.watch.console.figures import told

CONFIRM_S: Final = 60.0
"""How long a plan can be confirmed."""
_MOST_PLANS: Final = 16
_MOST_LINES: Final = 200
_PATIENCE_S: Final = 10.0
_OPTIONS: Final = mover.Options()

log = logger("console")

Values = dict[str, Any]
Work = Callable[[Catalog, mover.OnEvent], list[str]]
"""Carries out a plan, and returns the lines to report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A planned action, in words, and its work; ``resume`` is the command that resumes it."""

    title: str
    lines: list[str]
    work: Work
    resume: str | None = None


@dataclass(slots=True, kw_only=True)
class Job:
    """Work that was confirmed; ``progress`` is of the step that it is at."""

    id: int
    title: str
    resume: str | None
    started: float
    state: Literal["running", "done", "failed", "interrupted"] = "running"
    ended: float | None = None
    lines: list[str] = field(default_factory=list)
    progress: Values | None = None
    error: str | None = None

    @property
    def what_to_do(self) -> str:
        """The next step after a job that did not finish."""
        left = f"shardids shard move --list; to resume: {self.resume}" if self.resume else "shardids doctor"
        return f"To see the remaining steps: {left}"

    def values(self) -> Values:
        """Return the job as values for the page."""
        return {
            "id": self.id,
            "title": self.title,
            "state": self.state,
            "started": self.started,
            "ended": self.ended,
            "lines": self.lines[-_MOST_LINES:],
            "progress": self.progress,
            "error": self.error,
        }


class Actions:
    """The actions: planned, confirmed and carried out, one job at a time.

    Args:
        catalog_url: the catalog.
        on_change: called on each progress of the job, in the job's thread.
    """

    def __init__(self, catalog_url: str | URL, on_change: Callable[[Values], object]) -> None:
        self._catalog_url = catalog_url
        self._on_change = on_change
        self._plans: dict[str, tuple[float, Plan]] = {}
        self._job: Job | None = None
        self._thread: Thread | None = None
        self._is_stopping = False
        self._lock = Lock()

    def job(self) -> Values | None:
        """The job that runs, or else the last; ``None`` if there was none."""
        return None if self._job is None else self._job.values()

    def plan(self, action: str, arguments: Values) -> Values:
        """Return the steps of an action, and the token that confirms it.

        Raises:
            BadArgument: the action does not exist, or its arguments are wrong.
            ShardidsError: the action is not possible; nothing was changed.
        """
        if action not in _PLANNERS:
            raise BadArgument(
                f"action {action[:40]!r} does not exist", hint=f"The actions are {', '.join(_PLANNERS)}."
            )
        with closing(Catalog(self._catalog_url)) as catalog:
            plan = _PLANNERS[action](catalog, arguments)
        if not plan.lines:
            return {"plan": ["Nothing to do"], "confirm": None}
        confirm = secrets.token_urlsafe(16)
        with self._lock:
            now = time.monotonic()
            fresh = {one: kept for one, kept in self._plans.items() if now - kept[0] < CONFIRM_S}
            self._plans = dict(list(fresh.items())[1 - _MOST_PLANS :]) | {confirm: (now, plan)}
        return {"plan": plan.lines, "confirm": confirm}

    def start(self, confirm: str) -> Values:
        """Begin a planned action.

        Raises:
            BadArgument: this confirms no plan, or no longer does.
            ClusterConflict: another job is running.
        """
        with self._lock:
            if self._job is not None and self._job.state == "running":
                raise ClusterConflict(
                    f"another action is running: {self._job.title}", hint="Wait for its end."
                )
            planned, plan = self._plans.pop(confirm, (float("-inf"), None))
            if plan is None or time.monotonic() - planned > CONFIRM_S:
                raise BadArgument(
                    "this confirmation has expired, or was used", hint="Ask for the plan again."
                )
            number = self._job.id + 1 if self._job else 1
            job = self._job = Job(id=number, title=plan.title, resume=plan.resume, started=time.time())
            self._thread = Thread(
                target=self._run, args=(job, plan), name="shardids console job", daemon=True
            )
            self._thread.start()
        return job.values()

    def stop(self) -> str | None:
        """Interrupt the job that runs, as Ctrl-C does; return what to say of it."""
        thread, job = self._thread, self._job
        if thread is None or job is None or not thread.is_alive():
            return None
        self._is_stopping = True
        thread.join(_PATIENCE_S)
        if job.state == "done":
            return None
        if job.state == "failed":
            return f"failed: {job.title}: {(job.error or '').rstrip('.')}. {job.what_to_do}"
        return f"interrupted: {job.title}. {job.what_to_do}"

    def _run(self, job: Job, plan: Plan) -> None:
        log.info("begun: %s", job.title)
        self._on_change(job.values())
        try:
            with closing(Catalog(self._catalog_url)) as catalog:
                job.lines += plan.work(catalog, lambda event: self._follow(job, event))
            job.state = "done"
        except ShardidsError as error:
            job.state, job.error = "failed", told(error)
        except KeyboardInterrupt:
            job.state = "interrupted"
            job.error = f"The console ended. {job.what_to_do}"
        except Exception as error:
            log.exception("failed: %s", job.title)
            job.state, job.error = "failed", f"it failed: {type(error).__name__}"
        job.ended, job.progress = time.time(), None
        log.info("%s: %s", job.state, job.title)
        self._on_change(job.values())

    def _follow(self, job: Job, event: mover.Event) -> None:
        if self._is_stopping:
            # The mover then lets the source take writes again, as after Ctrl-C.
            raise KeyboardInterrupt
        match event:
            case mover.StepBegun():
                job.lines.append(f"shard {event.shard}: {event.step}")
                job.progress = {"shard": event.shard, "step": event.step}
            case mover.Copying():
                job.progress = {
                    "shard": event.shard,
                    "step": "copy",
                    "done": event.bytes_done,
                    "total": event.bytes_total,
                    "seconds_left": event.seconds_left,
                }
            case mover.Lagging():
                job.progress = {"shard": event.shard, "step": "catch up", "lag_bytes": event.lag_bytes}
            case mover.Waiting():
                job.lines.append(f"shard {event.shard}: put off ({event.attempt}): {event.reason}")
            case mover.StepDone():
                return
        self._on_change(job.values())


def _plan_move(catalog: Catalog, given: Values) -> Plan:
    shard, target = _shard(catalog, given), _name(given, "to")
    back = given.get("back") is True
    found = mover.plan_move(catalog, shard, target, back=back)
    rows = "rows never counted" if found.rows is None else f"about {counted(found.rows, 'row')}"
    size = f"{counted(found.tables, 'table')}, {rows}, {found.size_bytes:,} bytes"
    title = f'Move shard {shard} from node "{found.source}" to node "{target}"'

    def work(there: Catalog, on_event: mover.OnEvent) -> list[str]:
        return _results([mover.move(there, shard, target, back=back, options=_OPTIONS, on_event=on_event)])

    lines = [
        f"{title}: {size}",
        f"Writes stop for {_OPTIONS.max_pause_s:g} s at most.",
        f'The old copy stays on node "{found.source}", fenced, until: shardids shard purge {shard}',
        *found.notes,
    ]
    return Plan(title=title, lines=lines, work=work, resume="shardids shard move --resume")


def _plan_rebalance(catalog: Catalog, given: Values) -> Plan:
    by = given.get("by", mover.By.SIZE)
    # Load is measured over seconds, for which no page waits.
    if by not in list(mover.By) or by == mover.By.LOAD:
        raise BadArgument(
            f"nodes can't be balanced by {str(by)[:40]!r} here",
            hint="Balance by size, rows or writes; by load: shardids rebalance --by load",
        )
    mover.require_none_open(catalog)
    found = mover.plan_balance(catalog, mover.By(by))
    lines = [
        f'Move shard {one.shard} from node "{one.source}" to node "{one.target}"' for one in found.transfers
    ]

    def work(there: Catalog, on_event: mover.OnEvent) -> list[str]:
        with mover.rebalancing(there):
            mover.require_none_open(there)
            done = mover.carry_out(there, found.transfers, _OPTIONS, on_event)
        if left := [str(one) for one in done if isinstance(one, mover.NotMoved)]:
            raise MoveFailed(
                "\n".join(left), hint="The other shards were moved. To move the rest, rebalance again."
            )
        return _results([one for one in done if isinstance(one, mover.Result)])

    return Plan(
        title=f"Rebalance by {by}: {counted(len(lines), 'move')}",
        lines=lines,
        work=work,
        # To resume the one move that was interrupted would leave those that had not begun.
        resume=f"shardids rebalance --by {by} --resume",
    )


def _results(results: list[mover.Result]) -> list[str]:
    return [
        f'shard {one.shard}: {one.outcome} to node "{one.target}" in {one.seconds:.1f} s'
        + (f", without writes for {one.pause_ms:.0f} ms" if one.pause_ms is not None else "")
        for one in results
    ] + [warning for one in results for warning in one.stale_views]


def _plan_fence(catalog: Catalog, given: Values) -> Plan:
    shard = _shard(catalog, given)
    node = require_state(catalog, shard, "active")
    title = f'Fence shard {shard} on node "{node}"'
    lines = [
        title,
        "It issues no IDs, so inserts that need one fail, until it is activated. Its rows can be read.",
    ]
    return Plan(title=title, lines=lines, work=lambda there, _: [fence(there, shard)])


def _plan_unfence(catalog: Catalog, given: Values) -> Plan:
    shard = _shard(catalog, given)
    node = require_state(catalog, shard, "fenced")
    title = f'Activate shard {shard} on node "{node}"'
    lines = [title, "It issues IDs again, above all that it has issued."]

    def work(there: Catalog, _event: mover.OnEvent) -> list[str]:
        done = mover.activate(there, shard)
        return [f'Shard {shard} on node "{done.node}" is active']

    return Plan(title=title, lines=lines, work=work)


_PLANNERS: Final[dict[str, Callable[[Catalog, Values], Plan]]] = {
    "move": _plan_move,
    "rebalance": _plan_rebalance,
    "fence": _plan_fence,
    "unfence": _plan_unfence,
}


def _shard(catalog: Catalog, given: Values) -> int:
    shard = given.get("shard")
    count = catalog.shard_total()
    if type(shard) is not int or not 0 <= shard < count:
        raise BadArgument(
            f"{str(shard)[:40]!r} is not a shard of this cluster", hint=f"The shards are 0 to {count - 1}."
        )
    return shard


def _name(given: Values, key: str) -> str:
    name = given.get(key)
    if not isinstance(name, str) or not name:
        raise BadArgument(f"{key!r} must name a node")
    return name


def require_state(catalog: Catalog, shard: int, state: str) -> str:
    """Return the node of a shard that is in this state there, and is not being moved.

    Raises:
        ClusterConflict: it is in another state, or a move of it or an adoption is not over.
    """
    with alone(catalog, shard, "look", dry_run=True) as (node, connection):
        _require(connection, node, shard, state)
    return node


def fence(catalog: Catalog, shard: int) -> str:
    """Stop a shard from issuing IDs, at once and for every session; return what to tell.

    Raises:
        ClusterConflict: it is not active, or a move of it or an adoption is not over.
    """
    with alone(catalog, shard, "fence") as (node, connection):
        _require(connection, node, shard, "active")
        with connection.begin():
            connection.execute(text("select shardids.fence(:shard)"), {"shard": shard})
    return f'Shard {shard} on node "{node}" is fenced'


def _require(connection: Connection, node: str, shard: int, state: str) -> None:
    found = read_shard(connection, shard)
    if found is None:
        raise UnknownShard(
            f'the catalog places shard {shard} on node "{node}", which does not have it',
            hint="Restore its schema there from a backup, or see the other remedies: shardids doctor",
        )
    if found.state != state:
        raise ClusterConflict(
            f'shard {shard} on node "{node}" is {found.state}, not {state}',
            hint="For the remedy: shardids doctor",
        )
