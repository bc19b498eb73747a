"""A statement as SQLAlchemy sends it: every SELECT in it, each one's FROM, and what its functions compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy import ARRAY, ColumnElement, Connection, Engine, FromClause, TypeDecorator, text
from sqlalchemy import Enum as EnumType
from sqlalchemy.engine import Dialect
from sqlalchemy.ext import compiler
from sqlalchemy.sql.elements import Grouping, Label
from sqlalchemy.sql.selectable import ForUpdateArg

ELEMENTS: Final = frozenset(
    (
        *("bindparam", "null", "true", "false", "typeclause", "column", "cast", "case", "extract", "unary"),
        *("binary", "tuple", "grouping", "clauselist", "expression_clauselist", "type_coerce", "label"),
        *("label_reference",),
    )
)
"""Elements that compute one value of one row, if their parts do."""


class Kind(Enum):
    """The kind of a function; ``UNKNOWN`` are those that may depend on more than their arguments."""

    SCALAR = "scalar"
    AGGREGATE = "aggregate"
    WINDOW = "window"
    UNKNOWN = "unknown"


SYNTAX: Final = frozenset({"coalesce", "nullif", "greatest", "least"})
"""Expressions that look like functions, but are syntax to PostgreSQL: they compute one value of one row."""

STABLE: Final = frozenset(
    (
        *("now", "current_timestamp", "current_date", "localtimestamp", "transaction_timestamp", "age"),
        *("concat", "concat_ws", "format", "to_char", "to_date", "to_timestamp", "to_number", "date_trunc"),
        *("date_part", "extract", "to_json", "to_jsonb", "json_build_object", "json_build_array"),
        *("jsonb_build_object", "jsonb_build_array", "row_to_json", "array_to_json"),
        *("array_to_string", "length"),
    )
)
"""PostgreSQL's functions that depend on settings or the clock beside their arguments, and on nothing else."""


class Name(NamedTuple):
    """The name of a function as PostgreSQL looks for it; ``schema`` is empty if it is on the search path."""

    schema: str
    name: str


_NO_NAME: Final = Name("", "")
_UNQUOTED: Final = re.compile(r"[a-z0-9_$]+", re.IGNORECASE)


def name_of(function: Any) -> Name:
    """Return the name of a function; an empty one if the application compiles it by itself."""
    if compiles_itself(function):
        return _NO_NAME
    schema = ".".join(map(_folded, function.packagenames))
    return Name("" if schema == "pg_catalog" else schema, _folded(getattr(function, "name", "")))


def _folded(name: str) -> str:
    is_quoted = getattr(name, "quote", False) is not False or not _UNQUOTED.fullmatch(name)
    return str(name) if is_quoted else name.lower()


def own_name(function: Any) -> str:
    """Return the name of a function of PostgreSQL; an empty one if it is in another schema."""
    schema, name = name_of(function)
    return "" if schema else name


def compiles_itself(element: Any) -> bool:
    """Return whether the application writes an element's SQL, by ``@compiles``: its class tells nothing."""
    own = getattr(getattr(type(element), "_compiler_dispatcher", None), "specs", {})
    written = own.get("postgresql", own.get("default"))
    # For other servers only, what stands there for the others is SQLAlchemy's.
    return written is not None and written.__module__ != compiler.__name__


KindOf = Callable[[Any], Kind]
"""Returns the kind of a function in a statement."""

_asked: WeakKeyDictionary[Engine, dict[Name, Kind]] = WeakKeyDictionary()


def kinds_on(connection: Connection) -> KindOf:
    """Return the kinds of functions as the connection's server knows them; asked once per name and engine.

    A name is a scalar function's if every function that it can mean is immutable and returns one value, or is
    PostgreSQL's own and listed; and an aggregate's or a window function's if every one is.
    """
    known = _asked.setdefault(connection.engine, {})

    def kind_of(function: Any) -> Kind:
        name = name_of(function)
        if not name.schema and name.name in SYNTAX:
            return Kind.SCALAR
        if name not in known:
            known[name] = _ask(connection, name)
        return known[name]

    return kind_of


