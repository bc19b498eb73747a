"""Sharded models: the primary key, filled by the shard's ``next_id()``, the sharding key, reference tables.

Why SQLAlchemy inserts such rows in batches: ``docs/decisions/0009-bulk-inserts.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, overload

from sqlalchemy import BigInteger, Column, Connection, MetaData, Sequence, Table
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import MappedColumn, mapped_column
from sqlalchemy.sql.base import SchemaEventTarget
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.schema import SchemaItem
from sqlalchemy.types import TypeEngine

from shardids.catalog.topology import REFERENCE_SCHEMA
from shardids.errors import BadArgument

SHARDING_KEY = "shardids.sharding_key"
"""Marks the sharding key in a column's ``info``."""
REGION_OF_KEY = "shardids.region_of_key"
"""The key in a column's ``info`` of the function that determines the region of a sharding key."""
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
    """A mark for SQLAlchemy: the keys of rows inserted together rise in the order of the rows.

    It then inserts a thousand rows per statement and matches the keys that come back by their order. Being
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


Part = SchemaItem | TypeEngine[Any] | type[TypeEngine[Any]]
"""An argument of a column after its name: its type, a foreign key, a default …"""


@overload
def primary_key(**options: Any) -> MappedColumn[int]: ...
@overload
def primary_key(name: str, /, **options: Any) -> Column[int]: ...


def primary_key(*arguments: Any, **options: Any) -> Any:
    """Return the primary key column of a sharded model, or with its name that of a table or of SQLModel::

        class User(Base):
            __tablename__ = "users"
            id: Mapped[int] = shardids.primary_key()

        users = Table("users", metadata, primary_key("id"))

        class User(SQLModel, table=True):
            id: ShardId = Field(default=None, sa_column=primary_key("id"))

    A ``bigint`` whose server default is the shard's ``next_id()``, in ``create_all`` and in migrations.
    Objects that are flushed together are inserted in batches, as with ``Identity()``.
    ``options`` go to :func:`sqlalchemy.orm.mapped_column`, or :class:`sqlalchemy.Column`. Foreign keys to it
    are ``bigint`` as well: ``mapped_column(BigInteger, ForeignKey("users.id"))``; plain ``ForeignKey`` takes
    the type over.
    """
    return column_of(
        (*arguments, BigInteger, _RisingKey()),
        dict(primary_key=True, autoincrement=False, server_default=next_id(), **options),
    )


@overload
def sharding_key(
    *arguments: Part, region: RegionOfKey | None = None, **options: Any
) -> MappedColumn[Any]: ...
@overload
def sharding_key(
    name: str, /, *arguments: Part, region: RegionOfKey | None = None, **options: Any
) -> Column[Any]: ...


def sharding_key(*arguments: Any, region: RegionOfKey | None = None, **options: Any) -> Any:
    """Return the column that rows are sharded by, at most one in a model; with its name, one of a table::

        class User(Base):
            __tablename__ = "users"
            id: Mapped[int] = shardids.primary_key()
            name: Mapped[str] = shardids.sharding_key(unique=True)

        class User(SQLModel, table=True):
            id: ShardId = Field(default=None, sa_column=primary_key("id"))
            name: str = Field(sa_column=sharding_key("name", String, unique=True, nullable=False))

    A user lives in the shard ``cluster.shard_for(user.name)``. The value is an ``int``, ``str``, ``bytes`` or
    ``uuid.UUID``, and never changes. A model without a sharding key, but with a foreign key to one that has
    IDs, lives where its parent is.

    ``region`` is a function that returns the region of a key, or ``None`` of a key of no region: the user
    then lives in the shard ``cluster.shard_for(user.name, region=region(user.name))``. It is called with the
    value as the database has it, for each row and criterion, and never gives another answer for the same key.

    ``arguments`` and ``options`` go to :func:`sqlalchemy.orm.mapped_column`, or :class:`sqlalchemy.Column`.

    Raises:
        BadArgument: a name, and no type.
    """
    return column_of(arguments, {**options, "info": _info_of_key(options, region)})


def column_of(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a column of a model; where the first argument is its name, one of a table.

    Raises:
        BadArgument: a name, and nothing that gives the column a type.
    """
    if not arguments or not isinstance(arguments[0], str):
        return mapped_column(*arguments, **options)
    if len(arguments) == 1 and "type_" not in options:
        raise BadArgument(
            f'column "{arguments[0]}" has no type',
            hint=f'Write ("{arguments[0]}", String) for a table or SQLModel. In a model whose attribute has'
            f' another name than the column: (name="{arguments[0]}").',
        )
    return Column(*arguments, **options)


