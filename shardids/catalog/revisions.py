"""Reads the revisions in version tables, of shards and of nodes, with no rights beyond reading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.errors import ConnectionFailed, ShardidsError
from shardids.pg.queries import batches
from shardids.pg.reader import Reader, Refused, reading_as_reader

SHARED_SCHEMA: Final = "public"
"""Where node revisions create what the shards of a node share."""
NODE_VERSION_TABLE: Final = "alembic_node_version"
"""The version table of the node's branch, in the shared schema."""
_TABLES_AT_ONCE: Final = 32
"""How many version tables a query reads; a query for each would cost 0.7 ms per shard."""


def read_revisions(
    reader: Reader,
    connection: Connection,
    tables: Sequence[tuple[str, str]],
    *,
    statement_timeout: str | None = None,
) -> list[tuple[str, ...] | Refused]:
    """Return the revisions in each version table, given with its schema, in order, or why it can't be read.

    Up to 32 tables are locked at a time, for the milliseconds of one query.

    Where a database has no reader, ``shardids.revisions_in`` reads tables that can hold no code of others,
    in the connection's open transaction.
    """
    if reader.skips is not None:
        return [_revisions_in(connection, schema, table) for schema, table in tables]
    batches_of_tables = list(batches(tables, _TABLES_AT_ONCE))
    answers = reader.read(list(map(_in_one_query, batches_of_tables)), statement_timeout=statement_timeout)
    found: list[tuple[str, ...] | Refused] = []
    for batch, answer in zip(batches_of_tables, answers, strict=True):
        if not isinstance(answer, Refused):
            revisions: dict[int, list[str]] = {number: [] for number in range(len(batch))}
            for row in answer:
                revisions[row["number"]].append(row["revision"])
            found += [tuple(sorted(of_table)) for of_table in revisions.values()]
        elif len(batch) == 1:
            found.append(answer)
        else:
            # One table that can't be read hides the others.
            alone = reader.read(
                [_in_one_query([table]) for table in batch], statement_timeout=statement_timeout
            )
            found += [
                one if isinstance(one, Refused) else tuple(sorted(row["revision"] for row in one))
                for one in alone
            ]
    return found


def _in_one_query(tables: Sequence[tuple[str, str]]) -> str:
    """Return a query for the rows of version tables, each with the number of its table."""
    # The type of the column may be anybody's: its text, not a cast.
    query = sql.SQL("select {}::int as number, concat(v.version_num) as revision from only {} v")
    one_by_one = [query.format(number, sql.Identifier(*table)) for number, table in enumerate(tables)]
    return sql.SQL(" union all ").join(one_by_one).as_string()


def _revisions_in(connection: Connection, schema: str, table: str) -> tuple[str, ...] | Refused:
    try:
        with connection.begin_nested():
            found = connection.execute(
                text("select shardids.revisions_in(:schema, :table)"), {"schema": schema, "table": table}
            ).scalar()
    except ConnectionFailed:
        raise
    except ShardidsError as error:
        return Refused(reason=error.message, sqlstate=error.sqlstate or "42501")
    return tuple(found or ())


@contextmanager
def _transaction(engine: Engine) -> Iterator[Connection]:
    """Yield a connection in a transaction, which sets ``search_path`` also behind a pooler."""
    with engine.connect() as connection:
        connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            yield connection


def revisions_on(engine: Engine, what: str, version_table: str) -> Mapping[int, Standing]:
    """Do what :func:`revisions_of_shards` does, on a connection of an engine."""
    with _transaction(engine) as connection:
        return revisions_of_shards(connection, what, version_table)


def read_node_heads(engine: Engine, what: str) -> tuple[str, ...]:
    """Return the node revisions that a database is at, none before the first; ``what``: it, in words.

    Raises:
        MissingPrivilege: others could run code by it, and the node has no reader.
        StatementFailed: it can't be read.
    """
    with reading_as_reader(engine, what) as reader, _transaction(engine) as connection:
        is_there = connection.scalar(
            text("select exists (select from pg_class where oid = to_regclass(:table) and relkind = 'r')"),
            {"table": f"{SHARED_SCHEMA}.{NODE_VERSION_TABLE}"},
        )
        if not is_there:
            return ()
        (found,) = read_revisions(reader, connection, [(SHARED_SCHEMA, NODE_VERSION_TABLE)])
    if isinstance(found, Refused):
        raise reader.error(found, f"{SHARED_SCHEMA}.{NODE_VERSION_TABLE}")
    return found


# A view or a foreign table counts as none. An engine from before migrations has no enter_revision.
_VERSION_TABLES: Final = text("""
    select s.id as shard, s.schema::text as schema, c.oid is not null as has_table,
           substring(obj_description(c.oid, 'pg_class') from '^shardids: (.*)$') as unfinished
    from shardids.shard s
    join pg_namespace n on n.nspname = s.schema
    left join pg_class c on c.relnamespace = n.oid and c.relname = :table and c.relkind = 'r'
    where s.state <> 'moved' and 'shardids.enter_revision'::regproc is not null
    order by s.id""")

Standing = tuple[tuple[str, ...] | Refused | None, str | None]
"""The revisions in a shard's version table, ``None`` without one, and the unfinished revision."""


def revisions_of_shards(
    connection: Connection, what: str, version_table: str, *, statement_timeout: str | None = None
) -> Mapping[int, Standing]:
    """Return how each shard of a node stands; those that were moved away have no entry.

    ``what`` is the node, in words. Beside ``connection``, which is in a transaction, it opens its own.
    """
    there = connection.execute(_VERSION_TABLES, {"table": version_table}).all()
    having = [row for row in there if row.has_table]
    tables = [(row.schema, version_table) for row in having]
    with reading_as_reader(connection.engine, what) as reader:
        found = read_revisions(reader, connection, tables, statement_timeout=statement_timeout)
    revisions = {row.shard: answer for row, answer in zip(having, found, strict=True)}
    return {row.shard: (revisions.get(row.shard), row.unfinished) for row in there}
