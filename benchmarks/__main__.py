"""``python -m benchmarks [NAME…] [--rounds N] [--postgresql VERSION…] [--write FOLDER]``."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import (
    adopting,
    answers,
    blocks,
    coming_back,
    console,
    copying,
    doctor,
    draws,
    duplicates,
    first_draws,
    fixtures,
    in_place,
    in_python,
    loading,
    lookups,
    memory,
    migrations,
    moving,
    numbers,
    oltp,
    orm,
    provisioning,
    querying,
    redis_numbers,
    references,
    routing,
    rows,
    scraping,
    startup,
    taking_in,
    twophase,
    watching,
)
from benchmarks.report import Section, show, write
from shardids.pg.embedded import find_binaries
from tests.matrix import RELEASES, SUPPORTED, binaries

BENCHMARKS: dict[str, tuple[Callable[[int], Section], int]] = {
    "draws": (draws.one_session, 11),
    "sessions": (draws.many_sessions, 7),
    "oltp": (oltp.run, 3),
    "rows": (rows.run, 5),
    "numbers": (numbers.run, 5),
    "redis-numbers": (redis_numbers.run, 3),
    "copy": (copying.run, 5),
    "load": (loading.run, 5),
    "duplicates": (duplicates.run, 3),
    "blocks": (blocks.run, 5),
    "python": (in_python.run, 7),
    "startup": (startup.run, 5),
    "memory": (memory.run, 1),
    "first-draws": (first_draws.run, 21),
    "orm": (orm.run, 15),
    "answers": (answers.run, 15),
    "routing": (routing.run, 151),
    "tenants": (routing.tenants, 101),
    "newest": (routing.newest, 100),
    "one-row": (routing.one_row, 41),
    "twophase": (twophase.run, 15),
    "lookups": (lookups.run, 15),
    "references": (references.run, 11),
    "shards": (routing.many_shards, 1),
    "querying": (querying.run, 11),
    "fixtures": (fixtures.run, 5),
    "provisioning": (provisioning.run, 3),
    "doctor": (doctor.run, 7),
    "metrics": (scraping.run, 15),
    "console": (console.run, 40),
    "migrations": (migrations.run, 5),
    "add-column": (migrations.add_column, 5),
    "adopting": (adopting.run, 3),
    "comparison": (adopting.comparison, 3),
    "taking-in": (taking_in.run, 3),
    "coming-back": (coming_back.run, 3),
    "in-place": (in_place.run, 3),
    "moving": (moving.whole_move, 3),
    "pause": (moving.pause, 5),
    "watch": (watching.run, 3),
}

OF_VERSIONS = {"oltp": oltp.run, "pause": moving.pause}
"""Those that compare versions of PostgreSQL."""


def main() -> None:
    """Run the benchmarks that are named, or all; exits 1 if a promised ratio is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure shardids.")
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds of each, after one to warm up")
    parser.add_argument(
        "--postgresql",
        action="append",
        choices=SUPPORTED,
        help="oltp, pause: measure on this version's server, fetched if need be; may be repeated",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FOLDER",
        help="write benchmarks.json and .md there; keeps other sections",
    )
    arguments = parser.parse_args()
    sections = []
    for name in arguments.names or BENCHMARKS:
        run, rounds = BENCHMARKS[name]
        if name in OF_VERSIONS and arguments.postgresql:
            bindirs = [server_programs(version) for version in arguments.postgresql]
            run = partial(OF_VERSIONS[name], bindirs=bindirs)
        sections.append(run(arguments.rounds or rounds))
        show(sections[-1])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}."
    if arguments.write:
        write(sections, machine, arguments.write)
    if not all(ratio.reached for section in sections for ratio in section.ratios):
        raise SystemExit(1)


def server_programs(version: str) -> Path:
    """Return the folder of a version's server: of the test matrix, or else the one that is found."""
    return binaries(version) if version in RELEASES else find_binaries()


if __name__ == "__main__":
    main()
