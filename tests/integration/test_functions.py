"""The functions that need no look at the server are what ``pg_proc`` says they are."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.engine import URL

from shardids.catalog.connections import open_engine
from shardids.client.routing.functions import LISTED, STABLE, SYNTAX, Kind, kinds_on


def test_listed_functions_are_what_the_server_knows(server_url: URL) -> None:
    engine = open_engine(server_url, what="the server")
    with engine.connect() as connection:
        rows = connection.execute(
            text("""
                select proname, array_agg(distinct prokind::text), array_agg(distinct provolatile::text),
                       bool_or(proretset)
                from pg_proc where pronamespace = 'pg_catalog'::regnamespace group by 1""")
        )
        known = {name: (kinds, volatilities, is_set) for name, kinds, volatilities, is_set in rows}
    engine.dispose()
    expected = {Kind.SCALAR: {"f"}, Kind.AGGREGATE: {"a"}, Kind.WINDOW: {"w", "a"}}
    wrong = {
        name: known[name]
        for name, kind in LISTED.items()
        if name in known
        and name not in SYNTAX
        and (
            known[name][2]
            or not expected[kind].issuperset(known[name][0])
            or (kind is Kind.SCALAR and not {"i", *("s" * (name in STABLE))}.issuperset(known[name][1]))
        )
    }
    assert not wrong


def test_other_functions_are_asked_for_once(server_url: URL) -> None:
    engine = open_engine(server_url, what="the server")
    with engine.connect() as connection:
        kind_of = kinds_on(connection)
        assert kind_of("int4pl") is Kind.SCALAR
        assert kind_of("regr_slope") is Kind.AGGREGATE
        for name in ("random", "generate_series", "pg_backend_pid", "no_such_function", "nextval"):
            assert kind_of(name) is Kind.UNKNOWN, name
    engine.dispose()
    assert kind_of("int4pl") is Kind.SCALAR
