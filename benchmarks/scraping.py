"""Scraping the metrics of 4,096 shards on four nodes."""

from __future__ import annotations

import statistics
import time
from contextlib import closing

from prometheus_client import CollectorRegistry, generate_latest

from benchmarks.report import Measure, Section, figure
from shardids.pg.embedded import temporary_servers
from shardids.testing import devcluster
from shardids.watch.metrics import ClusterCollector

SHARDS = 4096
NODES = 4
MOST_MS = 100.0


def run(rounds: int) -> Section:
    """Measure whole scrapes, as text, and the CPU time of the process that asks."""
    walls, cpus = list[float](), list[float]()
    with temporary_servers(NODES, settings={"max_locks_per_transaction": "1024"}) as servers:
        url = devcluster.create_cluster(servers, SHARDS)
        with closing(ClusterCollector(url)) as collector:
            registry = CollectorRegistry()
            registry.register(collector)
            for round_ in range(rounds + 1):
                begun_s, own_s = time.perf_counter(), time.process_time()
                generate_latest(registry)
                if round_:  # the first one connects
                    walls.append((time.perf_counter() - begun_s) * 1000)
                    cpus.append((time.process_time() - own_s) * 1000)
                time.sleep(0.6)
    measures = (_measure("a scrape", walls), _measure("CPU of the exporter", cpus))
    return Section(
        title=f"A scrape of the metrics of {SHARDS:,} shards on {NODES} nodes",
        conditions=f"{NODES} servers and the exporter on one machine, fsync off, idle shards,"
        f" {rounds} rounds.",
        measures=measures,
        ratios=(figure("a scrape, ms", measures[0].median, at_most=MOST_MS),),
    )


def _measure(name: str, figures: list[float]) -> Measure:
    median, lowest, highest = statistics.median(figures), min(figures), max(figures)
    return Measure(name=name, unit="ms", median=median, lowest=lowest, highest=highest)
