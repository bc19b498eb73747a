"""Analysis of IDs that a viewer pastes: each by itself, all of them together, and their rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.losses import read_arrivals
from shardids.errors import BadArgument, ConnectionFailed, ShardidsError
from shardids.ids.layout import DecodedId, Layout
from shardids.ids.text import parse_id, to_decimal, to_text
from shardids.pg.reader import Refused, reading_as_reader
from shardids.watch.console.databases import STATEMENT, Databases
from shardids.watch.console.figures import clock_offset_s, owner_of, region_of
from shardids.watch.console.watching import Seen
from shardids.watch.stats import measured
from shardids.watch.stats.detector import Anomaly, Kind, span
from shardids.watch.stats.reading import foreign

MOST_SHOWN: Final = 200
"""The most IDs that are described one by one."""
_MOST_BAD: Final = 50
_MOST_BARS: Final = 120
_MOST_SHARDS: Final = 64
_MOST_ANOMALIES: Final = 20
_WORD: Final = re.compile(r"""[^\s,;:"'`=()\[\]{}<>|/?&#]+""")
_FUTURE_MS: Final = 60_000

Values = dict[str, Any]
Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The catalog's records of the past: the highest old ID, and each shard's moves, oldest first.

    A move is the last tick of its source, and the source's name: the target issued all IDs above that tick.
    """

    old_ids_below: int | None = None
    moves: Mapping[int, Sequence[tuple[int, str]]]


def inspect(written: str, seen: Seen, databases: Databases, *, rows: bool) -> Values:
    """Describe the IDs in a text; with ``rows``, look for the rows of the first ones.

    It skips words without a digit, and lists other words that are not IDs of this layout, with the reason.

    Raises:
        BadArgument: the text has no ID.
        ConnectionFailed: the catalog has never answered, so the layout is unknown.
    """
    if seen.known is None:
        raise ConnectionFailed("the catalog has not answered yet, so the layout is not known")
    layout = seen.known.layout
    ids, bad = read(written, layout)
    if not ids.size and not bad:
        raise BadArgument(
            "the text does not contain an ID",
            hint="Write an ID in decimal, as 0x and hexadecimal digits, or as 13 characters of base 32.",
        )
    first = [int(one) for one in ids[:MOST_SHOWN]]
    past = _past(databases, {layout.decode(one).shard for one in first})
    looked = look(databases, seen, layout, first, past.old_ids_below) if rows else None
    # Of the clocks that made the IDs: this machine's may be off.
    now = datetime.now(UTC) + timedelta(seconds=clock_offset_s(seen))
    together = measured.of(ids, layout, now=now, old_ids_below=past.old_ids_below)
    return {
        "ids": [_told(one, seen, layout, past, looked, now=now) for one in first],
        "count": int(ids.size),
        "bad": [{"text": word, "why": why} for word, why in bad[:_MOST_BAD]],
        "bad_count": len(bad),
        "old": together.old,
        "histogram": _histogram(together),
        "left_out": _left_out(together),
        "shards": _shards(together),
        "shard_count": int(together.shards.shard.size),
        "anomalies": [_sentence(one) for one in together.anomalies[:_MOST_ANOMALIES]],
        "unread": looked.unread if looked else [],
    }


def read(written: str, layout: Layout) -> tuple[Ids, list[tuple[str, str]]]:
    """Return the IDs of a text in their order, and the words that are not IDs, each with the reason."""
    ids: list[int] = []
    bad: list[tuple[str, str]] = []
    for word in _WORD.findall(written):
        try:
            ids.append(parse_id(word))
        except BadArgument as error:
            if any(letter.isdigit() for letter in word):
                bad.append((word[:80], error.message))
    found = np.array(ids, np.int64)
    is_foreign = foreign(found, layout)
    for place in is_foreign.nonzero()[0]:
        try:
            layout.decode(int(found[place]))
        except BadArgument as error:
            bad.append((to_decimal(int(found[place])), error.message))
    return found[~is_foreign], bad


def _told(
    id_: int, seen: Seen, layout: Layout, past: Past, looked: Looked | None, *, now: datetime
) -> Values:
    decoded = layout.decode(id_)
    found = looked.found.get(id_, Found()) if looked else Found()
    is_old = past.old_ids_below is not None and 0 <= id_ < past.old_ids_below
    node = None if is_old else owner_of(seen, decoded.shard)
    born_on = None if is_old else _born_on(decoded, node, past)
    return {
        "id": to_decimal(id_),
        "text": to_text(id_),
        "shard": None if is_old else decoded.shard,
        "node": node,
        "region": None if is_old else region_of(seen, decoded.shard),
        "time": None if is_old else decoded.time.timestamp(),
        "sequence": None if is_old else decoded.sequence,
        "bits": bits(id_, layout),
        "old": is_old,
        "born_on": born_on,
        "origin_differs": born_on is not None and born_on != node,
        "table": found.table,
        "found": found.there,
        "note": _note(id_, layout, seen, found, now, is_old=is_old),
    }


def bits(id_: int, layout: Layout) -> dict[str, str]:
    """Return the bits of an ID by their meaning, as they are written."""
    written = f"{id_ & (1 << layout.id_bits) - 1:0{layout.id_bits}b}"
    shard, sequence = layout.time_bits, layout.time_bits + layout.shard_bits
    return {"time": written[:shard], "shard": written[shard:sequence], "sequence": written[sequence:]}


def _note(id_: int, layout: Layout, seen: Seen, found: Found, now: datetime, *, is_old: bool) -> str | None:
    if is_old:
        return "issued before this cluster: it tells nothing of a shard or a time"
    decoded = layout.decode(id_)
    count = seen.known.shard_total if seen.known else 0
    ahead_s = (decoded.time - now).total_seconds()
    notes = []
    if decoded.shard >= count:
        notes.append(f"this cluster has no shard {decoded.shard}: its shards are 0 to {count - 1}")
    elif owner_of(seen, decoded.shard) is None:
        notes.append(f"shard {decoded.shard} is on no node now")
    if ahead_s * 1000 > _FUTURE_MS:
        notes.append(f"from the future, by {span(ahead_s)}: its shard ran ahead, or the ID was made up")
    if found.note is not None:
        notes.append(found.note)
    return "; ".join(notes) or None


def _born_on(decoded: DecodedId, node: str | None, past: Past) -> str | None:
    """Return the node that issued an ID.

    It is the source of the first move whose target issued only IDs above it, or today's owner.
    """
    tick = (decoded.ms << decoded.layout.sequence_bits) + decoded.sequence
    return next((source for last, source in past.moves.get(decoded.shard, ()) if tick <= last), node)


def _past(databases: Databases, shards: set[int]) -> Past:
    def ask(connection: Connection) -> Past:
        below = connection.scalar(text("select old_ids_below from shardids_catalog.cluster"))
        moves: dict[int, list[tuple[int, str]]] = {}
        for one in read_arrivals(connection):
            if one.shard in shards:
                moves.setdefault(one.shard, []).append((one.high_water_tick, one.source))
        return Past(old_ids_below=below, moves=moves)

    try:
        return databases.of_catalog(ask)
    except ShardidsError:
        # What IDs tell by themselves needs no server.
        return Past(moves={})


def _histogram(together: measured.IdStats) -> Values | None:
    series = together.series
    if not series.counts.any():
        return None
    if series.intervals > _MOST_BARS:
        factor = -(-series.intervals // _MOST_BARS)
        missing = -series.intervals % factor
        counts = np.pad(series.counts.sum(axis=0), (0, missing)).reshape(-1, factor).sum(axis=1)
    else:
        factor, counts = 1, series.counts.sum(axis=0)
    step_s = series.interval_ms * factor / 1000
    begin = series.start_ms / 1000
    return {
        "from": begin,
        "to": begin + step_s * len(counts),
        "step_s": step_s,
        "counts": [int(one) for one in counts],
    }


def _left_out(together: measured.IdStats) -> dict[str, int]:
    """Return the number of IDs outside of the histogram: from the future, and far from all others."""
    far = sum(int(one.value) for one in together.anomalies if one.kind is Kind.OUTSIDE)
    return {"future": together.count - int(together.series.counts.sum()) - far, "far": far}


def _shards(together: measured.IdStats) -> list[list[int]]:
    shards = together.shards
    order = (-shards.count).argsort(kind="stable")[:_MOST_SHARDS]
    return [[int(shards.shard[row]), int(shards.count[row])] for row in order]


def _sentence(one: Anomaly) -> str:
    of = "all shards" if one.shard is None else f"shard {one.shard}"
    when = f", {one.start:%Y-%m-%d %H:%M:%S}" if one.start else ""
    until = f" to {one.end:%H:%M:%S}" if one.start and one.end else ""
    return f"{one.kind}: {of}{when}{until}: {one.message}"


MOST_SHARDS: Final = 32
"""In how many shards rows are looked for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of an ID: the tables that hold a row with it; ``there`` is ``None`` where nobody could look."""

    there: bool | None = None
    table: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The rows found, by ID, and a sentence for each part that could not be read."""

    found: Mapping[int, Found]
    unread: Sequence[str]


