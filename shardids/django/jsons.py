"""IDs as strings in JSON, so that no digit is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder

_EXACT: Final = (1 << 53) - 1
"""The largest integer that JavaScript reads from JSON as it was written."""


class ShardIdJSONEncoder(DjangoJSONEncoder):
    """Writes integers beyond ±(2^53 - 1), as IDs are, as strings of digits; JavaScript would round them::

        JsonResponse({"id": question.pk}, encoder=ShardIdJSONEncoder)

    Keys of objects are strings in JSON anyway.
    """

    def encode(self, o: Any) -> str:
        """Returns the JSON text."""
        return super().encode(_readable(o))

    def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
        """Returns the JSON text in pieces."""
        return super().iterencode(_readable(o), _one_shot)

    def default(self, o: Any) -> Any:
        """Returns what JSON can hold in place of an object."""
        return _readable(super().default(o))


def _readable(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return str(int(value))
    if isinstance(value, Mapping):
        return {key: _readable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(one) for one in value]
    return value
