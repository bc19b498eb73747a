"""What an ID is: how its bits are divided, what they tell, and how they are written.

Pure computation on the standard library; no database is involved. :mod:`shardids.ids.arrays`, which needs
numpy, does the same for millions of IDs at once.
"""

from shardids.ids.decoded import DecodedId, IdRange
from shardids.ids.layout import PRESETS, Layout
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
    "PRESETS",
    "DecodedId",
    "IdRange",
    "Layout",
    "from_decimal",
    "from_text",
    "parse_id",
    "to_decimal",
    "to_signed",
    "to_text",
    "to_unsigned",
]
