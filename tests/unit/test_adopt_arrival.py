"""The watch on copies of tables: any change is progress."""

from __future__ import annotations

import pytest

from shardids.adopt.run import following


def test_fewer_rows_than_before_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(following.time, "monotonic", lambda: now)
    arrival = following.Arrival()
    idle = []
    # A large table is copied: its rows are no longer counted. Then only its slot moves.
    for now, seen in ((1, (900, "a")), (100, (20, "a")), (200, (20, "b")), (300, (20, "b"))):  # noqa: B007 -- the clock reads it
        idle.append(arrival.watch(seen))
    assert idle == [0, 0, 0, 100]
