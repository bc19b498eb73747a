"""Requirements of a way back at the source: a plan names them, a switch that keeps one refuses by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.plan.document import Kind, TablePlan
from shardids.pg.definitions import Definition
from shardids.replication.subscriptions import Refusal, unable_to_subscribe

_IN_THE_WAY: Final = text("""
    with part (name, oid) as (
      select name, p.relid from unnest(cast(:names as text[])) name, pg_partition_tree(to_regclass(name)) p
      union
      select name, to_regclass(name)::oid from unnest(cast(:names as text[])) name)
    select p.oid::regclass::text as name, quote_ident(t.tgname) as trigger
    from part p
    join pg_trigger t on t.tgrelid = p.oid and not t.tgisinternal and t.tgenabled in ('A', 'R')
                         and t.tgtype & 1 = 1
    union
    select p.oid::regclass::text, null
    from part p join pg_class c on c.oid = p.oid where c.relforcerowsecurity
    order by 1, 2""")


def way_back_at_source(
    source: Connection, tables: Sequence[TablePlan], there: Mapping[str, Definition], followed: int
) -> Iterator[Refusal]:
    """Require free workers at the source, rights of the role, and tables that take changes as they are.

    ``followed``: how many nodes the source is to follow.
    """
    yield from unable_to_subscribe(source, "the source", followed)
    names = [table.name for table in tables if table.kind is not Kind.LOOSE and table.name in there]
    for row in source.execute(_IN_THE_WAY, {"names": names}):
        if row.trigger is not None:
            yield Refusal(
                reason=f"trigger {row.trigger} of {row.name} would fire for rows from the shards",
                remedy=f"alter table {row.name} enable trigger {row.trigger}: for clients only",
            )
        else:
            yield Refusal(
                reason=f"{row.name} has row-level security for its owner too, as whom changes are applied",
                remedy=f"alter table {row.name} no force row level security",
            )
