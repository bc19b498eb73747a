"""Types of columns whose values are sent or read as others than they are in Python."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Integer, String, TypeDecorator, type_coerce


class Reversed(TypeDecorator[str]):
    """Text that is stored from its end: its own order is not that of the column."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Any) -> str | None:
        return None if value is None else value[::-1]

    def process_result_value(self, value: str | None, _dialect: Any) -> str | None:
        return None if value is None else value[::-1]


class Negated(TypeDecorator[int]):
    """A number that is selected with another sign."""

    impl = Integer
    cache_ok = True

    def column_expression(self, column: Any) -> Any:
        return type_coerce(-column, self)