def _info_of_key(options: dict[str, Any], region: RegionOfKey | None) -> dict[Any, Any]:
    """Return the ``info`` of a sharding key, and take the given values out of the options."""
    return {**options.pop("info", {}), SHARDING_KEY: True, **({REGION_OF_KEY: region} if region else {})}


REFERENCE: Final = "shardids.reference"
"""Marks a reference table in its ``info``, and the connection that may create it in its options."""


def reference_table(**options: Any) -> dict[str, Any]:
    """Return the ``__table_args__`` of a reference table's model::

        class Country(Base):
            __tablename__ = "countries"
            __table_args__ = shardids.reference_table()
            code: Mapped[str] = mapped_column(primary_key=True)

    The table is in schema ``shardids_ref`` of every node: foreign keys name it as
    ``shardids_ref.countries.code``. ``shardids reference create`` makes it, not ``create_all``. It is read in
    any session, and written to in :meth:`shardids.Cluster.reference_session`. ``options`` are further
    arguments of :class:`sqlalchemy.Table`; constraints go before it: ``(Index(…), reference_table())``. Where
    SQLAlchemy defines the table it raises :class:`~shardids.errors.BadArgument` if the table has no primary
    key, or anything of a shard: ``primary_key()``, a sharding key, a foreign key to a shard's table.
    """
    info = {**options.pop("info", {}), REFERENCE: True}
    listeners = [("after_parent_attach", _check), ("before_create", _refuse_creation)]
    return {"schema": REFERENCE_SCHEMA, "info": info, "listeners": listeners, **options}


def is_reference(table: object) -> bool:
    """Return whether a table was defined with :func:`reference_table`."""
    return isinstance(table, Table) and bool(table.info.get(REFERENCE))


def _check(table: Table, _metadata: object) -> None:
    if not table.primary_key.columns:
        raise _unfit(table, "has no primary key", "It identifies rows on all nodes: add one.")
    for column in table.columns:
        default = column.server_default
        if column.info.get(SHARDING_KEY):
            raise _unfit(table, f"has the sharding key {column.name}", "Its rows are in no shard.")
        if isinstance(getattr(default, "arg", None), next_id):
            raise _unfit(
                table,
                f"has IDs of a shard in column {column.name}",
                "Its rows are in no shard. Use a natural key, or Identity().",
            )
        for key in column.foreign_keys:
            target = key._get_colspec()
            if not target.startswith(f"{REFERENCE_SCHEMA}."):
                raise _unfit(
                    table,
                    f"has a foreign key from column {column.name} to {target}, which is a shard's",
                    "A reference table can refer to reference tables only, as in"
                    f' ForeignKey("{REFERENCE_SCHEMA}.table.column").',
                )


def _unfit(table: Table, fault: str, remedy: str) -> BadArgument:
    return BadArgument(f"reference table {table.name} {fault}", hint=remedy)


def _refuse_creation(table: Table, connection: Connection, **_: object) -> None:
    if connection.dialect.name == "postgresql" and not connection.get_execution_options().get(REFERENCE):
        raise BadArgument(
            f"reference table {table.name} is not made with the tables of a shard",
            hint=f"Before them: shardids reference create {table.name} --models PACKAGE.MODULE:BASE",
        )
