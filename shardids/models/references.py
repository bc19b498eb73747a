"""Reference tables: small tables with the same rows on every node, which rows of all shards may refer to."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Table

from shardids.errors import BadArgument
from shardids.models.columns import SHARDING_KEY, next_id

REFERENCE: Final = "shardids.reference"
"""Marks a reference table in its ``info``, and the connection that may create it in its options."""
REFERENCE_SCHEMA: Final = "shardids_ref"
"""The schema of reference tables on every node."""


def reference_table(**options: Any) -> dict[str, Any]:
    """Returns the ``__table_args__`` of a reference table's model::

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
    """Returns whether a table was defined with :func:`reference_table`."""
    return isinstance(table, Table) and bool(table.info.get(REFERENCE))


def _check(table: Table, _metadata: object) -> None:
    if not table.primary_key.columns:
        raise _unfit(table, "has no primary key", "Rows are told apart by it on all nodes: add one.")
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
