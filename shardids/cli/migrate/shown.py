"""How ``shardids migrate`` shows a run: progress, plan and report."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Event, Lock
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from shardids.catalog.leases import Lease
from shardids.cli.command import Run
from shardids.cli.printing import bars, err, out, print_json, print_rows
from shardids.migrate.lint import lint, squawk_path
from shardids.migrate.migration import PreparedRun
from shardids.migrate.plan import Outcome, Position, RunReport, shards_by_start, shown_heads
from shardids.migrate.runner import Observer
from shardids.pg.notation import shown_shards

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_MOST_ROWS = 50
"""How many shards a table lists one by one; more are grouped."""
_LINE_EVERY_S = 5.0


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a request to stop; a second ends the process at once.

    Ending at once is as safe as kill -9: the servers roll back open transactions.
    """

    def __init__(self) -> None:
        self.stop = Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._request)
        return self

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if self.stop.is_set():
            err.print("Interrupted. Run again to continue.")
            os._exit(1)
        self.stop.set()
        err.print(
            "Stopping: finishing the shards that run, beginning no others. Ctrl-C again to end at once."
        )

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Progress(Observer):
    """Shows how far each node is: by bars on a terminal, otherwise by a line every few seconds."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        if err.is_terminal:
            state = "{task.fields[running]} running, {task.fields[failed]} failed, {task.fields[rate]}"
            self._bars = bars("node {task.description}", "bar", "count", state, "left", transient=False)
        self._lock = Lock()
        self._tasks: dict[str, TaskID] = {}
        self._totals: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._began = self._said = time.monotonic()

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def planned(self, counts: Mapping[str, int]) -> None:
        """Begin a bar for each node, or make it longer by shards that others have returned."""
        self._totals.update(counts)
        self._began = self._said = time.monotonic()
        if self._bars is not None:
            for node in counts:
                if node not in self._tasks:
                    self._tasks[node] = self._bars.add_task(node, running=0, failed=0, rate="")
                self._bars.update(self._tasks[node], total=self._totals[node])

    def started(self, position: Position) -> None:
        """Count a shard as running."""
        with self._lock:
            self._running[position.node] += 1
            self._show(position.node)

    def retried(self, position: Position, attempt: int, error: str) -> None:
        """Show why a shard is tried again."""
        err.print(f"shard {position.shard}: attempt {attempt}: {error}")

    def ended(self, outcome: Outcome) -> None:
        """Count a shard as done or failed."""
        with self._lock:
            self._running[outcome.node] -= 1
            (self._done if outcome.status == "done" else self._failed)[outcome.node] += 1
            self._show(outcome.node)
        if outcome.status == "failed":
            err.print(f"shard {outcome.shard} failed: {outcome.error}")

    def waiting(self, lease: Lease) -> None:
        """Show which command the run waits for."""
        err.print(f"shard {lease.shard}: waits for a {lease}")

    def _show(self, node: str) -> None:
        now = time.monotonic()
        ended = self._done[node] + self._failed[node]
        rate = ended / max(now - self._began, 0.001)
        if self._bars is not None:
            self._bars.update(
                self._tasks[node],
                completed=ended,
                running=self._running[node],
                failed=self._failed[node],
                rate=f"{rate:.0f} a second" if rate >= 1 else f"{1 / rate:.0f} s each" if ended else "",
            )
        elif now - self._said > _LINE_EVERY_S:
            self._said = now
            for name, total in self._totals.items():
                err.print(
                    f"node {name}: {self._done[name]} of {total} done, {self._running[name]} running,"
                    f" {self._failed[name]} failed"
                )


def print_plan(run: Run, prepared: PreparedRun) -> None:
    """Print the shards with their present and future revisions, and the way there."""
    rows: list[dict[str, object]] = [
        {
            "shards": f"node {name}",
            "from": "",
            "to": revisions[-1],
            "revisions": ", ".join(revisions),
            "way": "alembic",
            "reason": "",
        }
        for name, revisions in prepared.nodes.items()
    ]
    for start, shards in shards_by_start(prepared.plan.pending).items():
        compiled = prepared.compiler.compile(prepared.plan.routes[start])
        rows.append(
            {
                "shards": shown_shards(shards),
                "from": shown_heads(start),
                "to": shown_heads(compiled.route.end),
                "revisions": ", ".join(compiled.route.revisions),
                "way": compiled.way,
                "reason": compiled.reason,
            }
        )
    rows += [
        {
            "shards": str(o.shard),
            "from": shown_heads(o.start),
            "to": "",
            "revisions": "",
            "way": "",
            "reason": o.error,
        }
        for o in prepared.refused
    ]
    run.print_rows(rows, empty="Nothing to do")


def print_sql(prepared: PreparedRun) -> None:
    """Print the SQL that the run sends to shards, once for each starting point."""
    for compiled in prepared.compiled():
        route = compiled.route
        typer.echo(f"-- from {shown_heads(route.start)} to {shown_heads(route.end)}: {compiled.way}")
        if compiled.reason:
            typer.echo(f"-- {compiled.reason}")
        if compiled.preface:
            typer.echo(compiled.preface + "\n")
        for stage in compiled.stages:
            for part in stage.parts:
                typer.echo(part.sql if part.in_transaction else f"-- outside a transaction\n{part.sql}")
                typer.echo()


def print_warnings_of_squawk(prepared: PreparedRun) -> None:
    """Warn of statements that are not safe under load, if squawk is installed."""
    if squawk_path() is None:
        return
    warnings = {warning: None for compiled in prepared.compiled() for warning in lint(compiled)}
    for warning in warnings:
        err.print(f"[yellow]Warning:[/] revision {warning.revision}: ", markup=True, end="")
        err.print(f"{warning.message} {warning.instead} ({warning.rule})")


def print_report(report: RunReport, prepared: PreparedRun, words: Sequence[str], *, as_json: bool) -> None:
    """Print the result of a run, a row for each shard or group of shards, and the command to retry it."""
    retry = "" if report.succeeded else report.retry_command(words)
    if as_json:
        print_json(
            {
                "seconds": round(report.seconds, 3),
                "nodes": [outcome.row() for outcome in report.nodes],
                "shards": [outcome.row() for outcome in report.outcomes],
                "retry": retry,
            }
        )
        return
    for node in report.nodes:
        out.print(f"Node {node.node}: {shown_heads(node.start)} to {shown_heads(node.end)}, {node.status}")
        if node.error:
            err.print(node.error)
    if not report.outcomes and report.nodes:
        return
    if not report.outcomes:
        # Without Rich, whose import is a tenth of such a run.
        typer.echo(f"Nothing to do: {len(prepared.plan.settled)} shards are at the target")
        return
    rows = [outcome.row() for outcome in report.outcomes]
    print_rows(rows if len(rows) <= _MOST_ROWS else _grouped(report.outcomes))
    done, failed, left = (len(report.of(status)) for status in ("done", "failed", "not started"))
    out.print(f"{done} done, {failed} failed, {left} not started, in {report.seconds:.1f} s")
    for reason in dict.fromkeys(c.reason for c in prepared.compiled() if c.reason):
        err.print(f"Through Alembic, shard by shard: {reason}")
    if retry:
        err.print("To run the rest:")
        typer.echo(retry, err=True)


def _grouped(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Return a row for the shards of a node with the same outcome, and one for each error."""
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for one in outcomes:
        error = one.error.replace(f"shard {one.shard} ", "").replace(f" {one.shard} ", " ")
        key = (one.node, shown_heads(one.start), shown_heads(one.end), one.status, one.way, error)
        groups.setdefault(key, []).append(one)
    return [
        {
            "node": members[0].node,
            "shards": shown_shards(member.shard for member in members),
            "from": shown_heads(members[0].start),
            "to": shown_heads(members[0].end),
            "status": members[0].status,
            "seconds each": round(sum(member.seconds for member in members) / len(members), 3),
            "way": members[0].way,
            "error": members[0].error,
        }
        for members in groups.values()
    ]
