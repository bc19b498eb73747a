"""``python -m benchmarks [NAME…] [--rounds N] [--write FOLDER]``."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

from benchmarks import (
    doctor,
    draws,
    duplicates,
    in_python,
    memory,
    migrations,
    moving,
    orm,
    provisioning,
    routing,
    rows,
)
from benchmarks.report import show, write

BENCHMARKS = {
    "draws": (draws.one_session, 11),
    "sessions": (draws.many_sessions, 7),
    "rows": (rows.run, 5),
    "duplicates": (duplicates.run, 3),
    "python": (in_python.run, 7),
    "memory": (memory.run, 1),
    "orm": (orm.run, 15),
    "routing": (routing.run, 151),
    "shards": (routing.many_shards, 1),
    "provisioning": (provisioning.run, 3),
    "doctor": (doctor.run, 7),
    "migrations": (migrations.run, 5),
    "moving": (moving.whole_move, 3),
    "pause": (moving.pause, 10),
}


def main() -> None:
    """Runs the benchmarks that are named, or all; exits 1 if a promised ratio is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure shardids.")
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="which (default: all)")
    parser.add_argument("--rounds", type=int, help="rounds of each, after one to warm up")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write benchmarks.json and .md there")
    arguments = parser.parse_args()
    sections = []
    for name in arguments.names or BENCHMARKS:
        run, rounds = BENCHMARKS[name]
        sections.append(run(arguments.rounds or rounds))
        show(sections[-1])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}."
    if arguments.write:
        write(sections, machine, arguments.write)
    if not all(ratio.reached for section in sections for ratio in section.ratios):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
