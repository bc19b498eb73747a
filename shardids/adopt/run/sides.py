"""The source of an adoption, its relay and the nodes that take it in: connections, names, the shard of a row.

The shard is an expression that PostgreSQL takes as a row filter on the relay, and as a partition key on the
nodes. Both allow immutable functions of PostgreSQL's own only, so
:func:`~shardids.catalog.topology.key_hash` is written with those: no cast to text, and no ``convert_to``,
which are not immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from psycopg import sql
from sqlalchemy import text
from sqlalchemy.engine import URL

from shardids.adopt.plan.document import Kind, Plan, TablePlan
from shardids.adopt.plan.obstacles import ROUTE
from shardids.adopt.recovery import await_recovered
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.old_ids import lowest_new_id
from shardids.catalog.rows import Catalog, Description
from shardids.catalog.topology import schema_name
from shardids.errors import AdoptionFailed, BadArgument, StatementFailed
from shardids.ids.layout import Layout
from shardids.pg.connections import keep_commits, keep_settings
from shardids.pg.definitions import KEY_TYPES, Column, Definition, read_definitions
from shardids.pg.locks import unread
from shardids.pg.queries import quoted
from shardids.pg.urls import parse_url, with_password_of
from shardids.replication.sides import SESSION, Side, move_nodes

_BYTES: Final = {
    "integer": "decode('i:' || textin(int8out({key})), 'escape')",
    "text": r"decode('s:' || replace({key}, '\', '\\'), 'escape')",
    "uuid": r"'\x753a'::bytea || uuid_send({key})",
}
"""The bytes that are hashed, by the family of the key's type; text has to be in UTF-8 on the server."""


def family_of(key: Column) -> str:
    """Return how a key is hashed: ``integer``, ``text`` or ``uuid``.

    Raises:
        BadArgument: it can't be.
    """
    if key.family is None:
        raise BadArgument(
            f"a key of type {key.type} has no shard", hint=f"It is one of {', '.join(KEY_TYPES)}."
        )
    return key.family


