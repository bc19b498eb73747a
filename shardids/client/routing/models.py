"""The attributes of mapped classes that determine a row's shard: IDs, the sharding key, foreign keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import (
    BIGINT,
    INTEGER,
    TEXT,
    VARCHAR,
    BigInteger,
    BindParameter,
    ClauseElement,
    Column,
    DefaultClause,
    Enum,
    Integer,
    String,
    Table,
    Text,
    TypeDecorator,
    Uuid,
    inspect,
)
from sqlalchemy.orm import InstanceState, Mapper, RelationshipProperty, Session
from sqlalchemy.types import TypeEngine

from shardids.catalog.keys.known import KnownHomes
from shardids.errors import BadArgument, UnknownId, UnsupportedKey
from shardids.ids.layout import Layout
from shardids.models.columns import REGION_OF_KEY, SHARDING_KEY, RegionOfKey, is_reference, next_id
from shardids.models.lookups import Lookup
from shardids.models.types import DIALECT, innermost, kind_of, variant

_HASHED = (int, str, bytes, UUID)


def kind_of_key(type_: TypeEngine[Any], what: str) -> type:
    """Return the kind of a sharding key's values in the database: ``int``, ``str``, ``bytes`` or ``UUID``.

    Raises:
        UnsupportedKey: values of this type can be equal and differ as text, or have no stable hash.
    """
    kind = kind_of(type_)
    if variant(type_).bind_expression(BindParameter("key", type_=type_)) is not None:
        # An SQL expression around the parameter makes in the database what is not hashed here.
        kind = None
    if kind is not None and kind in _HASHED:
        return kind
    raise UnsupportedKey(
        f"{what} of type {innermost(type_)!r} can't be a sharding key:"
        " equal values of it can have different hashes",
        hint="Use an integer, text of a deterministic collation, bytes or a UUID; for text in any case, a"
        " type that stores it in lower case.",
    )


def stored_value(type_: TypeEngine[Any], value: Any, kind: type | None) -> Any:
    """Return a value as its column's type converts it for the database.

    Raises:
        BadArgument: a value of another kind than the column's: PostgreSQL would turn it into one.
    """
    type_ = variant(type_)
    while isinstance(type_, TypeDecorator):
        if type(type_).process_bind_param is not TypeDecorator.process_bind_param:
            value = type_.process_bind_param(value, DIALECT)
        type_ = variant(type_.load_dialect_impl(DIALECT))
    if isinstance(type_, Enum):
        process = type_.bind_processor(DIALECT)  # type: ignore[no-untyped-call]  # SQLAlchemy's
        value = process(value) if process is not None else value
    elif isinstance(type_, Uuid) and isinstance(value, str):
        try:
            value = UUID(value)
        except ValueError:
            raise BadArgument(f"{value!r} is not a UUID") from None
    hashable = isinstance(value, int | str | bytes | UUID) and not isinstance(value, bool)
    if kind is not None and hashable and not isinstance(value, kind):
        raise BadArgument(f"a sharding key of this column is {_named(kind)}, not {_named(type(value))}")
    length = getattr(type_, "length", None)
    if isinstance(type_, String) and isinstance(value, str) and length is not None and len(value) > length:
        # PostgreSQL cuts spaces off.
        raise BadArgument(f"a sharding key of this column has at most {length} characters")
    return value


def claimed_value(lookup: Lookup, given: Any, type_: TypeEngine[Any] | None = None) -> Any:
    """Return a value of a look-up key as the database stores it; ``type_`` is its own, if not the column's.

    Raises:
        BadArgument: it is not of the column's kind, or only the database knows it.
    """
    if isinstance(given, ClauseElement) or hasattr(given, "__clause_element__"):
        raise BadArgument(
            f"look-up key {lookup} is set to an SQL expression or a default, whose value can't be claimed",
            hint="Give the value itself.",
        )
    value = stored_value(lookup.type_ if type_ is None else type_, given, None)
    if type(value) is not lookup.kind:
        raise BadArgument(f"{lookup} takes {lookup.kind.__name__}, and {given!r} is stored as {value!r}")
    return value


def _named(kind: type) -> str:
    return "text" if kind is str else kind.__name__


def default_key(column: Column[Any]) -> Any:
    """Return a new value of a sharding key's default in Python; ``None`` if it has none.

    Raises:
        BadArgument: the default needs the statement that it is for.
    """
    default = column.default
    if default is None or not (default.is_scalar or default.is_callable):
        return None
    if default.is_scalar:
        return default.arg  # type: ignore[attr-defined]  # a scalar default's value
    try:
        return default.arg(None)  # type: ignore[attr-defined]  # SQLAlchemy wraps it to take a context
    except AttributeError as error:
        raise BadArgument(
            f"the default of the sharding key {column} needs the context of a statement: {error}",
            hint="Set the key before the object is flushed.",
        ) from error


Key = int | str | bytes | UUID
"""A value of a sharding key."""


class OldIds(Protocol):
    """A finder of the shards of IDs that were issued before the cluster."""

    def has(self, id_: int) -> bool:
        """Return whether an ID is old."""

    def shards_of(self, ids: Iterable[int], table: str | None) -> Mapping[int, int]:
        """Return the shards of a table's old IDs, without those that no row had."""


