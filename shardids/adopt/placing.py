"""The shards of the source's rows, as the source can say: by a column, or by joins to the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psycopg import sql

from shardids.adopt.definitions import Definition
from shardids.adopt.plan import Kind, TablePlan
from shardids.adopt.sides import Sides

HOME: Final = "shardids_home"
"""The name of the column with a row's shard."""
NO_SHARD: Final = "0"
"""The shard of all rows of a table that is not split."""


def placed_rows(sides: Sides, plan: TablePlan, there: Mapping[str, Definition]) -> str:
    """Returns the rows of a table at the source, each with its shard, for FROM; NULL: it has no key."""
    name = there[plan.name].name
    if plan.kind is Kind.REFERENCE:
        return f"(select {NO_SHARD} as {HOME}, t.* from {name} t) t"  # noqa: S608 -- quoted
    key_table, joins = plan.name, ""
    of = "t."
    for number, hop in enumerate(plan.path if plan.kind is Kind.DERIVED else ()):
        last, of, key_table = of, f"p{number}.", hop.table
        equal = " and ".join(
            f"{of}{_quoted(theirs)} = {last}{_quoted(own)}"
            for own, theirs in zip(hop.columns, hop.referenced, strict=True)
        )
        joins += f" left join {hop.table} p{number} on {equal}"
    key = there[key_table].columns[plan.key or ""]
    shard = sides.shard_of_key(key, of=of)
    return f"(select {shard} as {HOME}, t.* from {name} t{joins}) t"  # noqa: S608 -- quoted


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()