def hashed_shard(column: str, family: str, shard_count: int, *, of: str = "") -> str:
    """Return an expression for the shard of a key: what ``shard_for_key`` returns for it.

    ``of``: the alias of the column's table, with a dot.
    """
    key = of + sql.Identifier(column).as_string()
    digest = f"sha256({_BYTES[family].format(key=key)})"
    # The hash is the digest's first eight bytes. Of a power of two the last of them tell.
    is_power = shard_count & (shard_count - 1) == 0
    needed = max(1, ((shard_count - 1).bit_length() + 7) // 8) if is_power else 8
    expression = ""
    for place in range(8 - needed, 8):
        byte = f"get_byte({digest}, {place})"
        expression = f"mod({f'{expression} * 256 + ' if expression else ''}{byte}, {shard_count})"
    return expression


def staged_shard(
    column: str, family: str, shard_count: int, layout: Layout, lowest_new_id: int, *, of: str = ""
) -> str:
    """Return an expression for the shard of a row, old or new: a key that a shard has issued names it."""
    hashed = hashed_shard(column, family, shard_count, of=of)
    if family != "integer":
        return hashed
    key = of + sql.Identifier(column).as_string()
    mask = (1 << layout.shard_bits) - 1
    issued = f"int4(({key}::bigint >> {layout.sequence_bits}) & {mask})"
    return f"case when {key} < {lowest_new_id} then {hashed} else {issued} end"


def _or_unowned(table: TablePlan, shard: str) -> str:
    """Return an expression for a row's shard, also if its key is NULL."""
    return shard if table.unowned_shard is None else f"coalesce({shard}, {table.unowned_shard})"


def row_filter(shard: str, shards: Iterable[int]) -> str:
    """Return a condition that rows of these shards meet; ``shard`` is an expression for a row's shard."""
    return f"{shard} in ({', '.join(map(str, shards))})"


def _relay_name(name: str) -> str:
    return f"{name}_relay"


_CONNECTIONS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Taker:
    """A node that takes rows in, those of its shards.

    ``name`` is that of its subscription, and of the publication and the slot that feed it.
    """

    side: Side
    shards: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """A database that follows the source, and that the nodes follow.

    ``name`` is that of its subscription, and of the publication and the slot on the source.
    """

    side: Side
    name: str


Follower = Taker | Relay
"""What subscribes to a publication; both have its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The source and the nodes of an adoption.

    Attributes:
        source: the database that is adopted.
        reading: the same, as the role that reads its rows.
        via: the relay; ``None`` where the adoption has nothing on it, before its run and after its switch.
        takers: the nodes with shards, by name.
        cluster: the cluster's fixed properties.
        lowest_new_id: IDs below it are old: the cluster has not issued them.
        plan: what becomes of each table.
        has_returned: an earlier adoption of the source has come back: it may have IDs of the cluster.
        name: of the sessions; other names begin with it.
    """

    source: Side
    reading: Side
    via: Relay | None = None
    takers: tuple[Taker, ...]
    cluster: Description
    lowest_new_id: int
    plan: Plan
    has_returned: bool
    name: str

    @property
    def relay(self) -> Relay:
        """Returns the relay, where the work needs it.

        Raises:
            AdoptionFailed: the adoption has nothing on it.
        """
        if self.via is None:
            raise AdoptionFailed(
                f"the adoption of {self.plan.source} has nothing on its relay any more",
                hint="For the next step: shardids adopt status",
            )
        return self.via

    @property
    def relay_name(self) -> str:
        """Returns the name of the relay's subscription, also where the adoption has left the relay."""
        return _relay_name(self.name)

    @property
    def all(self) -> tuple[Side, ...]:
        """Returns all databases, each once."""
        relays = () if self.via is None else (self.via.side,)
        return (self.source, *relays, *(taker.side for taker in self.takers))

    @property
    def followers(self) -> tuple[Follower, ...]:
        """Returns all that follow another database: the relay, and the nodes."""
        return (self.relay, *self.takers)

    @property
    def split(self) -> tuple[TablePlan, ...]:
        """Returns the tables whose rows are split."""
        return tuple(table for table in self.plan.tables if table.kind.is_split)

    @property
    def reference(self) -> tuple[TablePlan, ...]:
        """Returns the tables that every node gets with all rows."""
        return tuple(table for table in self.plan.tables if table.kind is Kind.REFERENCE)

    @property
    def derived(self) -> tuple[TablePlan, ...]:
        """Returns the tables whose rows find their key in another table, targets first."""
        found = [table for table in self.plan.tables if table.kind is Kind.DERIVED]
        return tuple(sorted(found, key=lambda table: len(table.path)))

    @property
    def names(self) -> list[str]:
        """Returns the names of all tables that are taken in."""
        return [table.name for table in (*self.split, *self.reference)]

    def definitions(self) -> dict[str, Definition]:
        """Read the present tables of the source, by name."""
        with self.source.engine.connect() as connection:
            return read_definitions(connection, self.names)

    def in_shard(self, table: Definition, shard: int) -> str:
        """Return the name, in SQL, of a table in a shard."""
        return quoted(schema_name(self.cluster.schema_prefix, shard), table.table)

    def hashed_shard(self, table: TablePlan, definition: Definition) -> str:
        """Return an expression for the shard of a row where the nodes fetch it."""
        if table.kind is Kind.DERIVED:
            return ROUTE
        return self.shard_of_key(table, definition)

    def shard_of_key(self, table: TablePlan, definition: Definition, *, of: str = "") -> str:
        """Return an expression for the shard of a row at the source by its key; ``of``: an alias and a dot.

        It is NULL for rows that stay there, since they have no key.
        """
        return _or_unowned(table, self._hashed_key(definition.columns[table.key or ""], of))

    def _hashed_key(self, key: Column, of: str) -> str:
        family, count = family_of(key), self.cluster.shard_count
        if self.has_returned:
            return staged_shard(key.name, family, count, self.cluster.layout, self.lowest_new_id, of=of)
        return hashed_shard(key.name, family, count, of=of)

    def staged_shard(self, table: TablePlan, definition: Definition) -> str:
        """Return an expression for the shard of a row on a node, which may have come after the switch."""
        if table.kind is Kind.DERIVED:
            return ROUTE
        key = table.key or ""
        family = family_of(definition.columns[key])
        count, layout = self.cluster.shard_count, self.cluster.layout
        return _or_unowned(table, staged_shard(key, family, count, layout, self.lowest_new_id))

    def row_filter(self, table: TablePlan, definition: Definition, taker: Taker) -> str:
        """Return the condition that the rows of a node meet where it fetches them."""
        return row_filter(self.hashed_shard(table, definition), taker.shards)

    def await_source(self) -> None:
        """Wait while the source recovers from a crash."""
        await_recovered(self.source.engine)

    def end_sessions(self, *, at_source: bool = True, dry_run: bool = False) -> None:
        """End the sessions that a former process may have left running; a dry run only connects."""
        if at_source:
            self.await_source()
        for side in self.all:
            if at_source or side is not self.source:
                side.end_sessions(self.name, dry_run=dry_run)


_HAS_RETURNED: Final = text("""
    select exists (select from shardids_catalog.adoption where outcome = 'returned' and source = :source)""")


@contextmanager
def opened_sides(
    catalog: Catalog,
    plan: Plan,
    source: URL,
    *,
    via: URL | None = None,
    reader: str | None = None,
    name: str,
) -> Iterator[Sides]:
    """Yield the source, the relay ``via`` and the nodes, not connected yet. Sessions are called ``name``.

    ``reader``: the source's URL with a role that reads its rows, if not that of ``source``.
    """
    description, placement = catalog.describe(), catalog.placement()
    with catalog.engine.connect() as connection:
        made_at = connection.scalar(text("select created_at from shardids_catalog.cluster"))
        has_returned = connection.scalar(_HAS_RETURNED, {"source": plan.source})
    with ExitStack() as kept:
        nodes = kept.enter_context(move_nodes(placement, catalog.url, name=name))
        relay = None
        if via is not None:
            relay = Relay(side=kept.enter_context(_opened(via, "relay", name)), name=_relay_name(name))
        original = kept.enter_context(_opened(source, "source", name))
        reading = original
        if reader is not None:
            reading = kept.enter_context(_opened(parse_url(reader), "source", name))
        sides = Sides(
            source=original,
            reading=reading,
            via=relay,
            takers=tuple(
                Taker(
                    side=Side(name=node, engine=nodes[node]),
                    shards=tuple(shards),
                    # A node's name may be too long for a slot, or have letters that a slot can't.
                    name=f"{name}_{number}",
                )
                for number, (node, shards) in enumerate(placement.by_node().items())
            ),
            cluster=description,
            lowest_new_id=lowest_new_id(description.layout, made_at),
            plan=plan,
            has_returned=bool(has_returned),
            name=name,
        )
        try:
            yield sides
        except StatementFailed as error:
            names = [
                (
                    f"the {side.name}" if side.name in ("source", "relay") else f'node "{side.name}"',
                    side.engine,
                )
                for side in sides.all
            ]
            raise unread(error, names) from error


@contextmanager
def _opened(url: URL, what: str, name: str) -> Iterator[Side]:
    engine = administrative_engine(url, what=f"the {what}", application_name=name, connections=_CONNECTIONS)
    keep_commits(engine)
    keep_settings(engine, SESSION)
    try:
        yield Side(name=what, engine=engine)
    finally:
        engine.dispose()


def relay_url(catalog: Catalog, plan: Plan, given: str | None) -> URL:
    """Return the URL to reach the plan's relay by, as :func:`source_url` does.

    Raises:
        BadArgument: neither the plan nor the caller names a relay.
    """
    if plan.via is None and given is None:
        raise BadArgument(
            "which relay? It is an empty database of PostgreSQL 15 or later with room for all rows",
            hint="--via, and its URL; a database on a server of one of the nodes will do.",
        )
    return source_url(catalog, plan.via or "", given)


def source_url(catalog: Catalog, stored: str, given: str | None) -> URL:
    """Return the URL to reach the source by: the given one, or the plan's with the catalog's password."""
    return parse_url(given) if given else with_password_of(parse_url(stored), catalog.url)
