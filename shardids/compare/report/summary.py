"""Sums up a comparison: the best at each measure, who issued a key twice, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardids.compare.report.figures import OF_A_TABLE, ONE_OWN, OWN, RANKED, Measure, listed
from shardids.compare.results import Comparison

ROUGH = (
    "A quick run: its figures are rough, and no more than a hint. Leave --quick out for figures to rely on."
)
"""The remark on a quick run."""
RISKS_TITLE = "Issued none twice in this run, but would under"
"""The title over :func:`risks`."""
MISSING_TITLE = "Left out, and why"
"""The title over :func:`left_out`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best at a measure, and where shardids with ``next_id()`` stands.

    Attributes:
        label: the measure, with its unit.
        name: the best scheme; with "and n more" if others share the figure.
        text: its figure.
        own_text: shardids' figure.
        place: its rank: how many schemes are better, plus one.
        of: how many schemes have the measure.
    """

    label: str
    name: str
    text: str
    own_text: str
    place: int
    of: int


def best_of(comparison: Comparison) -> list[Best]:
    """Returns the best scheme at each measure, but for measures that shardids or all others lack."""
    return [best for measure in RANKED if (best := _best(comparison, measure)) is not None]


def _best(comparison: Comparison, measure: Measure) -> Best | None:
    # Figures of a smaller table can't be compared: they are shown, but never as the best.
    rows = max((result.storage.rows for result in comparison.schemes if result.storage), default=0)
    found = [
        (value, result.about.name)
        for result in comparison.schemes
        if (value := measure.value(result)) is not None
        and not (measure in OF_A_TABLE and result.storage and result.storage.rows < rows)
    ]
    own_value = next((value for value, name in found if name == ONE_OWN), None)
    if own_value is None or all(name in OWN for _, name in found):
        return None
    pick = max if measure.most else min
    value, name = pick(found, key=lambda pair: pair[0])
    alike = sum(measure.text(other) == measure.text(value) for other, _ in found) - 1
    # Figures that read alike count as equal: they are not more exact than that.
    better = sum(
        (other > own_value if measure.most else other < own_value)
        and measure.text(other) != measure.text(own_value)
        for other, _ in found
    )
    return Best(
        label=measure.label,
        name=f"{name} and {alike} more" if alike else name,
        text=measure.text(value),
        own_text=measure.text(own_value),
        place=better + 1,
        of=len(found),
    )


def verdict(comparison: Comparison) -> str:
    """Says in a sentence how many of the schemes issued a key twice."""
    counted = [result for result in comparison.schemes if result.duplicates]
    if not counted:
        return "No keys were counted for duplicates in this run."
    keys = sum(case.keys for result in counted for case in result.duplicates.values())
    guilty = sum(result.twice > 0 for result in counted)
    found = f"{len(counted) - guilty} issued none twice, {guilty} did" if guilty else "none was issued twice"
    return f"{keys:,} keys of {len(counted)} schemes were checked for duplicates: {found}."


def repeaters(comparison: Comparison) -> list[tuple[str, str]]:
    """Returns a title, and the schemes that issued keys twice, with the cases and the numbers of keys."""
    return [
        (
            result.about.title,
            listed([f"{name} ({case.twice:,})" for name, case in result.duplicates.items() if case.twice]),
        )
        for result in comparison.schemes
        if result.twice
    ]


def risks(comparison: Comparison) -> list[tuple[str, str]]:
    """Returns a title, and the schemes that issued no key twice in this run, with what would make them."""
    return [
        (result.about.title, result.about.unsafe_under)
        for result in comparison.schemes
        if result.duplicates and not result.twice and result.about.unsafe_under
    ]


def left_out(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """Returns what was not measured, and why: "scheme, scheme" or "scheme, scheme (measure, measure)"."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, reason in comparison.left_out.items():
        names.setdefault(("", reason), []).append(name)
    for result in comparison.schemes:
        measures: dict[str, list[str]] = {}
        for measure, reason in result.left_out.items():
            measures.setdefault(reason, []).append(measure)
        for reason, of in measures.items():
            names.setdefault((f" ({', '.join(of)})", reason), []).append(result.about.name)
    for (suffix, reason), schemes in names.items():
        yield ", ".join(schemes) + suffix, reason
