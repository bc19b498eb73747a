"""The weather example, on two nodes."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import URL

from shardids import Cluster
from tests.conftest import dsn

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharding.py"

PRINTED = """\
Dublin: [55.0]
London: [65.0]
Tokyo: [80.0, 75.0]
hottest of all: Toronto
10 reports, 71.9 on average
by ID: Quito
"""


def test_the_weather_example(cluster_url: URL) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        env={"SHARDIDS_CATALOG": dsn(cluster_url), "PYTHONPATH": str(EXAMPLE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.stderr, ran.stdout) == ("", PRINTED)
    example = runpy.run_path(str(EXAMPLE))
    place, report = example["Place"], example["Report"]
    seen = 0
    with Cluster.connect(cluster_url) as cluster:
        for shard in range(8):
            with cluster.session(shard=shard) as session:
                for continent, place_id, temperature in session.execute(
                    select(place.continent, report.place_id, report.temperature).join(report.place)
                ):
                    assert cluster.shard_for(continent) == cluster.shard_of(place_id) == shard
                    assert temperature
                    seen += 1
    assert seen == 10
