"""Notes for the user who interrupts work in steps."""

from __future__ import annotations

import pytest

from shardids.errors import MoveFailed
from shardids.replication.steps import Report, StepBegun, ignore

WAYS = "Go on: again; undo: back"


def report() -> Report:
    found = Report("mover", "shard 4", {}, ignore, ways=WAYS)
    found(StepBegun(step="copy"))
    return found


def interrupt(then: Exception | None = None) -> None:
    with report().watching("begins"):
        try:
            raise KeyboardInterrupt
        finally:
            if then is not None:
                raise then


@pytest.mark.parametrize("then", [None, ValueError("can't change 'autocommit' now")])
def test_an_interrupt_says_how_to_go_on(then: Exception | None) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupt(then)
    assert caught.value.__notes__ == [f'Interrupted at step "copy". {WAYS}']


def test_an_error_that_says_more_is_not_hidden_by_the_interrupt() -> None:
    with pytest.raises(MoveFailed):
        interrupt(MoveFailed("shard 4 takes no writes"))
