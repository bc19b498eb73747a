"""The load of a file into the shards of a cluster, which continues an earlier run of the same load."""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final

from sqlalchemy import Connection, DefaultClause, MetaData, Table, text
from sqlalchemy.exc import NoSuchTableError
from sqlalchemy.schema import BLANK_SCHEMA

from shardids import Cluster
from shardids.catalog.alive import Alive, alive
from shardids.catalog.leases import session_name
from shardids.client.copying.copy import copy_failed
from shardids.client.copying.lanes import ROWS_A_TRANSACTION, BlockFailed, Copied, Lanes
from shardids.client.copying.target import CopyTarget, Router, refuse_lookups, target_of
from shardids.client.placement import PATIENCE_S
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.models.columns import next_id
from shardids.pg.locks import AdvisoryLock, holders_of
from shardids.tables.load.files import LONGEST_FIELD, CsvFile, ParquetFile
from shardids.tables.load.sending import (
    File,
    Mark,
    Reject,
    Rejects,
    Sender,
    read_marks,
    refuse_too_many,
)

_HASHED: Final = 1 << 20
_SWITCHING_S: Final = 0.001
_NEXT_ID: Final = re.compile(r'(?:.*\.)?"?next_id"?\(\)', re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Parameters of a load.

    Attributes:
        table: the table's name in every shard.
        key: the column to shard by; ``region`` is the region of all keys; ``id_`` is a column that holds IDs,
            ``shard`` the shard of all rows.
        format: ``csv`` or ``parquet``.
        columns: the columns of a CSV file without a header.
        name: the load's name in the shards' records.
        rejects: the file for rejected records.
        most_rejects: the most rejected records.
        trusted: roles whose code may run as the role that loads: see :mod:`shardids.pg.schemas`.
    """

    table: str
    key: str | None = None
    region: str | None = None
    id_: str | None = None
    shard: int | None = None
    format: str = "csv"
    delimiter: str = ","
    columns: Sequence[str] | None = None
    name: str
    rejects: Path
    most_rejects: int = 1_000
    rows_a_transaction: int = ROWS_A_TRANSACTION
    trusted: Sequence[str] = ()
    dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class Loaded:
    """The result of a load.

    Attributes:
        name: the load's name.
        rows: rows copied by this run; with ``dry_run``, those that would be sent.
        already: rows that an earlier run had copied.
        rejected: rejected records, those of earlier runs included.
        unlisted: how many of them the rejects file lacks: an earlier run wrote them to another.
        by_shard: the rows copied by this run, by shard.
    """

    name: str
    rows: int = 0
    already: int = 0
    rejected: int = 0
    unlisted: int = 0
    by_shard: dict[int, int] = field(default_factory=dict)


def load(
    cluster: Cluster,
    file: IO[bytes],
    settings: LoadSettings,
    on_progress: Callable[[Loaded], object] = lambda _loaded: None,
) -> Loaded:
    """Load an open file; ``on_progress`` is called after each transaction.

    Raises:
        BadArgument: the file, the table, the columns or the file for rejects are unfit. Nothing was loaded.
        ClusterConflict: the load's name is another's, or another process runs it, or could since the
            connection to the catalog was lost; or keys were moved since it began.
        CopyFailed: it stopped. Started again, it goes on where it ended.
    """
    if settings.shard is not None:
        cluster._checked(settings.shard)
    source = _source(file, settings)
    found: File
    if settings.format == "parquet":
        found = ParquetFile.read(file)
    else:
        found = CsvFile.read(file, settings.delimiter, settings.columns)
    table = _table(cluster, settings.table)
    target = target_of(
        table,
        found.names,
        key=settings.key,
        region=settings.region,
        id_=settings.id_,
        shard=settings.shard,
        spelled="--{}".format,
    )
    refuse_lookups(target, cluster.placement.lookups.values())
    with (
        _process_settings(),
        nullcontext() if settings.dry_run else _alone(cluster, settings.name) as alone,
    ):
        # Before any row is routed: rows that follow a later version are not those of the marks.
        homes_version = cluster._followed.homes.version
        marks = read_marks(cluster, settings.name, source, homes_version if settings.shard is None else None)
        rejects = Rejects(
            settings.rejects,
            settings.name,
            marks,
            require=lambda: None if alone is None else _require_alone(alone, settings.name),
            dry_run=settings.dry_run,
        )
        try:
            return _Load(
                cluster,
                found,
                target,
                settings,
                marks=marks,
                rejects=rejects,
                source=source,
                homes_version=homes_version,
            ).run(on_progress)
        finally:
            rejects.close()


@contextmanager
def _process_settings() -> Iterator[None]:
    """Set, until the block ends, what Python has once for the whole process."""
    switching_s, longest = sys.getswitchinterval(), csv.field_size_limit(LONGEST_FIELD)
    # A node's thread needs the interpreter for an instant after each answer, and would wait as long for it.
    sys.setswitchinterval(_SWITCHING_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switching_s)
        csv.field_size_limit(longest)


@contextmanager
def _alone(cluster: Cluster, load: str) -> Iterator[Alive]:
    """Keep other processes from running the load.

    Raises:
        ClusterConflict: one does. Nothing was read or changed.
    """
    place = int.from_bytes(sha256(load.encode()).digest()[:4], "big", signed=True)

    def take(connection: Connection) -> None:
        key = {"class": int(AdvisoryLock.LOAD), "key": place}
        if not connection.scalar(text("select pg_try_advisory_xact_lock(:class, :key)"), key):
            holders = holders_of(connection, AdvisoryLock.LOAD, place)
            names = ", ".join(f"{one.application or one.role} (process {one.pid})" for one in holders)
            raise ClusterConflict(
                f'another process is running the load "{load}": {names or "it has just ended"}',
                hint="Wait until it has ended, and start the load again if it has not loaded the whole file."
                " Its connection to the catalog holds the lock: if it hangs, end that session with"
                " pg_terminate_backend.",
            )

    with alive(cluster._catalog, session_name(f"load {load}"), take) as living:
        yield living


def _require_alone(alone: Alive, load: str) -> None:
    if not alone.is_alive():
        raise ClusterConflict(
            f'the connection to the catalog was lost, which keeps other processes off the load "{load}"',
            hint="Start the load again, which continues it.",
        )


class _Load:
    """One run."""

    def __init__(
        self,
        cluster: Cluster,
        file: File,
        target: CopyTarget,
        settings: LoadSettings,
        *,
        marks: Mapping[int, Mark],
        rejects: Rejects,
        source: str,
        homes_version: int,
    ) -> None:
        self._homes_version = homes_version
        self._cluster, self._file, self._target, self._settings = cluster, file, target, settings
        self._marks, self._rejects, self._source = marks, rejects, source
        self._loaded = Loaded(name=settings.name)
        self._router = Router(target, cluster, settings.shard, file.values)
        self._left = {shard: mark.rows for shard, mark in marks.items()}
        """How many records of each shard are still to be met up to the line of its mark."""
        self._last = max((mark.line for mark in marks.values()), default=0)
        """The last line of the marks; 0 behind it."""
        self._held: list[Reject] = []
        """Records up to that line that have no shard, and are not in the rejects file."""

    def run(self, on_progress: Callable[[Loaded], object]) -> Loaded:
        loaded = self._loaded
        if self._settings.dry_run:
            by_shard = Counter(shard for shards, _, _ in self._routed() for shard in shards)
            loaded.by_shard = dict(by_shard)
            return self._finished()

        def note(copied: Copied) -> None:
            loaded.rows += len(copied.rows)
            loaded.by_shard[copied.shard] = loaded.by_shard.get(copied.shard, 0) + len(copied.rows)
            loaded.rejected = self._rejects.count
            on_progress(loaded)

        lanes: Lanes[Any] = Lanes(
            followed=self._cluster._followed,
            engine_of=self._cluster.engine,
            send=self._sender().send,
            rows_a_transaction=self._settings.rows_a_transaction,
            patience_s=PATIENCE_S,
            on_copied=note,
        )
        try:
            lanes.run(self._routed())
        except BlockFailed as failed:
            then = "started again, the load goes on after them."
            raise copy_failed(self._target.name, failed, lanes.copied, then) from failed.error
        return self._finished()

    def _sender(self) -> Sender:
        return Sender(
            cluster=self._cluster,
            target=self._target,
            file=self._file,
            load=self._settings.name,
            source=self._source,
            homes_version=self._homes_version,
            taken={shard: mark.rows for shard, mark in self._marks.items()},
            rejects=self._rejects,
            most_rejects=self._settings.most_rejects,
            trusted=self._settings.trusted,
        )

    def _finished(self) -> Loaded:
        loaded = self._loaded
        self._pass_marks()
        loaded.rows = sum(loaded.by_shard.values())
        loaded.already = sum(mark.rows - mark.rejected for mark in self._marks.values())
        loaded.rejected = self._rejects.count
        loaded.unlisted = self._rejects.missing
        return loaded

    def _routed(self) -> Iterator[tuple[Sequence[int], Sequence[Any], Sequence[int]]]:
        """Yield the records that are not there yet: their shards, themselves, their lines."""
        for batch in self._file.batches(list(self._target.telling)):
            for line, record, reason in batch.unread:
                self._reject(line, record, reason)
            if not batch.records:
                continue
            if self._last and batch.lines[0] > self._last:
                self._pass_marks()
            shards = self._router.shards(batch.columns, len(batch.records))
            if shards is not None and not self._last:
                yield shards, batch.records, batch.lines
                continue
            every: Sequence[int | None] = shards or [
                self._shard_of([column[place] for column in batch.columns], line, record)
                for place, (line, record) in enumerate(zip(batch.lines, batch.records, strict=True))
            ]
            left = [
                place
                for place, (shard, line) in enumerate(zip(every, batch.lines, strict=True))
                if shard is not None and self._is_new(shard, line, batch.records[place])
            ]
            if left:
                yield (
                    [shard for shard in map(every.__getitem__, left) if shard is not None],
                    [batch.records[place] for place in left],
                    [batch.lines[place] for place in left],
                )

    def _is_new(self, shard: int, line: int, record: Any) -> bool:
        """Return whether an earlier run has neither taken nor rejected a record of a shard.

        Raises:
            ClusterConflict: the shard has taken other records than those that are its own now.
        """
        if line > self._last:
            if self._last:
                # Before any row behind them is sent, and not only at the end of its batch.
                self._pass_marks()
            return True
        if self._was_rejected(line, record):
            return False
        mark = self._marks.get(shard)
        if mark is None:
            return True
        if line <= mark.line:
            self._left[shard] -= 1
            return False
        self._require_met(shard)
        return True

    def _was_rejected(self, line: int, record: Any) -> bool:
        kept = self._rejects.without_shard.get(line)
        return kept is not None and kept == self._file.shown(record)

    def _pass_marks(self) -> None:
        """Leave the lines of the marks behind."""
        for shard in self._marks:
            self._require_met(shard)
        self._last = 0
        held, self._held = self._held, []
        self._rejects.add(held)

    def _require_met(self, shard: int) -> None:
        left = self._left[shard]
        if not left:
            return
        mark, name = self._marks[shard], self._loaded.name
        why = (
            "The file, a type of a column that determines the shard, or a row's shard has changed: undo that"
        )
        if left < 0:
            why = (
                "Records that had no shard when they were read have one now, and"
                f" {self._rejects.path} does not list them: name the file that does (--rejects)"
            )
        raise ClusterConflict(
            f'shard {shard} has taken {mark.rows:,} rows of the load "{name}" up to line {mark.line:,}, and'
            f" {mark.rows - left:,} belong to it now: which it has taken is not known any more",
            hint=f"{why}. Otherwise delete its rows, in all shards, and load the file under another name:"
            " --name",
        )

    def _shard_of(self, values: Sequence[Any], line: int, record: Any) -> int | None:
        """Return the shard of a record; None if it has none and is rejected."""
        try:
            return self._router.shard(values)
        except ShardidsError as error:
            reason = error.message
        except TypeError as error:  # It can't be a key: a list, say.
            reason = str(error)
        self._reject(line, record, reason)
        return None

    def _reject(self, line: int, record: Any, reason: str) -> None:
        if self._was_rejected(line, record):
            return
        reject = Reject(line=line, shard=None, row=0, reason=reason, record=self._file.shown(record))
        if line <= self._last:
            # It may have had a shard, which has taken it.
            self._held.append(reject)
        else:
            self._rejects.add([reject])
        refuse_too_many(self._rejects, self._settings.most_rejects, self._held)


def _source(file: IO[bytes], settings: LoadSettings) -> str:
    """Return the marks that distinguish a load from others of the same name."""
    if file.seekable():
        digest = sha256(file.read(_HASHED)).hexdigest()[:16]
        size = file.seek(0, 2)
        file.seek(0)
        what = f"{size} bytes, beginning {digest}"
    else:
        what = "a stream"
    named = (
        ("format", settings.format),
        ("delimiter", repr(settings.delimiter) if settings.format == "csv" else None),
        ("columns", None if settings.columns is None else ",".join(settings.columns)),
        ("key", settings.key),
        ("region", settings.region),
        ("id", settings.id_),
        ("shard", settings.shard),
    )
    how = "".join(f", {name} {value}" for name, value in named if value is not None)
    return f"{what}, into {settings.table}{how}"


def _table(cluster: Cluster, name: str) -> Table:
    """Read the table from a shard, as a table without a schema.

    Raises:
        BadArgument: the table does not exist.
    """
    shard = min(cluster.placement.node_of, default=0)
    schema = cluster.schema_of(shard)
    there = MetaData()
    with cluster.engine(cluster.node_of(shard)).connect() as connection:
        try:
            found = Table(name, there, schema=schema, autoload_with=connection)
        except NoSuchTableError:
            raise BadArgument(
                f'shard {shard} has no table {name} [node "{cluster.node_of(shard).name}"]',
                hint="Give the name without a schema. Tables are made by the application's migrations.",
            ) from None
    bare = MetaData()
    for table in there.tables.values():
        if table.schema == schema:
            table.to_metadata(
                bare,
                schema=None,  # type: ignore[arg-type]  # documented: no schema
                # Typed as text, which the constant is not.
                referred_schema_fn=lambda _t, _to, _c, of: BLANK_SCHEMA if of == schema else of,  # type: ignore[arg-type, return-value]  # see above
            )
    for table in bare.tables.values():
        for column in table.primary_key.columns:
            default = column.server_default
            if isinstance(default, DefaultClause) and _NEXT_ID.fullmatch(str(default.arg)):
                column.server_default = DefaultClause(next_id())
    return bare.tables[found.name]
