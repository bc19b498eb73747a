"""The load of a file into the shards of a cluster, which continues an earlier run of the same load."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final

from sqlalchemy import DefaultClause, MetaData, Table
from sqlalchemy.exc import NoSuchTableError
from sqlalchemy.schema import BLANK_SCHEMA

from shardids import Cluster
from shardids.client.copying.copy import copy_failed
from shardids.client.copying.lanes import BlockFailed, Copied, Lanes
from shardids.client.copying.target import CopyTarget, Router, refuse_lookups, target_of
from shardids.client.placement import PATIENCE_S
from shardids.errors import BadArgument, ClusterConflict, ShardidsError
from shardids.models.columns import next_id
from shardids.tables.load.files import CsvFile, ParquetFile
from shardids.tables.load.sending import (
    File,
    Mark,
    Reject,
    Rejects,
    Sender,
    read_marks,
    refuse_too_many,
)

_ROWS_A_TRANSACTION: Final = 20_000
"""A load that is killed loses no more than a few transactions."""
_HASHED: Final = 1 << 20
_SWITCHING_S: Final = 0.0002
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
    rows_a_transaction: int = _ROWS_A_TRANSACTION
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
        by_shard: the rows copied by this run, by shard.
    """

    name: str
    rows: int = 0
    already: int = 0
    rejected: int = 0
    by_shard: dict[int, int] = field(default_factory=dict)


def load(
    cluster: Cluster,
    file: IO[bytes],
    settings: LoadSettings,
    on_progress: Callable[[Loaded], object] = lambda _loaded: None,
) -> Loaded:
    """Load an open file; ``on_progress`` is called after each transaction.

    Raises:
        BadArgument: the file, the table or the columns are unfit. Nothing was loaded.
        ClusterConflict: the load's name is another's, or another process runs it.
        CopyFailed: it stopped. Started again, it goes on where it ended.
    """
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
    )
    refuse_lookups(target, cluster.placement.lookups.values())
    marks = read_marks(cluster, settings.name, source)
    rejects = Rejects(
        settings.rejects, {shard: mark.rows for shard, mark in marks.items()}, dry_run=settings.dry_run
    )
    switching_s = sys.getswitchinterval()
    # A node's thread needs the interpreter for an instant after each answer, and would wait as long for it.
    sys.setswitchinterval(_SWITCHING_S)
    try:
        return _Load(cluster, found, target, settings, marks=marks, rejects=rejects, source=source).run(
            on_progress
        )
    finally:
        sys.setswitchinterval(switching_s)
        rejects.close()


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
    ) -> None:
        self._cluster, self._file, self._target, self._settings = cluster, file, target, settings
        self._marks, self._rejects, self._source = marks, rejects, source
        self._loaded = Loaded(name=settings.name)
        self._router = Router(target, cluster, settings.shard, file.value)
        self._there = {shard: mark.rows for shard, mark in marks.items() if mark.rows}
        """How many rows of each shard, the first of the file, an earlier run has taken."""

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
            raise copy_failed(self._target.name, failed, lanes.copied) from failed.error
        return self._finished()

    def _sender(self) -> Sender:
        return Sender(
            cluster=self._cluster,
            target=self._target,
            file=self._file,
            load=self._settings.name,
            source=self._source,
            taken={shard: mark.rows for shard, mark in self._marks.items()},
            rejects=self._rejects,
            most_rejects=self._settings.most_rejects,
            trusted=self._settings.trusted,
        )

    def _finished(self) -> Loaded:
        loaded = self._loaded
        if self._there:
            raise ClusterConflict(
                f'shard {min(self._there)} has taken more rows of the load "{loaded.name}" than the file has',
                hint="This is not the file that was loaded before. Give its load another name: --name",
            )
        loaded.rows = sum(loaded.by_shard.values())
        loaded.already = sum(mark.rows - mark.rejected for mark in self._marks.values())
        loaded.rejected = self._rejects.count
        return loaded

    def _routed(self) -> Iterator[tuple[Sequence[int], Sequence[Any], Sequence[int]]]:
        """Yield the records that are not there yet: their shards, themselves, their lines."""
        for batch in self._file.batches(list(self._target.telling)):
            for line, record, reason in batch.unread:
                self._reject(line, record, reason)
            if not batch.records:
                continue
            shards = self._router.shards(batch.columns, len(batch.records))
            if shards is not None and not self._there:
                yield shards, batch.records, batch.lines
                continue
            every: Sequence[int | None] = shards or [
                self._shard_of([column[place] for column in batch.columns], line, record)
                for place, (line, record) in enumerate(zip(batch.lines, batch.records, strict=True))
            ]
            left = [place for place, shard in enumerate(every) if shard is not None and self._is_new(shard)]
            if left:
                yield (
                    [shard for shard in map(every.__getitem__, left) if shard is not None],
                    [batch.records[place] for place in left],
                    [batch.lines[place] for place in left],
                )

    def _is_new(self, shard: int) -> bool:
        """Return whether an earlier run has not taken the next row of a shard."""
        if shard not in self._there:
            return True
        self._there[shard] -= 1
        if not self._there[shard]:
            del self._there[shard]
        return False

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
        shown = self._file.shown(record)
        self._rejects.add([Reject(line=line, shard=None, row=0, reason=reason, record=shown)])
        refuse_too_many(self._rejects, self._settings.most_rejects)


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
