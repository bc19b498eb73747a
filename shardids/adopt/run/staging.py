"""Where rows arrive on the nodes: tables of the source's names, whose partitions are those of the shards.

The apply worker writes to a table of the source's name and PostgreSQL routes the row, so the shards' tables
are filled in place. Clients can't write to them meanwhile: the shards are fenced, and their tables have the
barriers of a move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.adopt.plan.document import Kind
from shardids.adopt.plan.obstacles import ROUTE
from shardids.adopt.run.sides import Sides, Taker
from shardids.catalog.old_ids import OldIdRule
from shardids.catalog.topology import schema_name
from shardids.errors import AdoptionFailed, StatementFailed
from shardids.pg.definitions import Definition, has_rows
from shardids.pg.locks import holders_of_tables, locked, named
from shardids.pg.queries import AS_IS, quoted
from shardids.replication.barrier import OnWait, with_locks
from shardids.replication.subscriptions import LOCK_FAILURES


def close_shards(taker: Taker, sides: Sides, there: Mapping[str, Definition]) -> None:
    """Let no client write to the shards of a node or to its reference tables. Idempotent.

    Raises:
        AdoptionFailed: a client has written to one of them since they were examined.
    """
    for shard in taker.shards:
        names = [sides.in_shard(there[table.name], shard) for table in sides.split]
        with taker.side.begin() as connection:
            if connection.execute(_STATE, {"shard": shard}).scalar_one() == "fenced":
                continue
            connection.execute(_WAIT)
            # Waits for whoever is writing; from here on nobody else begins.
            connection.execute(text("select shardids.add_barriers(:shard)"), {"shard": shard})
            connection.execute(text("select shardids.fence(:shard)"), {"shard": shard})
            _require_empty(connection, taker, names)
    for table in sides.reference:
        with taker.side.begin() as connection:
            connection.execute(_WAIT)
            if connection.execute(_CLOSE_TABLE, {"name": table.name}).scalar_one():
                _require_empty(connection, taker, [table.name])


def _require_empty(connection: Connection, taker: Taker, names: Iterable[str]) -> None:
    for name in names:
        if has_rows(connection, name):
            raise AdoptionFailed(
                f'node "{taker.side.name}": {name} has got rows since it was examined',
                hint="Undo the adoption with shardids adopt abort, and empty the table.",
            )


def open_shards(taker: Taker) -> None:
    """Let the shards of a node issue IDs and their tables take writes. Idempotent."""
    with taker.side.begin() as connection:
        connection.execute(
            _ACTIVATE,
            {"shards": list(taker.shards)},
        )
    with taker.side.autocommit() as connection:
        # The first draw opens the barrier.
        connection.execute(
            text("select shardids.release(shard) from unnest(cast(:shards as integer[])) shard"),
            {"shards": list(taker.shards)},
        )


def drop_barriers(taker: Taker) -> None:
    """Drop the barriers of the shards' tables, one shard at a time."""
    for shard in taker.shards:
        with_locks(taker.side, "select shardids.drop_barriers(:shard)", {"shard": shard})


def open_references(taker: Taker, sides: Sides, on_wait: OnWait) -> None:
    """Let clients write to the reference tables of a node. Idempotent.

    Raises:
        StatementFailed: a table stays locked; the message names by whom.
    """
    with taker.side.autocommit() as watching:
        for table in sides.reference:
            try:
                with_locks(
                    taker.side,
                    "select shardids.open_table(to_regclass(:name))",
                    {"name": table.name},
                    on_wait=partial(_name_user, on_wait, watching, taker, table.name),
                )
            except StatementFailed as error:
                if error.sqlstate not in LOCK_FAILURES:
                    raise
                node = f'node "{taker.side.name}"'
                raise locked(error, node, taker.side.engine, names=[table.name], again=_AGAIN) from error


_AGAIN = "shardids adopt run --resume"


def _name_user(on_wait: OnWait, watching: Connection, taker: Taker, name: str, attempt: int) -> None:
    who = named(holders_of_tables(watching, [name]))
    on_wait(attempt, f'table {name} on node "{taker.side.name}" is in use by {who}')


