"""Obstacles of the source: the one list that a plan shows, and that every later command refuses by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, text

from shardids.adopt.plan.document import STAYS, Finding, Kind, Severity, TablePlan
from shardids.adopt.plan.facts import blocks, column_name, find, shown_name
from shardids.adopt.plan.inventory import Server
from shardids.catalog.counters import COUNTER_TABLES
from shardids.pg.definitions import KEY_TYPES, Column, Definition
from shardids.replication.subscriptions import Refusal, ending_copies, unable_to_replicate

AGAIN: Final = "Write the plan again: shardids adopt plan"
FULL_NEEDS_ALL: Final = 18
"""From this version on a table with replica identity FULL and a generated column refuses its updates."""
_WORKERS: Final = 3
"""How many slots the relay takes: one for changes, two for tables that are copied."""
_RESERVED_SCHEMAS: Final = (
    "shardids",
    "shardids_catalog",
    "shardids_query",
    "shardids_nodes",
    "shardids_adopt",
    "shardids_relay",
)
_RESERVED: Final = frozenset(
    {"shardids_version", "shardids_load", "id_counter", "id_offset", "alembic_version", *COUNTER_TABLES}
)
_MAY_CREATE: Final = text("select has_database_privilege(current_database(), 'create')")
ROUTE: Final = "shardids_shard"
"""The column with the shard of a row without a key: on the relay, and where rows arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacles:
    """The obstacles of some tables of a source.

    Attributes:
        tables: the plan's.
        there: definitions at the source, by name; of tables without one only that is known.
        server: the source's server.
        shard_count: into how many shards the rows are split.
        guessed: what rows say of a guess, in words, by table.
        counted: how many rows have no key, in words, by table, where they were counted.
    """

    tables: Sequence[TablePlan]
    there: Mapping[str, Definition]
    server: Server
    shard_count: int
    guessed: Mapping[str, str] = field(default_factory=dict)
    counted: Mapping[str, str] = field(default_factory=dict)

    def find(self) -> Iterator[Finding]:
        """Yield all obstacles, those of the server first."""
        yield from self._of_server()
        for table in self._copied:
            if (there := self.there.get(table.name)) is None:
                yield blocks(
                    table.name,
                    "the source has no such table, or the role may not use its schema",
                    f"{AGAIN}, as a role that may read it",
                )
            else:
                yield from self._of_guess(table)
                yield from self._of_table(table, there)
        yield from self._of_names()
        yield from self._of_paths()

    def of_role(self, source: Connection) -> Iterator[Refusal]:
        """Yield the missing rights of a connection's role; a plan may be made as another one."""
        yield from ending_copies(source, "the source")
        yield from unable_to_replicate(source, "the source")
        if not source.scalar(_MAY_CREATE):
            yield Refusal(
                reason="the role may create neither publications nor schemas at the source",
                remedy="grant create on database … to …",
            )
        found = [self.there[table.name] for table in self._copied if table.name in self.there]
        foreign = [table for table in found if not table.is_own]
        if foreign:
            more = f" and {len(foreign) - 1:,} more" if len(foreign) > 1 else ""
            of_parts = " and of its partitions" if foreign[0].kind == "p" else ""
            yield Refusal(
                reason=f"the role is not an owner of {foreign[0].name}{of_parts}{more}",
                remedy="Use the owner's or a superuser's URL.",
            )
        for table in found:
            if table.hides_rows:
                yield Refusal(
                    reason=f"row security of {table.name} hides rows from the role: they would stay behind",
                    remedy=f"alter table {table.name} no force row level security; or use a role with"
                    " BYPASSRLS",
                )

    @property
    def _copied(self) -> Iterator[TablePlan]:
        return (table for table in self.tables if table.kind is not Kind.LOOSE)

    def _of_server(self) -> Iterator[Finding]:
        """Require a primary of no cluster, with room for the relay to follow it."""
        server, where = self.server, "the source"
        if server.is_of_cluster:
            yield blocks(
                where,
                "it belongs to a cluster of shardids already, as a node or its catalog",
                "Give the database of the application.",
            )
        if server.has_barrier:
            yield blocks(
                where,
                "it has a schema shardids_adopt: it was adopted, or is being adopted",
                "If no cluster needs it any more: drop schema shardids_adopt cascade",
            )
        if server.is_standby:
            yield blocks(
                where,
                "it is a standby: nothing can be published there",
                "Give the URL of the primary; or wait until the server is promoted: select pg_promote()",
            )
        if server.encoding != "UTF8":
            yield blocks(
                where,
                f"its encoding is {server.encoding}: text keys are hashed as UTF-8",
                "Restore it into a database of encoding UTF8.",
            )
        if server.wal_level != "logical":
            yield blocks(
                "wal_level",
                f"it is {server.wal_level}: changes can't be followed",
                "ALTER SYSTEM SET wal_level = 'logical'; and restart the source",
            )
        for name, most, used in (
            ("max_replication_slots", server.slots, server.used_slots),
            ("max_wal_senders", server.senders, server.used_senders),
        ):
            if used + _WORKERS > most:
                yield blocks(
                    name,
                    f"{max(0, most - used)} of {most} are free; the relay takes {_WORKERS}",
                    f"ALTER SYSTEM SET {name} = {used + _WORKERS}; and restart the source",
                )

    def _of_guess(self, table: TablePlan) -> Iterator[Finding]:
        if table.is_guess:
            yield find(
                Severity.TO_CONFIRM,
                table.name,
                "it finds its key by a guess from names"
                + (f"; {said}" if (said := self.guessed.get(table.name)) else ""),
                f"If it is right, take is_guess out of the plan's file; else --key or --loose {table.name}",
            )

    def _of_table(self, table: TablePlan, there: Definition) -> Iterator[Finding]:
        """Require a table whose rows and changes logical replication sends, all of them."""
        name = table.name
        if there.kind not in ("r", "p"):
            yield blocks(
                name,
                f"it is a {_KINDS.get(there.kind, 'relation of another kind')}: its rows can't be published",
                f"Leave it: --loose {name}; and create it on the nodes, if they need it.",
            )
            return
        if there.has_foreign_parts:
            yield blocks(
                name,
                "a partition of it is a foreign table, and can't be published",
                f"ALTER TABLE {name} DETACH PARTITION …; or leave it: --loose {name}",
            )
        if there.persistence != "p":
            yield blocks(
                name,
                "it is unlogged, or a partition of it is, and can't be published",
                f"ALTER TABLE {name} SET LOGGED; or leave it: --loose {name}",
            )
        if there.is_inherited:
            yield blocks(
                name,
                "it inherits from a table or is inherited by one: their rows are read together, and would be"
                " copied apart",
                f"Adopt partitioned tables by their root; else ALTER TABLE … NO INHERIT …, or --loose {name}",
            )
        if there.schema in _RESERVED_SCHEMAS:
            yield blocks(name, f"schema {there.schema} is shardids' own", "Rename it at the source.")
        if there.table in _RESERVED:
            yield blocks(
                name,
                "a shard has a table or sequence of this name already",
                f"Rename it, or leave it: --loose {name}",
            )
        for subscription in there.subscriptions:
            yield blocks(
                name,
                f"subscription {subscription} writes to it, past the barrier that stops writes at the switch",
                f"DROP SUBSCRIPTION {subscription}; or leave it: --loose {name}",
            )
        if ROUTE in there.columns:
            yield blocks(name, f"it has a column {ROUTE}, which an adoption adds", "Rename it at the source.")
        yield from self._of_identity(table, there)
        if table.kind in (Kind.ROOT, Kind.DIRECT):
            yield from self._of_key(table, there)

    def _of_identity(self, table: TablePlan, there: Definition) -> Iterator[Finding]:
        """Require a key that identifies changed rows, and that the source goes on changing rows."""
        name = table.name
        default = f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;" + (
            " likewise its partitions" if there.kind == "p" else ""
        )
        if not identity_of(there):
            yield blocks(name, _why_not_found(there), default if there.primary_key else _new_key(there))
        elif any(there.columns[one].is_generated for one in identity_of(there)):
            yield blocks(
                name,
                "a changed row is found by a generated column, which is not replicated",
                f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX …, one without it",
            )
        elif (
            there.has_full_identity
            and len(there.stored) < len(there.columns)
            and self.server.version >= FULL_NEEDS_ALL * 10000
        ):
            yield blocks(
                name,
                "it has replica identity FULL and a generated column: once it is published, updates fail",
                default if there.primary_key else f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX …;",
            )

    def _of_key(self, table: TablePlan, there: Definition) -> Iterator[Finding]:
        """Require a key that is replicated, and hashed like the root's."""
        key = there.columns.get(table.key or "")
        if key is None:
            yield blocks(table.name, f"it has no column {table.key}, which is to hold the key", AGAIN)
            return
        name = column_name(table.name, key.name)
        root = self._root_key
        if key.is_generated:
            yield blocks(
                name,
                "a generated column is not replicated: the key would be missing",
                f"ALTER TABLE {table.name} ALTER COLUMN {shown_name(key.name)} DROP EXPRESSION;",
            )
        if key.family is None or (root is not None and key.family != root.family):
            collation = "" if key.is_deterministic else ", of a nondeterministic collation,"
            wanted = (root.family if root is not None else None) or " or ".join(KEY_TYPES)
            yield blocks(
                name,
                f"a key of type {key.type}{collation} is not hashed as one of {wanted}",
                f"ALTER TABLE {table.name} ALTER COLUMN {shown_name(key.name)} TYPE …;",
            )
        if not key.not_null and table.unowned is None:
            yield self._unowned(table, key)
        elif table.unowned_shard is not None and table.unowned_shard >= self.shard_count:
            yield blocks(
                name,
                f"rows without a key are to go to shard {table.unowned_shard} of {self.shard_count}",
                f"Name another in the plan's file, or: --unowned {table.name}=SHARD",
            )

    def _unowned(self, table: TablePlan, key: Column) -> Finding:
        """Return the obstacle of a key that may be NULL, without a rule for such rows."""
        name, counted = column_name(table.name, key.name), self.counted.get(table.name)
        reason = "it may be NULL, and a row without key has no shard" + (f"; {counted}" if counted else "")
        rules = (
            f"Say where such rows go: --unowned {table.name}={STAYS}, to leave them where they are, or"
            f" --unowned {table.name}=SHARD"
        )
        if key.set_null_by is not None:
            return blocks(
                name,
                f'{reason}; foreign key "{key.set_null_by}" sets it NULL when the row that it refers to is'
                " deleted",
                f"{rules}. Not SET NOT NULL: such deletes would fail.",
            )
        return blocks(name, reason, f"{rules}. Or, if none is to be: {never_null(table.name, key.name)}")

    @property
    def _root_key(self) -> Column | None:
        for table in self.tables:
            if table.kind is Kind.ROOT and table.name in self.there:
                return self.there[table.name].columns.get(table.key or "")
        return None

    def _of_names(self) -> Iterator[Finding]:
        """Require one table of a name: all come into one schema a shard."""
        by_name = defaultdict(list)
        for table in self.tables:
            if table.kind.is_split and table.name in self.there:
                by_name[self.there[table.name].table].append(table.name)
        for name, tables in by_name.items():
            if len(tables) > 1:
                yield blocks(
                    ", ".join(sorted(tables)),
                    f"a shard is one schema, and can't have two tables {shown_name(name)}",
                    "Rename all but one, or leave it: --loose.",
                )

    def _of_paths(self) -> Iterator[Finding]:
        """Require paths that the relay follows: one hop, then the path of the table that it leads to."""
        by_name = {table.name: table for table in self.tables}
        for table in self.tables:
            if table.kind is not Kind.DERIVED:
                continue
            parent = by_name.get(table.path[0].table) if table.path else None
            if parent is None or not parent.kind.is_split:
                yield blocks(table.name, "its path leads to no table that is split", AGAIN)
            elif parent.path != table.path[1:] or parent.key != table.key:
                yield blocks(table.name, f"its path is not one hop and then that of {parent.name}", AGAIN)
            elif parent.unowned == STAYS:
                yield blocks(
                    table.name,
                    f"its path leads by {parent.name}, whose rows without a key stay at the source",
                    f"Let a shard take them: --unowned {parent.name}=SHARD",
                )
            elif table.name in self.there and parent.name in self.there:
                yield from self._of_hop(table, self.there[table.name], self.there[parent.name])

    def _of_hop(self, table: TablePlan, there: Definition, parent: Definition) -> Iterator[Finding]:
        """Require columns that the relay compares as the source does."""
        hop = table.path[0]
        for own, theirs in zip(hop.columns, hop.referenced, strict=True):
            unfit = [*_can_refer(there, own), *_can_refer(parent, theirs)]
            yield from unfit
            if not unfit and _alike(there.columns[own]) != _alike(parent.columns[theirs]):
                yield blocks(
                    column_name(table.name, own),
                    f"it and {column_name(hop.table, theirs)} are of types that a relay does not compare",
                    "Give both columns one type.",
                )


