"""What the shards of a node say of their numbers for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import Connection

from shardids.catalog.queries import batches, prepare, rows
from shardids.doctor.unread import Unread

KINDS: Final = "shardids_counter_kind"
ZONES: Final = "shardids_counter_zone"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfShard:
    """How a shard defines a kind of numbers: a row of its ``shardids_counter_kind``."""

    shard: int
    kind: str
    per: str
    zone: str
    prefix: str
    padding: int
    lanes: int
    keep_days: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneOfTenant:
    """The time zone that a tenant has of its own in a shard."""

    shard: int
    tenant: str
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterFacts:
    """The kinds of numbers in the shards of a node, and the zones of tenants."""

    kinds: tuple[KindOfShard, ...] = ()
    zones: tuple[ZoneOfTenant, ...] = ()


def read_counters(
    connection: Connection, kinds: Iterable[tuple[int, str]], zones: Iterable[tuple[int, str]], unread: Unread
) -> CounterFacts:
    """Reads them from shards, given with their schemas, that have the tables and let them be read."""
    found_kinds: list[KindOfShard] = []
    for batch in batches(list(kinds)):
        select = "select {}::integer as shard, kind, per, zone, prefix, padding, lanes, keep_days from {}"
        with connection.begin():
            prepare(connection)
            if some := unread.leave_out(connection, batch, lambda one: (one[1], KINDS, one[0])):
                found_kinds += rows(connection, _of_all(select, KINDS, some), KindOfShard)
    found_zones: list[ZoneOfTenant] = []
    for batch in batches(list(zones)):
        select = "select {}::integer as shard, tenant, zone from {}"
        with connection.begin():
            prepare(connection)
            if some := unread.leave_out(connection, batch, lambda one: (one[1], ZONES, one[0])):
                found_zones += rows(connection, _of_all(select, ZONES, some), ZoneOfTenant)
    return CounterFacts(kinds=tuple(found_kinds), zones=tuple(found_zones))


def _of_all(select: str, table: str, shards: Iterable[tuple[int, str]]) -> str:
    return (
        sql.SQL(" union all ")
        .join(
            sql.SQL(select).format(sql.Literal(shard), sql.Identifier(schema, table))
            for shard, schema in shards
        )
        .as_string()
    )
