"""The example that loads 100,000 rows with COPY and reserved IDs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import URL

from shardids import Cluster
from shardids.client.copying import Copied
from tests.conftest import dsn

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_bulk_copy(cluster_url: URL) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "bulk_copy.py")],
        env={"SHARDIDS_CATALOG": dsn(cluster_url), "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("100,000 rows into 8 shards in ")
    example = runpy.run_path(str(EXAMPLES / "bulk_copy.py"))
    table = example["readings"]
    more = [(f"sensor {number}", 20 + number / 1000) for number in range(1000)]
    with Cluster.connect(cluster_url) as cluster:
        copied: list[Copied] = []
        assert example["load"](cluster, more, copied.append).rows == len(more)
        seen = 0
        for block in copied:
            assert block.ids is not None
            with cluster.at(shard=block.shard).engine.begin() as connection:
                (drawn,) = connection.execute(
                    table.insert().values(sensor="drawn", celsius=0)
                ).inserted_primary_key
                everything = connection.execute(select(table).order_by(table.c.id)).all()
                known = connection.execute(
                    select(table).where(table.c.id.in_(block.ids)).order_by(table.c.id)
                )
                assert [tuple(row) for row in known] == [
                    (id_, *more[number - 1]) for id_, number in zip(block.ids, block.rows, strict=True)
                ]
            assert everything[-1].id == drawn > block.ids[-1]
            assert {cluster.shard_of(row.id) for row in everything} == {block.shard}
            assert {cluster.shard_for(row.sensor) for row in everything[:-1]} == {block.shard}
            seen += len(everything) - 1
        assert seen == 101_000