# Tables whose primary key is one bigint; parts of a partitioned table are read through it.
_KEYS: Final = text("""
    select s.id as shard, n.nspname as schema, c.relname as table_name, a.attname as column_name
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    join pg_class c on c.relnamespace = n.oid and c.relkind in ('r', 'p') and not c.relispartition
    join pg_index i on i.indrelid = c.oid and i.indisprimary and i.indnkeyatts = 1
    join pg_attribute a on a.attrelid = c.oid and a.attnum = i.indkey[0] and a.atttypid = 'bigint'::regtype
    where s.id = any(:shards)
    order by 1, 3""")


def look(
    databases: Databases, seen: Seen, layout: Layout, ids: Sequence[int], old_ids_below: int | None
) -> Looked:
    """Look for the rows of IDs. Rows of old IDs are not looked for: any shard may have them."""
    found: dict[int, Found] = {}
    wanted: defaultdict[int, list[int]] = defaultdict(list)
    for id_ in ids:
        if old_ids_below is None or not 0 <= id_ < old_ids_below:
            wanted[layout.decode(id_).shard].append(id_)
    per_node: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)
    unread: list[str] = []
    for number, (shard, mine) in enumerate(wanted.items()):
        node = owner_of(seen, shard)
        if node is None:
            continue
        if number >= MOST_SHARDS:
            found |= dict.fromkeys(
                mine, Found(note=f"not looked for: only in the first {MOST_SHARDS} shards")
            )
            continue
        per_node[node][shard] = mine
    answers = databases.of_nodes({name: _Question(name, shards) for name, shards in per_node.items()})
    for name, answer in answers.items():
        if isinstance(answer, ShardidsError):
            unread.append(answer.message)
            note = f'node "{name}" could not be asked for the row'
            found |= {id_: Found(note=note) for mine in per_node[name].values() for id_ in mine}
        else:
            found |= answer.found
            unread += answer.unread
    return Looked(found=found, unread=unread)


