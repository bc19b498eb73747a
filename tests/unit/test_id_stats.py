"""IDs as a record of load: reading them, measuring them, and `shardids id stats`."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT, DISCORD, Layout
from shardids.ids.order import pairs_out_of_order
from shardids.ids.text import to_signed, to_text
from shardids.watch import stats
from shardids.watch.stats.detector import span
from shardids.watch.stats.reading import read_ids
from shardids.watch.stats.series import bounds_of
from tests.support.clusters import COMMAND, command_here, environment
from tests.support.clusters import command as process
from tests.support.planted import MONDAY, Week

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def id_at(ms: int, shard: int = 5, sequence: int = 0, layout: Layout = DEFAULT) -> int:
    return layout.encode(at=NOW + timedelta(milliseconds=ms), shard=shard, sequence=sequence)


FAR = st.lists(st.integers(0, 600_000), max_size=6)


@given(st.integers(0, 100_000), FAR, FAR)
def test_what_is_left_out_is_further_from_the_rest_than_the_rest_lasts(
    lasts: int, before: list[int], after: list[int]
) -> None:
    core = np.linspace(0, lasts, 100).astype(np.int64)
    times = np.r_[-np.cumsum(before)[::-1], core, lasts + np.cumsum(after)].astype(np.int64)
    first, last = bounds_of(times)
    least = max(last - first, 60_000)
    for left_out, gaps in ((times[times < first], first - times), (times[times > last], times - last)):
        assert left_out.size <= 5
        assert not left_out.size or gaps[gaps > 0].min() > least


def test_one_by_one_further_is_not_far_from_all_others() -> None:
    core = np.linspace(0, 100_000, 96).astype(np.int64)
    thinner = np.array([190_000, 280_000, 370_000, 480_000])
    assert bounds_of(np.r_[core, thinner]) == (0, 480_000)
    assert bounds_of(np.r_[core, thinner + 10_001]) == (0, 100_000)
    # What one end has at 90 s each makes 210 s at the other end near.
    assert bounds_of(np.r_[-270_000, -180_000, -90_000, core, 310_000]) == (-270_000, 310_000)


@given(st.lists(st.integers(0, 20), max_size=40))
def test_pairs_out_of_order(values: list[int]) -> None:
    pairs = [(a, b) for at, a in enumerate(values) for b in values[at + 1 :]]
    wrong = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
    assert pairs_out_of_order(np.array(values, np.uint64)) == pytest.approx(wrong)


@given(
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=20), st.sampled_from(["\n", "\r\n"]), st.booleans()
)
def test_every_way_to_write_an_id_is_read(ids: list[int], end: str, ends: bool) -> None:
    for write in (str, to_text):
        text = end.join(map(write, ids)) + end * ends
        read = read_ids(io.BytesIO(text.encode()))
        assert read.ids.tolist() == [to_signed(one) for one in ids] or write is to_text
        assert (read.bad, read.lines.tolist()) == ([], list(range(1, len(ids) + 1)))


def test_each_line_that_is_no_id_is_named() -> None:
    read = read_ids(io.BytesIO(b"\xef\xbb\xbf7\n\n12x\n-8\n99999999999999999999999\n\\N\n1_0\n\xff\n9"))
    assert (read.ids.tolist(), read.lines.tolist()) == ([7, -8, 9], [1, 4, 9])
    assert [one.line for one in read.bad] == [3, 5, 6, 7, 8]
    assert "beyond the 64 bits" in read.bad[1].reason
    assert read.bad[2].reason == "NULL is no ID"


def test_a_line_that_does_not_end_is_not_read_into_memory() -> None:
    class Zeros(io.RawIOBase):
        read_bytes = 0

        def read(self, size: int = -1) -> bytes:
            self.read_bytes += size
            return b"7\n" if self.read_bytes == size else bytes(size)

    zeros = Zeros()
    with pytest.raises(BadArgument, match="line 2 has over 16,777,216 bytes"):
        read_ids(zeros)  # type: ignore[arg-type]  # it reads, which is all that is asked of it
    assert zeros.read_bytes < 100_000_000


def test_a_column_of_csv() -> None:
    text = 'name,"id"\n"a\nb",7\n\nc\nd,x\ne,8\n'
    read = read_ids(io.BytesIO(text.encode()), column="id")
    assert (read.ids.tolist(), read.lines.tolist()) == ([7, 8], [3, 7])
    assert [one.line for one in read.bad] == [5, 6]
    with pytest.raises(BadArgument, match="does not name one column 'key'"):
        read_ids(io.BytesIO(text.encode()), column="key")
    for text, what in (
        ('id\n7\n"8\n9\n', "line 4 is not CSV: unexpected end of data"),
        ('id\n7\n"8"x\n9\n', "line 3 is not CSV: ',' expected after '\"'"),
    ):
        with pytest.raises(BadArgument, match=what):
            read_ids(io.BytesIO(text.encode()), column="id")
    long = read_ids(io.BytesIO(b"id,text\n7," + b"x" * 300_000), column="id")
    assert (long.ids.tolist(), csv.field_size_limit()) == ([7], 131_072)
    with pytest.raises(BadArgument, match="can't separate"):
        read_ids(io.BytesIO(text.encode()), column="id", delimiter=",,")


@pytest.mark.parametrize("layout", [DEFAULT, DISCORD])
def test_what_a_few_ids_tell(layout: Layout) -> None:
    first, second = id_at(-5000, 5, 7, layout), id_at(-5000, 5, 8, layout)
    late, ahead = id_at(-1000, 5, 0, layout), id_at(61_000, 9, 0, layout)
    told = stats.of([late, first, second, second, ahead], layout, now=NOW)
    assert (told.count, told.old, told.duplicates, told.ahead, told.most_ahead_ms) == (5, 0, 1, 1, 61_000)
    assert (told.first, told.last) == (NOW - timedelta(seconds=5), NOW + timedelta(seconds=61))
    assert told.out_of_order == pytest.approx(3 / 10)
    assert told.per_second == pytest.approx(4 / 4)
    shards = told.shards
    assert (shards.shard.tolist(), shards.count.tolist()) == ([5, 9], [4, 1])
    assert (shards.gap_ms.tolist(), shards.most_in_ms.tolist()) == ([4000, 0], [3, 1])
    assert shards.run.tolist() == [2, 1]
    assert shards.gap_start_ms[0] == int((NOW - timedelta(seconds=5)).timestamp() * 1000)
    (future,) = told.anomalies
    assert (future.kind, future.shard, future.value) == (stats.Kind.FUTURE, 9, 61.0)


def test_old_ids_are_counted_apart_and_others_refused() -> None:
    told = stats.of([1, 17, id_at(0)], now=NOW, old_ids_below=1000)
    assert (told.count, told.old) == (1, 2)
    with pytest.raises(BadArgument, match=r"at index \[1\]: ID -1 is negative"):
        stats.of([id_at(0), -1])
    with pytest.raises(BadArgument, match="must be integers"):
        stats.of([1.5])
    with pytest.raises(BadArgument, match="no time zone"):
        stats.of([1], now=datetime(2026, 1, 1))


def test_no_ids_tell_nothing() -> None:
    told = stats.of([], now=NOW)
    assert (told.count, told.first, told.per_second, told.anomalies) == (0, None, 0.0, [])


def test_counts_are_those_of_numpy_in_any_order() -> None:
    week = Week(seed=1, shards=8, rows=20_000)
    ids = week.ids()
    told, shuffled = (stats.of(one, now=week.end) for one in (ids, week.chance.permutation(ids)))
    assert told.shards.count.tolist() == np.bincount(week.shard).tolist()
    assert told.series.counts.sum() == ids.size
    assert (told.tells_clocks, shuffled.tells_clocks) == (True, False)
    assert shuffled.anomalies == []
    assert shuffled.out_of_order == pytest.approx(0.5, abs=0.02)
    assert (told.series.counts == shuffled.series.counts).all()


def test_sorted_ids_say_nothing_of_clocks() -> None:
    week = Week(seed=1, shards=8, rows=20_000)
    week.clock_ms[week.shard == 3] += 30_000
    ids = week.ids()
    assert stats.of(ids, now=week.end).tells_clocks
    for one, is_sorted in ((np.sort(ids), True), (np.sort(ids)[::-1], False)):
        told = stats.of(one, now=week.end)
        assert (told.is_sorted, told.tells_clocks, told.anomalies) == (is_sorted, False, [])
    text = "\n".join(map(str, np.sort(ids)))
    assert "Nothing is said of clocks: the IDs are sorted" in command(stdin=text).stdout
    assert json.loads(command("--json", stdin=text).stdout)["sorted"] is True


def command(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return command_here("id", "stats", *words, stdin=stdin)


def test_the_command() -> None:
    ids = Week(seed=2, shards=4, rows=2000).ids()
    text = "\n".join(map(str, ids))
    ran = command(stdin=text)
    assert ran.stderr == ""
    assert f"{len(ids):,}" in ran.stdout
    assert "Nothing unusual." in ran.stdout
    told = json.loads(command("--json", "--top", "2", stdin=text).stdout)
    assert (told["ids"], told["shard_count"], len(told["shards"]), told["anomalies"]) == (len(ids), 4, 2, [])
    assert told["first"] > MONDAY.isoformat()
    many = "\n".join(map(str, Week(seed=2, shards=12, rows=2000).ids()))
    assert len(json.loads(command("--json", stdin=many).stdout)["shards"]) == 12
    assert command(stdin=many).stdout.count("2026-03-2") >= 10


def test_the_command_names_what_is_wrong() -> None:
    text = "7\nx\n-1\n"
    ran = command(stdin=text)
    assert (ran.returncode, ran.stdout) == (2, "")
    message = " ".join(ran.stderr.split())
    assert "line 2: 'x' is not the text form of an ID" in message
    assert "line 3: ID -1 is negative" in message
    assert "--skip-bad" in message
    skipped = command("--skip-bad", "--json", stdin=text)
    assert (skipped.returncode, json.loads(skipped.stdout)["bad"]) == (0, 2)
    assert skipped.stderr.count("left out") == 2
    assert command("--query", "select 1").returncode == 2
    for words in (["ids.txt"], ["-"], ["--column", "id"], ["--delimiter", ";"]):
        ran = command("--url", "postgresql://127.0.0.1:1/x", "--query", "select 1", *words)
        assert (ran.returncode, ran.stdout) == (2, "")
        name = words[0] if words[0].startswith("--") else "FILE"
        assert f"--query does not go with {name}" in ran.stderr
    nobody = command("--url", "postgresql://127.0.0.1:1/x", "--query", "select 1")
    assert nobody.returncode != 0
    assert "the database can't be reached" in " ".join(nobody.stderr.split())
    assert "--delimiter goes with --column" in command("--delimiter", ";").stderr
    assert command("/nonexistent/ids").returncode == 1


def test_no_ids_say_so_and_nothing_else() -> None:
    for text in ("", "\n \n", "\ufeff"):
        ran = command(stdin=text)
        assert (ran.returncode, ran.stderr) == (0, "There are no IDs.\n")
        assert "unusual" not in ran.stdout
        assert json.loads(command("--json", stdin=text).stdout)["ids"] == 0


def test_duplicates_are_not_passed_over() -> None:
    one = str(id_at(-1000))
    assert "Nothing unusual." in command(stdin=one).stdout
    assert "rate" not in command(stdin=one).stdout
    ran = command(stdin=f"{one}\n" * 1000)
    assert "999 had come before" in ran.stdout
    assert "Nothing else is unusual." in ran.stdout


def test_ids_of_another_layout_or_of_none_are_doubted() -> None:
    born = datetime.now(UTC) - timedelta(minutes=1)
    twitter = Layout.preset("twitter")
    for ids, words in (
        (range(1, 1001), "all IDs are of the first hour of the layout: did shards issue them"),
        ([twitter.encode(at=born, shard=3, sequence=one) for one in range(9)], "9 of 9 IDs are ahead of now"),
        ([DEFAULT.encode(at=born, shard=3, sequence=one) for one in range(9)], ""),
    ):
        ran = command(stdin="\n".join(map(str, ids)))
        assert ran.returncode == 0
        assert ran.stderr.startswith(f"Warning: {words}") if words else not ran.stderr
    own = "\n".join(str(twitter.encode(at=born, shard=3, sequence=one)) for one in range(9))
    assert not command("--layout", "twitter", stdin=own).stderr


def test_a_length_of_time_is_said_in_a_unit_of_its_size() -> None:
    told = [span(seconds) for seconds in (0, 61, 7199, 7200, 172_799, 172_800, 34_559_978.8, 4e8)]
    assert told == ["0.0 s", "61.0 s", "7,199.0 s", "2.0 h", "48.0 h", "2.0 days", "400.0 days", "12.7 years"]
    assert span(1.25, 3) == "1.250 s"
    future = str(DEFAULT.encode(at=datetime.now(UTC) + timedelta(days=400, hours=1), shard=1))
    ran = command(stdin=future)
    assert "its last ID is 400.0 days ahead of now" in ran.stdout
    assert "1, by 400.0 days at most" in ran.stdout


def test_what_strangers_give(tmp_path: Path) -> None:
    (tmp_path / "photos.csv").write_text("id,name\n7,x\n")
    for words, stdin, code, said in (
        ([""], "", 1, "Is a directory"),
        ([str(tmp_path)], "", 1, "Is a directory"),
        ([str(tmp_path / "photos.csv")], "", 2, "If the file is CSV: --column NAME."),
        ([str(tmp_path / "photos.csv"), "--column", "id", "--delimiter", ""], "", 2, "can't separate"),
        ([], "\x00\x01\x02\n" * 9, 2, "and 4 more"),
        ([], "1_000\n1,000\n", 2, "line 2: '1,000' is not the text form of an ID"),
        (["--column", "id"], "", 2, "does not name one column 'id'"),
    ):
        ran = command(*words, stdin=stdin)
        assert (ran.returncode, ran.stdout) == (code, ""), words
        assert said in " ".join(ran.stderr.split()), words
    signs = [id_at(-one) for one in range(9)]
    assert json.loads(command("--json", stdin="\r\n".join(f"+{one}" for one in signs)).stdout)["ids"] == 9


def test_figures_are_whole_on_a_narrow_terminal() -> None:
    ran = process("id", "stats", stdin="\n".join(map(str, Week(seed=2, shards=4).ids())), COLUMNS="40")
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [len(line) for line in lines if line and line[0] in "0123"] == [9] * 4
    assert "…" not in ran.stdout.split("row")[-1]


def test_a_pipe_and_a_signal_end_it_without_a_traceback(tmp_path: Path) -> None:
    def started(*words: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        words = (sys.executable, "-c", COMMAND, "id", "stats", *words)
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment())

    os.mkfifo(tmp_path / "ids")
    with started(str(tmp_path / "ids"), "--json") as reading:
        (tmp_path / "ids").write_text(str(id_at(-1000)))
        assert json.loads(reading.communicate(timeout=60)[0])["ids"] == 1
    with started("--json") as ending:
        assert ending.stdin
        assert ending.stdout
        assert ending.stderr
        ending.stdout.close()
        ending.stdin.write(b"\n".join(b"%d" % one for one in Week(seed=1, shards=64, rows=5000).ids()))
        ending.stdin.close()
        assert b"Traceback" not in ending.stderr.read()
    with started(str(tmp_path / "ids")) as waiting, (tmp_path / "ids").open("w"):
        # It has opened the file, and reads.
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
        assert (waiting.returncode, out) == (130, b"")
        assert b"Traceback" not in err
    closed = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", COMMAND, "id", "stats"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(),
    )
    assert (closed.returncode, closed.stdout) == (1, "")
    assert closed.stderr.startswith("Error: stdin is closed")


def test_without_numpy_the_command_says_what_to_install() -> None:
    program = f"import sys; sys.modules['numpy'] = None\n{COMMAND}"
    ran = subprocess.run(
        [sys.executable, "-c", program, "id", "stats"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "needs numpy" in ran.stderr
    assert "pip install 'shardids[ops]'" in ran.stderr
