"""Which expressions are right when each shard computes them from its own rows: a list, and nothing else."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Select
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import Over
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import ScalarSelect, SelectStatementGrouping

from shardids.client.routing.functions import Kind, KindOf
from shardids.client.routing.sources import Scope, plain
from shardids.errors import CannotCombine

IN_PYTHON: Final = (
    'Select the rows and compute it in Python, or name the shard: bind_arguments={"shard_id": number}.'
)
_CONSTANT: Final = re.compile(r"\s*(\*|-?\d+(\.\d+)?|'[^'\\]*'|null|true|false)\s*", re.IGNORECASE)

_LEAVES: Final = frozenset(
    ("bindparam", "null", "true", "false", "collation", "typeclause", "table", "textual_label_reference")
)
_PARTS: Final = frozenset(
    (
        *("label", "grouping", "clauselist", "expression_clauselist", "tuple", "case", "cast", "type_coerce"),
        *("extract", "array", "slice", "unary", "binary", "label_reference", "funcfilter", "withingroup"),
        *("aggregate_order_by", "asc", "desc"),
    )
)
"""Elements that are right if their parts are."""

_OPERATORS: Final = frozenset(
    (
        *(
            "add",
            "sub",
            "mul",
            "truediv",
            "floordiv",
            "mod",
            "neg",
            "inv",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
        ),
        *("and_", "or_", "is_", "is_not", "is_true", "is_false", "is_distinct_from", "is_not_distinct_from"),
        *("in_op", "not_in_op", "between_op", "not_between_op", "comma_op", "concat_op", "collate", "exists"),
        *("like_op", "not_like_op", "ilike_op", "not_ilike_op", "startswith_op", "not_startswith_op"),
        *("endswith_op", "not_endswith_op", "contains_op", "not_contains_op", "istartswith_op"),
        *("not_istartswith_op", "iendswith_op", "not_iendswith_op", "icontains_op", "not_icontains_op"),
        *("regexp_match_op", "not_regexp_match_op", "getitem", "json_getitem_op", "json_path_getitem_op"),
        *("bitwise_and_op", "bitwise_or_op", "bitwise_xor_op", "bitwise_not_op", "bitwise_lshift_op"),
        *("bitwise_rshift_op", "asc_op", "desc_op", "nulls_first_op", "nulls_last_op"),
        *(
            [
                "->",
                "->>",
                "#>",
                "#>>",
                "@>",
                "<@",
                "?",
                "?|",
                "?&",
                "&&",
                "||",
                "~",
                "~*",
                "!~",
                "!~*",
                "^",
                "<<",
                ">>",
            ]
        ),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Where an expression stands.

    Attributes:
        scope: whose columns it may use.
        grouped: whether each shard has all rows of a group, so that it may hold aggregates.
        bound: whether all rows that the statement reads are in one shard, so that it may compute anything.
        filters: whether it is a condition that discards rows, for which NULL is as good as false.
    """

    scope: Scope | None = None
    grouped: bool = False
    bound: bool = False
    filters: bool = False


