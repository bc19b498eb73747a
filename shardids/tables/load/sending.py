"""Rows on their way to the shards: sent by COPY, counted in ``shardids_load`` there, or rejected."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import IO, Any, Final, Protocol

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids import Cluster
from shardids.catalog.topology import Node
from shardids.client.blocks import reserve_for as blocks_of_ids
from shardids.client.copying.copy import failed_line, in_words
from shardids.client.copying.lanes import Block, Copied, of_driver
from shardids.client.copying.target import CopyTarget
from shardids.errors import BadArgument, ClusterConflict, MissingPrivilege, ShardidsError
from shardids.pg.queries import batches
from shardids.pg.schemas import administers, untrusted
from shardids.pg.sqlfiles import read_sql
from shardids.pg.statement_log import logged_copy
from shardids.tables.load.files import Batch

TABLE = "shardids_load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The progress of a load in a shard: its first so many rows are copied, or were rejected."""

    rows: int
    rejected: int


def read_marks(cluster: Cluster, load: str, source: str) -> dict[int, Mark]:
    """Return the marks of a load, by shard.

    Raises:
        ClusterConflict: a load of this name was of another file, or read in another way.
    """
    found: dict[int, Mark] = {}
    for name, shards in cluster.placement.by_node().items():
        schemas = {cluster.schema_of(shard): shard for shard in shards}
        with cluster.engine(cluster.placement.nodes[name]).connect() as connection:
            there = connection.scalars(
                text(
                    "select n.nspname from pg_catalog.pg_class c"
                    " join pg_catalog.pg_namespace n on n.oid operator(pg_catalog.=) c.relnamespace"
                    " join pg_catalog.pg_roles r on r.oid operator(pg_catalog.=) c.relowner"
                    " where c.relname operator(pg_catalog.=) :table and c.relkind operator(pg_catalog.=) 'r'"
                    # A table of another role is refused before rows are sent: its policies would run here.
                    " and (r.rolname operator(pg_catalog.=) current_user"
                    "  or r.oid operator(pg_catalog.=) (select e.nspowner from pg_catalog.pg_namespace e"
                    "                                   where e.nspname operator(pg_catalog.=) 'shardids'))"
                ),
                {"table": TABLE},
            ).all()
            for some in batches([schema for schema in there if schema in schemas]):
                for schema, of, rows, rejected in _read(connection, some, load):
                    _check_source(load, of, source)
                    found[schemas[schema]] = Mark(rows=rows, rejected=rejected)
    return found


def _read(connection: Connection, schemas: Iterable[str], load: str) -> list[tuple[str, str, int, int]]:
    branches = sql.SQL(" union all ").join(
        sql.SQL("select {}, source, rows, rejected from {} where load = %(load)s").format(
            sql.Literal(schema), sql.Identifier(schema, TABLE)
        )
        for schema in schemas
    )
    return of_driver(connection).execute(branches, {"load": load}).fetchall()


def _check_source(load: str, found: str, source: str) -> None:
    if found != source:
        raise ClusterConflict(
            f'load "{load}" is of another file, or had other options: {found}, now {source}',
            hint="Give this load another name: --name",
        )


