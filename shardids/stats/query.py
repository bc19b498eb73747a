"""IDs that a database answers, as the text that ``read_ids`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, cast

import psycopg
from sqlalchemy.pool import NullPool

from shardids.catalog.connections import CONNECT_TIMEOUT_S, open_engine
from shardids.catalog.urls import parse_url
from shardids.errors import ShardidsError


@contextmanager
def answer(url: str, query: str) -> Iterator[IO[bytes]]:
    """Yields a file with the rows of a query, one a line, as COPY writes them. The query may only read.

    Raises:
        BadArgument: the URL is not one of PostgreSQL.
        ShardidsError: the database can't be reached, or refuses the query.
    """
    engine = open_engine(
        parse_url(url), what="the database", connect_timeout_s=CONNECT_TIMEOUT_S, poolclass=NullPool
    )
    # What the user wrote is the user's SQL, with the user's rights. The line feed ends a comment.
    copy = f"copy ({query.rstrip().removesuffix(';')}\n) to stdout".encode()
    with TemporaryFile() as file:
        try:
            with engine.connect().execution_options(postgresql_readonly=True) as connection:
                cursor = cast("psycopg.Cursor", connection.connection.cursor())
                with cursor.copy(copy) as rows:
                    for row in rows:
                        file.write(row)
        except psycopg.Error as error:
            raise ShardidsError(error.diag.message_primary or str(error)) from None
        file.seek(0)
        yield file
