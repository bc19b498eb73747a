"""What a console that ends says of the action that was running: of each end that it can have."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

import pytest

from shardids import mover
from shardids.errors import ClusterConflict
from shardids.watch.console import acting

NOWHERE = "postgresql://127.0.0.1:1/nowhere"


class Work:
    """Work that waits until the console ends, tells of a step, and has this end."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end
        self.has_begun = Event()
        self.go_on = Event()

    def __call__(self, _catalog: object, on_event: mover.OnEvent) -> list[str]:
        self.has_begun.set()
        assert self.go_on.wait(60)
        self._end()
        on_event(mover.StepBegun(shard=1, step="copy"))
        return []


def fail() -> None:
    raise ClusterConflict("the shard has gone", hint="Look for it.")


@pytest.mark.parametrize(
    ("end", "resume", "said"),
    [
        (
            lambda: None,
            "shardids rebalance --by size --resume",
            "interrupted: Work. To see the remaining steps: shardids shard move --list;"
            " to resume: shardids rebalance --by size --resume",
        ),
        (lambda: None, None, "interrupted: Work. To see the remaining steps: shardids doctor"),
        (
            fail,
            "shardids shard move --resume",
            "failed: Work: the shard has gone. Look for it. To see the remaining steps: shardids shard move"
            " --list; to resume: shardids shard move --resume",
        ),
    ],
)
def test_the_end_of_the_console_is_told(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], object], resume: str | None, said: str
) -> None:
    work = Work(end)
    plan = acting.Plan(title="Work", lines=["Work"], work=work, resume=resume)
    monkeypatch.setitem(acting._PLANNERS, "work", lambda _catalog, _given: plan)
    actions = acting.Actions(NOWHERE, lambda _job: None)
    assert actions.stop() is None
    actions.start(actions.plan("work", {})["confirm"])
    assert work.has_begun.wait(60)
    joined = actions._thread.join if actions._thread else None
    assert joined is not None

    def join(timeout: float) -> None:
        # The console is ending by now.
        work.go_on.set()
        joined(timeout)

    monkeypatch.setattr(actions._thread, "join", join)
    assert actions.stop() == said
    assert actions.stop() is None
