"""IDs of the past: for rows whose keys are kept beside them, by the times at which they were made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, text

from shardids.catalog.old_ids import lowest_new_id
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument
from shardids.ids.layout import Layout
from shardids.pg.queries import prepare
from shardids.pg.sqlfiles import read_sql

__all__ = ["fill_past_ids", "room_for_past_ids"]


def room_for_past_ids(catalog: Catalog) -> tuple[datetime, datetime]:
    """Return the earliest time for which rows can have IDs of the past, and the time that they must precede.

    It begins with the layout's epoch, or above the IDs that are old, and ends a day before the cluster was
    made: its shards have issued no ID until then.

    Raises:
        BadArgument: the time does not exist.
    """
    with catalog.engine.connect() as connection:
        row: Any = connection.execute(text("select * from shardids_catalog.cluster")).one()
    bits = {name: getattr(row, name) for name in ("time_bits", "shard_bits", "sequence_bits")}
    layout = Layout(epoch_ms=row.epoch_ms, **bits)
    end = layout.decode(lowest_new_id(layout, row.created_at)).time
    first = layout.first_time
    if row.old_ids_below is not None:
        first = layout.time_at(layout.decode(row.old_ids_below - 1).ms + 1)
    if first >= end:
        raise BadArgument(
            f"no room for IDs of the past: it would begin at {first:%Y-%m-%d %H:%M:%S} and end at"
            f" {end:%Y-%m-%d %H:%M:%S} UTC",
            hint="The limit of old IDs is too high, or the layout's epoch too late.",
        )
    return first, end


def fill_past_ids(
    catalog: Catalog,
    node: Connection,
    shard: int,
    *,
    table: str,
    id_column: str = "id",
    time_column: str = "created_at",
    order_column: str,
) -> int:
    """Give the rows of a shard's table that have no ID one of the time at which they were made.

    IDs are distinct and in the order of the times; those of one time are in the order of ``order_column``, a
    unique one. It is one statement in the transaction of ``node``, a connection to the shard's owner, and
    holds up writers of the table. Times without a zone are UTC. Calls are idempotent.

    Returns:
        how many rows got one.

    Raises:
        BadArgument: a row has no time, or one at which the shard may have issued IDs or that the layout does
            not have; or some rows have IDs of the past already.
        UnknownShard: the shard is not on that node.
    """
    first, end = room_for_past_ids(catalog)
    prepare(
        node,
        shard=shard,
        table_name=table,
        id_column=id_column,
        time_column=time_column,
        order_column=order_column,
        first_time=first.astimezone(UTC).isoformat(),
        end_time=end.astimezone(UTC).isoformat(),
    )
    node.execute(text("set local statement_timeout = 0"))
    node.execution_options(no_parameters=True).exec_driver_sql(read_sql("adopt/past_ids.v1"))
    return int(node.scalar(text("select current_setting('shardids.filled')")) or 0)
