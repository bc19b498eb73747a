"""``shardids adopt back`` and ``finish``: the way back is taken, or given up."""

from __future__ import annotations

from collections.abc import Callable

from shardids.adopt import returning
from shardids.cli.adopt_run import MaxPauseOption, SourceOption, status
from shardids.cli.adopt_shown import pause_seconds, print_done, shown
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption, YesOption, confirm, opened
from shardids.cli.output import err, out


def back(
    catalog: CatalogOption,
    source: SourceOption = None,
    max_pause: MaxPauseOption = "2s",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Stop writes to the shards and let the source take them again, after a switch with --keep-back.

    The shards are left fenced, with their rows: "adopt abort" empties them.
    """
    pause_s = pause_seconds(max_pause)
    if dry_run:
        status(catalog, source, None, as_json)
        return
    confirm("Stop writes to the shards, and return to the source?", yes=yes)
    with opened(catalog) as there, shown() as show:
        done = returning.back(there, source=source, max_pause_s=pause_s, on_event=show)
    print_done(done, as_json=as_json)
    if not as_json:
        out.print("The source takes writes. The shards refuse them, and keep their rows.")
        err.print("To empty the shards and let them take writes: shardids adopt abort")


def finish(
    catalog: CatalogOption,
    source: SourceOption = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give the way back up: the source no longer follows the shards, and keeps refusing writes."""
    if dry_run:
        status(catalog, source, None, as_json)
        return
    confirm("Give up the way back to the source?", yes=yes)
    with opened(catalog) as there, shown() as show:
        done = returning.finish(there, source=source, on_event=show)
    print_done(done, as_json=as_json)


COMMANDS: dict[str, Callable[..., None]] = {"back": back, "finish": finish}
"""The functions by the names of their commands, in the order of ``--help``."""
