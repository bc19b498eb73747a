"""What SQLAlchemy makes of a statement before it writes SQL: every SELECT in it, and what each reads from."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from sqlalchemy.engine import Dialect


class Sent(NamedTuple):
    """A statement as it is sent.

    Attributes:
        statement: with all that loader options, inheritance and extra criteria added to it.
        parts: each SELECT in it, and itself if it is one, by its ``id``: as it was, as it is sent, and the
            items of its FROM.
    """

    statement: Any
    parts: dict[int, tuple[Any, Any, list[Any]]]


def as_sent(statement: Any, dialect: Dialect) -> Sent:
    """Compiles a statement and keeps what the compiler saw."""
    base: Any = dialect.statement_compiler
    compiler = _recorder(base)(dialect, statement)
    state = compiler.compile_state
    found = compiler.parts.get(id(statement))
    if found is not None:
        return Sent(found[1], compiler.parts)
    return Sent(getattr(state, "statement", statement), compiler.parts)


@cache
def _recorder(base: Any) -> Any:
    """Returns a compiler that notes each SELECT. SQLAlchemy decides there which tables are correlated."""

    class Recorder(base):  # type: ignore[misc]  # the dialect's compiler
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.parts: dict[int, tuple[Any, Any, list[Any]]] = {}
            self._under_way: list[Any] = []
            super().__init__(*arguments, **options)

        def visit_select(self, select_stmt: Any, *arguments: Any, **options: Any) -> Any:
            self._under_way.append(select_stmt)
            try:
                return super().visit_select(select_stmt, *arguments, **options)
            finally:
                self._under_way.pop()

        def _setup_select_stack(self, select: Any, *arguments: Any) -> Any:
            froms = super()._setup_select_stack(select, *arguments)
            given = self._under_way[-1]
            if id(given) in self.parts and set(self.parts[id(given)][2]) != set(froms):
                # Used twice, correlated to different tables: nothing is known of either.
                self.parts[id(given)] = (given, None, [])
            else:
                self.parts[id(given)] = (given, select, froms)
            return froms

    return Recorder