_KINDS: Final = {"f": "foreign table", "v": "view", "m": "materialized view"}
REFERRED: Final = frozenset({"smallint", "integer", "bigint", "uuid", "date", "text", "character varying"})
"""Types of columns that lead from a row to the one with its key."""
_ALIKE: Final = {"smallint": "integer", "bigint": "integer", "character varying": "text"}
"""Types of columns that can refer to one of another type."""


def never_null(table: str, *columns: str) -> str:
    """Return statements that make columns NOT NULL; none stops writers for long."""
    names = [shown_name(column) for column in columns]
    met = " AND ".join(f"{name} IS NOT NULL" for name in names)
    changes = ", ".join(f"ALTER COLUMN {name} SET NOT NULL" for name in names)
    return (
        f"ALTER TABLE {table} ADD CONSTRAINT shardids_key CHECK ({met}) NOT VALID;"
        f" ALTER TABLE {table} VALIDATE CONSTRAINT shardids_key;"
        f" ALTER TABLE {table} {changes}, DROP CONSTRAINT shardids_key;"
    )


def identity_of(table: Definition) -> Sequence[str]:
    """Return the columns that identify an updated or deleted row on the relay; none: the whole row."""
    return table.primary_key if table.identity is None else table.identity


def _why_not_found(table: Definition) -> str:
    """Return why no columns identify a changed row."""
    if table.has_deferrable_key:
        why = "its primary key is deferrable, which replication can't use"
    elif table.kind == "p":
        why = "it and its partitions have no key in common that replication finds a changed row by"
    elif table.identity is None:
        return "it has no key to find a changed row by"
    else:
        why = "it has no key"
    if table.identity is None:
        return why
    otherwise = ", or the relay to apply that" if table.kind == "p" else ""
    return f"{why}: as soon as it is published, the source refuses to update and delete its rows{otherwise}"