class ExpressionCheck(ABC):
    """Walks expressions. Whoever derives from it knows about SELECT."""

    def __init__(self, kind_of: KindOf) -> None:
        self._kind_of = kind_of

    @abstractmethod
    def subquery(self, select: Any, around: Around, equal: tuple[Any, Any] | None) -> tuple[Scope, bool]:
        """Checks a SELECT in an expression; ``equal`` are two columns that are tested to be equal.

        Returns:
            its scope, and whether it is bound to the row around it by its own conditions.

        Raises:
            CannotCombine: its answer would depend on the shard.
        """

    def check_all(self, elements: Iterable[Any], around: Around) -> None:
        """Checks several expressions."""
        for element in elements:
            self.check(element, around)

    def check(self, element: Any, around: Around) -> None:
        """Refuses an expression with an element that is not on the list.

        Raises:
            CannotCombine: it has one.
        """
        kind = element.__visit_name__
        if isinstance(
            element, ScalarSelect | SelectStatementGrouping
        ):  # The latter is EXISTS of SQLAlchemy 2.0.
            self.subquery(element.element, around, None)
        elif isinstance(element, FunctionElement):
            self._function(element, around)
        elif isinstance(element, Over):
            self._window(element, around)
        elif kind == "column":
            self._column(element)
        elif kind in _PARTS:
            self.check_parts(element, around)
        elif kind not in _LEAVES:
            refuse(element)

    def knows(self, operator: Any) -> bool:
        """Returns whether an operator is on the list."""
        return (getattr(operator, "opstring", None) or operator.__name__) in _OPERATORS

    def check_parts(self, element: Any, around: Around) -> None:
        """Checks an operator and its operands, or another element that is right if its parts are."""
        operator = getattr(element, "operator", None) or getattr(element, "modifier", None)
        if operator is not None and not self.knows(operator):
            name = getattr(operator, "opstring", None) or operator.__name__
            raise CannotCombine(
                f"the operator {name} over several shards is not known to be right", hint=IN_PYTHON
            )
        if operator in (operators.in_op, operators.not_in_op):
            select = plain(element.right)
            select = select.element if isinstance(select, ScalarSelect) else select
            if isinstance(select, Select):
                self._member(element, select, around)
                return
        keeps = operator in (operators.and_, operators.or_) or element.__visit_name__ == "grouping"
        self.check_all(element.get_children(), around if keeps else replace(around, filters=False))

    def _member(self, element: Any, select: Any, around: Around) -> None:
        """``x IN (SELECT y …)``: right if equal values are in one shard, and NULL makes no difference."""
        self.check(element.left, replace(around, filters=False))
        columns = list(select.selected_columns)
        scope, bound = self.subquery(
            select, around, (element.left, columns[0]) if len(columns) == 1 else None
        )
        if bound or (around.filters and element.operator is operators.in_op):
            return
        given, found = around.scope and around.scope.trait(element.left), scope.trait(columns[0])
        if not (given and given[1].required and found and found[1].required):
            raise CannotCombine(
                f"{element.left} IN (SELECT …) over several shards is only right in WHERE: it may be NULL",
                hint="Use it in where(), joined with and_() or or_(), or exists() with both tables.",
            )

    def _function(self, element: Any, around: Around) -> None:
        name = str(getattr(element, "name", "")).lower()
        kind = self._kind_of(name)
        if kind is Kind.UNKNOWN or kind is Kind.WINDOW:
            raise CannotCombine(
                f"{name}() over several shards is not known to depend on its arguments only",
                hint=f"Declare it IMMUTABLE on the nodes if it is. {IN_PYTHON}",
            )
        if kind is Kind.AGGREGATE and not (around.grouped or around.bound):
            refuse_aggregate(name)
        self.check_all(arguments(element), replace(around, filters=False, grouped=False))

    def _window(self, over: Any, around: Around) -> None:
        partition = list(over.partition_by.clauses) if over.partition_by is not None else []
        if not (around.bound or (around.scope and around.scope.tells_shard(partition))):
            raise CannotCombine(
                "a window over several shards would see one shard at a time",
                hint="Partition it by an ID or the sharding key, or compute it in Python.",
            )
        function = getattr(over.element, "func", over.element)
        name = str(getattr(function, "name", "")).lower()
        if not isinstance(function, FunctionElement) or self._kind_of(name) is Kind.UNKNOWN:
            raise CannotCombine(f"{name}() as a window over several shards is not known", hint=IN_PYTHON)
        parts = [*arguments(function), *partition]
        parts += [over.order_by] if over.order_by is not None else []
        parts += [over.element.criterion] if function is not over.element else []
        self.check_all(parts, replace(around, filters=False))

    def _column(self, column: Any) -> None:
        if getattr(column, "is_literal", False):
            if not _CONSTANT.fullmatch(column.name):
                raise CannotCombine(
                    f"literal_column({column.name!r}) over several shards could be anything",
                    hint="Write it with SQLAlchemy's expressions, or name the shard.",
                )
        elif column.table is None:
            refuse(column)


def arguments(function: Any) -> list[Any]:
    """Returns the arguments of a function; of an aggregate, without its DISTINCT or its ``*``."""
    return [
        one.element if getattr(one, "operator", None) is operators.distinct_op else one
        for one in function.clauses
        if not (getattr(one, "is_literal", False) and one.name == "*")
    ]


def refuse(element: Any) -> None:
    """Raises CannotCombine for an element that is not on the list."""
    named = type(element).__name__.removeprefix("Annotated")
    written = f" {str(element)!r}" if element.__visit_name__ == "textclause" else ""
    raise CannotCombine(
        f"{named}{written} over several shards is not known to be right",
        hint="Write it with SQLAlchemy's expressions over mapped columns, or name the shard:"
        ' bind_arguments={"shard_id": number}.',
    )


def refuse_aggregate(name: str) -> None:
    """Raises CannotCombine for an aggregate that would see the rows of one shard."""
    raise CannotCombine(
        f"{name}() over several shards can't be made of the shards' own",
        hint="count(), sum(), min(), max() and exists() can, alone in their columns: select sum() and"
        " count() for an average, and the distinct values to count them.",
    )
