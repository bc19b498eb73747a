"""IDs that a database answers, as the text that ``read_ids`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO

import psycopg

from shardids.catalog.urls import parse_url
from shardids.errors import ShardidsError


@contextmanager
def answer(url: str, query: str) -> Iterator[IO[bytes]]:
    """Yields a file with the rows of a query, one a line, as COPY writes them. The query may only read.

    Raises:
        BadArgument: the URL is not one of PostgreSQL.
        ShardidsError: the database can't be reached, or refuses the query.
    """
    where = parse_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    # What the user wrote is the user's SQL, with the user's rights. The line feed ends a comment.
    copy = f"copy ({query.rstrip().removesuffix(';')}\n) to stdout".encode()
    with TemporaryFile() as file:
        try:
            with psycopg.connect(where) as connection, connection.cursor() as cursor:
                connection.read_only = True
                with cursor.copy(copy) as rows:
                    for row in rows:
                        file.write(row)
        except psycopg.Error as error:
            raise ShardidsError(error.diag.message_primary or str(error)) from None
        file.seek(0)
        yield file
