"""The drill of docs/how-to/lost-node.md, with a real streaming standby and writers at work."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psycopg
import pytest
from markdown_it import MarkdownIt

from shardids import Cluster
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict
from shardids.mover import failover
from shardids.pg.embedded import find_binaries, temporary_servers
from shardids.testing.devcluster import create_cluster
from tests.acceptance.test_tutorial import Reader
from tests.support.standbys import standby_of

pytestmark = pytest.mark.long

DRILL = Path(__file__).parents[2] / "docs" / "how-to" / "lost-node.md"
SHARDS = 64
LOST = range(36, 40)
"""Some shards of node b."""


def commands() -> list[tuple[str, str]]:
    """What the drill types, and what it shows that comes of it."""
    text = DRILL.read_text(encoding="utf-8")
    blocks = [t.content for t in MarkdownIt().parse(text) if t.type == "fence" and t.info == "console"]
    steps = [step for block in blocks for step in block.split("$ ")[1:]]
    return [(command, shown) for command, _, shown in (step.partition("\n") for step in steps)]


def draw(url: str, until: threading.Event, drawn: list[int]) -> None:
    """Draws IDs and keeps each one, until the server goes or it is told to stop."""
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            while not until.is_set():
                for shard in LOST:
                    rows = connection.execute(f"select shard_{shard:04}.next_ids(100)").fetchall()
                    drawn += [id_ for (id_,) in rows]
    except psycopg.OperationalError:
        return


def test_the_drill(tmp_path: Path) -> None:
    with temporary_servers(2) as servers:
        catalog_url = create_cluster(servers, SHARDS)
        with standby_of(servers[1]) as copy, Cluster.connect(catalog_url) as cluster:
            standby_url = copy.url()
            reader = Reader(tmp_path)
            reader.environment |= {"SHARDIDS_CATALOG": catalog_url, "STANDBY": standby_url}
            reader.environment["PATH"] += f"{os.pathsep}{find_binaries()}"
            drawn: list[int] = []
            drawing = threading.Thread(target=draw, args=(servers[1].url(), threading.Event(), drawn))
            drawing.start()
            with psycopg.connect(standby_url, autocommit=True) as standby:
                # So that what the primary issued last never arrives.
                time.sleep(0.5)
                standby.execute("alter system set primary_conninfo = ''")
                standby.execute("select pg_reload_conf()")
                time.sleep(0.5)
                refuse_too_early(catalog_url, standby_url)
            servers[1].kill()
            drawing.join(30)
            for command, shown in commands():
                reader.type(command, shown)
            assert len(drawn) == len(set(drawn)) > 1000
            cluster.refresh()
            assert cluster.node_of(40).url.startswith(standby_url.partition("?")[0])
            again: list[int] = []
            for shard in LOST:
                block = cluster.at(shard=shard).reserve(1000)
                again += block
                assert min(block) > max(id_ for id_ in drawn if cluster.shard_of(id_) == shard)
            assert not set(again) & set(drawn)


def refuse_too_early(catalog_url: str, standby_url: str) -> None:
    """The old server answers, or the new one is none: nothing is changed."""
    catalog = Catalog(catalog_url)
    try:
        before = catalog.placement()
        for name, url, reason in (
            ("b", standby_url, "still takes writes"),
            ("z", standby_url, 'there is no node "z"'),
            ("b", before.nodes["b"].url, None),
        ):
            if reason is None:
                assert failover.replace_node(catalog, name, url, dry_run=True).shards == SHARDS // 2
                continue
            with pytest.raises(ClusterConflict, match=reason):
                failover.replace_node(catalog, name, url)
        assert catalog.placement() == before
    finally:
        catalog.close()
