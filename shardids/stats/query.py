"""IDs that a database answers, as the text that ``read_ids`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO

import psycopg
from psycopg import sql
from sqlalchemy.pool import NullPool

from shardids.catalog.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.catalog.statement_log import logged_copy
from shardids.catalog.urls import parse_url
from shardids.errors import BadArgument, ShardidsError


@contextmanager
def answer(url: str, query: str) -> Iterator[IO[bytes]]:
    """Yields a file with the rows of a query, one a line, as COPY writes them. The query may only read.

    Raises:
        BadArgument: the URL is not one of PostgreSQL, or the query is empty or has not one column.
        ShardidsError: the database can't be reached, or refuses the query.
    """
    if not query.rstrip().removesuffix(";").strip():
        raise BadArgument("the query is empty", hint="For example: select id from shard_0005.photos")
    engine = open_engine(
        parse_url(url), what="the database", connect_timeout_s=CONNECT_TIMEOUT_S, poolclass=NullPool
    )
    # What the user wrote is the user's SQL, with the user's rights. The line feed ends a comment.
    copy = sql.SQL("copy ({}\n) to stdout").format(sql.SQL(query.rstrip().removesuffix(";")))
    with TemporaryFile() as file:
        try:
            with (
                engine.connect().execution_options(postgresql_readonly=True) as connection,
                logged_copy(connection, copy) as rows,
            ):
                columns = rows.cursor.pgresult.nfields if rows.cursor.pgresult else 1
                if columns != 1:
                    raise BadArgument(f"the query has {columns} columns", hint="Ask for the IDs alone.")
                for row in rows:
                    file.write(row)
        except psycopg.Error as error:
            raise ShardidsError(
                f"the database refuses the query: {error.diag.message_primary or error}"
            ) from None
        file.seek(0)
        yield file
