"""The two ways to read a CSV file: whole blocks without a quote, and record by record."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st
from psycopg import Copy

from shardids import Layout
from shardids.client.blocks import IdBlock
from shardids.tables.load.files import Batch, CsvFile

FIELDS = st.text(alphabet=["a", "7", " ", ",", ";", "\t", "|", "é", "\u2028", "\x85", "\0", "\\", ".", "%"])
LINES = st.one_of(
    st.lists(FIELDS, max_size=5).map(",".join),
    st.lists(FIELDS, max_size=5).map(";".join),
    st.sampled_from(["", '"', 'a,"b', '"a""b",', '"a\nb",c', "a\rb", '"",', "\udcff,\udcfe", "\\."]),
)


class Copied:
    """Collects the bytes of a COPY."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        """Take bytes."""
        self.sent += data


def file_of(data: bytes, *, width: int, delimiter: str) -> CsvFile:
    names = [f"c{place}" for place in range(width)]
    return CsvFile.read(io.BytesIO(data), delimiter, names)


@given(
    lines=st.lists(LINES, min_size=1, max_size=6),
    ends=st.sampled_from(["\n", "\r\n"]),
    closed=st.booleans(),
    width=st.integers(1, 4),
    places=st.lists(st.integers(0, 3), max_size=3, unique=True),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
)
@example(lines=["a,b,c", "a"], ends="\n", closed=True, width=2, places=[0], delimiter=",")
@example(lines=["a", "b,c,d"], ends="\n", closed=True, width=2, places=[0], delimiter=",")
@example(lines=["a", "", "b"], ends="\n", closed=False, width=1, places=[0], delimiter=",")
@example(lines=["a,b", "", "c,d"], ends="\r\n", closed=False, width=2, places=[], delimiter=",")
def test_a_block_without_quotes_has_the_records_that_are_found_one_by_one(
    *, lines: Sequence[str], ends: str, closed: bool, width: int, places: Sequence[int], delimiter: str
) -> None:
    data = (ends.join(lines) + ends * closed).encode(errors="surrogateescape")
    file = file_of(b"", width=width, delimiter=delimiter)
    wanted = [place for place in places if place < width]
    quick = file._plain(data, 7, wanted) if data else None
    if quick is None:
        return
    slow, _ = file._quoted(data, 7, wanted)
    assert not slow.unread
    assert shown(quick) == shown(slow)


def shown(batch: Batch) -> dict[str, Any]:
    return {
        "records": list(batch.records),
        "lines": list(batch.lines),
        "columns": [list(column) for column in batch.columns],
    }


@given(rows=st.lists(st.tuples(st.integers(0, 99), st.text("ab %é", max_size=4)), min_size=1, max_size=8))
def test_usual_records_are_read_as_a_block(rows: Sequence[tuple[int, str]]) -> None:
    data = "".join(f"{number},{text}\n" for number, text in rows).encode()
    batch = file_of(b"", width=2, delimiter=",")._plain(data, 2, [0, 1])
    assert batch is not None
    assert [list(column) for column in batch.columns] == [
        [b"%d" % number for number, _ in rows],
        [text.encode() or None for _, text in rows],
    ]


@given(
    records=st.lists(st.binary(max_size=6), min_size=1, max_size=40),
    sequence_bits=st.integers(3, 12),
    first_tick=st.integers(0, 1 << 40),
    part=st.tuples(st.integers(0, 39), st.integers(0, 39)),
    delimiter=st.sampled_from([",", "%", "\t"]),
)
@example(records=[b""] * 40, sequence_bits=12, first_tick=9_980, part=(0, 40), delimiter=",")
def test_each_record_follows_its_id(
    *, records: list[bytes], sequence_bits: int, first_tick: int, part: tuple[int, int], delimiter: str
) -> None:
    layout = Layout(epoch_ms=0, time_bits=41, shard_bits=10, sequence_bits=sequence_bits)
    ids = IdBlock(layout=layout, shard=5, first_tick=first_tick, size=len(records))
    start, stop = min(part), min(max(part), len(records))
    if start >= stop:
        start, stop = 0, len(records)
    copied = Copied()
    file = file_of(b"", width=2, delimiter=delimiter)
    file.write(cast(Copy, copied), ids.runs(start, stop), records[start:stop])
    assert copied.sent == b"".join(
        b"%d%b%b\n" % (id_, delimiter.encode(), record)
        for id_, record in zip([*ids][start:stop], records[start:stop], strict=True)
    )


def test_ids_below_zero_and_small_ones_are_written_in_full() -> None:
    copied = Copied()
    file = file_of(b"", width=2, delimiter=",")
    file.write(cast(Copy, copied), [range(-3, -1), range(9_999, 10_001)], [b"a", b"b", b"c", b"d"])
    assert copied.sent == b"-3,a\n-2,b\n9999,c\n10000,d\n"
