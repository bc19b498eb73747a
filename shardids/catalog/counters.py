"""Kinds of numbers for people: when each begins again, and how it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from shardids.errors import BadArgument

COUNTER_TABLES: Final = frozenset(
    {"shardids_counter", "shardids_counter_kind", "shardids_counter_zone", "shardids_counter_change"}
)
"""The tables in a shard's schema that hold its counters."""
QUICK_LANES: Final = 32
"""How many transactions may draw from one counter at once, where numbers may be missing."""
Period = Literal["day", "month", "year", "never"]

_PLACEHOLDER: Final = re.compile(r"\{(tenant|period)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterKind:
    """A kind of numbers, such as those of orders.

    Attributes:
        name: its name, 1 to 100 characters.
        per: when its counters begin again at 1.
        zone: the time zone that decides when that is, for tenants without their own.
        prefix: what stands before the number. ``{tenant}`` and ``{period}`` are replaced, the latter by
            ``2026-11-22``, ``2026-11`` or ``2026``. By default ``{tenant}-{period}-``.
        padding: how many digits a number has, 1 to 18; more are refused. 0: as many as it needs.
        gapless: whether no number is missing. Draws of one counter then wait for each other's COMMIT.
        keep_days: how many days before a tenant's newest period others are kept.

    Raises:
        BadArgument: a value is out of range, the prefix has another placeholder, or the zone is unknown.
    """

    name: str
    per: Period = "never"
    zone: str = "UTC"
    prefix: str | None = None
    padding: int = 4
    gapless: bool = True
    keep_days: int = 400

    def __post_init__(self) -> None:
        what = f'numbers of kind "{self.name}"'
        if not 1 <= len(self.name) <= 100:
            raise BadArgument("the name of a kind of numbers has 1 to 100 characters")
        if self.per not in get_args(Period):
            raise BadArgument(f"{what} begin again per day, month, year or never, not per {self.per!r}")
        if not 0 <= self.padding <= 18:
            raise BadArgument(f"{what} are padded to 0 to 18 digits, not to {self.padding}")
        if not 1 <= self.keep_days <= 100_000:
            raise BadArgument(f"counters of {what} are kept for 1 to 100000 days, not for {self.keep_days}")
        if set("{}") & set(_PLACEHOLDER.sub("", self.prefix or "")):
            raise BadArgument(
                f"{what}: prefix {self.prefix!r} has another placeholder than {{tenant}} and {{period}}"
            )
        if self.per == "never" and "{period}" in (self.prefix or ""):
            raise BadArgument(f"{what} never begin again, so their prefix can't have a {{period}}")
        _check_zone(self.zone, what)

    @property
    def lanes(self) -> int:
        """Returns how many transactions may draw from one of its counters at once."""
        return 1 if self.gapless else QUICK_LANES

    @property
    def arguments(self) -> tuple[str | int | None, ...]:
        """Returns the arguments of ``shardids.define_counter`` and ``number_rows``, from ``kind`` on."""
        return (self.name, self.per, self.zone, self.prefix, self.padding, self.lanes, self.keep_days)


def _check_zone(zone: str, what: str) -> None:
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        # Without data on time zones here, only the server knows: it refuses the definition.
        if available_timezones():
            raise BadArgument(
                f"{what}: no time zone {zone!r}", hint="Name one such as Europe/Berlin."
            ) from None
