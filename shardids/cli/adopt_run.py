"""The commands of ``shardids adopt`` that work at an adoption: all but ``plan``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from shardids.adopt import adoption, returning
from shardids.adopt.handing_back import HOW_TO_MEND
from shardids.adopt.plan_file import read_plan
from shardids.adopt.way_back import NodeBack
from shardids.catalog.rows import Catalog
from shardids.catalog.urls import shown_url
from shardids.cli.adopt_shown import pause_seconds, print_done, shown
from shardids.cli.common import (
    CatalogOption,
    DryRunOption,
    JsonOption,
    TrustOption,
    YesOption,
    confirm,
    opened,
    print_json,
)
from shardids.cli.output import err, out

SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        envvar="SHARDIDS_SOURCE",
        metavar="URL",
        help="The source, if it is not reached as the plan says, or needs a password. It is not stored.",
    ),
]
ViaOption = Annotated[
    str | None,
    typer.Option(
        "--via",
        envvar="SHARDIDS_RELAY",
        metavar="RELAY",
        help="The relay's URL: an empty database of PostgreSQL 15 or later between the source and the nodes;"
        " by default as the plan says. Its password is not stored.",
    ),
]
ReaderOption = Annotated[
    str | None,
    typer.Option(
        "--reader-url",
        envvar="SHARDIDS_SOURCE_READER",
        metavar="URL",
        help="The source's URL with a role that can only read, a member of pg_read_all_data. Rows are read as"
        " that role, and code of their tables' owners runs as it. Needed where the other role can write, and"
        " roles that are not superusers own objects there. It is not stored.",
    ),
]
MaxPauseOption = Annotated[
    str, typer.Option(metavar="TIME", help="How long one attempt may stop writes: 500ms, 2s.")
]


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What shardids adopt plan has written.")],
    catalog: CatalogOption,
    source: SourceOption = None,
    via: ViaOption = None,
    reader_url: ReaderOption = None,
    direct: Annotated[
        bool, typer.Option("--direct", help="Without the plan's relay: the nodes follow the source itself.")
    ] = False,
    trust: TrustOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy all rows into the shards, compare them, and let the nodes follow the source.

    Applications go on using the source. Everything is checked before anything is made.
    """
    wanted = read_plan(plan)
    if direct:
        via, wanted = None, replace(wanted, via=None)
    with opened(catalog) as there:
        if dry_run:
            found = adoption.check(
                there, wanted, source=source, via=via, reader=reader_url, trusted=trust or ()
            )
            if as_json:
                print_json(asdict(found))
                return
            out.print(
                f"{found.split} tables would be split into {found.shards} shards on {found.nodes} nodes,"
                f" {found.reference} go to every node, {found.loose} stay at the source;"
                f" about {found.rows:,} rows, {decimal(found.size_bytes)}"
            )
            if found.relay_bytes:
                out.print(
                    f"The relay would hold all of it, about {decimal(found.relay_bytes)}, and for a"
                    " while twice as much of tables that find their key in others"
                )
            out.print("No obstacles found; nothing was changed")
            return
        with shown() as show:
            done = adoption.run(
                there, wanted, source=source, via=via, reader=reader_url, trusted=trust or (), on_event=show
            )
    print_done(done, as_json=as_json)


