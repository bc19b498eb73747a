"""Rows on their way to the shards: sent by COPY, counted in ``shardids_load`` there, or rejected."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import IO, Any, Final, Protocol

import psycopg
from psycopg import sql
from sqlalchemy import Connection, text

from shardids import Cluster
from shardids.catalog.topology import Node
from shardids.client.blocks import IdBlock
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
    """The progress of a load in a shard: so many rows are copied, or were rejected.

    They are the records up to a line of the file that belonged to the shard when they were read.
    """

    rows: int
    rejected: int
    line: int


def read_marks(cluster: Cluster, load: str, source: str, homes_version: int | None = None) -> dict[int, Mark]:
    """Return the marks of a load, by shard.

    ``homes_version`` is the version of the directory of keys that routes the rows, ``None`` if nothing
    depends on it.

    Raises:
        ClusterConflict: a load of this name was of another file, or read in another way; or keys were moved
            since it began, so that the first rows of a shard are not those that it has taken.
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
                for schema, of, rows, rejected, version, line in _read(connection, some, load):
                    if line is None:
                        raise _of_an_older_version(load, schema)
                    _check_source(load, of, source)
                    if homes_version not in (None, version):
                        raise _rerouted(load, schema, rows)
                    found[schemas[schema]] = Mark(rows=rows, rejected=rejected, line=line)
    return found


def _read(
    connection: Connection, schemas: Iterable[str], load: str
) -> list[tuple[str, str, int, int, int, int | None]]:
    branches = sql.SQL(" union all ").join(
        # A table of an older version has no column line.
        sql.SQL(
            "select {}, l.source, l.rows, l.rejected, l.homes_version, (pg_catalog.to_jsonb(l)"
            " operator(pg_catalog.->>) 'line')::bigint from {} l where l.load = %(load)s"
        ).format(sql.Literal(schema), sql.Identifier(schema, TABLE))
        for schema in schemas
    )
    return of_driver(connection).execute(branches, {"load": load}).fetchall()


def _rerouted(load: str, schema: str, rows: int) -> ClusterConflict:
    return ClusterConflict(
        f'keys were moved to other shards since load "{load}" began: which {rows:,} rows of the file {schema}'
        " has taken is not known any more",
        hint="If it had ended, nothing is left to do. Otherwise delete its rows, in all shards, and load the"
        " file under another name: --name. Let a load end before a key is moved.",
    )


def _of_an_older_version(load: str, schema: str) -> ClusterConflict:
    return ClusterConflict(
        f'load "{load}" was begun by an older version of shardids, which did not write how far in the'
        f" file the rows of {schema} reach",
        hint="If it had ended, nothing is left to do. Otherwise delete its rows, in all shards, and load the"
        " file under another name: --name.",
    )


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


def advance(
    driver: psycopg.Connection, load: str, source: str, steps: Sequence[Step], *, homes_version: int
) -> None:
    """Advance shards' marks in the transaction that copies the rows; add to ``rejected``.

    Raises:
        ClusterConflict: another process has advanced a mark: it runs the same load.
    """
    moves = []
    for number, step in enumerate(steps):
        statement = sql.SQL(
            "update {table} set rows = {rows}, rejected = rejected + {rejected}, line = {line}, at = default"
            " where load = %(load)s and rows = {before} returning 1"
        )
        if step.before == 0:
            statement = sql.SQL(
                "insert into {table} (load, source, rows, rejected, line, homes_version)"
                " values (%(load)s, %(source)s, {rows}, {rejected}, {line}, %(version)s)"
                " on conflict do nothing returning 1"
            )
        move = statement.format(
            table=sql.Identifier(step.schema, TABLE),
            rows=sql.Literal(step.after.rows),
            rejected=sql.Literal(step.after.rejected),
            line=sql.Literal(step.after.line),
            before=sql.Literal(step.before),
        )
        moves.append(sql.SQL("{} as ({})").format(sql.Identifier(f"step_{number}"), move))
    counts = (
        sql.SQL("(select count(*) from {})").format(sql.Identifier(f"step_{number}"))
        for number in range(len(steps))
    )
    query = sql.SQL("with {} select {}").format(sql.SQL(", ").join(moves), sql.SQL(", ").join(counts))
    moved = driver.execute(query, {"load": load, "source": source, "version": homes_version}).fetchone() or ()
    for step, count in zip(steps, moved, strict=True):
        if count != 1:
            raise ClusterConflict(
                f'another process is running the load "{load}":'
                f" it has copied rows into {step.schema} meanwhile",
                hint="Wait for it, or end it and start the load again, which continues it.",
            )