def stage(taker: Taker, sides: Sides, there: Mapping[str, Definition]) -> None:
    """Make the tables that take rows in, and the shards' tables their partitions. Idempotent."""
    for table in sides.split:
        definition = there[table.name]
        with taker.side.begin() as connection:
            connection.execute(_WAIT)
            if table.kind is Kind.DERIVED:
                _add_routes(connection, taker, sides, definition)
            connection.execute(
                text("select shardids.stage(:schema, :table, cast(:template as regclass), :home, :adoption)"),
                {
                    "schema": definition.schema,
                    "table": definition.table,
                    "template": sides.in_shard(definition, taker.shards[0]),
                    "home": sides.staged_shard(table, definition),
                    "adoption": sides.name,
                },
            )
            connection.execute(
                text("""
                    select shardids.stage_shard(cast(:parent as regclass), part.shard, part.name::regclass)
                    from unnest(cast(:shards as integer[]), cast(:names as text[])) part (shard, name)"""),
                {
                    "parent": table.name,
                    "shards": list(taker.shards),
                    "names": [sides.in_shard(definition, shard) for shard in taker.shards],
                },
            )
            for shard in taker.shards:
                connection.execute(
                    text("select shardids.set_indexes_aside(cast(:part as regclass))"),
                    {"part": sides.in_shard(definition, shard)},
                )


def make_indexes(taker: Taker) -> None:
    """Make the indexes of the shards' tables that were dropped before the rows came. Idempotent.

    Changes wait for each.
    """
    with taker.side.autocommit() as connection:
        left = connection.execute(
            text("select part::text, name::text from shardids.index_aside order by part, name")
        )
        indexes = left.all()
    for index in indexes:
        with taker.side.begin() as connection:
            connection.execute(text("select set_config('statement_timeout', '0', true)"))
            connection.execute(
                text("select shardids.make_index(cast(:part as regclass), :name)"), index._asdict()
            )


def analyze(taker: Taker) -> None:
    """Gather statistics on the rows of a node's shards."""
    with taker.side.autocommit() as connection:
        for shard in taker.shards:
            connection.execute(text("select shardids.analyze(:shard)"), {"shard": shard})


def _add_routes(connection: Connection, taker: Taker, sides: Sides, table: Definition) -> None:
    connection.execute(
        text("""
            select shardids.add_route(part.name::regclass, :route, part.shard, :adoption)
            from unnest(cast(:shards as integer[]), cast(:names as text[])) part (shard, name)"""),
        {
            "route": ROUTE,
            "adoption": sides.name,
            "shards": list(taker.shards),
            "names": [sides.in_shard(table, shard) for shard in taker.shards],
        },
    )


def unstage(taker: Taker, sides: Sides) -> None:
    """Leave the shards' tables on their own, with their rows, and drop what took rows in. Idempotent.

    Each attempt to lock a table holds its clients up for 0.1 s at most.
    """
    with taker.side.autocommit() as connection:
        staged = connection.execute(
            text("select parent::text, part::text from shardids.staged(:adoption) where part is not null"),
            {"adoption": sides.name},
        ).all()
    for parent, part in staged:
        with_locks(
            taker.side,
            "select shardids.unstage_shard(cast(:parent as regclass), cast(:part as regclass))",
            {"parent": parent, "part": part},
        )
    with_locks(taker.side, "select shardids.drop_staging(:adoption)", {"adoption": sides.name})
    with taker.side.autocommit() as connection:
        routes = {"route": ROUTE, "adoption": sides.name}
        routed = connection.scalars(
            text("select part::text from shardids.routed(:route, :adoption) part"), routes
        )
        parts = routed.all()
    for part in parts:
        drop = "select shardids.drop_route(cast(:part as regclass), :route, :adoption)"
        with_locks(taker.side, drop, {**routes, "part": part})