def resume(
    catalog: CatalogOption,
    source: SourceOption = None,
    via: ViaOption = None,
    reader_url: ReaderOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Go on with an adoption that was paused or interrupted, from the step that it was at."""
    if dry_run:
        status(catalog, source, via, as_json)
        return
    with opened(catalog) as there, shown() as show:
        done = adoption.resume(there, source=source, via=via, reader=reader_url, on_event=show)
    print_done(done, as_json=as_json)


def pause(
    catalog: CatalogOption,
    source: SourceOption = None,
    via: ViaOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop the nodes from following the source, until "adopt resume".

    The source keeps its log for them meanwhile: look at the room on its disk.
    """
    if dry_run:
        status(catalog, source, via, as_json)
        return
    with opened(catalog) as there:
        done = adoption.pause(there, source=source, via=via)
    print_done(done, as_json=as_json)


def compare(
    catalog: CatalogOption,
    source: SourceOption = None,
    via: ViaOption = None,
    reader_url: ReaderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare every row of the source with those of the shards, while applications write."""
    with opened(catalog) as there, shown() as show:
        done = adoption.compare(there, source=source, via=via, reader=reader_url, on_event=show)
    print_done(done, as_json=as_json)


def abort(
    catalog: CatalogOption,
    source: SourceOption = None,
    via: ViaOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Undo an adoption: leave the source as it was, and empty the shards of the rows that were copied.

    After "adopt back" it empties the shards; a return that was interrupted is given up.
    """
    if dry_run:
        status(catalog, source, via, as_json)
        return
    confirm("Remove the rows that were copied into the shards?", yes=yes)
    with opened(catalog) as there, shown() as show:
        done = adoption.abort(there, source=source, via=via, on_event=show)
    print_done(done, as_json=as_json)


def switch(
    catalog: CatalogOption,
    source: SourceOption = None,
    via: ViaOption = None,
    max_pause: MaxPauseOption = "2s",
    keep_back: Annotated[
        bool, typer.Option("--keep-back", help="Send what is written to the shards back to the source.")
    ] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop writes at the source and let the shards take them.

    Applications that still use the source get an error when they write, from the first moment on. With
    --keep-back the source follows the shards, and takes over again with "adopt back"; without it there is
    no way back.
    """
    pause_s = pause_seconds(max_pause)
    if dry_run:
        if keep_back:
            with opened(catalog) as there:
                _print_notes(returning.check_switch(there, source=source))
        status(catalog, source, via, as_json)
        return
    question = "Stop writes at the source?" if keep_back else "Stop writes at the source for good?"
    confirm(question, yes=yes)
    with opened(catalog) as there:
        with shown() as show:
            done = adoption.switch(
                there, source=source, via=via, max_pause_s=pause_s, keep_back=keep_back, on_event=show
            )
        print_done(done, as_json=as_json)
        if not as_json:
            _print_changes(there, is_kept=done.outcome is None)


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        err.print(f"note: {note}", markup=False)
    err.print("No obstacles to a way back found; nothing was changed")


def status(
    catalog: CatalogOption, source: SourceOption = None, via: ViaOption = None, as_json: JsonOption = False
) -> None:
    """Show how far the adoption is: its step, and how far each node is behind the source."""
    with opened(catalog) as there:
        found = adoption.status(there, source=source, via=via)
    if found is None:
        if as_json:
            print_json(None)
        else:
            err.print("No adoption is under way")
        return
    its = found.adoption
    row = {
        "source": its.source,
        "step": its.step,
        "paused": its.is_paused,
        "started": its.started_at.isoformat(timespec="seconds"),
        "compared": its.compared_at and its.compared_at.isoformat(timespec="seconds"),
        "switched": its.switched_at and its.switched_at.isoformat(timespec="seconds"),
        "source_takes_writes": None if found.is_source_closed is None else not found.is_source_closed,
        "source_problem": found.source_problem or None,
        "lag_bytes": found.lag_bytes,
        "relay": its.plan.via
        and {
            "url": its.plan.via,
            "lag_bytes": found.relay and found.relay.lag_bytes,
            "slot": found.relay and found.relay.name,
            "source_keeps_bytes": found.relay and found.relay.kept_bytes,
            "problem": found.relay_problem or None,
        },
    }
    if as_json:
        print_json(row | {"way_back": {node: asdict(one) for node, one in (found.way_back or {}).items()}})
        return
    for name, value in row.items():
        if name not in {"lag_bytes", "relay", "source_problem"}:
            out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    if found.source_problem:
        err.print(f"The source does not answer: {found.source_problem}", markup=False)
    if found.way_back is not None:
        _print_way_back(found.way_back, answers=not found.source_problem)
        return
    _print_relay(found)
    if found.source_problem and found.adoption.plan.via is None:
        return
    for node, lag in found.lag_bytes.items():
        behind = (
            "has no slot at the source, or one that was given up" if lag is None else f"{decimal(lag)} behind"
        )
        out.print(f"node {node}: {behind}", markup=False)


def _print_relay(found: adoption.Status) -> None:
    if found.adoption.plan.via is None:
        return
    out.print(f"relay: {found.adoption.plan.via}", markup=False)
    if found.relay is not None:
        out.print(
            f"relay: {decimal(found.relay.lag_bytes or 0)} behind the source, which keeps"
            f" {decimal(found.relay.kept_bytes or 0)} of its log for it (slot {found.relay.name})",
            markup=False,
        )
    if found.relay_problem:
        err.print(
            f"The relay does not answer, and the source keeps its log meanwhile: {found.relay_problem}",
            markup=False,
        )


def _print_way_back(states: dict[str, NodeBack], *, answers: bool) -> None:
    """Prints how the source follows the shards, and how to go on if it does not."""
    for node, state in states.items():
        out.print(f"way back from node {node}: {state.told()}", markup=False)
    if any(state.is_lost for state in states.values()):
        err.print("There is no way back any more: shardids adopt finish")
    elif not answers:
        err.print(
            "The nodes keep their logs for the source meanwhile."
            " If it is lost for good: shardids adopt finish"
        )
    elif any(state.is_stopped for state in states.values()):
        err.print(HOW_TO_MEND, markup=False)
    else:
        err.print("To return to the source: shardids adopt back; to stay: shardids adopt finish")


def _print_changes(there: Catalog, *, is_kept: bool) -> None:
    """Prints what applications have to change."""
    out.print("The shards have taken over. Applications now:")
    for line in (
        f"connect by the catalog: Cluster.connect({shown_url(there.url)!r})",
        "open sessions by the key: cluster.session(key=KEY), or by an ID: cluster.session(id=ID, of=Table)",
        "leave new IDs to the default of the column: next_id() of the shard",
    ):
        out.print(f"- {line}", markup=False)
    if is_kept:
        out.print(
            "The source's tables refuse writes, and follow the shards until adopt back or adopt finish."
        )
    else:
        out.print("The source's tables refuse writes. Drop the old database when nobody reads it any more.")


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "status": status,
    "compare": compare,
    "pause": pause,
    "resume": resume,
    "abort": abort,
    "switch": switch,
}
"""The functions by the names of their commands, in the order of ``--help``."""
