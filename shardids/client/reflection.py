"""What ``inspect()`` shows of a shard: the shard's tables, where no schema is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getmembers, isfunction, signature
from typing import Any

from sqlalchemy.dialects.postgresql.base import PGInspector


class ShardInspector(PGInspector):
    """An inspector whose schema is the shard's, on an engine or a connection as seen from one shard."""

    @property
    def default_schema_name(self) -> str | None:
        """The shard's schema; that of the database where the bind is not a shard's."""
        translated = self.bind.get_execution_options().get("schema_translate_map", {})
        name: str | None = translated.get(None)
        return super().default_schema_name if name is None else name


def _of_the_shard(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(method)

    @wraps(method)
    def inspected(self: ShardInspector, *arguments: Any, **options: Any) -> Any:
        given = parameters.bind(self, *arguments, **options)
        here = self.bind.get_execution_options().get("schema_translate_map", {}).get(None)
        asked = given.arguments.get("schema")
        if here is None or asked not in (None, here):
            return method(self, *arguments, **options)
        given.arguments["schema"] = here
        found = method(*given.args, **given.kwargs)
        if method.__name__ == "get_foreign_keys":
            return [_without_schema(key, here) for key in found]
        if "_multi_" not in method.__name__:
            return found
        # Those are keyed by the schema that was asked for, and the table.
        tables = {(asked, table): value for (_, table), value in found.items()}
        if method.__name__ == "get_multi_foreign_keys":
            tables = {table: [_without_schema(key, here) for key in keys] for table, keys in tables.items()}
        return tables

    return inspected


def _without_schema(key: Any, here: str) -> Any:
    return {**key, "referred_schema": None} if key["referred_schema"] == here else key


for _name, _method in getmembers(PGInspector, isfunction):
    if "schema" in signature(_method).parameters and not _name.startswith("_"):
        setattr(ShardInspector, _name, _of_the_shard(_method))
