"""A breaker per node: after some failures to connect in a row, calls to it fail at once, except a probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Final
from weakref import WeakSet

import psycopg
from sqlalchemy import Engine

from shardids.catalog.topology import Node
from shardids.errors import ConnectionFailed, NodeDown
from shardids.logs import logger
from shardids.pg.connections import in_child, translate
from shardids.pg.urls import parse_url

FAILURES: Final = 5
"""How many attempts to connect have to fail in a row."""
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0
"""How long calls are refused before one is let through as a probe: at first, and after failed probes."""
_PROBE_S: Final = 30.0
"""How long a probe may take before another call becomes one."""

log = logger("client")


class Breaker:
    """The breaker of one node, for all threads and tasks of a process.

    Only attempts to connect count: while connections work, nothing is asked of it. An attempt that
    the server answers, if only to refuse it, does not count as a failure.

    Args:
        node: the node.
        on_refused: is called for each call that is refused.
    """

    def __init__(self, node: Node, on_refused: Callable[[Node], object] | None = None) -> None:
        self.node = node
        self._on_refused = on_refused
        self._engines = WeakSet[Engine]()
        self._reset()
        in_child(self, Breaker._reset)

    def _reset(self) -> None:
        self._lock = Lock()
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._probe_at = 0.0
        self._reason = ""

    @property
    def is_open(self) -> bool:
        """Returns whether calls are refused."""
        return self._failures >= FAILURES

    @property
    def is_in_doubt(self) -> bool:
        """Returns whether the last attempt to connect failed."""
        return self._failures > 0

    def renew(self, engine: Engine) -> None:
        """Let the engine's connections be made anew when the breaker has opened: idle ones may be silent."""
        self._engines.add(engine)

    def admit(self) -> bool:
        """Return whether the call is a probe, whose outcome :meth:`counting` has to see.

        Raises:
            NodeDown: the breaker is open, and a probe is not due.
        """
        if self._failures < FAILURES:
            return False
        now = time.monotonic()
        with self._lock:
            if self._failures < FAILURES:
                return False
            if now >= self._probe_at:
                self._probe_at = now + _PROBE_S
                return True
            left_s = min(self._probe_at - now, self._pause_s)
        if self._on_refused is not None:
            self._on_refused(self.node)
        raise NodeDown(
            f'not connecting to node "{self.node.name}": the last {FAILURES} attempts failed: {self._reason}',
            hint=f"The next attempt is in {left_s:.1f} s. If the node is lost:"
            f" shardids node replace {self.node.name} --dry-run",
        )

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Refuse the attempt inside, or count it.

        Raises:
            NodeDown: see :meth:`admit`.
        """
        with self.counting(is_probe=self.admit()):
            yield

    @contextmanager
    def counting(self, *, is_probe: bool = False) -> Iterator[None]:
        """Count the attempt inside."""
        try:
            yield
        except psycopg.Error as error:
            what, url = f'node "{self.node.name}"', parse_url(self.node.url)
            ours = translate(error, what=what, url=url)
            if isinstance(ours, ConnectionFailed) and not ours.has_answered:
                self._fail(ours, is_probe=is_probe)
            else:
                self._succeed()
            raise
        except BaseException:
            if is_probe:
                # A task that was cancelled, for one: the next call is the probe.
                self._probe_at = 0.0
            raise
        self._succeed()

    def _succeed(self) -> None:
        if not self._failures:
            return
        with self._lock:
            was_open = self.is_open
            self._failures, self._pause_s = 0, FIRST_PAUSE_S
        if was_open:
            log.info('node "%s" answers again', self.node.name, extra={"node": self.node.name})

    def _fail(self, error: ConnectionFailed, *, is_probe: bool) -> None:
        with self._lock:
            self._failures += 1
            self._reason = error.message
            opens = self._failures == FAILURES
            # Attempts that were under way when it opened say nothing new.
            if is_probe:
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            if is_probe or opens:
                self._probe_at = time.monotonic() + self._pause_s
        if opens:
            log.warning(
                'node "%s" is not asked for now, except by one probe at a time: %s',
                self.node.name,
                error.message,
                extra={"node": self.node.name},
            )
            for engine in list(self._engines):
                # As SQLAlchemy does when a connection was lost.
                engine.pool._invalidate_time = time.time()


class Breakers:
    """The breakers of a cluster's nodes. A node at another address, as after a failover, has a new one.

    In the child of a fork all are closed: its attempts are its own.
    """

    def __init__(self, on_refused: Callable[[Node], object] | None = None) -> None:
        self._on_refused = on_refused
        self._of_nodes: dict[Node, Breaker] = {}
        self._reset()
        in_child(self, Breakers._reset)

    def of(self, node: Node) -> Breaker:
        """Return the breaker of a node."""
        with self._lock:
            known = self._of_nodes.get(node)
            if known is None:
                known = self._of_nodes[node] = Breaker(node, self._on_refused)
            return known

    def are_open(self, nodes: Mapping[str, Node]) -> dict[str, bool]:
        """Return for each node, by name, whether calls to it are refused."""
        return {name: node in self._of_nodes and self._of_nodes[node].is_open for name, node in nodes.items()}

    def _reset(self) -> None:
        self._lock = Lock()
