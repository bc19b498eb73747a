"""The largest scenarios of the generator's model: every order in which their steps can run."""

from __future__ import annotations

import pytest

from tests.unit.generator_model import Rules
from tests.unit.test_generator_model import LARGE_SCENARIOS, Program, require_promises


@pytest.mark.parametrize(("programs", "rules", "least_states"), LARGE_SCENARIOS)
def test_the_generator_keeps_its_promises_in_every_order(
    programs: tuple[Program, ...], rules: Rules, least_states: int
) -> None:
    require_promises(programs, rules, least_states)