_HEADER = ("load", "line", "shard", "row", "reason", "record")


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
    """The file of a load's rejected records, which is written before their transaction commits; threads may
    share it.

    Records that an earlier run wrote and did not commit are removed, and so are those without a shard behind
    the last line of the marks: this run finds them again. ``require`` raises if another process
    may write the file.

    Attributes:
        count: how many records are rejected.
        missing: how many of them shards have counted, and the file lacks.
        without_shard: the records without a shard that an earlier run has passed, by line.

    Raises:
        BadArgument: the file is another load's, or not one of rejected records; it was not changed.
    """

    def __init__(
        self, path: Path, load: str, marks: Mapping[int, Mark], *, require: Callable[[], None], dry_run: bool
    ) -> None:
        self.path, self._load, self._lock, self._dry_run = path, load, Lock(), dry_run
        self._require = require
        self._file: IO[str] | None = None
        last = max((mark.line for mark in marks.values()), default=0)
        kept = [one for one in self._read() if _is_committed(one, marks, last)]
        self._seen = {(one.shard, one.row) for one in kept if one.shard is not None}
        self.without_shard = {one.line: one.record for one in kept if one.shard is None}
        self.missing = max(sum(mark.rejected for mark in marks.values()) - len(self._seen), 0)
        self.count = len(self._seen) + len(self.without_shard) + self.missing
        if dry_run:
            return
        if kept:
            self._file = self._replaced(kept)
        else:
            path.unlink(missing_ok=True)

    def add(self, rejects: Iterable[Reject]) -> None:
        """Write rejects, those of shards to the disk; one that is there already is not repeated."""
        with self._lock:
            new = [each for each in rejects if each.shard is None or (each.shard, each.row) not in self._seen]
            if not new:
                return
            self._write(new, durably=any(each.shard is not None for each in new))
            # Last: a block that fails is sent again, and these must be written then.
            self._seen.update((each.shard, each.row) for each in new if each.shard is not None)
            self.count += len(new)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _read(self) -> list[Reject]:
        """Return the records in the file."""
        path = self.path
        try:
            is_one = path.is_file() or not path.exists()
            # Its end may be cut off within a character.
            text = path.read_bytes().decode(errors="replace") if is_one else ""
            rows = [*csv.reader(StringIO(text, newline=""))]
        except FileNotFoundError:
            return []
        except (OSError, csv.Error) as error:
            raise BadArgument(f"{path} can't be read: {error}", hint="Name another file: --rejects") from None
        if tuple(rows[0] if rows else ()) != _HEADER:
            raise BadArgument(
                f"{path} exists, and is not a file of rejected records",
                hint="Name another file: --rejects",
            )
        whole = [row for row in rows[1 : None if text.endswith("\n") else -1] if len(row) == len(_HEADER)]
        if others := {row[0] for row in whole} - {self._load}:
            raise BadArgument(
                f'{path} has rejected records of the load "{min(others)}"',
                hint="Name another file: --rejects",
            )
        return [
            Reject(
                line=int(line),
                shard=int(shard) if shard else None,
                row=int(row),
                reason=reason,
                record=record,
            )
            for _, line, shard, row, reason, record in whole
            if line.isdecimal() and row.isdecimal() and (not shard or shard.isdecimal())
        ]

    def _write(self, rejects: Sequence[Reject], *, durably: bool) -> None:
        if self._dry_run:
            return
        if durably:
            # Another process would have replaced the file, and what is counted here would be in none.
            self._require()
        if self._file is None:
            self._file = self._made(rejects)
        else:
            self._file.write(self._rows(rejects))
            self._file.flush()
        if durably:
            os.fsync(self._file.fileno())

    def _rows(self, rejects: Iterable[Reject], *, header: bool = False) -> str:
        text = StringIO(newline="")
        rows = csv.writer(text)
        if header:
            rows.writerow(_HEADER)
        rows.writerows(
            [
                self._load,
                each.line,
                "" if each.shard is None else each.shard,
                each.row,
                each.reason,
                each.record,
            ]
            for each in rejects
        )
        return text.getvalue()

    def _made(self, rejects: Sequence[Reject]) -> IO[str]:
        """Make the file, which did not exist when the run began."""
        try:
            file = self.path.open("x", encoding="utf-8", newline="")
        except FileExistsError:
            raise BadArgument(
                f"{self.path} was made meanwhile, by another load", hint="Name another file: --rejects"
            ) from None
        file.write(self._rows(rejects, header=True))
        file.flush()
        _keep_name(self.path)
        return file

    def _replaced(self, kept: Sequence[Reject]) -> IO[str]:
        """Replace the file, by one that is complete on the disk at every moment, and open the new one."""
        path = self.path.resolve()
        new = path.with_name(f"{path.name}.new")
        with new.open("w", encoding="utf-8", newline="") as file:
            file.write(self._rows(kept, header=True))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _keep_name(path)
        return path.open("a", encoding="utf-8", newline="")