def make_tables(connection: Connection, schemas: Iterable[str]) -> None:
    """Make the table in shards. Idempotent."""
    setting = sql.SQL("select pg_catalog.set_config('shardids.schema', {}, true);\n")
    script = [setting.format(schema).as_string() + read_sql("load/marks.v1") for schema in schemas]
    of_driver(connection).execute("\n".join(script).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A shard's mark before and after a transaction."""

    schema: str
    before: int
    after: Mark


def advance(driver: psycopg.Connection, load: str, source: str, steps: Sequence[Step]) -> None:
    """Advance shards' marks in the transaction that copies the rows; add to ``rejected``.

    Raises:
        ClusterConflict: another process has advanced a mark: it runs the same load.
    """
    moves = []
    for number, step in enumerate(steps):
        statement = sql.SQL(
            "update {table} set rows = {rows}, rejected = rejected + {rejected}, at = default"
            " where load = %(load)s and rows = {before} returning 1"
        )
        if step.before == 0:
            statement = sql.SQL(
                "insert into {table} (load, source, rows, rejected)"
                " values (%(load)s, %(source)s, {rows}, {rejected}) on conflict do nothing returning 1"
            )
        move = statement.format(
            table=sql.Identifier(step.schema, TABLE),
            rows=sql.Literal(step.after.rows),
            rejected=sql.Literal(step.after.rejected),
            before=sql.Literal(step.before),
        )
        moves.append(sql.SQL("{} as ({})").format(sql.Identifier(f"step_{number}"), move))
    counts = (
        sql.SQL("(select count(*) from {})").format(sql.Identifier(f"step_{number}"))
        for number in range(len(steps))
    )
    query = sql.SQL("with {} select {}").format(sql.SQL(", ").join(moves), sql.SQL(", ").join(counts))
    moved = driver.execute(query, {"load": load, "source": source}).fetchone() or ()
    for step, count in zip(steps, moved, strict=True):
        if count != 1:
            raise ClusterConflict(
                f'another process is running the load "{load}":'
                f" it has copied rows into {step.schema} meanwhile",
                hint="Wait for it, or end it and start the load again, which continues it.",
            )


_HEADER = ("line", "shard", "row", "reason", "record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A record that is not loaded.

    Attributes:
        line: its line in the file.
        shard: its shard; ``None`` if it has none.
        row: its number among the shard's rows of this load, from 1.
        reason: why.
        record: the record.
    """

    line: int
    shard: int | None
    row: int
    reason: str
    record: str


class Rejects:
    """The file of rejected records, which is written before their transaction commits; threads may share it.

    Records that an earlier run wrote and did not commit are removed, and so are those without a shard: this
    run finds them again.
    """

    def __init__(self, path: Path, marks: Mapping[int, int], *, dry_run: bool) -> None:
        self.path, self._lock, self._dry_run = path, Lock(), dry_run
        self._file: IO[str] | None = None
        kept: list[list[str]] = []
        with suppress(FileNotFoundError), path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            if tuple(next(rows, _HEADER)) != _HEADER:
                raise BadArgument(
                    f"{path} exists, and is not a file of rejected records",
                    hint="Name another file: --rejects",
                )
            kept = [row for row in rows if _is_committed(row, marks)]
        self._seen = {(int(row[1]), int(row[2])) for row in kept}
        self.count = len(kept)
        if kept:
            self._write(kept, durably=True)
        elif not dry_run:
            path.unlink(missing_ok=True)

    def add(self, rejects: Iterable[Reject]) -> None:
        """Write rejects, those of shards to the disk; one that is there already is not repeated."""
        with self._lock:
            new = [each for each in rejects if each.shard is None or (each.shard, each.row) not in self._seen]
            if not new:
                return
            self._seen.update((each.shard, each.row) for each in new if each.shard is not None)
            self.count += len(new)
            rows = [
                [
                    str(each.line),
                    "" if each.shard is None else str(each.shard),
                    str(each.row),
                    each.reason,
                    each.record,
                ]
                for each in new
            ]
            self._write(rows, durably=any(each.shard is not None for each in new))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, rows: list[list[str]], *, durably: bool) -> None:
        if self._dry_run:
            return
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8", newline="")
            csv.writer(self._file).writerow(_HEADER)
        csv.writer(self._file).writerows(rows)
        self._file.flush()
        if durably:
            os.fsync(self._file.fileno())


def _is_committed(row: list[str], marks: Mapping[int, int]) -> bool:
    # The last line may be cut off.
    if len(row) != len(_HEADER) or not row[1].isdecimal() or not row[2].isdecimal():
        return False
    return int(row[2]) <= marks.get(int(row[1]), 0)


_OF_A_ROW: Final = ("22", "23", "P0")
"""Classes of errors that a row's values cause: data, constraints, and what triggers raise."""


class File(Protocol):
    """A file of records."""

    @property
    def names(self) -> Sequence[str]:
        """The columns."""

    def batches(self, places: Sequence[int]) -> Iterator[Batch]:
        """Yield the records, with the fields at these places."""

    def value(self, field: Any, kind: type | None, /) -> Any:
        """Return the value of a field; a kind of ``None`` is an ID. Raises BadArgument."""

    def options(self) -> sql.Composable:
        """Return what follows COPY … FROM STDIN."""

    def write(self, copy: psycopg.Copy, ids: Sequence[int] | None, records: Sequence[Any]) -> None:
        """Send records."""

    def place_of_line(self, records: Sequence[Any], line: int) -> int:
        """Return the place of the record that PostgreSQL means by a line."""

    def shown(self, record: Any) -> str:
        """Return a record as text, for people."""


Part = tuple[int, int, int]
"""Records of a block: the block's place, the first of them and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The sender of blocks of one load; ``taken`` is how many rows of each shard earlier runs have taken."""

    cluster: Cluster
    target: CopyTarget
    file: File
    load: str
    source: str
    taken: Mapping[int, int]
    rejects: Rejects
    most_rejects: int
    trusted: Sequence[str]

    def send(
        self, connection: Connection, blocks: Sequence[Block[Any]], node: Node, check: Callable[[], None]
    ) -> list[Copied]:
        """Copy blocks over the open transaction of a connection to their node."""
        schemas = [self.cluster.schema_of(block.shard) for block in blocks]
        before = [self.taken.get(block.shard, 0) + block.before for block in blocks]
        self._require_trusted(connection, [sql.Identifier(schema, self.target.name) for schema in schemas])
        make_tables(connection, [schema for schema, rows in zip(schemas, before, strict=True) if rows == 0])
        ids: Sequence[Sequence[int] | None] = [None] * len(blocks)
        if self.target.id_column is not None:
            counts = {block.shard: len(block.items) for block in blocks}
            ids = [[*some] for some in blocks_of_ids(connection, counts, self.cluster.layout)]
        refused = self._copy(connection, blocks, schemas, ids, check)
        # First, so that a row is never lost; what is not committed is taken out by the next run.
        self.rejects.add(
            Reject(
                line=blocks[n].numbers[place],
                shard=blocks[n].shard,
                row=before[n] + place + 1,
                reason=reason,
                record=self.file.shown(blocks[n].items[place]),
            )
            for (n, place), reason in refused.items()
        )
        refuse_too_many(self.rejects, self.most_rejects)
        rejected = Counter(n for n, _ in refused)
        advance(
            of_driver(connection),
            self.load,
            self.source,
            [
                Step(
                    schema=schemas[n],
                    before=before[n],
                    after=Mark(rows=before[n] + len(block.items), rejected=rejected[n]),
                )
                for n, block in enumerate(blocks)
            ],
        )
        return [
            Copied(
                shard=block.shard,
                node=node.name,
                rows=[line for place, line in enumerate(block.numbers) if (n, place) not in refused]
                if rejected[n]
                else block.numbers,
                ids=None,
            )
            for n, block in enumerate(blocks)
        ]

    def _require_trusted(self, connection: Connection, tables: Sequence[sql.Identifier]) -> None:
        """Refuse tables where others could run code as a role that administers the cluster.

        Raises:
            MissingPrivilege: they could.
        """
        if not administers(connection):
            return
        # That of COPY: until the transaction ends, no trigger, default or constraint is made there.
        of_driver(connection).execute(
            sql.SQL("lock table {} in row exclusive mode").format(sql.SQL(", ").join(tables))
        )
        # Its settings are not the load's.
        with connection.begin_nested() as looking:
            found = untrusted(connection, [table.as_string() for table in tables], trusted=self.trusted)
            looking.rollback()
        for one in found:
            raise MissingPrivilege(
                one.reason,
                hint="Load as a role that may INSERT there and does not administer the cluster."
                f" {one.remedy}",
            )

    def _copy(
        self,
        connection: Connection,
        blocks: Sequence[Block[Any]],
        schemas: Sequence[str],
        ids: Sequence[Sequence[int] | None],
        check: Callable[[], None],
    ) -> dict[tuple[int, int], str]:
        """Copy the records that the server takes; return the rest, by block and record, with the reasons.

        If it refuses a block, all are rolled back and copied again: those before it, it, and those after it.
        That block is then copied in parts: the records before the one that the server names, that record, and
        those after it; or halves, if it names none.
        """
        statements = [
            sql.SQL("{} {}").format(self.target.statement(schema), self.file.options()) for schema in schemas
        ]
        refused: dict[tuple[int, int], str] = {}
        todo: list[list[Part]] = [[(n, 0, len(block.items)) for n, block in enumerate(blocks)]]
        while todo:
            check()
            parts = todo.pop()
            failed = self._try(connection, blocks, statements, ids, parts)
            if failed is None:
                continue
            at, error = failed
            if len(parts) > 1:
                todo += [some for some in (parts[at + 1 :], parts[at : at + 1], parts[:at]) if some]
                continue
            ((n, start, end),) = parts
            if end - start == 1:
                refused[n, start], _ = in_words(error)
                continue
            cuts = [start, (start + end) // 2, end]
            if line := failed_line(error):
                place = start + self.file.place_of_line(blocks[n].items[start:end], line)
                if start <= place < end:
                    cuts = [start, place, place + 1, end]
            todo += [[(n, a, b)] for a, b in reversed([*pairwise(cuts)]) if a < b]
        return refused

    def _try(
        self,
        connection: Connection,
        blocks: Sequence[Block[Any]],
        statements: Sequence[sql.Composed],
        ids: Sequence[Sequence[int] | None],
        parts: Sequence[Part],
    ) -> tuple[int, psycopg.Error] | None:
        """Copy parts; return which one the server refuses, and the error, if it is one of the records'."""
        at = 0
        try:
            with connection.begin_nested():
                for at, (n, start, end) in enumerate(parts):  # noqa: B007 -- used after an error
                    of_block = ids[n]
                    with logged_copy(connection, statements[n]) as copy:
                        self.file.write(
                            copy,
                            None if of_block is None else of_block[start:end],
                            blocks[n].items[start:end],
                        )
        except psycopg.Error as error:
            client_side = error.sqlstate is None and isinstance(
                error, psycopg.ProgrammingError | psycopg.DataError
            )
            if not client_side and (error.sqlstate or "")[:2] not in _OF_A_ROW:
                raise
            return at, error
        return None


def refuse_too_many(rejects: Rejects, most: int) -> None:
    """End a load that rejects more than it may.

    Raises:
        ShardidsError: it does.
    """
    if rejects.count > most:
        raise ShardidsError(
            f"{rejects.count:,} records were rejected, more than the limit of {most:,}",
            hint=f"{rejects.path} has the reasons. Raise the limit with --max-rejects, and start the load"
            " again to continue it.",
        )
