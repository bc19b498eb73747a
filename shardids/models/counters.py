"""A column of numbers for people, such as ``ACME-2026-11-22-0042``, drawn by a trigger of its table."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, String, Table, event
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import MappedColumn, mapped_column
from sqlalchemy.schema import ExecutableDDLElement, FetchedValue
from sqlalchemy.sql.base import SchemaEventTarget
from sqlalchemy.sql.compiler import DDLCompiler

from shardids.catalog.counters import CounterKind, Period
from shardids.errors import BadArgument
from shardids.models.columns import SHARDING_KEY


class RowNumber(FetchedValue):
    """The server default of a column of numbers: what :func:`counter` gives its column, for Core tables::

        Table("orders", metadata, primary_key("id"), Column("customer", Text, nullable=False),
              Column("number", Text, RowNumber("order", tenant="customer", per="day"), nullable=False))

    ``create_all`` and ``op.create_table`` define the kind in the shard and create the trigger with the table.
    ``shardids migrate revision --autogenerate`` writes it into the revision.

    Args:
        kind: the name of the kind of numbers; several tables may share one.
        tenant: the column whose value, as text, is the tenant. By default the table's sharding key.
        per, zone, prefix, padding, gapless, keep_days: as in :func:`counter`.

    Raises:
        BadArgument: as :func:`counter`; a missing tenant, and a kind that another table of the metadata
            defines differently, when the table is defined.
    """

    def __init__(self, kind: str, *, per: Period, tenant: str | None = None, **definition: Any) -> None:
        super().__init__()
        self.kind = CounterKind(name=kind, per=per, **definition)
        self._tenant = tenant

    def _set_parent(self, parent: SchemaEventTarget, **options: Any) -> None:
        super()._set_parent(parent, **options)
        event.listen(parent, "after_parent_attach", self._enter)

    def _enter(self, column: Column[Any], table: Table) -> None:
        # By then the table has all its columns.
        event.listen(table, "after_parent_attach", lambda whole, _metadata: self._check(whole))
        event.listen(
            table,
            "after_create",
            lambda whole, connection, **given: _execute(_NumberRows(whole, column, self), connection, given),
        )

    def _check(self, table: Table) -> None:
        self.tenant_in(table)
        for column in (column for other in table.metadata.tables.values() for column in other.columns):
            default = column.server_default
            if not isinstance(default, RowNumber) or default.kind.name != self.kind.name:
                continue
            if default.kind != self.kind:
                raise BadArgument(
                    f'tables "{column.table.name}" and "{table.name}" define numbers of kind'
                    f' "{self.kind.name}" differently',
                    hint="Define the kind alike in both, or give one of them another kind.",
                )

    def tenant_in(self, table: Table) -> str:
        """Return the name of the column with the tenant.

        Raises:
            BadArgument: the table has no such column, or none is named and it has no sharding key.
        """
        if self._tenant is not None:
            column = next((c for c in table.columns if self._tenant in (c.key, c.name)), None)
        else:
            column = next((c for c in table.columns if c.info.get(SHARDING_KEY)), None)
        if column is None:
            missing = "a sharding key" if self._tenant is None else f'a column "{self._tenant}"'
            raise BadArgument(
                f'numbers of kind "{self.kind.name}" need a tenant, and table "{table.name}" does not have'
                f" {missing}",
                hint='Name the column whose value the counters are for: counter(…, tenant="customer_id")',
            )
        return str(column.name)

    def __repr__(self) -> str:
        kind = self.kind
        column: Column[Any] | None = getattr(self, "column", None)
        tenant = self._tenant if column is None else self.tenant_in(column.table)
        return (
            f"RowNumber({kind.name!r}, per={kind.per!r}, tenant={tenant!r}, zone={kind.zone!r},"
            f" prefix={kind.prefix!r}, padding={kind.padding}, gapless={kind.gapless},"
            f" keep_days={kind.keep_days})"
        )


class _NumberRows(ExecutableDDLElement):
    """A call of ``shardids.number_rows``, which defines the kind and creates the trigger."""

    def __init__(self, table: Table, column: Column[Any], default: RowNumber) -> None:
        self.table = table
        self.arguments = (str(column.name), default.tenant_in(table), *default.kind.arguments)


@compiles(_NumberRows, "postgresql")
def _compile_number_rows(element: _NumberRows, compiler: DDLCompiler, **_options: Any) -> str:
    table = compiler.preparer.format_table(element.table).replace("'", "''")
    values = (
        compiler.sql_compiler.render_literal_value(one, String()) if isinstance(one, str) else one
        for one in element.arguments
    )
    listed = ", ".join("null" if one is None else str(one) for one in values)
    return f"SELECT shardids.number_rows('{table}', {listed})"


def _execute(element: _NumberRows, connection: Any, given: dict[str, Any]) -> None:
    # Alembic has no connection where it writes SQL, but a runner.
    runner = given.get("_ddl_runner") if connection is None else connection
    if runner is not None and runner.dialect.name == "postgresql":
        runner.execute(element)


def counter(
    kind: str,
    *,
    per: Period,
    tenant: str | None = None,
    zone: str = "UTC",
    prefix: str | None = None,
    padding: int = 4,
    gapless: bool = True,
    keep_days: int = 400,
    **options: Any,
) -> MappedColumn[str]:
    """Return a column of numbers for people, counted per tenant::

        class Order(Base):
            __tablename__ = "orders"
            id: Mapped[int] = shardids.primary_key()
            customer: Mapped[str] = shardids.sharding_key()
            number: Mapped[str] = shardids.counter("order", per="day")  # ACME-2026-11-22-0042

    A trigger of the table draws the number where an INSERT gives none. The day is that of the statement.

    Args:
        kind: the name of the kind of numbers; tables may share one, if they define it alike.
        per: when the numbers begin again at 1: ``day``, ``month``, ``year`` or ``never``.
        tenant: the column whose value, as text, is the tenant. By default the model's sharding key.
        zone: the time zone that decides when a period ends, for tenants without a zone.
        prefix: the text before the number; ``{tenant}`` and ``{period}`` are replaced. By default
            ``{tenant}-{period}-``, or ``{tenant}-`` if numbers never begin again.
        padding: the digits of a number, 1 to 18; one that needs more is refused
            (:class:`~shardids.errors.NumbersExhausted`). 0: as many as it needs.
        gapless: whether no number is missing. An INSERT then waits until others of the same tenant and kind
            have committed. Otherwise it does not wait, and numbers may be missing or come out of order.
        keep_days: how many days before a tenant's newest period others are kept.
        options: for :func:`sqlalchemy.orm.mapped_column`, such as ``unique``.

    Raises:
        BadArgument: the zone is unknown, a value is out of range, or (when the model is defined) the column
            for the tenant does not exist, or another table defines the kind differently.
    """
    number = RowNumber(
        kind,
        per=per,
        tenant=tenant,
        zone=zone,
        prefix=prefix,
        padding=padding,
        gapless=gapless,
        keep_days=keep_days,
    )
    return mapped_column(String, server_default=number, **options)
