"""What the functions of PostgreSQL compute, as ``pg_proc`` says."""

from __future__ import annotations

from sqlalchemy import func, text
from sqlalchemy.engine import URL

from shardids.client.routing.sent import STABLE, SYNTAX, Kind, kinds_on
from shardids.pg.connections import open_engine


def test_listed_functions_are_what_the_server_knows(server_url: URL) -> None:
    engine = open_engine(server_url, what="the server")
    with engine.connect() as connection:
        rows = connection.execute(
            text("""
                select proname from pg_proc
                where pronamespace = 'pg_catalog'::regnamespace
                  and (prokind <> 'f' or provolatile = 'v' or proretset)""")
        )
        others = {name for (name,) in rows}
    engine.dispose()
    assert not others & (SYNTAX | STABLE)


def test_other_functions_are_asked_for_once(server_url: URL) -> None:
    engine = open_engine(server_url, what="the server")
    with engine.connect() as connection:
        kind_of = kinds_on(connection)
        assert kind_of(func.int4pl()) is Kind.SCALAR
        assert kind_of(func.coalesce(1)) is Kind.SCALAR
        for name in ("regr_slope", "count", "sum", "min", "max", "avg", "string_agg", "bool_and"):
            assert kind_of(getattr(func, name)()) is Kind.AGGREGATE, name
        assert kind_of(func.row_number()) is Kind.WINDOW
        for name in ("abs", "lower", "round", "md5", "left", "replace", "array_length"):
            assert kind_of(getattr(func, name)()) is Kind.SCALAR, name
        for name in ("random", "generate_series", "pg_backend_pid", "no_such_function", "nextval"):
            assert kind_of(getattr(func, name)()) is Kind.UNKNOWN, name
    engine.dispose()
    assert kind_of(func.int4pl()) is Kind.SCALAR
