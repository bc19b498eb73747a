"""Which cases of a test are usual, for ``make test``, and which ones long together, for ``make test-long``.

A case is the value of an argument, or the tuple of the values of several; a tuple that is one value comes as
``pytest.param(value)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases of a parametrized test: the first and each ``every``-th after it stay usual."""
    return [case if number % every == 0 else long(case) for number, case in enumerate(cases)]


def long(case: Any) -> Any:
    """A case that takes long, by itself or with others like it."""
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
