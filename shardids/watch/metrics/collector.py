"""A collector for a registry of prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from threading import Lock, Timer
from typing import Final

from sqlalchemy.engine import URL

from shardids.errors import BadArgument, MissingLibrary, ShardidsError
from shardids.logs import logger
from shardids.watch.facts.reading import TIMEOUT_S, Asker, NodeRates, Reading
from shardids.watch.metrics.samples import METRICS, MOST_TOP, TOP, Sample, samples

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise MissingLibrary(
        "metrics need prometheus_client", hint="To install it: pip install 'shardids[ops]'"
    ) from error

IDLE_S: Final = 300.0
"""How long connections stay open when nobody asks."""

log = logger("metrics")


class ClusterCollector(Collector):
    """A collector that reads a cluster whenever the registry is collected; safe to share between threads.

    Args:
        catalog_url: the catalog. Its user also logs in to the nodes, with its password or else that of
            ``PGPASSWORD`` or ``~/.pgpass``.
        top: the number of shards per node with their own series, by rate and by lead.
        timeout_s: the most time of one reading, in seconds.
        totals: whether to add up from reading to reading, which a process that reads once can't.

    Raises:
        BadArgument: ``top`` or ``timeout_s`` is out of range, or the URL is malformed.
    """

    def __init__(
        self, catalog_url: str | URL, *, top: int = TOP, timeout_s: float = TIMEOUT_S, totals: bool = True
    ) -> None:
        if not 0 <= top <= MOST_TOP:
            raise BadArgument(f"the number of shards with series must be 0 to {MOST_TOP}, not {top}")
        if not 0 < timeout_s <= 60:
            raise BadArgument(f"the timeout must be above 0 and at most 60 s, not {timeout_s:g}")
        self._asker = Asker(catalog_url, timeout_s=timeout_s)
        self._top = top
        self._totals = totals
        self._lock = Lock()
        self._rates: dict[str, NodeRates] = {}
        self._down: set[str] = set()
        self._going_on: Future[list[Sample]] | None = None
        self._rest = Timer(IDLE_S, self._rest_now)
        self._is_closed = False

    def describe(self) -> list[Metric]:
        """Return all metrics without samples, so that a registry knows their names and asks no cluster."""
        return [_family(name) for name in METRICS]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a reading; see :meth:`read`."""
        families = {name: _family(name) for name in METRICS}
        for sample in self.read():
            families[sample.name].add_metric(sample.labels, sample.value)
        yield from (family for family in families.values() if family.samples)

    def read(self) -> list[Sample]:
        """Return the samples of a reading: of one that goes on in another thread already, if one does."""
        with self._lock:
            going_on = self._going_on
            if going_on is None:
                self._going_on = mine = Future[list[Sample]]()
        if going_on is not None:
            return going_on.result()
        self._rest.cancel()
        try:
            mine.set_result(self._read())
        except BaseException as error:  # noqa: BLE001 -- raised below, and where others wait
            mine.set_exception(error)
        with self._lock:
            self._going_on = None
            self._rest = Timer(IDLE_S, self._rest_now)
            self._rest.daemon = True
            if not self._is_closed:
                self._rest.start()
        return mine.result()

    def _rest_now(self) -> None:
        with self._lock:
            if self._going_on is None:
                self._asker.rest()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            self._rest.cancel()
        self._asker.close()

    def _read(self) -> list[Sample]:
        reading = self._asker.read()
        self._rates = {name: self._rates.get(name) or NodeRates() for name in reading.nodes}
        for name, answer in reading.nodes.items():
            if answer.shards is not None and reading.known is not None:
                self._rates[name].look(answer.shards, answer.read_at, reading.known.layout)
        self._tell(reading)
        return list(samples(reading, self._rates, top=self._top, totals=self._totals))

    def _tell(self, reading: Reading) -> None:
        """Log who does not answer, and who answers again; once each time."""
        errors: dict[str, ShardidsError | None] = {"the catalog": reading.catalog_error}
        errors |= {f'node "{name}"': answer.error for name, answer in reading.nodes.items()}
        for who, error in errors.items():
            if error is None and who in self._down:
                log.warning("%s can be read again", who)
            elif error is not None and who not in self._down:
                log.warning("%s could not be read: %s", who, error.message)
        self._down = {who for who, error in errors.items() if error is not None}


def _family(name: str) -> GaugeMetricFamily | CounterMetricFamily:
    metric = METRICS[name]
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(name, metric.says, labels=metric.labels)