def _new_key(table: Definition) -> str:
    """Return what gives a table a key that identifies changed rows."""
    name, loose = table.name, f"or leave it: --loose {table.name}"
    use = f"CREATE UNIQUE INDEX … ON {name} (…); ALTER TABLE {name} REPLICA IDENTITY USING INDEX …;"
    if table.kind == "p":
        return f"{use} likewise its partitions, each with its part of the index; {loose}"
    return (
        f"{use} {loose}" if table.has_deferrable_key else f"ALTER TABLE {name} ADD PRIMARY KEY (…); {loose}"
    )


def base_type(type_name: str) -> str:
    """Return a type without its length: ``numeric`` for ``numeric(10,2)``."""
    head, _, rest = type_name.partition("(")
    return head + rest.partition(")")[2]


def _alike(column: Column) -> str:
    return _ALIKE.get(base_type(column.type), column.type)


def _can_refer(table: Definition, name: str) -> Iterator[Finding]:
    subject, column = column_name(table.name, name), table.columns.get(name)
    if column is None:
        yield blocks(subject, "it is on the way to a key, and does not exist", AGAIN)
    elif column.labels is not None or base_type(column.type) not in REFERRED or column.is_generated:
        yield blocks(
            subject,
            f"it is on the way to a key, and {column.type}{', generated' if column.is_generated else ''}",
            f"Such a column is a stored one, {', '.join(sorted(REFERRED))}; or give the table a column with"
            " the key.",
        )
    elif not column.is_deterministic:
        yield blocks(
            subject,
            "it is on the way to a key, and of a nondeterministic collation",
            "Give the table a column with the key.",
        )
