"""Tables, counts and progress as a terminal shows them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from rich.console import Console

from shardids import mover
from shardids.cli import printing, rebalance
from shardids.cli.printing import print_json, print_rows
from shardids.cli.shards import shown_moves
from shardids.pg.notation import counted

URL = "postgresql://postgres@127.0.0.1:41997/postgres?passfile=/home/ann/trial/.shardids/a/pgpass"
ROW = {"node": "a", "size_bytes": 147_456, "since": datetime(2026, 11, 29, 0, 13, 4, tzinfo=UTC), "url": URL}


@contextmanager
def terminal(patch: pytest.MonkeyPatch, stream: printing.Stream) -> Iterator[io.StringIO]:
    """Catch what a stream shows on a terminal of 60 columns."""
    shown = io.StringIO()
    patch.setitem(vars(stream), "console", Console(file=shown, width=60, soft_wrap=True, force_terminal=True))
    yield shown


def test_addresses_times_and_sizes_stay_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(monkeypatch, printing.out) as shown:
        print_rows([ROW, ROW | {"node": "b", "since": None}])
    heading, first, second = shown.getvalue().splitlines()
    assert heading.split("\x1b[0m")[0].endswith("node")
    assert "size_bytes" not in heading
    assert f"a     147.5 kB  2026-11-29 00:13  {URL}" in first
    assert URL in second
    print_json([ROW])
    assert json.loads(capsys.readouterr().out) == [ROW | {"since": "2026-11-29T00:13:04+00:00"}]


def test_a_text_wraps_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, printing.out) as shown:
        print_rows([{"node": "a", "reason": "its clock is behind the clocks of others " * 3}])
    assert all(len(line) <= 60 for line in shown.getvalue().splitlines()[1:])


def test_a_move_shows_which_of_its_steps_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, printing.err) as shown, shown_moves() as show:
        show(mover.StepBegun(shard=4, step="copy", number=4, total=11))
        show(
            mover.Copying(shard=4, bytes_done=0, bytes_total=0, rows_done=0, rows_total=0, seconds_left=None)
        )
    assert "step 4 of 11" in shown.getvalue()


def test_amounts_have_their_units() -> None:
    assert rebalance._amount(1_458_176, mover.By.SIZE) == "1.5 MB"
    assert rebalance._amount(1_458_176, mover.By.ROWS) == "1,458,176 rows"
    assert [counted(count, "row") for count in (0, 1, 1_064)] == ["0 rows", "1 row", "1,064 rows"]