def _keep_name(path: Path) -> None:
    """Write a file's entry in its folder to the disk."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_committed(reject: Reject, marks: Mapping[int, Mark], last: int) -> bool:
    if reject.shard is None:
        return reject.line <= last
    mark = marks.get(reject.shard)
    return mark is not None and reject.row <= mark.rows


_OF_A_ROW: Final = ("22", "23", "54", "P0")
"""Classes of errors that a row's values cause: data, constraints, limits, and what triggers raise."""


class File(Protocol):
    """A file of records."""

    @property
    def names(self) -> Sequence[str]:
        """The columns."""

    def batches(self, places: Sequence[int]) -> Iterator[Batch]:
        """Yield the records, with the fields at these places."""

    def values(self, fields: Sequence[Any], kind: type | None, /) -> Sequence[Any]:
        """Return the values of fields; a kind of ``None`` is an ID. Raises BadArgument."""

    def options(self) -> sql.Composable:
        """Return what follows COPY … FROM STDIN."""

    def write(self, copy: psycopg.Copy, ids: Iterable[range] | None, records: Sequence[Any]) -> None:
        """Send records."""

    def place_of_line(self, records: Sequence[Any], line: int) -> int:
        """Return the place of the record that PostgreSQL means by a line."""

    def shown(self, record: Any) -> str:
        """Return a record as text, for people."""


Part = tuple[int, int, int]
"""Records of a block: the block's place, the first of them and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """The sender of blocks of one load.

    ``taken`` is how many rows of each shard earlier runs have taken, ``homes_version`` the version of the
    directory of keys when this run began.
    """

    cluster: Cluster
    target: CopyTarget
    file: File
    load: str
    source: str
    homes_version: int
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
        ids: Sequence[IdBlock | None] = [None] * len(blocks)
        if self.target.id_column is not None:
            counts = {block.shard: len(block.items) for block in blocks}
            ids = blocks_of_ids(connection, counts, self.cluster.layout)
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
                    after=Mark(rows=before[n] + len(block.items), rejected=rejected[n], line=block.through),
                )
                for n, block in enumerate(blocks)
            ],
            homes_version=self.homes_version,
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
        ids: Sequence[IdBlock | None],
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
        ids: Sequence[IdBlock | None],
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
                            None if of_block is None else of_block.runs(start, end),
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


def refuse_too_many(rejects: Rejects, most: int, held: Sequence[Reject] = ()) -> None:
    """End a load that rejects more than it may; ``held`` are not in the file yet.

    Raises:
        ShardidsError: it does.
    """
    count = rejects.count + len(held)
    if count > most:
        why = f"{rejects.path} has the reasons"
        if held:
            why = f"It does not have line {held[0].line}: {held[0].reason}. {why} of others"
        raise ShardidsError(
            f"{count:,} records were rejected, more than the limit of {most:,}",
            hint=f"{why}. Raise the limit with --max-rejects, and start the load again to continue it.",
        )
