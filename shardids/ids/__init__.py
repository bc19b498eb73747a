"""IDs: the division of their bits, the parts that these encode, and the ways to write an ID.

Pure computation on the standard library; no database is involved. :mod:`shardids.ids.arrays`, which needs
numpy, does the same for millions of IDs at once.
"""

from shardids.ids.layout import (
    FOREIGN,
    PRESETS,
    DecodedId,
    ForeignId,
    ForeignLayout,
    IdRange,
    Layout,
    parse_layout,
)
from shardids.ids.text import (
    from_decimal,
    from_text,
    parse_id,
    to_decimal,
    to_signed,
    to_text,
    to_unsigned,
)

__all__ = [
    "FOREIGN",
    "PRESETS",
    "DecodedId",
    "ForeignId",
    "ForeignLayout",
    "IdRange",
    "Layout",
    "from_decimal",
    "from_text",
    "parse_id",
    "parse_layout",
    "to_decimal",
    "to_signed",
    "to_text",
    "to_unsigned",
]
