"""For the tests of applications: IDs without a server.

:func:`fake_ids` makes IDs that are the same in every run.
"""

from typing import TYPE_CHECKING

from shardids._lazy import lazy_names

if TYPE_CHECKING:
    from shardids.testing.fakes import FakeIds, fake_ids

__all__ = ["FakeIds", "fake_ids"]

__getattr__, __dir__ = lazy_names(
    __name__, {"FakeIds": "shardids.testing.fakes", "fake_ids": "shardids.testing.fakes"}
)