def _ask(connection: Connection, name: Name) -> Kind:
    is_listed = not name.schema and name.name in STABLE
    found = connection.execute(
        text("""select distinct case when prokind = 'f' and not proretset and (
                                       provolatile = 'i' or :listed and nspname = 'pg_catalog') then 'scalar'
                                     when prokind = 'a' then 'aggregate'
                                     when prokind = 'w' then 'window' else 'unknown' end
                from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = pronamespace
                where proname = :name and cast(:schema as text) in (nspname::text, '')"""),
        {"name": name.name, "schema": name.schema, "listed": is_listed},
    ).scalars()
    kinds = set(found)
    if not kinds and is_listed:
        return Kind.SCALAR  # It is syntax.
    return Kind(kinds.pop()) if len(kinds) == 1 else Kind.UNKNOWN


@cache
def _attributes(kind: Any) -> dict[str, str]:
    # SQLAlchemy's own list of a statement's parts, by which it copies, compares and caches statements. It has
    # public methods that set a clause, and none that reads one.
    return {name.lstrip("_"): name for name, *_ in getattr(kind, "_traverse_internals", ())}


def part_of(statement: Any, name: str) -> Any:
    """Return a part of a statement, by its name in SQLAlchemy; ``None`` if this kind has no such part."""
    attribute = _attributes(statement.__class__).get(name)
    return None if attribute is None else getattr(statement, attribute)


def with_parts(statement: Any, **parts: Any) -> Any:
    """Return a copy of a statement with other parts."""
    copy = statement.execution_options()
    for name, part in parts.items():
        setattr(copy, _attributes(statement.__class__)[name], part)
    return copy


class Clauses(NamedTuple):
    """The clauses of a SELECT."""

    group_by: Sequence[Any]
    having: Sequence[Any]
    order_by: Sequence[Any]
    distinct: bool
    distinct_on: Sequence[Any]
    limit: Any
    offset: Any
    fetch: Any
    locks: bool

    @property
    def are_cut(self) -> bool:
        """Whether only some of the rows are its answer."""
        return any(one is not None for one in (self.limit, self.offset, self.fetch))


def clauses_of(select: Any) -> Clauses:
    """Return the clauses of a SELECT."""
    return Clauses(
        group_by=part_of(select, "group_by_clauses"),
        having=part_of(select, "having_criteria"),
        order_by=part_of(select, "order_by_clauses"),
        distinct=part_of(select, "distinct"),
        distinct_on=part_of(select, "distinct_on"),
        limit=part_of(select, "limit_clause"),
        offset=part_of(select, "offset_clause"),
        fetch=part_of(select, "fetch_clause"),
        locks=part_of(select, "for_update_arg") is not None,
    )


def assigned(statement: Any) -> dict[str, Any]:
    """Return the values that an INSERT or UPDATE sets itself, by the column's key or the attribute."""
    # SQLAlchemy 2.0 keeps those of ordered_values() apart.
    values = {**(part_of(statement, "values") or {}), **dict(part_of(statement, "ordered_values") or ())}
    return {str(getattr(column, "key", column)): value for column, value in values.items()}


def plain(element: Any) -> Any:
    """Return an expression without its label and parentheses."""
    while isinstance(element, Label | Grouping):
        element = element.element
    return element


def is_native_enum(type_: Any) -> bool:
    """Return whether each shard has its own type for these values, or for their elements."""
    while isinstance(type_, TypeDecorator | ARRAY):
        type_ = type_.item_type if isinstance(type_, ARRAY) else type_.impl_instance
    return isinstance(type_, EnumType) and type_.native_enum


class Part(NamedTuple):
    """A SELECT as it was, which keeps its ``id``, and as it is sent: ``None`` if nothing is known of it."""

    given: Any
    core: Any
    froms: list[Any]


