"""Moves, rebalances, migrations, DDL, bulk loads, failovers and dead networks at random, under writers."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from shardids.pg.urls import parse_url
from tests.faults.conftest import Report
from tests.support.faults import scaled
from tests.support.migrations import App
from tests.support.soak.commands import Launcher
from tests.support.soak.field import Field, folder_in
from tests.support.soak.log import Log
from tests.support.soak.run import SHARDS, Soak
from tests.support.soak.scene import Scene

MINUTES = float(os.environ.get("SHARDIDS_SOAK_MINUTES", scaled("1.5", "60")))
ROUND_S = scaled(45.0, 75.0)
SEED = int(os.environ.get("SHARDIDS_SOAK_SEED") or scaled(2, random.SystemRandom().randrange(1_000_000)))


def test_nothing_is_lost_twice_or_stuck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: Report
) -> None:
    with Field.opened(SHARDS) as field:
        app = App(tmp_path / "migrations", parse_url(field.catalog_url), capsys)
        variables = {"SHARDIDS_CATALOG": field.catalog_url, "SHARDIDS_MIGRATIONS": str(app.folder)}
        log = Log(tmp_path / "log")
        with Launcher(folder_in(tmp_path, "commands"), variables) as launcher:
            soak = Soak(Scene(field=field, launcher=launcher, log=log, app=app), SEED)
            try:
                soak.go(MINUTES * 60, ROUND_S)
            finally:
                log.write("end", f"{dict(log.counts)} {log.reasons.most_common()}")
                log.close()
    counts = ", ".join(f"{count} {what}" for what, count in sorted(log.counts.items()))
    ends = soak.expected.ends
    report(
        f"{counts} in {soak.rounds} rounds and {log.seconds:.0f} s, seed {SEED}; {ends['ok']:,} transactions"
        f" acknowledged, {ends['no']:,} refused, {ends['maybe']} uncertain; {len(soak.expected.ids):,} IDs,"
        f" {soak.rows:,} rows"
    )
