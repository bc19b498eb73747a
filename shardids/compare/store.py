"""Writes a comparison as JSON, and reads it back."""

from __future__ import annotations

from typing import Any

from shardids.compare.results import FORMAT, Comparison
from shardids.compare.schemes.scheme import library
from shardids.errors import BadArgument

_MADE_BY = "Make one with: shardids compare --json"


def check_libraries() -> None:
    """Refuses to continue without the library that JSON needs.

    Raises:
        MissingLibrary: pydantic is not installed.
    """
    library("pydantic")


def to_json(comparison: Comparison, *, indent: int | None = 2) -> str:
    """Returns the comparison as JSON, with the names of the dataclasses' attributes.

    Raises:
        MissingLibrary: pydantic is not installed.
    """
    return str(_adapter().dump_json(comparison, indent=indent).decode())


def from_json(text: str) -> Comparison:
    """Returns the comparison that :func:`to_json` wrote.

    Raises:
        BadArgument: the text is not a comparison, or one of another :data:`~shardids.compare.results.FORMAT`.
        MissingLibrary: pydantic is not installed.
    """
    pydantic_core = library("pydantic_core")
    try:
        value = pydantic_core.from_json(text)
    except ValueError as error:
        raise BadArgument(f"this is no JSON: {error}", hint=_MADE_BY) from None
    if not isinstance(value, dict) or not isinstance(value.get("format"), int):
        raise BadArgument("this JSON is no comparison: it names no format", hint=_MADE_BY)
    if value["format"] != FORMAT:
        raise BadArgument(
            f"this comparison has format {value['format']}, but this version of shardids reads {FORMAT}",
            hint="Read it with the version that wrote it, or measure again.",
        )
    try:
        comparison: Comparison = _adapter().validate_json(text)
    except ValueError as error:
        raise BadArgument(f"this comparison can't be read: {error}", hint=_MADE_BY) from None
    return comparison


def _adapter() -> Any:
    return library("pydantic").TypeAdapter(Comparison)
