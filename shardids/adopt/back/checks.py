"""Checks of the requirements of the way back. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from sqlalchemy import Connection, text

from shardids.adopt.back.way_back import logs_too_little
from shardids.adopt.plan.document import Kind, TablePlan
from shardids.adopt.plan.obstacles import FULL_NEEDS_ALL, ROUTE, identity_of
from shardids.adopt.plan.returning import way_back_at_source
from shardids.adopt.run.following import try_subscribing
from shardids.adopt.run.numbers import sequences_are_fit, sequences_that_stay
from shardids.adopt.run.requirements import refuse
from shardids.adopt.run.sides import Sides, Taker
from shardids.errors import AdoptionRefused, ShardidsError
from shardids.pg.connections import server_major
from shardids.pg.definitions import Column, Definition, read_definitions
from shardids.replication.subscriptions import Refusal, unable_to_publish

_INTEGERS = ("smallint", "integer")
_SLOTS = 2
"""How many slots a node has for the way back while writes stop; afterwards one."""


def check_way_back(sides: Sides) -> list[str]:
    """Require that all that is written to the shards can go back to the source.

    Returns its later obstacles, constraints of the source that the shards do not keep; and which of its
    sequences stay as they are.

    Raises:
        AdoptionRefused: something can't go back; the message has every reason.
    """
    there = sides.definitions()
    refusals: list[Refusal] = []
    notes: list[str] = []
    with sides.source.autocommit() as source:
        refusals += way_back_at_source(source, sides.plan.tables, there, len(sides.takers))
        refusals += sequences_are_fit(source, sides)
        for taker in sides.takers:
            refusals += _node_is_fit(taker, sides, there)
            refusals += _source_reaches(taker, sides)
        notes += _may_stop(source, sides, there)
        notes += sequences_that_stay(source, sides)
    try:
        refuse(sides.plan, list(dict.fromkeys(refusals)))
    except AdoptionRefused as error:
        raise AdoptionRefused(
            error.message.replace("can't be adopted", "can't take back the writes to the shards", 1),
            hint=error.hint,
        ) from None
    return notes


def _node_is_fit(taker: Taker, sides: Sides, there: Mapping[str, Definition]) -> Iterator[Refusal]:
    """Require a node that can send changes, and tables there whose rows fit into those of the source."""
    node = f'node "{taker.side.name}"'
    with taker.side.engine.connect() as connection:
        yield from unable_to_publish(connection, node, _SLOTS)
        version = server_major(connection)
        connection.rollback()
        names = {
            table.name: [sides.in_shard(there[table.name], shard) for shard in taker.shards]
            for table in sides.split
        } | {table.name: [table.name] for table in sides.reference}
        found = read_definitions(connection, chain.from_iterable(names.values()))
    is_first = taker is sides.takers[0]
    tables = (*sides.split, *sides.reference)
    for table, here in [(one, found[name]) for one in tables for name in names[one.name]]:
        yield from _goes_back(table, there[table.name], here)
        if is_first or table.kind is not Kind.REFERENCE:
            yield from _takes_writes(table, here, version)
        if table.kind is not Kind.REFERENCE:
            yield from _is_found(table, there[table.name], here, version)
        elif logs_too_little(there[table.name], here):
            yield Refusal(
                reason=f"{node} logs less of a changed row of {table.name} than the source finds it by",
                remedy=f"On the nodes: alter table {table.name} replica identity full",
            )


def _takes_writes(table: TablePlan, here: Definition, version: int) -> Iterator[Refusal]:
    """Require a table that takes updates and deletes once it is published.

    PostgreSQL refuses them if it logs whole rows, and some columns are not published.
    """
    if here.identity is not None:
        return
    if table.kind is Kind.DERIVED:
        why = "of a derived table not all columns are sent"
    elif version >= FULL_NEEDS_ALL and len(here.stored) < len(here.columns):
        why = "its generated column is not sent"
    else:
        return
    name, where, who = here.table_sql, "In the shards", f"the shards' table {here.table_sql}"
    if table.kind is Kind.REFERENCE:
        name, where, who = table.name, "On the nodes", table.name
    yield Refusal(
        reason=f"{who} logs whole rows, and {why}: its updates and deletes would fail",
        remedy=f"{where}: alter table {name} replica identity"
        f" {'default' if here.primary_key else 'using index …'}",
    )


def _goes_back(table: TablePlan, there: Definition, here: Definition) -> Iterator[Refusal]:
    """Require that the source takes every value that the shards take."""
    for column in here.stored:
        name, own = f"{table.name}.{column.name}", there.columns.get(column.name)
        if column.name == ROUTE and table.kind is Kind.DERIVED:
            # It is not sent.
            continue
        if own is None:
            yield Refusal(
                reason=f"{name} is in the shards only: its values can't go back",
                remedy="Drop it in the shards; or abort, add it at the source, and begin again.",
            )
            continue
        yield from _takes_back(table, column, own)


def _takes_back(table: TablePlan, here: Column, there: Column) -> Iterator[Refusal]:
    name = f"{table.name}.{there.name}"
    again = "shardids adopt abort; at the source:"
    if there.type in _INTEGERS and here.type != there.type:
        yield Refusal(
            reason=f"{name} is {there.type} at the source: new IDs don't fit",
            remedy=f'{again} alter table {table.name} alter column "{there.name}" type bigint;'
            " then shardids adopt run",
        )
    elif there.labels is not None and not set(here.labels or ()) <= set(there.labels):
        yield Refusal(
            reason=f"{name} has further values in the shards",
            remedy="alter type … add value, at the source",
        )
    elif there.labels is None and here.type != there.type:
        yield Refusal(
            reason=f"{name} is {here.type} in the shards, and {there.type} at the source",
            remedy=f'{again} alter table {table.name} alter column "{there.name}" type {here.type};'
            " then shardids adopt run",
        )
    if there.not_null and not here.not_null:
        yield Refusal(
            reason=f"{name} may be NULL in the shards, and not at the source",
            remedy="Set it NOT NULL in the shards; or abort, and drop NOT NULL at the source.",
        )


def _is_found(table: TablePlan, there: Definition, here: Definition, version: int) -> Iterator[Refusal]:
    """Require that the source finds the row of every change."""
    if logs_too_little(there, here):
        why = f"the source finds rows of {there.name} by {', '.join(sorted(identity_of(there)))}"
        if set(here.identity or ()) != set(here.primary_key):
            yield Refusal(
                reason=f"{why}, and the shards' tables log another index",
                remedy=f"In the shards: alter table {here.table} replica identity default",
            )
        elif version >= FULL_NEEDS_ALL and len(here.stored) < len(here.columns):
            yield Refusal(
                reason=f"{why}, which the shards don't log; rows with a generated column they cannot log",
                remedy="In the shards: a unique index on these columns, and replica identity using index …",
            )
        elif table.kind is Kind.DERIVED:
            # A table of which some columns are published can't log whole rows.
            yield Refusal(
                reason=f"{why}, which the shards don't log: of a derived table they can't log all columns",
                remedy=f"At the source: alter table {there.name} replica identity default",
            )


def _source_reaches(taker: Taker, sides: Sides) -> Iterator[Refusal]:
    """Require that the source can connect to a node: it tries, and rolls back."""
    try:
        try_subscribing(sides.source, taker.side)
    except ShardidsError as error:
        yield Refusal(
            reason=f'the source can\'t reach node "{taker.side.name}": {error.message}',
            remedy="The node's URL in the catalog must be good at the source too, and pg_hba.conf must let"
            " the role in.",
        )


_UNIQUES = text("""
    select name, i.indexrelid::regclass::text as index, i.indisexclusion as is_exclusion,
           i.indpred is not null or i.indexprs is not null as is_special,
           array(select a.attname::text from pg_attribute a
                 where a.attrelid = i.indrelid
                   and a.attnum = any ((i.indkey::int2[])[0:i.indnkeyatts - 1])) as columns
    from unnest(cast(:names as text[])) name
    join pg_index i on i.indrelid = to_regclass(name)
    where i.indisunique or i.indisexclusion order by 1, 2""")
_OTHERS = text("""
    select name, 'constraint ' || quote_ident(k.conname) as what
    from unnest(cast(:names as text[])) name
    join pg_constraint k on k.conrelid = to_regclass(name) and k.contype = 'c'
    union all
    select name, 'its partitions, none of which is for all other rows,'
    from unnest(cast(:names as text[])) name
    join pg_partitioned_table p on p.partrelid = to_regclass(name)
    where p.partstrat <> 'h' and p.partdefid = 0
    order by 1, 2""")


def _may_stop(source: Connection, sides: Sides, there: Mapping[str, Definition]) -> Iterator[str]:
    """Yield requirements of the source on rows that the shards, all together, may not have."""
    taker = sides.takers[0]
    for table in (*sides.split, *sides.reference):
        is_split = table.kind is not Kind.REFERENCE
        name = sides.in_shard(there[table.name], taker.shards[0]) if is_split else table.name
        with taker.side.autocommit() as node:
            kept = [
                set(row.columns)
                for row in node.execute(_UNIQUES, {"names": [name]})
                if not (row.is_special or row.is_exclusion)
            ]
        for row in source.execute(_UNIQUES, {"names": [table.name]}):
            if (
                row.is_special
                or row.is_exclusion
                or not _is_kept(table, row.columns, kept, is_split=is_split)
            ):
                yield (
                    f"the shards don't keep {row.index} of {table.name} ({', '.join(row.columns)}) unique"
                    " among them: two rows that clash stop the way back"
                )
    for row in source.execute(_OTHERS, {"names": sides.names}):
        yield f"table {row.name} has {row.what} at the source: a row that breaks it stops the way back"


def _is_kept(table: TablePlan, columns: Sequence[str], kept: list[set[str]], *, is_split: bool) -> bool:
    """Return whether no two rows of the cluster can be the same in these columns."""
    unique = any(one <= set(columns) for one in kept)
    # Rows with one key are in one shard; an ID is of one row.
    return unique and (not is_split or table.key in columns or table.id in columns)
