"""``shardids rebalance``."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shardids.cli.beside import rebalance_on_citus
from shardids.cli.command import OnBusyOption, Run, TrustOption, refuse, takes
from shardids.cli.copies import print_left
from shardids.cli.printing import err, out, print_json, print_rows
from shardids.cli.shards import (
    MaxPauseOption,
    VerifyOption,
    options_of,
    print_results,
    shown_moves,
)
from shardids.errors import BadArgument
from shardids.pg.notation import parse_duration_ms, parse_part

if TYPE_CHECKING:
    from shardids import mover

By = Literal["size", "rows", "writes", "load"]
ByOption = Annotated[By, typer.Option("--by", help="The quantity to balance over the nodes.")]
MarginOption = Annotated[
    str | None,
    typer.Option(
        metavar="PART",
        help="Tolerated distance of a node from the mean, as a part of the mean: 0.1 or 10%.",
        show_default="0.1",
    ),
]


_OF_A_WATCH: Final = "without --watch"
_UNITS: Final = {"rows": "rows", "writes": "writes", "load": "pages/s"}
ByDefault = Annotated[
    By | None,
    typer.Option(
        "--by", help="The quantity to balance over the nodes.", show_default="size; with --watch load"
    ),
]


def _duration(default: str, says: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="TIME", help=says, show_default=default)
    return option


@takes("catalog", "dry-run", "json")
def rebalance(
    run: Run,
    by: ByDefault = None,
    drain: Annotated[
        str | None,
        typer.Option(metavar="NODE", help="Move all shards away from this node, so that it can be removed."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="A node that keeps its shards, and gets none; repeatable."),
    ] = None,
    margin: MarginOption = None,
    over: Annotated[
        str | None,
        _duration(
            "10s; with --watch 1min", "How long load is measured; with --watch the time between readings."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="First resume moves that were interrupted.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Run on, and move shards whenever three readings in a row find the nodes uneven. One line"
            " for each decision; SIGTERM ends it.",
        ),
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="HH:MM-HH:MM", help="With --watch: moves begin, and are likely to end, in this time."
        ),
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="That of the window.", show_default="UTC")
    ] = None,
    max_lag: Annotated[
        str | None,
        _duration("30s", "With --watch: no move begins while a standby or subscriber is further behind."),
    ] = None,
    max_latency: Annotated[
        str | None,
        _duration(
            "100ms", "With --watch: no move begins while a node takes longer for a statement without tables."
        ),
    ] = None,
    rest: Annotated[
        str | None, _duration("1h", "With --watch: how long a shard stays where it is after a move.")
    ] = None,
    min_gain: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="With --watch: the least part of the mean that moves have to take from a node: 0.1 or 10%.",
            show_default="0.1",
        ),
    ] = None,
    verify: VerifyOption = False,
    max_pause: MaxPauseOption = None,
    trust: TrustOption = None,
    on_busy: OnBusyOption = "wait",
) -> None:
    """Move shards, one after another, until all nodes carry about the same.

    Pinned shards stay: see "shard pin". After an interruption, run it again with --resume; with --watch it
    resumes its own moves.
    """
    from shardids import mover
    from shardids.catalog.references import references_of

    of_watch: dict[str, object] = {
        "window": window,
        "timezone": timezone,
        "max_lag": max_lag,
        "max_latency": max_latency,
        "rest": rest,
        "min_gain": min_gain is not None,
    }
    if run.is_on_citus:
        own: dict[str, object] = {
            "by": by,
            "drain": drain,
            "exclude": exclude,
            "margin": margin is not None,
            "over": over,
            "watch": watch,
        }
        own |= {"resume": resume, "verify": verify, "max_pause": max_pause, "trust": trust}
        rebalance_on_citus(run, on_busy, own | of_watch)
        return
    options = options_of(verify, max_pause, trust, on_busy)
    if watch:
        refuse("to --watch", drain=drain, resume=resume, on_busy=on_busy != "wait")
        refuse("without --window", timezone=window is None and timezone)
        _watch(
            run,
            mover.Terms(
                by=mover.By(by or "load"),
                margin=mover.MARGIN if margin is None else parse_part(margin, "--margin"),
                least_gain=0.1 if min_gain is None else parse_part(min_gain, "--min-gain"),
                exclude=tuple(exclude or ()),
                over_s=_seconds(over, 60.0),
                rest_s=_seconds(rest, 3600.0),
                max_lag_s=_seconds(max_lag, 30.0),
                max_latency_s=_seconds(max_latency, 0.1),
                window=None if window is None else mover.Window.parse(window, timezone or "UTC"),
                options=options,
            ),
        )
        return
    refuse(_OF_A_WATCH, **of_watch)
    if by != "load":
        refuse("without --by load", over=over)
    if drain is not None:
        refuse("to --drain, which leaves nothing", margin=margin is not None)
        if references_of(run.catalog).writer == drain:
            err.print(
                f'Reference tables are written to on node "{drain}", which this does not change.'
                " Before the node is removed: shardids reference move --to NODE"
            )
    tolerated = mover.MARGIN if margin is None else parse_part(margin, "--margin")
    kept = float("inf") if drain is not None else tolerated
    measure = mover.By(by or "size")
    over_s = _seconds(over, mover.OVER_S)
    balance(
        run,
        lambda: mover.plan_balance(
            run.catalog,
            measure,
            exclude=exclude or (),
            drained=drain,
            margin=kept,
            weights=mover.measure(run.catalog, measure, over_s),
        ),
        options,
        by=measure,
        resume=resume,
    )


def _seconds(given: str | None, default: float) -> float:
    if given is None:
        return default
    milliseconds = parse_duration_ms(given)
    if milliseconds == 0:
        raise BadArgument(f"{given!r} is too short", hint="For example: 500ms, 30s or 1h")
    return milliseconds / 1000


def _watch(run: Run, terms: mover.Terms) -> None:
    """Run a watch until a signal ends it; with ``--dry-run`` print the decisions of one reading."""
    from shardids import mover

    def show(decision: mover.Decision) -> None:
        values = {**asdict(decision), "at": decision.at.isoformat(timespec="seconds")}
        typer.echo(json.dumps(values) if run.as_json else str(decision))

    watch = mover.Watch(run.catalog, terms, show)
    if run.dry:
        watch.look()
        return
    with _until_signalled(watch.stop):
        watch.run()


@contextmanager
def _until_signalled(stop: Callable[[], object]) -> Iterator[None]:
    """Call ``stop`` on the first SIGTERM or SIGINT; the second interrupts at once, as Ctrl-C does."""
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in signals}

    def first(_number: int, _frame: object) -> None:
        for number in signals:
            signal.signal(number, signal.default_int_handler)
        stop()

    for number in signals:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rebalance_all(run: Run) -> None:
    """Move shards until all nodes carry about the same."""
    from shardids import mover

    by = mover.By.SIZE
    balance(run, lambda: mover.plan_balance(run.catalog, by), mover.Options(), by=by, resume=False)


def balance(
    run: Run, find: Callable[[], mover.Balance], options: mover.Options, *, by: mover.By, resume: bool
) -> None:
    """Print the moves of a plan, then makes them."""
    from shardids import mover

    there = run.catalog
    with ExitStack() as kept:
        if not run.dry:
            kept.enter_context(mover.rebalancing(there))
        _balance(run, find, options, by=by, resume=resume)


def _balance(
    run: Run, find: Callable[[], mover.Balance], options: mover.Options, *, by: mover.By, resume: bool
) -> None:
    from shardids import mover

    there = run.catalog
    done: list[mover.Result | mover.NotMoved] = []
    if resume and run.dry:
        for interrupted in mover.open_moves(there):
            mover.check_open(there, interrupted.shard)
    else:
        if resume:
            with shown_moves() as show:
                done = mover.resume_open(there, options, show)
        mover.require_none_open(there)
    found = find()
    if run.as_json and run.dry:
        print_json(asdict(found))
        return
    if not run.as_json:
        rows = [asdict(one) | {"weight": _amount(one.weight, by)} for one in found.transfers]
        print_rows(rows, empty="Nothing to move")
        for node, before in found.before.items():
            after = _amount(found.after[node], by)
            out.print(f'node "{node}": {_amount(before, by)} before, {after} after')
    if run.dry:
        return
    with shown_moves() as show:
        done += mover.carry_out(there, found.transfers, options, show)
    if done or run.as_json:
        print_results(run, [one for one in done if isinstance(one, mover.Result)])
    print_left([str(one) for one in done if isinstance(one, mover.NotMoved)])


def _amount(load: float, by: mover.By) -> str:
    from rich.filesize import decimal

    return decimal(round(load)) if by == "size" else f"{load:,.0f} {_UNITS[by]}"