_UNKNOWN: Final = Part(None, None, [])


class Sent(NamedTuple):
    """A statement as it is sent.

    Attributes:
        statement: with all that loader options, inheritance and extra criteria added to it.
        parts: each SELECT in it, and itself if it is one, by its ``id``.
        others: the tables that an UPDATE or DELETE reads besides its own.
        ctes: the statements of its CTEs, by their ``id``.
        unread: text, hints and extensions of syntax: no list of elements says anything of them.
    """

    statement: Any
    parts: dict[int, Part]
    others: list[Any]
    ctes: dict[int, Any]
    unread: list[str]

    def part(self, select: Any) -> Part:
        """Return a SELECT as it is sent."""
        return self.parts.get(id(select), _UNKNOWN)

    @property
    def sources(self) -> list[Any]:
        """All that its SELECTs read from; ``None`` stands for an unknown SELECT."""
        return [
            one for _, core, froms in self.parts.values() for one in (froms if core is not None else [None])
        ]


def as_sent(statement: Any, dialect: Dialect) -> Sent:
    """Compile a statement and keep the elements that the compiler visited."""
    base: Any = dialect.statement_compiler
    compiler = _recorder(base)(dialect, statement)
    state = compiler.compile_state
    core = compiler.parts.get(id(statement), _UNKNOWN).core
    return Sent(
        getattr(state, "statement", statement) if core is None else core,
        compiler.parts,
        compiler.others,
        {id(cte.element): cte.element for cte in compiler.ctes or ()},
        compiler.unread,
    )


@cache
def _recorder(base: Any) -> Any:
    """Return a compiler that notes each SELECT. SQLAlchemy decides there which tables are correlated."""

    class Recorder(base):  # type: ignore[misc]  # the dialect's compiler
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.parts: dict[int, Part] = {}
            self.others: list[Any] = []
            self.unread: list[str] = []
            self._given: list[Any] = []
            super().__init__(*arguments, **options)

        def visit_select(self, select_stmt: Any, *arguments: Any, **options: Any) -> Any:
            self._given.append(select_stmt)
            try:
                return super().visit_select(select_stmt, *arguments, **options)
            finally:
                self._given.pop()

        # What a SELECT reads from besides the tables of those around it is known here alone.
        def _setup_select_stack(self, select: Any, *arguments: Any) -> Any:
            froms = super()._setup_select_stack(select, *arguments)
            given = self._given[-1]
            known = self.parts.get(id(given))
            # Used twice, correlated to different tables: nothing is known of either.
            is_unlike = known is not None and set(known.froms) != set(froms)
            self.parts[id(given)] = Part(given, None, []) if is_unlike else Part(given, select, froms)
            listed = (ColumnElement, FromClause, ForUpdateArg)
            children = select.get_children()
            self.unread += [type(one).__name__ for one in children if not isinstance(one, listed)]
            return froms

        def update_from_clause(self, statement: Any, table: Any, others: Any, *rest: Any, **kw: Any) -> Any:
            self.others += others
            return super().update_from_clause(statement, table, others, *rest, **kw)

        def delete_extra_from_clause(
            self, statement: Any, table: Any, others: Any, *rest: Any, **kw: Any
        ) -> Any:
            self.others += others
            return super().delete_extra_from_clause(statement, table, others, *rest, **kw)

        def visit_textclause(self, textclause: Any, *arguments: Any, **options: Any) -> Any:
            self.unread.append(f"TextClause {textclause.text!r}")
            return super().visit_textclause(textclause, *arguments, **options)

        def format_from_hint_text(self, sqltext: Any, table: Any, hint: Any, *rest: Any) -> Any:
            self.unread.append(f"the hint {hint!r}")
            return super().format_from_hint_text(sqltext, table, hint, *rest)

        def get_statement_hint_text(self, hint_texts: Any) -> Any:
            self.unread.append(f"the hint {' '.join(hint_texts)!r}")
            return super().get_statement_hint_text(hint_texts)

    return Recorder
