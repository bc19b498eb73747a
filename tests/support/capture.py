"""A consumer of the changes of a cluster: reads pgoutput by SQL, and merges the nodes' streams into one."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psycopg

from shardids.beside.capture import PUBLICATION, slot_of
from tests.support.moves import TwoNodes, schema

Row = dict[str, str | None]

READ = """
    select data from pg_logical_slot_get_binary_changes(
      %s, null, null, 'proto_version', '1', 'publication_names', %s, 'origin', %s)"""


@dataclass(frozen=True)
class Change:
    """One change of a row: ``insert``, ``update`` or ``delete``, of which ``row`` has the key."""

    kind: str
    table: str
    row: Row


class Reader:
    """Reads the messages of pgoutput, protocol version 1."""

    def __init__(self) -> None:
        self._relations: dict[int, tuple[str, list[str]]] = {}

    def changes(self, message: bytes) -> Iterator[Change]:
        kind, rest = message[:1], message[1:]
        if kind == b"R":
            self._relation(rest)
        elif kind in (b"I", b"U", b"D"):
            table, columns = self._relations[struct.unpack_from("!I", rest)[0]]
            tuples, position = [], 4
            while position < len(rest):
                row, position = self._tuple(rest, position + 1, columns)
                tuples.append(row)
            yield Change({b"I": "insert", b"U": "update", b"D": "delete"}[kind], table, tuples[-1])

    def _relation(self, rest: bytes) -> None:
        (oid,) = struct.unpack_from("!I", rest)
        namespace, name, more = rest[4:].split(b"\0", 2)
        (count,) = struct.unpack_from("!H", more, 1)
        columns, position = [], 3
        for _ in range(count):
            end = more.index(b"\0", position + 1)
            columns.append(more[position + 1 : end].decode())
            position = end + 9
        self._relations[oid] = (f"{namespace.decode() or 'pg_catalog'}.{name.decode()}", columns)

    @staticmethod
    def _tuple(rest: bytes, position: int, columns: list[str]) -> tuple[Row, int]:
        (count,) = struct.unpack_from("!H", rest, position)
        position += 2
        row: Row = {}
        for name in columns[:count]:
            form = rest[position : position + 1]
            position += 1
            if form == b"t":
                (length,) = struct.unpack_from("!I", rest, position)
                row[name] = rest[position + 4 : position + 4 + length].decode()
                position += 4 + length
            elif form == b"n":
                row[name] = None
        return row, position


@dataclass(frozen=True)
class Left:
    """A shard that one node has given away, and the next has not taken yet."""

    source: str
    target: str | None
    tick: str | None


@dataclass
class Consumer:
    """Merges the streams of two nodes: a shard's changes come from the node that has it, one after the other.

    The rule of docs/how-to/capture-changes.md. ``copies`` counts changes on a node without the shard.
    """

    nodes: TwoNodes
    merged: list[Change] = field(default_factory=list)
    copies: int = 0

    def __post_init__(self) -> None:
        cluster, placement = self.nodes.catalog.describe().cluster, self.nodes.catalog.placement()
        self._slots = {name: slot_of(cluster, name) for name in self.nodes.servers}
        self._holder: dict[int, str | Left] = dict(placement.node_of)
        self._shard_of = {schema(shard): shard for shard in placement.node_of}
        self._copies: set[tuple[str, int]] = set()
        self._queues: dict[str, deque[Change]] = defaultdict(deque)
        self._kept = ExitStack()
        self._connections = {
            name: self._kept.enter_context(self.nodes.connected(name)) for name in self.nodes.servers
        }

    def close(self) -> None:
        self._kept.close()

    def poll(self) -> None:
        """Reads what there is on each node, and hands on what is in order."""
        for name, connection in self._connections.items():
            self._queues[name] += read(connection, self._slots[name])
        while any(self._drain(name) for name in self._queues):
            pass

    def waiting(self) -> list[tuple[str, Change, object]]:
        """What was read and not handed on: of each node the first change, and who has the shard."""
        heads = [(node, queue[0]) for node, queue in self._queues.items() if queue]
        return [(node, head, self._holder.get(int(head.row["id"] or -1))) for node, head in heads]

    def _drain(self, node: str) -> bool:
        queue, moved_on = self._queues[node], False
        while queue:
            change = queue[0]
            if change.table == "shardids.shard":
                if change.kind == "insert":
                    self._copies.add((node, int(change.row["id"] or -1)))
                elif change.kind == "update" and not self._follow(node, change.row):
                    break
            elif change.table.partition(".")[0] in self._shard_of:
                shard = self._shard_of[change.table.partition(".")[0]]
                if self._holder[shard] == node:
                    self.merged.append(change)
                else:
                    self.copies += 1
            queue.popleft()
            moved_on = True
        return moved_on

    def _follow(self, node: str, row: Row) -> bool:
        """Follows a change of a shard's state; false if it comes later than one on another node."""
        shard, state, tick = int(row["id"] or -1), row["state"], row["high_water_tick"]
        holder = self._holder[shard]
        if state == "moved" and holder == node:
            self._holder[shard] = Left(node, row["moved_to"], tick)
        elif state == "active" and holder != node:
            if not isinstance(holder, Left):
                return False
            # A cutover that was put off: the old node has its own rows still, not a copy of the new node's.
            is_reopened = node == holder.source and (node, shard) not in self._copies
            if not is_reopened and (node, tick) != (holder.target, holder.tick):
                return False
            self._holder[shard] = node
            self._copies.discard((node, shard))
        return True


def read(connection: psycopg.Connection[Any], slot: str, origin: str = "none") -> list[Change]:
    """What a slot has, which is not there a second time."""
    reader = Reader()
    found = connection.execute(READ, [slot, PUBLICATION, origin]).fetchall()
    return [change for (message,) in found for change in reader.changes(message)]
