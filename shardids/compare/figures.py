"""Numbers as people read them: three digits that count, thousands apart, a dash for what is missing."""

from __future__ import annotations

import math

MISSING = "\N{EN DASH}"
_SMALLEST = 0.001


def three(value: float | None) -> str:
    """Three digits that count; above 100 all digits before the point. Never 0 for what is more than 0."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    if abs(value) < _SMALLEST:
        return f"<{_SMALLEST}"
    rounded = float(f"{value:.3g}")
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """The same, with k and M for thousands and millions: 412k, 1.20M."""
    if value is None or abs(value) < 10_000:
        return three(value)
    return f"{three(value / 1e6)}M" if abs(value) >= 999_500 else f"{three(value / 1e3)}k"


def duration(seconds: float) -> str:
    """In the unit that suits it: 45 s, 12 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def sentence(words: str) -> str:
    """With a capital at its beginning and a full stop at its end."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}." if words else ""


def listed(words: list[str]) -> str:
    """With commas and "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
