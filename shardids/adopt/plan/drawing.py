"""The columns that decide where clients look for a row, and what fills them in the shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shardids.pg.definitions import Column

NEXT_ID: Final = "next_id()"


def drawn_keys(columns: Mapping[str, Column], id_: str | None, root_key: str | None) -> dict[str, str | None]:
    """Return the defaults in the shards of a split table's ID and, of the root, its key.

    Only columns that the source fills are there, by a default of any kind or as an identity. An integer draws
    from ``next_id()``, whatever it drew from. A key of another type has no default: the value decides the
    shard, so it has to be known before the shard is chosen.

    ``id_``, ``root_key``: their names; ``root_key`` of the root only.
    """
    found: dict[str, str | None] = {}
    for name in dict.fromkeys((id_, root_key)):
        column = columns.get(name or "")
        if column is None or not column.is_drawn:
            continue
        if column.family == "integer":
            found[column.name] = NEXT_ID
        elif name == root_key:
            found[column.name] = None
    return found
