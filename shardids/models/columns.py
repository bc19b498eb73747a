"""Columns of sharded models: the primary key, filled by the shard's ``next_id()``, and the sharding key.

Why SQLAlchemy inserts such rows in batches: ``docs/decisions/0009-bulk-inserts.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import BigInteger, Column, MetaData, Sequence, Table
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import MappedColumn, mapped_column
from sqlalchemy.sql.base import SchemaEventTarget
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

SHARDING_KEY = "shardids.sharding_key"
"""Marks the sharding key in a column's ``info``."""
REGION_OF_KEY = "shardids.region_of_key"
"""Where a column's ``info`` has the function that tells the region of a sharding key."""
RegionOfKey = Callable[[Any], str | None]


class next_id(FunctionElement[int]):  # noqa: N801 -- SQL functions have lower-case names, as sqlalchemy.func's
    """The SQL expression ``next_id()``: an ID of the shard that the statement is for.

    With a ``schema_translate_map`` (:meth:`shardids.Cluster.session` and ``create_all`` on such a
    connection) it names the shard's schema: ``shard_0005.next_id()``. Without one it is bare and found by
    ``search_path``, as in an Alembic migration that runs in the shard.
    """

    type = BigInteger()
    inherit_cache = True
    name = "next_id"


# Never a table: an object without a schema, so that the compiler puts the shard's schema before its name
# exactly as it does for the model's own tables.
_FUNCTION = Table("next_id", MetaData())


@compiles(next_id)
def _compile_next_id(_element: next_id, compiler: SQLCompiler, **_options: Any) -> str:
    return f"{compiler.preparer.format_table(_FUNCTION)}()"


@compiles(next_id, "sqlite")
def _compile_for_sqlite(*_: object, **_options: Any) -> str:
    # Functions have no schemas there. shardids.testing registers this one.
    return "next_id()"


class _RisingKey(Sequence):
    """Tells SQLAlchemy that the keys of rows inserted together rise in the order of the rows.

    It then inserts a thousand rows a statement and matches the keys that come back by their order. Being
    ``optional``, the sequence is neither created nor named in the INSERT: the server default fills the
    column. The column must not be ``autoincrement`` as well, or it would be made ``BIGSERIAL``.
    """

    def __init__(self) -> None:
        super().__init__("next_id", optional=True)

    def _copy(self) -> _RisingKey:
        return _RisingKey()

    def _set_parent(self, parent: SchemaEventTarget, **options: Any) -> None:
        super()._set_parent(parent, **options)
        # The argument insert_sentinel of a column inside Annotated gets lost on its way to the model's.
        if isinstance(parent, Column):
            parent._insert_sentinel = True


def primary_key(**options: Any) -> MappedColumn[int]:
    """Returns the primary key column of a sharded model::

        class User(Base):
            __tablename__ = "users"
            id: Mapped[int] = shardids.primary_key()

    A ``bigint`` whose server default is the shard's ``next_id()``, in ``create_all`` and in migrations.
    Objects that are flushed together are inserted in batches, as with ``Identity()``.
    ``options`` go to :func:`sqlalchemy.orm.mapped_column`. Foreign keys to it are ``bigint`` as well:
    ``mapped_column(BigInteger, ForeignKey("users.id"))``; plain ``ForeignKey`` takes the type over.
    """
    return mapped_column(
        BigInteger,
        _RisingKey(),
        primary_key=True,
        autoincrement=False,
        server_default=next_id(),
        **options,
    )


def primary_key_column(name: str, **options: Any) -> Column[int]:
    """Returns :func:`primary_key` for a Core table: ``Table("users", metadata, primary_key_column("id"))``.

    ``options`` go to :class:`sqlalchemy.Column`.
    """
    return Column(
        name,
        BigInteger,
        _RisingKey(),
        primary_key=True,
        autoincrement=False,
        server_default=next_id(),
        **options,
    )


def sharding_key(*arguments: Any, region: RegionOfKey | None = None, **options: Any) -> MappedColumn[Any]:
    """Returns the column that a model's rows are sharded by, at most one in a model::

        class User(Base):
            __tablename__ = "users"
            id: Mapped[int] = shardids.primary_key()
            name: Mapped[str] = shardids.sharding_key(unique=True)

    A user lives in the shard ``cluster.shard_for(user.name)``. The value is an ``int``, ``str``, ``bytes`` or
    ``uuid.UUID``, and never changes. A model without a sharding key, but with a foreign key to one that has
    IDs, lives where its parent is.

    ``region`` is a function that tells the region of a key, or ``None`` of a key of no region: the user then
    lives in the shard ``cluster.shard_for(user.name, region=region(user.name))``. It is called with the value
    as the database has it, for each row and criterion, and never gives another answer for the same key.

    ``arguments`` and ``options`` go to :func:`sqlalchemy.orm.mapped_column`.
    """
    return mapped_column(*arguments, info=_info_of_key(options, region), **options)


def sharding_key_column(*arguments: Any, region: RegionOfKey | None = None, **options: Any) -> Column[Any]:
    """Returns :func:`sharding_key` for a Core table, or for SQLModel::

        class User(SQLModel, table=True):
            id: int | None = Field(default=None, sa_column=primary_key_column("id"))
            name: str = Field(sa_column=sharding_key_column("name", String, unique=True))

    ``arguments`` and ``options`` go to :class:`sqlalchemy.Column`.
    """
    return Column(*arguments, info=_info_of_key(options, region), **options)


def _info_of_key(options: dict[str, Any], region: RegionOfKey | None) -> dict[Any, Any]:
    """Returns the ``info`` of a sharding key, and takes what was given out of the options."""
    return {**options.pop("info", {}), SHARDING_KEY: True, **({REGION_OF_KEY: region} if region else {})}
