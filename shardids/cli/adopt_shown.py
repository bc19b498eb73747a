"""How ``shardids adopt`` shows an adoption in progress, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from shardids.adopt import events
from shardids.catalog.notation import parse_duration_ms
from shardids.cli.common import print_json
from shardids.cli.output import err, out
from shardids.errors import BadArgument


def pause_seconds(max_pause: str) -> float:
    """Returns what ``--max-pause`` says, in seconds."""
    milliseconds = parse_duration_ms(max_pause)
    if not 50 <= milliseconds <= 600_000:
        raise BadArgument(f"{max_pause!r} is not between 50ms and 10min", hint="For example: 500ms or 2s")
    return milliseconds / 1000


def print_done(done: events.Result, *, as_json: bool) -> None:
    """Prints how far a command has brought the adoption."""
    if as_json:
        print_json(asdict(done))
        return
    paused = "" if done.pause_ms is None else f"; no writes were taken for {done.pause_ms:.0f} ms"
    out.print(f"{done.outcome or f'at step {done.step}'} after {done.seconds:.1f} s{paused}")
    if done.outcome is None and done.step == "follow":
        err.print("When applications are ready for the cluster: shardids adopt switch")


@contextmanager
def shown() -> Iterator[events.OnEvent]:
    """Shows an adoption in progress: by a bar on a terminal, otherwise by a line for each step."""
    columns = (TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(event: events.Event) -> None:
            line, total, completed = _told(event)
            if isinstance(event, events.Noted) and err.is_terminal:
                progress.console.print(line, markup=False)
            if not err.is_terminal:
                if isinstance(event, events.StepBegun | events.Waiting | events.Compared | events.Noted):
                    err.print(line, markup=False)
                return
            progress.update(task, description=line, total=total, completed=completed)

        yield show


def _told(event: events.Event) -> tuple[str, float | None, float]:
    """Returns a text for an event, with the total and the completed part of its bar."""
    match event:
        case events.StepBegun() | events.StepDone():
            return event.step, None, 0
        case events.Copying():
            return (
                f"copy · {event.rows_done:,} of about {event.rows_total:,} rows · {event.tables_left} to do",
                event.rows_total,
                event.rows_done,
            )
        case events.Lagging():
            return f"follow · {decimal(event.lag_bytes)} behind", None, 0
        case events.Waiting():
            return f"put off ({event.attempt}): {event.reason}", None, 0
        case events.Compared():
            return f"compare · {event.table}: {event.rows:,} rows are the same", None, 0
        case events.Noted():
            return f"note: {event.note}", None, 0