class MovedIds(Protocol):
    """A finder of the shards of rows that have left the one they were born in."""

    def learn(self, ids: Iterable[int], layout: Layout) -> None:
        """Ask for the shards of IDs at once, as far as a server has to be asked for them."""


class ShardFinder(Protocol):
    """A finder of the shards of IDs and keys: the cluster."""

    @property
    def layout(self) -> Layout:
        """The layout of IDs."""

    @property
    def shard_count(self) -> int:
        """The number of shards; they are numbered from 0."""

    @property
    def old_ids(self) -> OldIds | None:
        """The finder of the shards of old IDs; ``None`` if no table was adopted."""

    def shard_of(self, id_: int, *, of: str | None = None) -> int:
        """Return the shard of the row that has an ID; ``of`` is its table."""

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        """Return the shard of a sharding key, among those of its region."""

    @property
    def homes(self) -> KnownHomes:
        """The directory of keys."""

    @property
    def moved_ids(self) -> MovedIds | None:
        """The finder of the shards of rows that have left the one they were born in."""


Claimed = Mapping[Any, int]
"""The shard of the row that has each value of a look-up key."""


class Claimant(Protocol):
    """The claims on values of look-up keys, which also find the shards of claimed values: the cluster."""

    def claim(self, lookup: Lookup, rows: Claimed) -> None:
        """Claim values for rows that were written and not committed. Raises IntegrityError if it can't."""

    def shards_of(self, lookup: Lookup, values: Iterable[Any]) -> Claimed | None:
        """Return the shards whose rows can have the values; ``None`` if they are not known."""


