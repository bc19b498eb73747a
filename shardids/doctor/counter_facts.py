"""What the shards of a node say of their numbers for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql

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
    kinds: Sequence[tuple[int, str]], zones: Sequence[tuple[int, str]], unread: Unread
) -> CounterFacts:
    """Reads them from shards, given with their schemas, that have the tables and let them be read."""

    def rows_of(table: str, columns: str, shards: Sequence[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        def query_of(one: tuple[int, str]) -> str:
            return (
                sql.SQL("select {}::integer as shard, {} from {}")
                .format(sql.Literal(one[0]), sql.SQL(columns), sql.Identifier(one[1], table))
                .as_string()
            )

        for _, found in unread.read(shards, lambda one: (table, one[0]), query_of):
            yield from found

    return CounterFacts(
        kinds=tuple(
            KindOfShard(**row)
            for row in rows_of(KINDS, "kind, per, zone, prefix, padding, lanes, keep_days", kinds)
        ),
        zones=tuple(ZoneOfTenant(**row) for row in rows_of(ZONES, "tenant, zone", zones)),
    )
