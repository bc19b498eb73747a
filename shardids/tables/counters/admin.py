"""Definition of kinds of numbers in all shards, and counters set by hand, each with a row that says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import date
from typing import Any

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog.counters import CounterKind
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog
from shardids.errors import BadArgument
from shardids.pg.queries import AS_IS
from shardids.tables.counters.listing import Change, listed

_DEFINE = text("""
    select shardids.define_counter(
      n, :kind, :per, :zone, cast(:prefix as text), :padding, :lanes, :keep_days)
    from unnest(cast(:shards as integer[])) n""")
_NAMES = ("kind", "per", "zone", "prefix", "padding", "lanes", "keep_days")
_SET = text("""
    select * from shardids.set_number(
      :shard, :tenant, :kind, :number, :reason, :again, cast(:period as date), :skip)""")


def define(catalog: Catalog, kind: CounterKind, *, dry_run: bool = False) -> int:
    """Define a kind of numbers in every shard, or change how they are written; return how many shards.

    Runs a transaction a node, and commits them once all have succeeded; with ``dry_run`` none.

    Raises:
        BadArgument: the kind is defined already and begins again at other times, or is quick and was gapless.
    """
    placement = catalog.placement()
    per_node = placement.by_node()
    values = dict(zip(_NAMES, kind.arguments, strict=True))
    with Nodes(placement.nodes, catalog.url) as nodes, ExitStack() as stack:
        transactions = []
        for name, shards in per_node.items():
            connection = stack.enter_context(nodes[name].connect())
            transactions.append(connection.begin())
            connection.execute(_DEFINE, {**values, "shards": list(shards)})
        for transaction in transactions:
            if not dry_run:
                transaction.commit()
    return sum(map(len, per_node.values()))


def read_kinds(connection: Connection, schema: str) -> list[dict[str, Any]]:
    """Return the kinds of numbers that a shard has, by its schema, for :func:`define_kinds`."""
    has = text("select to_regclass(format('%I.shardids_counter_kind', cast(:schema as text))) is not null")
    if not connection.scalar(has, {"schema": schema}):
        return []
    query = sql.SQL("select {} from {}").format(
        sql.SQL(", ").join(map(sql.Identifier, _NAMES)), sql.Identifier(schema, "shardids_counter_kind")
    )
    rows = connection.exec_driver_sql(query.as_string(), execution_options=AS_IS)
    return [dict(row._mapping) for row in rows]


def define_kinds(connection: Connection, shard: int, kinds: Iterable[Mapping[str, Any]]) -> None:
    """Define kinds of numbers in one shard, as another one has them. Idempotent."""
    for kind in kinds:
        connection.execute(_DEFINE, {**kind, "shards": [shard]})


def set_next(
    catalog: Catalog,
    *,
    tenant: str,
    kind: str,
    number: int,
    reason: str,
    again: bool = False,
    period: date | None = None,
    shard: int | None = None,
    dry_run: bool = False,
) -> Change:
    """Set the next number of a counter; wait until those that are drawing have committed.

    Args:
        again: whether numbers may be issued that were issued before.
        period: a day of the period; by default the present one. One that is not kept any more needs
            ``again``, one further ahead than periods are kept is refused.
        shard: the tenant's shard, if it has no numbers of this kind yet.

    Raises:
        BadArgument: the kind is unknown, numbers would come twice and ``again`` is not set, or the tenant's
            shard is not known.
    """
    values = {"number": number, "again": again, "skip": False}
    return _set(catalog, tenant, kind, reason, period, shard, values, dry_run)


def skip(
    catalog: Catalog,
    *,
    tenant: str,
    kind: str,
    count: int,
    reason: str,
    period: date | None = None,
    shard: int | None = None,
    dry_run: bool = False,
) -> Change:
    """Leave the next so many numbers of a counter out. Otherwise as :func:`set_next`."""
    values = {"number": count, "again": False, "skip": True}
    return _set(catalog, tenant, kind, reason, period, shard, values, dry_run)


def set_zone(
    catalog: Catalog, *, tenant: str, zone: str, shard: int | None = None, dry_run: bool = False
) -> int:
    """Set a tenant's time zone, in its shard; return that shard.

    Raises:
        BadArgument: the server knows no such zone, or the tenant's shard is not known.
    """
    with _shard_of(catalog, tenant, None, shard, dry_run=dry_run) as (connection, found):
        connection.execute(
            text("select shardids.set_counter_zone(:shard, :tenant, :zone)"),
            {"shard": found, "tenant": tenant, "zone": zone},
        )
    return found


def _set(  # noqa: PLR0917 -- what the two above have in common
    catalog: Catalog,
    tenant: str,
    kind: str,
    reason: str,
    period: date | None,
    shard: int | None,
    values: dict[str, Any],
    dry_run: bool,
) -> Change:
    values |= {"tenant": tenant, "kind": kind, "reason": reason, "period": period}
    with _shard_of(catalog, tenant, kind, shard, dry_run=dry_run) as (connection, found):
        connection.execute(_SET, {**values, "shard": found})
        done = connection.execute(
            text("""
                select of_tenant as tenant, of_kind as kind, period, changed_at, changed_by, highest_before,
                       next_number, reason
                from shardids.counter_changes(:shard, :tenant) where of_kind = :kind
                order by changed_at desc limit 1"""),
            {"shard": found, "tenant": tenant, "kind": kind},
        ).one()
    return Change(shard=found, **done._asdict())


@contextmanager
def _shard_of(
    catalog: Catalog, tenant: str, kind: str | None, shard: int | None, *, dry_run: bool
) -> Iterator[tuple[Connection, int]]:
    """Yield a transaction on the node of a tenant's shard, and the shard; ``dry_run`` rolls it back."""
    if shard is None:
        found = sorted({one.shard for one in listed(catalog, tenant=tenant, kind=kind)})
        if len(found) != 1:
            where = f"in shards {', '.join(map(str, found))}" if found else "in no shard yet"
            raise BadArgument(f'tenant "{tenant}" has numbers {where}', hint="Name its shard: --shard N")
        shard = found[0]
    node = catalog.node_of(shard)
    with Nodes({node.name: node}, catalog.url) as nodes, nodes[node.name].connect() as connection:
        transaction = connection.begin()
        yield connection, shard
        if dry_run:
            transaction.rollback()
        else:
            transaction.commit()
