"""Functions, operators, types and relations that win against PostgreSQL's own wherever they are found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import psycopg

from shardids.pg.sqlfiles import data_folder
from tests.support.clusters import ROOT

Db = psycopg.Connection[Any]
Arguments = tuple[str, ...]

# Warnings reach the server's log from a transaction that is rolled back, or only reads, as well.
_HIT = """
create schema planted;
grant usage on schema planted to public;
create function planted.hit(what text) returns text language plpgsql as $$
  begin
    raise warning 'hostile: % in: %', what,
      pg_catalog.regexp_replace(pg_catalog.current_query(), '\\s+', ' ', 'g');
    return what;
  end $$"""

_TYPES: list[str] = re.findall(
    r"\S+",
    """
    "char" boolean bigint smallint integer text oid regclass regproc regprocedure regtype regnamespace regrole
    name varchar bpchar timestamptz timestamp date interval numeric float8 json jsonb pg_lsn xid xid8 tid uuid
    text[] name[] oid[] integer[] bigint[] smallint[] regclass[]
    """,
)
"""The types of values in our statements."""

_ANY = ["text", "name", "integer", "bigint", "oid", "regclass", "boolean"]
_ANY_ARRAY = ["text[]", "name[]", "oid[]", "integer[]", "bigint[]"]
_POLYMORPHIC: Mapping[str, list[str]] = {
    '"any"': _ANY,
    "anyelement": _ANY,
    "anynonarray": _ANY,
    "anycompatible": _ANY,
    "anycompatiblenonarray": _ANY,
    "anyarray": _ANY_ARRAY,
    "anycompatiblearray": _ANY_ARRAY,
}
_NEVER_OURS = {"internal", "cstring", "trigger", "event_trigger"}


class Names:
    """What shardids' SQL and Python files may resolve without a schema, as one server knows it."""

    def __init__(self, db: Db) -> None:
        text = "\n".join(path.read_text(encoding="utf-8") for path in _sources())
        words = set(re.findall(r"\b([a-z_][a-z0-9_]*)\s*\(", text))
        symbols = set(re.findall(r"[-+*/<>=~!@#%^&|?]+", text))
        casts = set(re.findall(r"::\s*([a-z_][a-z0-9_]*)", text)) | {"name", "text", "regclass", "oid"}
        relations = set(re.findall(r"\b(pg_[a-z_]+)\b", text))
        self._accepted = _accepted(db)
        self.functions = {
            (name, tuple(types))
            for name, types in db.execute(
                """select distinct proname, array(select t::regtype::text from unnest(proargtypes::oid[])
                                                  with ordinality as u (t, n) order by n)
                   from pg_proc where pronamespace = 'pg_catalog'::regnamespace and proname = any (%s)""",
                [list(words)],
            )
        }
        self.operators = db.execute(
            """select oprname, oprleft::regtype::text, oprright::regtype::text, oprresult::regtype::text
               from pg_operator where oprnamespace = 'pg_catalog'::regnamespace and oprkind = 'b'
                 and oprname = any (%s) and oprleft::regtype::text = any (%s)""",
            [list(symbols), [*self._accepted, *_POLYMORPHIC]],
        ).fetchall()
        self.types = _column(
            db,
            """select typname from pg_type
               where typnamespace = 'pg_catalog'::regnamespace and typtype = 'b' and typname = any (%s)""",
            casts,
        )
        self.relations = _column(
            db,
            """select relname from pg_class
               where relnamespace = 'pg_catalog'::regnamespace and relkind in ('r', 'v')
                 and relname = any (%s)""",
            relations,
        )

    def overloads(self, most: int) -> Iterator[tuple[str, Arguments]]:
        """Every function's own types, and those that a call of it may have instead.

        Of each function of PostgreSQL's there are ``most`` at most; those that change fewer types come first.
        """
        found = {}
        for name, types in self.functions:
            if not _NEVER_OURS & {*types}:
                choices = [self._instead(one) for one in types]
                changed = sorted(
                    product(*choices) if len(types) <= 4 else zip(*choices, strict=False),
                    key=lambda chosen, types=types: sum(a != b for a, b in zip(chosen, types, strict=True)),
                )
                for chosen in changed[:most]:
                    found[name, chosen] = None
                # format(text, variadic "any") and its like take more of them.
                if types and types[-1] == '"any"':
                    for extra in product(("text", "name", "integer"), repeat=2):
                        found[name, (*changed[0], *extra)] = None
        yield from found

    def pairs(self) -> Iterator[tuple[str, str, str, str]]:
        """Operators on the types of ours for which PostgreSQL has none, but would convert them."""
        there = {(name, left, right) for name, left, right, _ in self.operators}
        found = {}
        for name, left, right, result in self.operators:
            for one in product(self._instead(left), self._instead(right)):
                if (name, *one) not in there and result not in _POLYMORPHIC:
                    found.setdefault((name, *one), result)
        for (name, left, right), result in found.items():
            yield name, left, right, result

    def _instead(self, type_: str) -> list[str]:
        return _POLYMORPHIC.get(type_) or [type_, *self._accepted.get(type_, [])]


