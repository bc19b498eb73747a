"""What a cluster's metrics say at one time, by name and labels; and the process that serves them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from sqlalchemy.engine import URL

from shardids.watch.metrics import ClusterCollector
from shardids.watch.metrics.samples import METRICS
from tests.conftest import dsn
from tests.support.clusters import COMMAND, environment

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


@contextmanager
def served(
    url: URL, *options: str, listen: str = "127.0.0.1:0"
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address and all that it said before."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "metrics", "--listen", listen, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(SHARDIDS_CATALOG=dsn(url)),
    )
    assert process.stderr is not None
    said = ""
    try:
        while not (found := re.search(r"Serving (http://\S+/metrics)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, found[1], said
    finally:
        process.kill()
        process.communicate()
