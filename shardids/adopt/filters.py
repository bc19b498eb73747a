"""The shard of a row as SQL that PostgreSQL takes as a row filter and as a partition key.

Both allow immutable functions of PostgreSQL's own only, so :func:`~shardids.catalog.topology.key_hash` is
written with those: no cast to text, and no ``convert_to``, which are not immutable.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from psycopg import sql

from shardids.errors import BadArgument
from shardids.ids.layout import Layout

_BYTES: Final = {
    "integer": "decode('i:' || textin(int8out({key})), 'escape')",
    "text": r"decode('s:' || replace({key}, '\', '\\'), 'escape')",
    "uuid": r"'\x753a'::bytea || uuid_send({key})",
}
"""The bytes that are hashed, by the family of the key's type; text has to be in UTF-8 on the server."""
_FAMILIES: Final = {
    "smallint": "integer",
    "integer": "integer",
    "bigint": "integer",
    "text": "text",
    "character varying": "text",
    "uuid": "uuid",
}
ROUTE: Final = "shardids_shard"
"""The column with the shard of a row that has no key of its own: on the relay, and where rows arrive."""
KEY_TYPES: Final = tuple(_FAMILIES)
"""The types that a sharding key may have at the source, without their lengths."""


def family_of(type_name: str) -> str:
    """Returns how keys of a type are hashed: ``integer``, ``text`` or ``uuid``.

    Raises:
        BadArgument: keys of this type can't be.
    """
    family = _FAMILIES.get(type_name.partition("(")[0])
    if family is None:
        raise BadArgument(
            f"a key of type {type_name} has no shard", hint=f"It is one of {', '.join(KEY_TYPES)}."
        )
    return family


def hashed_shard(column: str, family: str, shard_count: int, *, of: str = "") -> str:
    """Returns an expression for the shard of a key: what ``shard_for_key`` returns for it.

    ``of``: the alias of the column's table, with a dot.
    """
    key = of + sql.Identifier(column).as_string()
    digest = f"sha256({_BYTES[family].format(key=key)})"
    # The hash is the digest's first eight bytes. Of a power of two the last of them tell.
    is_power = shard_count & (shard_count - 1) == 0
    needed = max(1, ((shard_count - 1).bit_length() + 7) // 8) if is_power else 8
    expression = ""
    for place in range(8 - needed, 8):
        byte = f"get_byte({digest}, {place})"
        expression = f"mod({f'{expression} * 256 + ' if expression else ''}{byte}, {shard_count})"
    return expression


def staged_shard(
    column: str, family: str, shard_count: int, layout: Layout, lowest_new_id: int, *, of: str = ""
) -> str:
    """Returns an expression for the shard of a row, old or new: a key that a shard has issued names it."""
    hashed = hashed_shard(column, family, shard_count, of=of)
    if family != "integer":
        return hashed
    key = of + sql.Identifier(column).as_string()
    mask = (1 << layout.shard_bits) - 1
    issued = f"int4(({key}::bigint >> {layout.sequence_bits}) & {mask})"
    return f"case when {key} < {lowest_new_id} then {hashed} else {issued} end"


def row_filter(shard: str, shards: Iterable[int]) -> str:
    """Returns a condition that rows of these shards meet; ``shard`` is an expression for a row's shard."""
    return f"{shard} in ({', '.join(map(str, shards))})"
