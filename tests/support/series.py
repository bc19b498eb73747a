"""What a cluster's metrics say at one time, by name and labels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from sqlalchemy.engine import URL

from shardids.metrics import ClusterCollector
from shardids.metrics.names import METRICS

Series = dict[tuple[str, ...], float]
"""Values by name of the metric and values of its labels."""


@contextmanager
def collecting(url: str | URL, **options: float) -> Iterator[ClusterCollector]:
    with closing(ClusterCollector(url, **options)) as collector:
        yield collector


def read(collector: ClusterCollector) -> Series:
    samples = collector.read()
    series: Series = {(sample.name, *sample.labels): sample.value for sample in samples}
    assert len(series) == len(samples)
    for name, *labels in series:
        assert len(METRICS[name].labels) == len(labels)
    return series


def scraped(url: str | URL, **options: float) -> Series:
    with collecting(url, **options) as collector:
        return read(collector)