def give_back(taker: Taker, sides: Sides) -> None:
    """Remove the rows that have arrived, and let clients write again. Idempotent.

    A shard that is fenced in its row was closed when its tables were empty; no client has written since. None
    opens before all rows are gone: what clients then write may refer to rows of reference tables.
    """
    bare = bare_names(sides)
    for shard in taker.shards:
        schema = schema_name(sides.cluster.schema_prefix, shard)
        names = ", ".join(quoted(schema, name) for name in bare)
        with taker.side.begin() as connection:
            connection.execute(_WAIT)
            if connection.execute(_STATE, {"shard": shard}).scalar_one_or_none() == "fenced":
                # The barrier refuses TRUNCATE as well.
                connection.execute(_DROP_BARRIERS, {"shard": shard})
                connection.exec_driver_sql(f"truncate {names}", execution_options=AS_IS)
                connection.execute(_MAKE_INDEXES, {"shard": shard})
                connection.execute(text("select shardids.add_barriers(:shard)"), {"shard": shard})
    _empty_references(taker, sides)
    for shard in taker.shards:
        with taker.side.begin() as connection:
            connection.execute(_WAIT)
            connection.execute(_DROP_BARRIERS, {"shard": shard})
            connection.execute(_ACTIVATE, {"shards": [shard]})


def _empty_references(taker: Taker, sides: Sides) -> None:
    """Delete the rows of the reference tables that are closed, and open them.

    One statement, at whose end foreign keys are checked: the tables may refer to each other in any way.
    """
    with taker.side.begin() as connection:
        connection.execute(_WAIT)
        closed = [
            table.name
            for table in sides.reference
            if connection.execute(_OPEN_TABLE, {"name": table.name}).scalar_one()
        ]
        if closed:
            deletes = ", ".join(
                f"d{number} as (delete from {name})"  # noqa: S608 -- quoted
                for number, name in enumerate(closed)
            )
            connection.exec_driver_sql(f"with {deletes} select", execution_options=AS_IS)


def bare_names(sides: Sides) -> list[str]:
    """Return the names of the tables in a shard; the source may have lost a table meanwhile."""
    with sides.takers[0].side.autocommit() as connection:
        return list(connection.scalars(_BARE, {"names": [table.name for table in sides.split]}))


_WAIT = text("select set_config('lock_timeout', '10s', true)")
_DROP_BARRIERS = text("select shardids.drop_barriers(:shard)")
_MAKE_INDEXES = text("""
    select shardids.make_index(a.part, a.name) from shardids.index_aside a
    where a.part = any (shardids.tables_of(:shard))""")
_STATE = text("select state from shardids.shard where id = :shard for update")
_BARE = text("select (parse_ident(name))[2] from unnest(cast(:names as text[])) name")
_ACTIVATE = text("""
    select shardids.activate(s.id) from shardids.shard s
    where s.id = any(:shards) and (s.state <> 'active' or pg_sequence_last_value(s.id_offset) < 0)
    order by s.id""")
_CLOSE_TABLE = text("select shardids.close_table(to_regclass(:name))")
_OPEN_TABLE = text("select shardids.open_table(to_regclass(:name))")


def old_ids(taker: Taker, sides: Sides, rule: OldIdRule, after: int | None) -> Iterator[tuple[int, int]]:
    """Yield the old IDs of a table on a node that are above one, each with its shard, in order."""
    column = sql.Identifier(rule.column).as_string()
    rows = " union all ".join(
        f"select {column} as id, {shard} as shard from"  # noqa: S608 -- quoted
        f" {quoted(schema_name(sides.cluster.schema_prefix, shard), rule.table)}"
        for shard in taker.shards
    )
    with taker.side.engine.connect() as connection:
        found = connection.execution_options(stream_results=True, no_parameters=True).exec_driver_sql(
            f"select id, shard from ({rows}) rows where id < {sides.lowest_new_id}"  # noqa: S608 -- quoted
            f"{'' if after is None else f' and id > {after}'} order by id"
        )
        for row in found:
            yield row.id, row.shard
