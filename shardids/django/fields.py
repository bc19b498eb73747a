"""The primary key of a sharded model, the SQL function that fills it, and its text in JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Func

from shardids.client.routing.one_shard import refuse_earlier_value
from shardids.django.aliases import get_cluster
from shardids.django.choice import written_after
from shardids.errors import WrongShard

if TYPE_CHECKING:
    from django.db.models.sql.compiler import SQLCompiler

    _BigAutoField = models.BigAutoField[Any, Any]
else:
    _BigAutoField = models.BigAutoField


class NextId(Func):
    """The SQL expression ``next_id()``: an ID of the shard in use.

    On a shard's alias it names the shard's schema: ``"shard_0005".next_id()``. Elsewhere it is bare and found
    by ``search_path``, as in a migration that runs in the shard. It may be a field's ``db_default``.
    """

    arity = 0
    allowed_default = True
    output_field = models.BigIntegerField()

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, *_: Any, **_context: Any
    ) -> tuple[str, tuple[str | int, ...]]:
        """Return the call."""
        return next_id_sql(connection), ()


def next_id_sql(connection: BaseDatabaseWrapper) -> str:
    """Return the call of ``next_id()`` as a connection writes it."""
    schema = getattr(connection, "schema", None)
    return "next_id()" if schema is None else f'"{schema}".next_id()'


def is_of_shards(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a connection is to shards: they have ``next_id()``."""
    return hasattr(connection, "schema")


class ShardIdField(_BigAutoField):
    """The primary key of a sharded model::

        class Question(models.Model):
            id = ShardIdField()

    A ``bigint`` whose default in the database is the shard's ``next_id()``: ``save()``, ``create()`` and
    ``bulk_create()`` leave it to the shard and read it back. A model is sharded if its primary key is such a
    field. Foreign keys to it are ``bigint``. It may be ``DEFAULT_AUTO_FIELD``.

    A value is an ``int``, or its digits in a string; a ``float`` has lost digits, and is refused.
    """

    description = "ID of a shard"

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("primary_key", True)
        super().__init__(*args, **options)

    def get_internal_type(self) -> str:
        """Return ``BigIntegerField``: the column has no identity."""
        return "BigIntegerField"

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the column's type, in databases without ``next_id()`` that of a ``BigAutoField``."""
        return super().db_type(connection) if is_of_shards(connection) else _ELSEWHERE.db_type(connection)

    def db_type_suffix(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the column's default, in databases without ``next_id()`` that of a ``BigAutoField``."""
        if is_of_shards(connection):
            return f"DEFAULT {next_id_sql(connection)}"
        return _ELSEWHERE.db_type_suffix(connection)

    def to_python(self, value: Any) -> int | None:
        """Return the ID. Raises ValidationError for other values, floats and booleans among them."""
        if isinstance(value, float | bool):
            raise ValidationError(self.error_messages["invalid"], code="invalid", params={"value": value})
        found: int | None = super().to_python(value)
        return found

    def get_prep_value(self, value: Any) -> Any:
        """Return the parameter of a statement. Raises TypeError for floats and booleans."""
        if isinstance(value, float | bool):
            raise TypeError(f"Field '{self.name}' expected an ID, an int or its digits, but got {value!r}.")
        return super().get_prep_value(value)

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the key of an object that is being saved.

        Raises:
            BadArgument: a new row's key, set by the application, does not sort after what
                :func:`shardids.django.run_in_shard` was given; nothing was written.
        """
        found = super().pre_save(model_instance, add)
        if add and self.primary_key and (after := written_after()):
            with suppress(TypeError, ValidationError):  # An expression; what is no key is refused later.
                id_ = self.to_python(found)
                if id_ is not None and (latest := after.get(get_cluster().layout.shard_of(id_))) is not None:
                    refuse_earlier_value(self.model._meta.label, self.name, id_, latest)
        return found

    def get_db_prep_save(self, value: Any, connection: BaseDatabaseWrapper) -> Any:
        """Return the parameter of a statement that writes this key, or a foreign key to it.

        IDs from before the cluster name no shard, and are not examined.

        Raises:
            WrongShard: a shard would get an ID of another; nothing was written.
            BadArgument: an ID of no shard of the cluster.
        """
        found = super().get_db_prep_save(value, connection)
        shard: int | None = getattr(connection, "shard", None)
        if self.primary_key and shard is not None and isinstance(found, int):
            cluster = get_cluster()
            is_old = cluster.old_ids is not None and cluster.old_ids.has(found)
            if not is_old and (its := cluster.shard_of(found)) != shard:
                raise WrongShard(
                    f"{self.model._meta.label} {found} is of shard {its}: it can't be written or referred to"
                    f" in shard {shard}",
                    hint="Write it in its own shard: in_shard(id=…). A new object gets its ID when saved.",
                )
        return found


_ELSEWHERE: Final = _BigAutoField(primary_key=True)

_EXACT: Final = (1 << 53) - 1
"""The largest integer that JavaScript reads from JSON as it was written."""


class ShardIdJSONEncoder(DjangoJSONEncoder):
    """Writes integers beyond ±(2^53 - 1), as IDs are, as strings of digits; JavaScript would round them::

        JsonResponse({"id": question.pk}, encoder=ShardIdJSONEncoder)

    Keys of objects are strings in JSON anyway.
    """

    def encode(self, o: Any) -> str:
        """Return the JSON text."""
        return super().encode(_readable(o))

    def iterencode(self, o: Any, _one_shot: bool = False) -> Iterator[str]:
        """Return the JSON text in pieces."""
        return super().iterencode(_readable(o), _one_shot)

    def default(self, o: Any) -> Any:
        """Return what JSON can hold in place of an object."""
        return _readable(super().default(o))


def _readable(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        return str(int(value))
    if isinstance(value, Mapping):
        return {key: _readable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(one) for one in value]
    return value