class _Question:
    """The question for the rows of IDs of a node, by shard: three statements for any number of tables."""

    def __init__(self, node: str, wanted: Mapping[int, Sequence[int]]) -> None:
        self._what = f'node "{node}"'
        self._wanted = wanted

    def __call__(self, connection: Connection) -> Looked:
        keys = connection.execute(_KEYS, {"shards": list(self._wanted)}).all()
        query = sql.SQL("select {column} as id from {table} where {column} = any({ids}::bigint[])")
        with reading_as_reader(connection.engine, self._what) as reader:
            answers = reader.read(
                [
                    query.format(
                        column=sql.Identifier(key.column_name),
                        table=sql.Identifier(key.schema, key.table_name),
                        ids=sql.Literal(list(self._wanted[key.shard])),
                    ).as_string()
                    for key in keys
                ],
                statement_timeout=STATEMENT,
            )
        rows: defaultdict[int, list[str]] = defaultdict(list)
        hidden: set[int] = set()
        unread: list[str] = []
        for key, answer in zip(keys, answers, strict=True):
            if isinstance(answer, Refused):
                hidden.add(key.shard)
                unread.append(f"{key.schema}.{key.table_name} was not looked at: {answer.reason}")
                continue
            for row in answer:
                rows[row["id"]].append(key.table_name)
        found = {}
        for shard, ids in self._wanted.items():
            for id_ in ids:
                if id_ in rows:
                    found[id_] = Found(there=True, table=", ".join(sorted(rows[id_])))
                else:
                    found[id_] = Found(there=None if shard in hidden else False)
        return Looked(found=found, unread=unread)
