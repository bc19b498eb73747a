"""The rates of the last hour as Prometheus has them, which outlives the console."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from threading import Lock
from typing import Any, Final
from urllib.error import URLError
from urllib.parse import urlencode, urlsplit, urlunsplit
from urllib.request import HTTPBasicAuthHandler, HTTPPasswordMgrWithDefaultRealm, ProxyHandler, build_opener

from shardids.errors import BadArgument, ConnectionFailed
from shardids.watch.console.figures import Values, short
from shardids.watch.console.watching import HISTORY_S

STEP_S: Final = 15
_TIMEOUT_S: Final = 2.0
_MOST_BYTES: Final = 8 << 20
_NODES: Final = "max by (node) (shardids_ticks_drawn_per_second)"
_NO_ANSWER: Final = (OSError, HTTPException, ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""What asking raises if it is down, or if something else answers."""
_SHARDS: Final = 'max by (shard) (shardids_shard_ticks_drawn_per_second{{shard=~"{}"}})'


class Prometheus:
    """A client of a Prometheus that scrapes ``shardids metrics`` of this cluster.

    Args:
        url: its address, such as ``http://prometheus:9090``; user and password in it are not shown.

    Raises:
        BadArgument: the URL is not an address of this form.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise BadArgument("the address of Prometheus is malformed") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadArgument(
                "the address of Prometheus is malformed", hint="For example: http://127.0.0.1:9090"
            )
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.shown = urlunsplit(
            (parts.scheme, f"{host}:{port}" if port else host, parts.path.rstrip("/"), "", "")
        )
        passwords = HTTPPasswordMgrWithDefaultRealm()
        if parts.username:
            passwords.add_password(None, self.shown, parts.username, parts.password or "")
        self._opener = build_opener(ProxyHandler({}), HTTPBasicAuthHandler(passwords))
        self._lock = Lock()
        self._asked = float("-inf")
        self._known: Values | None = None
        self._error: str | None = None

    def rates(self, nodes: Sequence[str], shards: Sequence[int]) -> Values:
        """Return the rates of the last hour, of these shards; they may be some seconds old.

        Raises:
            ConnectionFailed: it does not answer, or with something else.
        """
        with self._lock:
            if time.monotonic() - self._asked > STEP_S:
                try:
                    self._known, self._error = self._ask(nodes, shards), None
                except _NO_ANSWER as error:
                    self._error = _reason(error)
                self._asked = time.monotonic()
            if self._known is None or self._error is not None:
                raise ConnectionFailed(f"can't read rates from Prometheus at {self.shown}: {self._error}")
            return self._known

    def _ask(self, nodes: Sequence[str], shards: Sequence[int]) -> Values:
        end = int(time.time()) // STEP_S * STEP_S
        times = list(range(end - int(HISTORY_S) + STEP_S, end + 1, STEP_S))
        by_node = self._series(_NODES, "node", times)
        wanted = "|".join(map(str, shards))
        by_shard = self._series(_SHARDS.format(wanted), "shard", times) if shards else {}
        none = [None] * len(times)
        return {
            "times": times,
            "nodes": {name: by_node.get(name, none) for name in nodes},
            "shards": {str(shard): by_shard.get(str(shard), none) for shard in shards},
            "source": "prometheus",
        }

    def _series(self, query: str, label: str, times: Sequence[int]) -> Mapping[str, list[Any]]:
        asked = urlencode({"query": query, "start": times[0], "end": times[-1], "step": STEP_S})
        with self._opener.open(f"{self.shown}/api/v1/query_range?{asked}", timeout=_TIMEOUT_S) as told:
            answer = json.loads(told.read(_MOST_BYTES))
        if answer["status"] != "success":
            raise ValueError("it refuses the query")
        places = {time_: place for place, time_ in enumerate(times)}
        found: dict[str, list[Any]] = {}
        for one in answer["data"]["result"]:
            values = found.setdefault(str(one["metric"][label]), [None] * len(times))
            for at, value in one["values"]:
                if round(at) in places and math.isfinite(number := float(value)):
                    values[places[round(at)]] = short(number)
        return found


def _reason(error: Exception) -> str:
    # What it answers is not repeated: it may be another's page.
    if isinstance(error, URLError) and isinstance(error.reason, OSError):
        return error.reason.strerror or type(error.reason).__name__
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, URLError) and hasattr(error, "code"):
        return f"it answers {error.code}"
    return "it does not answer as Prometheus does"
