"""The picture of an ID's bits."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from shardids.ids import DecodedId, Layout
from shardids.ids.text import to_text, to_unsigned

STYLES = {"unused": "dim", "time": "cyan", "shard": "magenta", "sequence": "yellow"}


def bit_picture(decoded: DecodedId, layout: Layout, where: str = "") -> Group:
    """Returns the ID, its 64 bits in the colours of the fields, and what each field says.

    ``where`` is printed beside the shard: the node that owns it now.
    """
    widths = {
        "unused": 64 - layout.id_bits,
        "time": layout.time_bits,
        "shard": layout.shard_bits,
        "sequence": layout.sequence_bits,
    }
    bits = f"{to_unsigned(decoded.id):064b}"
    drawn, start = Text("  "), 0
    for field, width in widths.items():
        drawn.append(bits[start : start + width], STYLES[field])
        drawn.append(" " if width else "")
        start += width
    time = f"{decoded.time:%Y-%m-%d %H:%M:%S}.{decoded.time.microsecond // 1000:03d} UTC"
    head = Text.assemble((str(decoded.id), "bold"), ("   " + to_text(decoded.id), "dim"))
    facts = (("time", decoded.ms, time), ("shard", decoded.shard, where), ("sequence", decoded.sequence, ""))
    labels = {field: f"{field} ({widths[field]} bits)" for field, _, _ in facts}
    longest = max(map(len, labels.values()))
    digits = max(len(str(value)) for _, value, _ in facts)
    # Lines, not a table: a narrow terminal wraps them, and would cut a table's cells.
    lines = [
        Text.assemble(
            "    ",
            (f"{labels[field]:<{longest}}", STYLES[field]),
            f"    {value:>{digits}}    {said}".rstrip(),
        )
        for field, value, said in facts
    ]
    return Group(head, drawn, *lines)
