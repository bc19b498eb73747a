"""Inventories of sources that no server has, for tests of what is concluded from them."""

from __future__ import annotations

from shardids.adopt.plan.inventory import ForeignKey, Inventory, Key, Server, Table
from shardids.pg.definitions import Column

SERVER = Server(
    version=180000,
    is_standby=False,
    wal_level="logical",
    encoding="UTF8",
    slots=10,
    used_slots=0,
    senders=10,
    used_senders=0,
    large_objects=0,
    prepared_transactions=0,
    is_of_cluster=False,
    has_barrier=False,
    counted_s=None,
)


def column(text: str) -> Column:
    name, _, type_ = text.rstrip("?").partition(":")
    return Column(
        name=name,
        type=type_ or "bigint",
        builtin_type={"": "int8", "text": "text", "uuid": "uuid", "int4": "int4"}.get(type_),
        not_null=not text.endswith("?"),
    )


def inventory(**tables: str) -> Inventory:
    """Of tables with a column ``id`` each, and others: ``a b?>users c:text``; ``?`` is nullable."""
    found, keys = {}, []
    for name, text in tables.items():
        columns = {"id": column("id")}
        for word in text.split():
            own, _, target = word.partition(">")
            columns[column(own).name] = column(own)
            if target:
                keys.append(foreign_key(name, column(own).name, target))
        primary = Key(
            name="k",
            is_primary=True,
            is_exclusion=False,
            is_partial=False,
            has_expression=False,
            columns=("id",),
        )
        found[name] = Table(schema="public", name=name, sql=name, columns=columns, keys=[primary])
    return Inventory(server=SERVER, tables=found, foreign_keys=keys, things=[])


def foreign_key(table: str, columns: str, target: str, referenced: str = "id", **options: bool) -> ForeignKey:
    return ForeignKey(
        name=f"{table}_{columns}",
        table=table,
        columns=tuple(columns.split(",")),
        referenced_table=target,
        referenced=tuple(referenced.split(",")),
        **options,
    )