def _sources() -> Iterator[Path]:
    yield from sorted(data_folder("sql").glob("*/*.sql"))
    yield from sorted(data_folder("migrations").rglob("*.py"))
    yield from sorted((ROOT / "shardids").rglob("*.py"))


def _column(db: Db, query: str, names: set[str]) -> list[str]:
    return [name for (name,) in db.execute(query.encode(), [sorted(names)]).fetchall()]


def _accepted(db: Db) -> dict[str, list[str]]:
    """The types of ours, and what PostgreSQL takes for each of them without being asked."""
    rows = db.execute(
        """select t::regtype::text, array(select castsource::regtype::text from pg_cast
                                          where casttarget = t::regtype and castcontext = 'i'
                                            and castsource = any (%(types)s::regtype[])
                                            and castsource <> casttarget)
           from unnest(%(types)s::text[]) t""",
        {"types": _TYPES},
    ).fetchall()
    return dict(rows)


def plant(db: Db, schema: str, names: Names, *, most: int = 60, symbols: str | None = None) -> int:
    """Plants all of them in a schema where the session's role can create; how many statements that takes.

    ``most``: overloads of each function. ``symbols``: the only operators.
    """
    db.execute("set search_path = pg_catalog")
    if schema == "public":
        db.execute(_HIT.encode())
    statements = []
    for name, types in names.overloads(most):
        signature = f'{schema}."{name}"({", ".join(types)})'
        statements.append(f"create function {signature} returns text {_body(signature)}")
    for number, (name, left, right, result) in enumerate(names.pairs()):
        if symbols is not None and name not in symbols.split():
            continue
        function, operator = f"{schema}.operator_{number}", f"{schema}.{name} ({left}, {right})"
        does = f"$1 operator(pg_catalog.{name}) $2"
        statements.append(
            f"create function {function}({left}, {right}) returns {result} {_body(operator, does)}"
        )
        statements.append(
            f"create operator {schema}.{name} (function={function}, leftarg={left}, rightarg={right})"
        )
    for start in range(0, len(statements), 500):
        db.execute("; ".join(statements[start : start + 500]).encode())
    return len(statements)


def _body(what: str, result: str = "null") -> str:
    quoted = what.replace("'", "''")
    return f"language plpgsql as $b$ begin perform planted.hit('{quoted}'); return {result}; end $b$"


def plant_words(db: Db, schema: str, names: Names) -> None:
    """Types and relations of PostgreSQL's names; those of pg_temp are found before its own."""
    db.execute("set search_path = pg_catalog")
    for name in names.relations:
        db.execute(f"create view {schema}.{name} as select planted.hit('relation {name}') as oid".encode())
    for name in names.types:
        check = f"check (planted.hit('type {name}') is null)"
        db.execute(f"create domain {schema}.{name} as pg_catalog.{name} {check}".encode())
