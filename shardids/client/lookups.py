"""Claims on the values of look-up keys, made before their rows are committed, and searches by them.

A session writes its rows, claims their values here, over separate connections, and then commits. Why no two
rows with one value can both be committed: ``docs/decisions/0035-unique-over-shards.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import BindParameter, Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import operators

from shardids.catalog import lookups
from shardids.catalog.lookups import SQL_TYPES, Stamped, Value, shard_of_claim
from shardids.catalog.topology import Node, RegisteredLookup
from shardids.client.placement import PATIENCE_S, Attempts, FollowedPlacement
from shardids.client.routing.claiming import shown, taken
from shardids.client.routing.models import claimed_value
from shardids.errors import (
    BadArgument,
    ClusterConflict,
    LookupBusy,
    ShardidsError,
    StatementFailed,
    UnknownValue,
)
from shardids.models.lookups import Lookup, lookup_of

T = TypeVar("T")

_LOCK_MS: Final = 100
"""How long writers of a table may queue behind one attempt to wait for those before them."""
_LOCKS: Final = 20
"""How many attempts to make; between two of them the server pauses as long."""
_ROUNDS: Final = 50
"""How often to begin again with values that others claim, take over and give up at the same time."""
_FRESH_S: Final = 1.0
"""How long to wait for the placement that confirms that the asked node owns the shard."""
_LOCK_NOT_AVAILABLE: Final = "55P03"
_TRANSIENT: Final = ("40001", "40P01")
"""Errors that concurrent transactions cause, and that a repetition avoids."""
_ATTEMPTS: Final = 50


class Claims:
    """The claims of a cluster; safe between threads. ``engine_of`` gives a node's engine, in autocommit mode.

    Its connections are others than those of sessions, so that nobody waits for one while holding one.
    ``rows`` reads the rows that values are claimed for: by default the session's role, as it reads others.
    """

    def __init__(
        self,
        followed: FollowedPlacement,
        engine_of: Callable[[Node], Engine],
        *,
        shard_count: int,
        schema_of: Callable[[int], str],
        on_clash: Callable[[Lookup], object] | None = None,
        rows: Rows | None = None,
    ) -> None:
        self._rows = rows or OwnRows(engine_of, schema_of)
        self._followed = followed
        self._on_clash = on_clash
        self._engine_of = engine_of
        self._shard_count = shard_count
        self._schema_of = schema_of

    def claim(self, lookup: Lookup, rows: Mapping[Value, int]) -> None:
        """Claim values for the shards of rows that the caller has written, and not yet committed.

        Raises:
            IntegrityError: another shard has a row with one of the values.
            LookupBusy: whether another shard will have one is not decided yet.
            ClusterConflict: the look-up was not created.
        """
        for value in self._asked(lookup, lambda: list(self._claim(lookup, rows))):
            if self._on_clash is not None:
                self._on_clash(lookup)
            raise taken(lookup, value)

    def claim_committed(self, lookup: Lookup, shard: int, values: Sequence[Value]) -> list[Value]:
        """Claim the values of committed rows of a shard; return those that a row of another shard also has.

        Raises:
            LookupBusy, ClusterConflict: as :meth:`claim` does.
        """
        taken = list(self._claim(lookup, dict.fromkeys(values, shard)))
        return [value for value in taken if value in self._with_rows(lookup, shard, taken)] if taken else []

    def shards_of(self, lookup: Lookup, values: Iterable[Value]) -> Mapping[Value, int] | None:
        """Return the shards whose rows can have the values; ``None`` if they are not known.

        They are not known before all rows that were there have been claimed.
        """
        registered = self._registered(lookup)
        if not registered.is_ready:
            return None
        wanted = list(values)
        return self._asked(
            lookup,
            lambda: {
                v: shard
                for v, (shard, _) in self._find(lookup, registered, wanted).items()
                if self._exists(shard)
            },
        )

    def give_up(self, lookup: Lookup, found: Mapping[Value, Stamped]) -> list[Value]:
        """Delete claims for rows that are not there and won't be, as they were read; return their values.

        Raises:
            LookupBusy: whether a row will be there is not decided yet.
        """
        by_shard: dict[int, list[Value]] = defaultdict(list)
        for value, (shard, _) in found.items():
            by_shard[shard].append(value)
        rows = {
            v
            for shard, values in by_shard.items()
            if self._exists(shard)
            for v in self._with_rows(lookup, shard, values)
        }
        registered, type_ = self._registered(lookup), SQL_TYPES[lookup.kind.__name__]
        given_up: list[Value] = []
        for shard, values in self._by_claims(found.keys() - rows).items():
            statement = lookups.take(self._schema_of(shard), registered.claims, type_)
            gone = self.ask(shard, statement, values, [found[value][1] for value in values], None)
            given_up += [row[0] for row in gone]
        return given_up

    def redirect(self, lookup: Lookup, values: Sequence[Value], source: int, target: int) -> None:
        """Let claims for a shard be for the other one that the rows have gone to. Idempotent.

        The rows are in both shards meanwhile, so that each claim is of a shard with the row.

        Raises:
            LookupBusy: others change the claims all the time.
        """
        registered, left = self._registered(lookup), list(values)
        for _ in range(_ROUNDS):
            found = {
                value: stamped
                for value, stamped in self._find(lookup, registered, left).items()
                if stamped[0] == source
            }
            taken_ = self._take(lookup, registered, dict.fromkeys(found, target), found) if found else set()
            left = [value for value in found if value not in taken_]
            if not left:
                return
        raise LookupBusy(
            f"{lookup}: can't change the claim of {shown(left[0])}: others have changed it {_ROUNDS} times",
            hint="Run it again.",
        )

    def ask(self, shard: int, statement: str, *given: Any) -> list[Any]:
        """Run a statement in its own transaction on the owner of a shard, and return its rows."""
        found: list[Any] = []
        self._at_owners(
            [shard], lambda node, _: found.extend(run_alone(self._engine_of(node), statement, given))
        )
        return found

    def refresh(self, lookup: Lookup) -> bool:
        """Read again whether rows can be looked up; return whether it could."""
        return self._asked(lookup, self._followed.try_refresh)

    def claims_are_elsewhere(self, lookup: Lookup, value: Value) -> bool:
        """Read the placement again; return whether the claim of a value is on another node now."""
        return self._asked(lookup, lambda: self.is_elsewhere(self._by_claims([value])))

    def find(self, lookup: Lookup, values: Sequence[Value]) -> dict[Value, Stamped]:
        """Return the claims of values, whether the look-up is ready or not."""
        return self._find(lookup, self._registered(lookup), values)

    def _asked(self, lookup: Lookup, ask: Callable[[], T]) -> T:
        return self._followed.asked(ask, f"the shard of a value of {lookup} is asked for")

    def _registered(self, lookup: Lookup) -> RegisteredLookup:
        name = (lookup.table, lookup.column)
        found = self._followed.current.lookups.get(name)
        if found is None and self._followed.try_refresh():
            found = self._followed.current.lookups.get(name)
        if found is None:
            raise ClusterConflict(
                f"{lookup} is a look-up key in the model, and the cluster has no such look-up",
                hint=f"To create it: shardids lookup create {lookup}",
            )
        return found

    def _claim(self, lookup: Lookup, rows: Mapping[Value, int]) -> Iterator[Value]:
        """Claim values; yield those that rows of other shards have."""
        registered = self._registered(lookup)
        held = self._claim_free(lookup, registered, rows)
        yield from self._settle(lookup, registered, {v: s for v, s in rows.items() if v not in held})

    def _claim_free(
        self, lookup: Lookup, registered: RegisteredLookup, rows: Mapping[Value, int]
    ) -> set[Value]:
        """Claim values that no other shard has claimed, in one statement per node; return them."""
        type_ = SQL_TYPES[lookup.kind.__name__]
        by_shard = self._by_claims(rows)
        held: set[Value] = set()

        def claim(node: Node, shards: Sequence[int]) -> None:
            statement = lookups.claim_in([self._schema_of(one) for one in shards], registered.claims, type_)
            given = [part for one in shards for part in (by_shard[one], [rows[v] for v in by_shard[one]])]
            held.update(row[0] for row in run_alone(self._engine_of(node), statement, given))

        self._at_owners(by_shard, claim)
        _require_same(lookup, rows, held)
        return held

    def _settle(
        self, lookup: Lookup, registered: RegisteredLookup, rows: Mapping[Value, int]
    ) -> Iterator[Value]:
        """Claim values that other shards had claimed: for rows that are there, or never came, or went.

        All that one shard had claimed are looked for there together. Yields those that have such a row.
        """
        left = dict(rows)
        for _ in range(_ROUNDS):
            if not left:
                return
            # Read before the rows are looked for: whoever claims after this gives a claim another stamp.
            found = self._find(lookup, registered, list(left))
            free = {
                v: s
                for v, s in left.items()
                if v not in found or found[v][0] == s or not self._exists(found[v][0])
            }
            done = self._claim_free(lookup, registered, free) if free else set()
            claimed: dict[int, list[Value]] = defaultdict(list)
            for value in left.keys() - free.keys():
                claimed[found[value][0]].append(value)
            for other, values in sorted(claimed.items()):
                there = self._with_rows(lookup, other, values)
                yield from there
                gone = {value: left[value] for value in values if value not in there}
                done |= there | self._take(lookup, registered, gone, found)
            left = {value: shard for value, shard in left.items() if value not in done}
        if left:
            raise LookupBusy(
                f"{lookup}: can't claim {shown(next(iter(left)))}: other transactions have claimed and"
                f" released it {_ROUNDS} times",
                hint="Run the transaction again.",
            )

    def _take(
        self,
        lookup: Lookup,
        registered: RegisteredLookup,
        gone: Mapping[Value, int],
        found: Mapping[Value, Stamped],
    ) -> set[Value]:
        """Take claims without rows, as they were read; return the values that nobody has claimed since."""
        type_ = SQL_TYPES[lookup.kind.__name__]
        taken_: set[Value] = set()
        for mine, values in self._by_claims(gone).items():
            statement = lookups.take(self._schema_of(mine), registered.claims, type_)
            stamps, shards = [found[v][1] for v in values], [gone[v] for v in values]
            taken_.update(row[0] for row in self.ask(mine, statement, values, stamps, shards))
        return taken_

    def _find(
        self, lookup: Lookup, registered: RegisteredLookup, values: Sequence[Value]
    ) -> dict[Value, Stamped]:
        by_shard = self._by_claims(values)
        found: dict[Value, Stamped] = {}

        def ask(node: Node, shards: Sequence[int]) -> None:
            schemas = [self._schema_of(shard) for shard in shards]
            statement = lookups.find_in(schemas, registered.claims, SQL_TYPES[lookup.kind.__name__])
            given = [by_shard[shard] for shard in shards]
            found.update(
                (row[0], (row[1], row[2])) for row in run_alone(self._engine_of(node), statement, given)
            )

        self._at_owners(by_shard, ask)
        return found

    def _with_rows(self, lookup: Lookup, shard: int, values: Sequence[Value]) -> set[Value]:
        """Return the values that rows of a shard have, when all who had written to the table have ended."""
        there = self._read(lookup, shard, values)
        # Where the shard was before it moved, a row can be that is not any more.
        if there and self.is_elsewhere([shard]):
            there = self._read(lookup, shard, values)
        rest = [value for value in values if value not in there]
        return there | self.after_writers(lookup, shard, rest) if rest else there

    def _read(
        self, lookup: Lookup, shard: int, values: Sequence[Value], lock_ms: int | None = None
    ) -> set[Value]:
        found: set[Value] = set()
        self._at_owners(
            [shard],
            lambda node, _: found.update(
                self._rows.with_values(node, lookup, shard, values, lock_ms=lock_ms)
            ),
        )
        return found

    def is_elsewhere(self, shards: Collection[int]) -> bool:
        """Read the placement again; return whether one of the shards has another node than was known."""
        known = self._followed.current.node_of
        self._followed.try_refresh(_FRESH_S)
        return any(known.get(one) != self._followed.current.node_of.get(one) for one in shards)

    def after_writers(self, lookup: Lookup, shard: int, values: Sequence[Value] = ()) -> set[Value]:
        """Return those of the values that rows of a shard have when all who had written to the table ended.

        Raises:
            LookupBusy: they have not, in 4 s.
        """
        for _ in range(_LOCKS):
            try:
                return self._read(lookup, shard, values, _LOCK_MS)
            except (DBAPIError, StatementFailed) as error:
                if sqlstate_of(error) != _LOCK_NOT_AVAILABLE:
                    raise
                self.ask(shard, f"select pg_catalog.pg_sleep({_LOCK_MS / 1000})")
        claimed = f"shard {shard} has claimed {shown(values[0])}" if values else f"shard {shard}"
        pids = [row[0] for row in self.ask(shard, lookups.in_the_way(self._schema_of(shard), lookup.table))]
        raise LookupBusy(
            f"{lookup}: {claimed}, and transactions that have written to {lookup.table} there, or vacuum or"
            f" alter it, have not ended for {2 * _LOCK_MS * _LOCKS / 1000:g} s (process IDs there:"
            f" {', '.join('prepared' if pid is None else str(pid) for pid in pids) or 'none any more'})",
            hint="Run it again when they have ended. If this transaction itself moves a value between shards:"
            " delete the value in one transaction, and write it in the next.",
        )

    def _exists(self, shard: int) -> bool:
        """Return whether the cluster has such a shard: a claim for another one is free."""
        if self._followed.current.has(shard, self._shard_count):
            return True
        # It may have been made since.
        self._followed.try_refresh(_FRESH_S)
        return self._followed.current.has(shard, self._shard_count)

    def _by_claims(self, values: Iterable[Value]) -> dict[int, list[Value]]:
        by_shard: dict[int, list[Value]] = defaultdict(list)
        for value in values:
            by_shard[shard_of_claim(value, self._shard_count)].append(value)
        return dict(sorted(by_shard.items()))

    def _at_owners(self, shards: Iterable[int], ask: Callable[[Node, Sequence[int]], object]) -> None:
        """Ask each node about those of the shards that it has; of one that has moved, the next owner."""
        todo = list(shards)
        tried: dict[int, Attempts] = {}
        while todo:
            attempts = tried.setdefault(todo[0], Attempts(self._followed, todo[0], PATIENCE_S))
            node = attempts.next_node()
            placement = self._followed.current
            there = [shard for shard in todo if placement.node_of.get(shard) == node.name]
            try:
                ask(node, there or todo[:1])
            except (ShardidsError, DBAPIError) as error:
                attempts.wait(attempts.pause_after(error))
            else:
                todo = [shard for shard in todo if shard not in (there or todo[:1])]


def _require_same(lookup: Lookup, wanted: Collection[Value], held: Iterable[Value]) -> None:
    """Refuse a value that the column changes, as ``varchar(n)`` cuts spaces off the end of a text."""
    for value in held:
        if value not in wanted:
            raise BadArgument(
                f"the column of {lookup} changes the value: it stores {shown(repr(value))}",
                hint="Give the value as the column stores it, without spaces at its end.",
            )


def shard_of_criterion(criterion: Any, claims: Claims) -> int:
    """Return the shard of the row that a criterion on a look-up key finds, ``User.email == "…"``.

    Raises:
        BadArgument: it is another criterion, or the look-up is not ready.
        UnknownValue: no row has the value.
    """
    sides = (getattr(criterion, "left", None), getattr(criterion, "right", None))
    bases = getattr(sides[0], "base_columns", ())
    lookup = lookup_of(next(iter(bases))) if len(bases) == 1 else None
    is_equal = getattr(criterion, "operator", None) is operators.eq
    if lookup is None or not is_equal or not isinstance(sides[1], BindParameter):
        raise BadArgument(
            f"lookup={criterion} does not compare a look-up key with a value",
            hint='Write lookup=User.email == "…", where email is a lookup_key().',
        )
    value = claimed_value(lookup, sides[1].effective_value, sides[1].type)
    found = claims.shards_of(lookup, [value])
    if found is None and claims.refresh(lookup):
        found = claims.shards_of(lookup, [value])
    if found is None:
        raise BadArgument(
            f"look-up {lookup} is not ready: values of some existing rows are not claimed",
            hint=f"To claim them: shardids lookup backfill {lookup}",
        )
    if value not in found and claims.claims_are_elsewhere(lookup, value):
        found = claims.shards_of(lookup, [value]) or {}
    if value not in found:
        raise UnknownValue(f"no row has the {lookup} {shown(value)}")
    return found[value]


def run_alone(
    engine: Engine, statement: str, given: Sequence[Any] = (), *, before: str = ""
) -> Sequence[Any]:
    """Run a statement in its own transaction; repeat it after a conflict with other transactions.

    The engine is in autocommit mode. ``before`` begins a transaction, which is then rolled back.
    """

    def run() -> Sequence[Any]:
        with engine.connect() as connection, _after(connection, before):
            return connection.exec_driver_sql(statement, tuple(given)).all()

    return attempted(run)


def attempted(run: Callable[[], T]) -> T:
    """Run a transaction; one that others made impossible, again."""
    left = _ATTEMPTS
    while True:
        try:
            return run()
        except (DBAPIError, StatementFailed) as error:
            left -= 1
            if not left or sqlstate_of(error) not in _TRANSIENT:
                raise


class Rows(Protocol):
    """A reader of the rows of look-up keys."""

    def with_values(
        self, node: Node, lookup: Lookup, shard: int, values: Sequence[Value], *, lock_ms: int | None = None
    ) -> Sequence[Value]:
        """Return those of the values that rows of a shard have, on its node.

        With ``lock_ms``, when all who had written to the table have ended; it fails with 55P03 if that takes
        longer.
        """


class OwnRows:
    """A reader of rows with the session's role, as for its other statements.

    ``engine_of`` gives a node's engine.
    """

    def __init__(self, engine_of: Callable[[Node], Engine], schema_of: Callable[[int], str]) -> None:
        self._engine_of = engine_of
        self._schema_of = schema_of

    def with_values(
        self, node: Node, lookup: Lookup, shard: int, values: Sequence[Value], *, lock_ms: int | None = None
    ) -> Sequence[Value]:
        """Read them: see :class:`Rows`."""
        schema, type_ = self._schema_of(shard), SQL_TYPES[lookup.kind.__name__]
        before = ""
        if lock_ms is not None:
            before = lookups.wait_for_writers(schema, lookup.table, lookup.column, lock_ms=lock_ms)
        statement = lookups.rows_in(schema, lookup.table, lookup.column, type_)
        found = run_alone(self._engine_of(node), statement, (list(values),), before=before)
        return [row[0] for row in found]


def sqlstate_of(error: DBAPIError | StatementFailed) -> str | None:
    """Return the error code that the server gave."""
    return error.sqlstate if isinstance(error, StatementFailed) else getattr(error.orig, "sqlstate", None)


@contextmanager
def _after(connection: Connection, before: str) -> Iterator[None]:
    if not before:
        yield
        return
    try:
        connection.exec_driver_sql(before)
        yield
    finally:
        if not connection.invalidated:
            connection.exec_driver_sql("rollback")