_PLAIN = {BigInteger, Integer}
"""Types of IDs that do nothing to a value."""
_PLAIN_KEYS = {*_PLAIN, BIGINT, INTEGER, TEXT, Text, String, VARCHAR}
"""Types of sharding keys that do nothing to a value, if they have neither a length nor a variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tells:
    """The way from a column's value to the shard of its row.

    Attributes:
        kind: the kind of its sharding keys in the database; ``None`` if its values are IDs.
        type_: the column's type.
        table: the table whose IDs its values are.
        region: returns the region of a sharding key; ``None`` if the keys are spread over all shards.
        is_plain: whether the column's type stores values of the kind as they are.
    """

    kind: type | None
    type_: TypeEngine[Any]
    table: str | None = None
    region: RegionOfKey | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        has_limits = getattr(self.type_, "length", None) is not None or variant(self.type_) is not self.type_
        object.__setattr__(self, "is_plain", type(self.type_) in _PLAIN_KEYS and not has_limits)

    def alike(self, other: Tells, *, by_table: bool) -> bool:
        """Return whether equal values of both columns determine the same shard.

        Two tables never have the same new ID, but may have the same old one: ``by_table`` says so.
        """
        return (
            self.kind is other.kind
            and self.region is other.region
            and (not by_table or self.table == other.table)
        )

    def shard(self, value: Any, finder: ShardFinder, type_: TypeEngine[Any] | None = None) -> int:
        """Return the shard that a value tells; ``type_`` is that of the parameter, if not the column's.

        Raises:
            BadArgument: a value that is not of the column's kind, or a key of a region that there is not.
            UnknownId: an ID of no shard of this cluster, or an old one that no row had.
        """
        is_stored = type_ is None and self.is_plain and type(value) is self.kind
        type_ = self.type_ if type_ is None else type_
        if type(value) is int and type(type_) in _PLAIN and self.kind is None:
            return finder.shard_of(value, of=self.table)
        stored = value if is_stored else stored_value(type_, value, self.kind)
        if self.kind is None:
            return finder.shard_of(stored, of=self.table)
        return finder.shard_for(stored, region=self.region(stored) if self.region else None)

    def shards(
        self, values: Iterable[Any], finder: ShardFinder, type_: TypeEngine[Any] | None = None
    ) -> list[tuple[Any, int]]:
        """Return values with their shards, without IDs that no row can have; it asks for all at once.

        Raises:
            BadArgument: as :meth:`shard` does.
        """
        old = finder.old_ids if self.kind is None else None
        found: list[tuple[Any, int]] = []
        if old is not None:
            stored = [(value, stored_value(type_ or self.type_, value, None)) for value in values]
            shards = old.shards_of([id_ for _, id_ in stored if old.has(id_)], self.table)
            found = [(value, shards[id_]) for value, id_ in stored if id_ in shards]
            values = [value for value, id_ in stored if id_ not in shards and not old.has(id_)]
        values = list(values)
        if self.kind in (int, str) and self.region is None and type_ is None and self._is_plain(values):
            return list(zip(values, finder.homes.shards_for(values, finder.shard_count), strict=True))
        if self.kind is None and len(values) > 1 and finder.moved_ids is not None:
            finder.moved_ids.learn((value for value in values if type(value) is int), finder.layout)
        for value in values:
            with suppress(UnknownId):
                found.append((value, self.shard(value, finder, type_)))
        return found

    def _is_plain(self, values: Iterable[Any]) -> bool:
        """Return whether the column's type stores these values as they are."""
        return self.is_plain and {*map(type, values)} == {self.kind}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The attributes and relationships of one mapped class that concern the shard of its rows.

    Attributes:
        name: the class's name.
        telling: attributes whose value determines the shard: IDs, the sharding key, foreign keys to them.
        key: the attribute that is the model's own sharding key, if there is one.
        key_column: its column.
        relatives: relationships over foreign keys: both ends live in one shard.
        streamed: those of them that are never in an object's ``__dict__`` (``write_only``, ``dynamic``).
        of_interest: all attributes that can help to find the shard.
        identity: how each part of the primary key determines the shard, if it does.
        is_reference: whether its table has the same rows on every node.
        stays: whether a row was found to be loaded from one shard, with old IDs or without.
    """

    name: str
    telling: tuple[tuple[str, Tells], ...]
    key: str | None
    key_column: Column[Any] | None
    relatives: tuple[str, ...]
    streamed: tuple[str, ...]
    of_interest: frozenset[str]
    identity: tuple[Tells | None, ...]
    is_reference: bool
    stays: set[bool] = field(default_factory=set)

    @property
    def located(self) -> bool:
        """Whether the primary key is unique over all shards: it determines the shard, or all have the row."""
        return self.is_reference or any(self.identity)

    def shard_of_identity(self, identity: Sequence[Any], finder: ShardFinder) -> int | None:
        """Return the shard of the row with this primary key, or ``None`` if that does not tell.

        Raises:
            BadArgument: an ID of no shard of this cluster.
            UnsupportedKey: a key that has no hash.
        """
        if len(identity) != len(self.identity):
            return None  # Which SQLAlchemy refuses.
        for value, tells in zip(identity, self.identity, strict=True):
            if tells is not None and value is not None:
                return tells.shard(value, finder)
        return None


def mapper_written(statement: Any) -> Mapper[Any] | None:
    """Return the mapped class that an INSERT, UPDATE or DELETE is of; ``None`` if it is of a table."""
    try:
        entity = statement.entity_description.get("entity")
    except KeyError:
        # Of a table, with criteria that name a class: SQLAlchemy takes it for one of the class.
        return None
    mapper = getattr(inspect(entity, raiseerr=False), "mapper", None)
    return mapper if isinstance(mapper, Mapper) else None


def require_located(mapper: Mapper[Any]) -> None:
    """Refuse a model if two of its rows, in different shards, may have the same primary key.

    Raises:
        BadArgument: the primary key does not determine the shard.
    """
    facts = facts_of(mapper)
    if not facts.located:
        raise BadArgument(
            f"the primary key of {facts.name} does not determine the shard of a row: in a session over all"
            " shards, two rows could have the same identity",
            hint="Make primary_key(), the sharding key, or a foreign key to one of them part of the primary"
            " key; or select columns instead of objects, or use cluster.session() on one shard.",
        )


_KNOWN: WeakKeyDictionary[Mapper[Any], ModelFacts] = WeakKeyDictionary()


def facts_of(mapper: Mapper[Any]) -> ModelFacts:
    """Return the facts of a mapped class.

    Raises:
        BadArgument: it has two sharding keys, or rows of shards in a table that is not in each shard.
    """
    facts = _KNOWN.get(mapper)
    if facts is None:
        facts = _KNOWN[mapper] = _read(mapper)
    return facts


def _read(mapper: Mapper[Any]) -> ModelFacts:
    name = mapper.class_.__name__
    keys = [prop.key for prop in mapper.column_attrs if any(map(is_sharding_key, prop.columns))]
    if len(keys) > 1:
        raise BadArgument(
            f"{name} has two sharding keys, {keys[0]} and {keys[1]}",
            hint="A row lives in one shard: mark one column with sharding_key().",
        )
    _refuse_schema(mapper)
    telling = {
        prop.key: tells
        for prop in mapper.column_attrs
        for column in prop.columns
        if (tells := how_it_tells(column)) is not None
    }
    relatives = [prop for prop in mapper.relationships if _follows_foreign_key(prop)]
    return ModelFacts(
        name=name,
        telling=tuple(telling.items()),
        key=keys[0] if keys else None,
        key_column=next(filter(is_sharding_key, mapper.column_attrs[keys[0]].columns)) if keys else None,  # type: ignore[arg-type]  # a Column
        relatives=tuple(prop.key for prop in relatives),
        streamed=tuple(prop.key for prop in relatives if prop.lazy in ("dynamic", "write_only")),
        of_interest=frozenset((*telling, *(prop.key for prop in relatives))),
        identity=tuple(map(how_it_tells, mapper.primary_key)),
        is_reference=is_reference(mapper.local_table),
    )


def _refuse_schema(mapper: Mapper[Any]) -> None:
    """Refuse a table with rows of shards that is not in each shard, but in one schema for all of a node."""
    table = mapper.local_table
    if not isinstance(table, Table) or table.schema is None:
        return
    if any(is_sharding_key(column) or is_filled(column) for column in table.columns):
        raise BadArgument(
            f"the table of {mapper.class_.__name__} is in schema {table.schema}, not in each shard",
            hint="Its rows have IDs or keys of shards: remove schema= from the model and its metadata.",
        )


def refuse_reference_write(statement: Any) -> None:
    """Refuse an INSERT, UPDATE or DELETE of a reference table.

    Raises:
        BadArgument: it is one.
    """
    table: Any = getattr(statement, "table", None)
    if is_reference(table):
        raise _reference_refused(table.name)


def _reference_refused(name: str) -> BadArgument:
    return BadArgument(
        f"a session on shards can't write to reference table {name}",
        hint="Use cluster.reference_session(), which connects to the writer of reference tables.",
    )


def refuse_reference(state: InstanceState[Any], session: Session) -> None:
    """Refuse a row of a reference table that a flush would write.

    Raises:
        BadArgument: it is one.
    """
    if facts_of(state.mapper).is_reference and (
        state.key is None or session.is_modified(state.obj(), include_collections=False)
    ):
        raise _reference_refused(str(state.mapper.local_table.description))


def is_sharding_key(column: object) -> bool:
    """Return whether a column was made by :func:`shardids.sharding_key`."""
    return isinstance(column, Column) and bool(column.info.get(SHARDING_KEY))


def is_filled(column: Column[Any]) -> bool:
    """Return whether the shard fills a column: with the next ID."""
    default = column.server_default
    return isinstance(default, DefaultClause) and isinstance(default.arg, next_id)


def how_it_tells(column: object) -> Tells | None:
    """Return how the values of a table's column determine the shard of their rows.

    A primary key that the shard fills does, a sharding key does, and so does a foreign key that leads to
    either: it can't cross shards, so the row lives in the shard of the row that it refers to.
    """
    if not isinstance(column, Column):
        return None
    table: str | None = None
    for referred in _referred(column):
        if is_sharding_key(referred):
            if table is not None:
                break
            return Tells(
                kind=kind_of_key(column.type, str(column)),
                type_=column.type,
                region=referred.info.get(REGION_OF_KEY),
            )
        if is_filled(referred) and referred.primary_key:
            # An ID that refers to another is the same, as with joined inheritance: the last table issued it.
            table = referred.table.name
    return None if table is None else Tells(kind=None, type_=column.type, table=table)


def _referred(column: Column[Any]) -> Iterator[Column[Any]]:
    """Yield the column, and all that its foreign keys lead to."""
    seen = {column}
    todo = [column]
    while todo:
        here = todo.pop()
        yield here
        new = {key.column for key in here.foreign_keys} - seen
        seen |= new
        todo += new


def _follows_foreign_key(prop: RelationshipProperty[Any]) -> bool:
    pairs = [*prop.synchronize_pairs, *(prop.secondary_synchronize_pairs or ())]
    if is_reference(prop.parent.local_table) or is_reference(prop.mapper.local_table):
        return False
    return not prop.viewonly and any(
        isinstance(here, Column) and isinstance(there, Column) and there.references(here)
        for here, there in pairs
    )
