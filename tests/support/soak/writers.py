"""Applications that write through ``Shard.run`` alone, and record what was acknowledged to them."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from shardids import Cluster
from shardids.errors import CommitUncertain, ConnectionFailed, ShardFenced
from tests.support.moves import schema
from tests.support.soak.commands import Stuck
from tests.support.soak.field import Field
from tests.support.soak.records import Record, Tried

MAY_END_WITH = frozenset(
    {"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "25P03", "25006", "SI002", "SI003"}
)
"""SQLSTATEs of what undoes a transaction: conflicts, time-outs, ends of sessions and servers, fences."""
IDLE_S = 90.0
"""How long one operation may take whatever happens: more than a network is silent, and a server away."""


class Refused(Exception):
    """The writer itself found that the transaction should not go on."""


class Gate:
    """Lets writers pass, or keeps them between two operations."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def is_open(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        self._open.wait()


class Writer(threading.Thread):
    """One operation after another on rows of its own, in any shard."""

    every_s = 0.03

    def __init__(self, number: int, *, field: Field, cluster: Cluster, gate: Gate, folder: Path, seed: int):
        super().__init__(name=f"writer {number}", daemon=True)
        self.number, self.field, self.cluster = number, field, cluster
        self.random = random.Random(f"{seed} writer {number}")
        self.record = Record(folder / f"writer-{number}.jsonl")
        self.failure: BaseException | None = None
        self.written: dict[int, int] = defaultdict(int)
        """How many operations were acknowledged, by shard."""
        self.own: dict[int, dict[int, list[int]]] = defaultdict(dict)
        """Entries, or loads, that are there for sure, with their parts, by shard."""
        self.operation = 0
        self._gate = gate
        self._ends = threading.Event()
        self._waits = threading.Event()

    def run(self) -> None:
        try:
            while not self._ends.wait(self.every_s):
                if not self._gate.is_open():
                    self.calm()
                    self._waits.set()
                    self._gate.wait()
                    self._waits.clear()
                    continue
                self.operation += 1
                self.step(self.random.choice(self.field.shards))
        except BaseException as failure:  # noqa: BLE001 -- raised again by raise_failure
            self.failure = failure
        finally:
            self._waits.set()

    def step(self, shard: int) -> None:
        """One operation on a shard."""
        raise NotImplementedError

    def calm(self) -> None:
        """Brings to its end what an operation has left open."""

    def await_idle(self) -> None:
        """Returns when it waits at the closed gate.

        Raises:
            Stuck: its operation does not end.
        """
        if not self._waits.wait(IDLE_S):
            raise Stuck(f"{self.name} has been in operation {self.operation} for more than {IDLE_S:g} s")

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise AssertionError(f"{self.name}, operation {self.operation}") from self.failure

    def stop(self) -> None:
        self._ends.set()
        self.join(IDLE_S)
        self.record.close()

    def transaction(self, shard: int, work: Callable[[Session, Tried], None]) -> Tried | None:
        """Runs ``work`` in a transaction wherever the shard is; what it did, if that was acknowledged."""
        tried = Tried()

        def attempt(session: Session) -> None:
            nonlocal tried
            tried = Tried()
            try:
                work(session, tried)
            finally:
                self.record.tried(self.operation, shard, tried)

        try:
            self.cluster.at(shard=shard).run(attempt)
        except CommitUncertain:
            self.record.ended(self.operation, "maybe")
            self.forget(shard, tried)
            return None
        except (ConnectionFailed, ShardFenced, Refused, DBAPIError) as error:
            if isinstance(error, DBAPIError) and sqlstate_of(error.orig) not in MAY_END_WITH:
                raise
            self.record.ended(self.operation, "no")
            time.sleep(0.05)
            return None
        self.record.ended(self.operation, "ok")
        self.keep(shard, tried)
        return tried

    def keep(self, shard: int, tried: Tried) -> None:
        """Remembers what was acknowledged."""
        self.written[shard] += 1
        own = self.own[shard]
        for kind, id_, value in tried.made:
            if kind == "parts":
                own[value].append(id_)
            else:
                own[id_] = []
        self.forget(shard, tried)

    def forget(self, shard: int, tried: Tried) -> None:
        """Touches no row any more that is gone, or may be."""
        for _, id_ in tried.gone:
            self.own[shard].pop(id_, None)

    def insert(self, session: Session, shard: int, tried: Tried, parts: int) -> None:
        """An entry with parts, under IDs that the defaults draw."""
        s, values = schema(shard), {"writer": self.number, "value": self.operation}
        entry = session.execute(
            text(f"insert into {s}.entries (writer, value) values (:writer, :value) returning id"), values
        ).scalar_one()
        tried.made.append(("entries", entry, self.operation))
        for _ in range(parts):
            adding = text(f"insert into {s}.parts (entry_id) values (:entry) returning id")
            part = session.execute(adding, {"entry": entry}).scalar_one()
            tried.made.append(("parts", part, entry))

    def update(self, session: Session, shard: int, tried: Tried, entry: int) -> None:
        changing = text(f"update {schema(shard)}.entries set value = value + :value where id = :entry")
        found = session.execute(changing, {"value": self.operation, "entry": entry}).rowcount  # type: ignore[attr-defined]  # a CursorResult
        assert found == 1, f"shard {shard}: entry {entry}, which was acknowledged, is not there to be updated"
        tried.added.append((entry, self.operation))

    def delete(self, session: Session, shard: int, tried: Tried, entry: int) -> None:
        removing = text(f"delete from {schema(shard)}.entries where id = :entry")
        found = session.execute(removing, {"entry": entry}).rowcount  # type: ignore[attr-defined]  # a CursorResult
        assert found == 1, f"shard {shard}: entry {entry}, which was acknowledged, is not there to be deleted"
        tried.gone += [("entries", entry), *(("parts", part) for part in self.own[shard][entry])]

    def any_own(self, shard: int) -> int | None:
        """An entry of its own that is there."""
        own = self.own[shard]
        return self.random.choice([*own]) if own else None


class Rows(Writer):
    """Usual transactions: a row or a few, then COMMIT."""

    def step(self, shard: int) -> None:
        entry, kind = self.any_own(shard), self.random.random()
        if entry is None or kind < 0.5:
            self.transaction(shard, lambda session, tried: self.insert(session, shard, tried, parts=2))
        elif kind < 0.75:
            self.transaction(shard, lambda session, tried: self.update(session, shard, tried, entry))
        else:
            self.transaction(shard, lambda session, tried: self.delete(session, shard, tried, entry))


class Lingerer(Writer):
    """Transactions that stay open for seconds, some with an old snapshot."""

    every_s = 0.2

    def step(self, shard: int) -> None:
        pauses = [self.random.uniform(0, 1.5) for _ in range(self.random.randint(1, 4))]
        is_old = self.random.random() < 0.3

        def work(session: Session, tried: Tried) -> None:
            if is_old:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
                session.execute(text("select 1"))
            for pause in pauses:
                self.insert(session, shard, tried, parts=1)
                self._ends.wait(pause)

        self.transaction(shard, work)


def sqlstate_of(error: BaseException | None) -> str | None:
    """The SQLSTATE of a driver's error; that of a lost connection if there is none."""
    return getattr(error, "sqlstate", None) or "57P01"
