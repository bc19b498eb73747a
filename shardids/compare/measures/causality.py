"""Counts answers whose keys sort before those that they answer, between two nodes whose clocks differ."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from shardids.compare.measures.measuring import NODES, Measuring
from shardids.compare.results import Answers
from shardids.compare.schemes import Servers, Source, scheme_of
from shardids.compare.testbed.faketime import FakedClock

_PATIENCE_S: Final = 20.0

Counted: TypeAlias = "tuple[int, int]"
"""How many answers there were, and how many of them sort before what they answer, or with it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the clients meet, how long the first asks, and whether generators are told what is answered."""

    address: str
    seconds: float
    told: bool


def measure_causality(run: Measuring, clocks: Sequence[FakedClock]) -> dict[str, list[Answers]]:
    """Lets clients of two nodes answer each other; the first node's clock is ahead by one skew after another.

    Then once more: generators that can hear of the key that is answered are told it.
    """
    found: dict[str, list[Answers]] = {}
    skewed_ms = 0.0
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "answers"
        for skew_ms in run.sizes.skews_ms:
            # Only forward: generators in the process refuse a clock that steps back.
            clocks[0].step((skew_ms - skewed_ms) / 1000)
            skewed_ms = skew_ms
            untold = run.each("causality", lambda name: _answers(name, run, address, told=False))
            hearing = replace(run, schemes={n: scheme for n, scheme in run.schemes.items() if scheme.hears})
            told = hearing.each("causality", lambda name: _answers(name, run, address, told=True))
            for name, (answers, first) in untold.items():
                heard = told.get(name)
                found.setdefault(name, []).append(
                    Answers(
                        skew_ms=skew_ms,
                        answers=answers,
                        first=first,
                        told=None if heard is None else heard[0],
                        told_first=None if heard is None else heard[1],
                    )
                )
    return {name: all_ for name, all_ in found.items() if len(all_) == len(run.sizes.skews_ms)}


def _answers(name: str, run: Measuring, address: Path, *, told: bool) -> Counted:
    turn = Turn(str(address), run.sizes.answers_s, told)
    jobs = [(name, run.servers, node, turn) for node in range(NODES)]
    counted = run.clients.run(_answering, jobs)
    return sum(answers for answers, _ in counted), sum(first for _, first in counted)


@contextlib.contextmanager
def _answering(name: str, servers: Servers, node: int, turn: Turn) -> Iterator[Callable[[], Counted]]:
    """Returns the job of a client: the first node's asks and ends, the second's answers."""
    with scheme_of(name).open(servers, node) as source, socket.socket(socket.AF_UNIX) as own:
        own.settimeout(_PATIENCE_S)
        source.draw()
        if node == 0:
            Path(turn.address).unlink(missing_ok=True)
            own.bind(turn.address)
            own.listen()

        def go() -> Counted:
            if node == 0:
                other, _ = own.accept()
                with other:
                    other.settimeout(_PATIENCE_S)
                    return _converse(source, other, asks_for_s=turn.seconds, told=turn.told)
            own.connect(turn.address)
            return _converse(source, own, asks_for_s=0, told=turn.told)

        yield go


def _converse(source: Source, other: socket.socket, *, asks_for_s: float, told: bool) -> Counted:
    """Answers each key that comes with another, until the other end, or the time, is over."""
    answers = first = 0
    with other.makefile("rwb") as lines:

        def say(key: int) -> None:
            lines.write(b"%d\n" % key)
            lines.flush()

        end = time.monotonic() + asks_for_s
        if asks_for_s:
            say(int(source.draw()))
        while line := lines.readline():
            asked = int(line)
            answer = int(source.draw_after(asked) if told else source.draw())
            answers, first = answers + 1, first + (answer <= asked)
            if asks_for_s and time.monotonic() > end:
                break
            say(answer)
    return answers, first
