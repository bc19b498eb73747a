"""Interrupts at moments that no clock finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, text

from shardids.replication.barrier import HeldLock


def interrupt_after(patch: pytest.MonkeyPatch, found: str, *, is_lost: bool) -> None:
    """Interrupts after the first COMMIT under a lock of the catalog that leaves rows which ``found`` selects.

    ``is_lost``: the interrupt takes the connection along, as it does while COMMIT waits for its answer.
    """
    transaction, interrupted = HeldLock.transaction, []

    @contextmanager
    def interrupting(lock: HeldLock) -> Iterator[Connection]:
        with transaction(lock) as connection:
            yield connection
            is_now = not interrupted and connection.scalar(text(f"select exists ({found})"))
        if is_now:
            interrupted.append(lock)
            if is_lost:
                connection.invalidate()
            raise KeyboardInterrupt

    patch.setattr(HeldLock, "transaction", interrupting)
