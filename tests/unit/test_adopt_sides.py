"""The sides of an adoption."""

from __future__ import annotations

from typing import Any, cast

import pytest

from shardids.adopt.plan.document import Plan
from shardids.adopt.run.sides import Sides
from shardids.errors import AdoptionFailed


def test_work_on_a_relay_that_the_adoption_has_left_is_refused() -> None:
    """Also without assertions, as ``python -O`` runs it."""
    nothing = cast("Any", None)
    sides = Sides(
        source=nothing,
        reading=nothing,
        takers=(),
        cluster=nothing,
        lowest_new_id=0,
        plan=Plan(source="postgresql://shop", server_version=180000, root="users", shard_count=1, tables=()),
        has_returned=False,
        name="shardids_adopt_1",
    )
    with pytest.raises(AdoptionFailed, match="the adoption of postgresql://shop has nothing on its relay"):
        _ = sides.followers
