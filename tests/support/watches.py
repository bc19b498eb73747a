"""Rebalances that run on: in this process, and as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.errors import ShardidsError
from tests.support.clusters import COMMAND, environment
from tests.support.waiting import PATIENCE_S, wait_for

QUICK = ("--by", "size", "--over", "200ms")
"""Sizes need no time to be measured."""


class Watched:
    """A watch in a thread of this process, and its decisions."""

    def __init__(self, catalog_url: str, terms: mover.Terms) -> None:
        self.decisions: list[mover.Decision] = []
        self.error: ShardidsError | None = None
        self._catalog = Catalog(catalog_url)
        self._watch = mover.Watch(self._catalog, terms, self.decisions.append)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._watch.run()
        except ShardidsError as error:
            self.error = error

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._catalog.close()

    def says(self, what: str) -> list[str]:
        """What the decisions of a kind say."""
        return [one.says for one in self.decisions if one.what == what]

    def wait_for(self, what: str, words: str = "") -> str:
        """The first decision of a kind that says the words."""

        def found() -> str | None:
            assert self.error is None or what == "error", self.error
            return next((says for says in self.says(what) if words in says), None)

        return str(wait_for(found, f"{what}: {words}; {self.decisions[-3:]}"))


class Process:
    """``shardids rebalance --watch`` as a process, and the decisions that it has printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.decisions: list[dict[str, Any]] = []
        self.said = ""
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._hear)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.decisions.append(json.loads(line))

    def _hear(self) -> None:
        assert self.process.stderr is not None
        self.said = self.process.stderr.read()

    def ended(self, number: int | None = None) -> int:
        """Its exit code, after a signal if one is given."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join()
        return code

    def wait_for(self, what: str) -> dict[str, Any]:
        """The first decision of a kind."""

        def found() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.said
            return next((one for one in self.decisions if one["what"] == what), None)

        return dict(wait_for(found, what) or {})


@contextmanager
def watching(catalog_url: str, *options: str) -> Iterator[Process]:
    """``shardids rebalance --watch``, until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "rebalance", "--watch", "--json", *options],
        env=environment(SHARDIDS_CATALOG=catalog_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        running = Process(process)
        try:
            yield running
        finally:
            if process.poll() is None:
                process.kill()
            running.ended()
