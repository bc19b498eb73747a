"""Execution of statements in several shards: SELECT, UPDATE, DELETE in all that are named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Join, Result, TableClause, inspect, select, true, tuple_
from sqlalchemy.orm import LoaderCriteriaOption, ORMExecuteState
from sqlalchemy.sql import visitors

from shardids.catalog.topology import Node, Placement
from shardids.client.routing.aggregates import folded
from shardids.client.routing.criteria import Named, Read, narrowed
from shardids.client.routing.fanout import (
    STAND_IN,
    Asked,
    Capture,
    MergePlan,
    answer,
    compiled,
    plan,
)
from shardids.client.routing.models import facts_of
from shardids.client.routing.nodes import SHARD, NodeSession, everywhere
from shardids.client.routing.query_node import ENGINE, by_views
from shardids.client.routing.sent import kinds_on, part_of, with_parts
from shardids.client.routing.shapes import Check, conjuncts
from shardids.errors import BadArgument, CannotCombine, FanOutRefused

T = TypeVar("T")

_AHEAD: Final = 50
"""How many keys more than are wanted are read at once, in case that others hold rows."""

_MOST_PAGES: Final = 8
"""The most plans that a statement keeps, one per LIMIT and OFFSET."""

_READS: Final[WeakKeyDictionary[Any, dict[tuple[bool, bool], bool]]] = WeakKeyDictionary()
"""For each compiled statement that passed the check: does it read tables?

It was checked with old IDs or without, and with folds or without: values of literals decide whether it folds,
and statements that differ in their values only are compiled once.
"""


class Execution:
    """One execution of a statement that is not a matter of a single shard."""

    _began: Placement | None = None
    """The placement as the statement knew it when it asked its first shard."""

    def __init__(self, context: ORMExecuteState) -> None:
        self.context = context
        self.session: NodeSession = context.session  # type: ignore[assignment]  # it is one
        self._shards = self.session.shards
        self._given: Any = context.parameters

    def result(self, named: Named) -> Result[Any]:
        """Execute the statement in the shards that its criteria name.

        Raises:
            FanOutRefused: the session does not ask these shards with one statement.
            CannotCombine: neither the shards nor the query node can answer a SELECT.
            BadArgument: it can't be sent to several shards.
        """
        context, statement = self.context, self.context.statement
        if not (context.is_select or context.is_update or context.is_delete):
            raise BadArgument(
                f"a {type(statement).__name__} does not name a shard",
                hint='Name it: session.execute(statement, bind_arguments={"shard_id": number})',
            )
        shards = self.asked(named)
        if context.is_select:
            return self._select(statement, named, shards)
        try:
            self.check(statement).change()
        except CannotCombine as refused:
            statement = self._by_keys(statement, refused)
            named = self._named(statement)
            shards = self._all_of(named)
        results = self.in_each(named, shards, lambda shard: self._changed(statement, named, shard))
        return results[0].merge(*results[1:])

    def in_each(self, named: Named, shards: Sequence[int], do: Callable[[int], T]) -> list[T]:
        """Return ``do(shard)`` of each shard; an error after the first fails the transaction.

        Raises:
            RowsUnsettled: rows of a key came to another shard meanwhile.
        """
        # A pool may let a session wait for longer than a move does between its announcement and the switch.
        for node, _ in self._by_node(named, shards):
            self.session.connection_of(node)

        def checked(shard: int) -> T:
            self._require_settled(shards)
            return do(shard)

        return self.session.in_each(shards, checked)

    def _require_settled(self, shards: Sequence[int]) -> None:
        """Require, before each question of one statement, that its answers are of rows in the same places.

        Nothing is sent: moves wait for so long that this process has heard of them.

        Raises:
            RowsUnsettled: rows of a key came to another shard since the first question, or are about to.
        """
        if self._began is not None:
            self._shards.placement.require_settled(shards, since=self._began)

    def asked(self, named: Named) -> Sequence[int]:
        """Return the shards that the statement asks.

        Raises:
            FanOutRefused: the session does not ask these shards with one statement.
        """
        fan_out, count = self.session.fan_out, self._shards.shard_count
        if fan_out == "all" or (fan_out == "named" and named.shards is not None):
            return self._all_of(named)
        mappers = self.context.all_mappers
        examples = [
            f"{one.class_.__name__}.{name} == …" for one in mappers for name, _ in facts_of(one).telling
        ]
        hint = f"Name the rows' owner: {', '.join(examples) or 'criteria on an ID or a sharding key'}"
        if fan_out == "never":
            count = count if named.shards is None else len(named.shards)
            said = f"the statement concerns {count} shards, and this session sends statements to one"
            raise FanOutRefused(said, hint=f'{hint}; or open the session with fan_out="all".')
        parts = visitors.iterate(self.context.statement)  # type: ignore[arg-type]  # it is one that can be read
        tables = (one.name for one in parts if isinstance(one, TableClause))
        models = [one.class_.__name__ for one in mappers] or list(dict.fromkeys(tables))
        raise FanOutRefused(
            f"the statement on {', '.join(models)} names no shard, and this session does not ask all"
            f" {count} of them",
            hint=f'{hint}; or name the shard: bind_arguments={{"shard_id": number}}.',
        )

    def check(self, statement: Any) -> Check:
        """Return the check of a statement that goes to several shards."""
        connection = self.session.node_connection(0)
        by_table = self._shards.old_ids is not None
        return Check(statement, connection.dialect, by_table=by_table, kind_of=kinds_on(connection))

    def _named(self, statement: Any) -> Named:
        return Read(statement, self._given, self._shards).named()

    def _all_of(self, named: Named) -> Sequence[int]:
        placement = self.session.settled(named.shards)
        if named.shards is None:
            shards = everywhere(self._shards, placement).shards
        else:
            # Criteria that contradict each other find nothing, wherever they are asked.
            shards = sorted(named.shards) or [0]
        self._began = self._began or placement
        return shards

    # UPDATE and DELETE.

    def _by_keys(self, statement: Any, refused: CannotCombine) -> Any:
        """Return an UPDATE or DELETE of the rows whose keys a statement before it finds by its criteria.

        The UPDATE or DELETE repeats the criteria that each shard can test by itself.

        Raises:
            CannotCombine: the query node can't be used, or a value to set depends on rows of other shards.
        """
        key = tuple(statement.table.primary_key)
        if statement.whereclause is None or not key:
            raise refused
        column = key[0] if len(key) == 1 else tuple_(*key)
        rows = {_value(row) for row in self._routed(select(*key).where(statement.whereclause))}
        criteria = list(conjuncts([statement.whereclause]))

        def with_only(kept: Iterable[Any]) -> Any:
            dropped = {id(one) for one in criteria} - {id(one) for one in kept}

            def replace(element: Any, **_: Any) -> Any:
                return true() if id(element) in dropped else None

            return visitors.replacement_traverse(statement, {}, replace)

        def is_right(changed: Any) -> bool:
            try:
                self.check(changed).change()
            except CannotCombine:
                return False
            return True

        bound = [one for one in criteria if is_right(with_only([one]))]
        mine = with_only(bound).where(column.in_(rows))
        if not is_right(mine):
            raise refused
        return mine

    def _changed(self, statement: Any, named: Named, shard: int) -> Result[Any]:
        """Change the rows of one shard, and only the session's objects of these rows.

        By default SQLAlchemy looks for the objects in Python, in the whole session: it would add a relative
        change to each of them once per shard. ``fetch`` asks each shard for the keys of the rows it changed.
        """
        wanted = self.context.execution_options.get("synchronize_session", "auto")
        if wanted in ("auto", "evaluate"):
            wanted = "fetch"
        # Beside the statement, where Query.update() says its own, which goes before what the statement says.
        return self._in_shard(statement, named, shard, synchronize_session=wanted)

    # SELECT.

    def _routed(self, statement: Any) -> Result[Any]:
        named = self._named(statement)
        return self._select(statement, named, self._all_of(named))

    def _select(self, statement: Any, named: Named, shards: Sequence[int]) -> Result[Any]:
        try:
            how, shared, reads_tables = self._planned(statement, named, shards[0])
        except CannotCombine as refused:
            return by_views(self.context, statement, refused, shards[0])
        if not reads_tables:
            return self._in_shard(statement, named, shards[0])
        if how.limit is not None or how.offset:
            if how.locks:
                return self._lock_some(statement, how, is_joined=shared.multiplies_rows)
            if shared.multiplies_rows:
                return self._of_keys(statement, *self._keys(statement, how, limit=how.limit))
        # Only now: what was refused has begun a transaction on one node, not on all.
        asked = {self.session.connection_of(node): some for node, some in self._by_node(named, shards)}
        options = self.context.execution_options
        chunk = options.get("yield_per") or (
            options.get("max_row_buffer", 1000) if options.get("stream_results") else 0
        )
        if how.folds or (how.keys and shared.multiplies_rows):
            chunk = 0  # The rows of an object stay together, so that only all of them can be sorted.
        check = partial(self._require_settled, shards)
        replay = answer(how, shared, asked, check, chunk)
        return self.context.invoke_statement(
            statement,
            bind_arguments={"shard_id": shards[0]},
            execution_options={STAND_IN: replay, ENGINE: "merge", **self.session.within(shards[0])},
        )

    def _planned(self, statement: Any, named: Named, shard: int) -> tuple[MergePlan, Capture, bool]:
        """Return the plan of the answers, the question to each shard, and whether it reads tables."""
        numbers, kept = named.read.numbers(), named.read.reading.kept
        by_table = self._shards.old_ids is not None
        # Each engine has a dialect of its own.
        key = None if numbers is None else (self.session.engine_of(shard).dialect, by_table, *numbers)
        planned: tuple[MergePlan, Capture, bool] | None = kept.get(key)
        if planned is None:
            connection = self.session.node_connection(shard)
            how = plan(statement, self._given)
            shared = compiled(connection, how.branch, self._given)
            planned = how, shared, self._reads_tables(connection, shared, how)
            if key:
                if len(kept) >= _MOST_PAGES:
                    kept.clear()
                kept[key] = planned
        return planned

    def _by_node(self, named: Named, shards: Sequence[int]) -> Iterable[tuple[Node, Asked]]:
        """Return what each node is asked; all by one placement."""
        placement = self.session.settled(named.shards)
        if named.shards is None:
            return [(node, Asked(schemas)) for node, schemas in everywhere(self._shards, placement).by_node]
        by_node: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            by_node[placement.locate(shard).name].append(shard)
        lists = named.lists.items()
        return [
            (
                placement.nodes[name],
                Asked(
                    tuple(map(self._shards.schema_of, there)),
                    [{key: places.get(shard, ()) for key, places in lists} for shard in there]
                    if lists
                    else (),
                ),
            )
            for name, there in by_node.items()
        ]

    def _reads_tables(self, connection: Connection, shared: Any, how: MergePlan) -> bool:
        """Return whether a SELECT, whose shape is checked here, reads tables."""
        by_table = self._shards.old_ids is not None
        known = _READS.setdefault(shared.compiled, {})
        reads_tables = known.get((by_table, bool(how.folds)))
        if reads_tables is None:
            # SQLAlchemy puts a LIMIT into a subquery where objects are several rows each.
            branch = how.branch.limit(None).offset(None)
            check = Check(branch, connection.dialect, by_table=by_table, kind_of=kinds_on(connection))
            reads_tables = check.select(folded if how.folds else None)
            known[by_table, bool(how.folds)] = reads_tables
        return reads_tables

    def _in_shard(self, statement: Any, named: Named, shard: int, **options: Any) -> Result[Any]:
        mine, parameters = narrowed(statement, self._given, named, shard)
        return self.context.invoke_statement(
            mine,
            parameters,
            bind_arguments={"shard_id": shard},
            execution_options={SHARD: shard, **self.session.within(shard), **options},
        )

    # A LIMIT that the shards can't apply by themselves: first the keys of the rows, then the rows.

    def _keys(
        self, statement: Any, how: MergePlan, *, limit: int | None, without: Sequence[Any] = ()
    ) -> tuple[Any, list[Any]]:
        """Return the primary key of a SELECT's only table, and its values of the rows, in order and limited.

        Raises:
            CannotCombine: its rows are not those of one table.
        """
        entity = inspect(statement.column_descriptions[0].get("entity"), raiseerr=False)
        source = statement.columns_clause_froms[0] if entity is None else entity.selectable
        key = tuple(getattr(source, "primary_key", ()))
        # Without loader options, which need their objects; criteria for all of a class's rows stay.
        options = part_of(statement, "with_options")
        criteria = tuple(one for one in options if isinstance(one, LoaderCriteriaOption))
        bare = with_parts(statement, with_options=criteria, for_update_arg=None)
        # By expressions, as names of other selected columns would mean nothing.
        ordered = bare.order_by(None).order_by(*(one.clause() for one in how.keys))
        keys = ordered.with_only_columns(*key).limit(limit)
        (only, *others) = keys.get_final_froms()
        if others or not key or (isinstance(only, Join) and not only.compare(source)):
            raise CannotCombine(
                "LIMIT of locked rows, or of objects that are several rows each, works for one table",
                hint="Select the limited primary keys first, and then the rows by them.",
            )
        column = key[0] if len(key) == 1 else tuple_(*key)
        if without:
            keys = keys.where(column.not_in(without))
        return column, list(map(_value, self._routed(keys)))

    def _of_keys(self, statement: Any, key: Any, values: Sequence[Any]) -> Result[Any]:
        """Return the rows of a SELECT that have these primary keys, without its LIMIT."""
        return self._routed(statement.limit(None).offset(None).where(key.in_(values)))

    def _lock_some(self, statement: Any, how: MergePlan, *, is_joined: bool) -> Result[Any]:
        """Return a SELECT with LIMIT that locks rows: those that it returns, and no others.

        Rows that it does not get, as others hold them or have changed them meanwhile, are passed over.
        """
        if how.limit is None or how.offset or is_joined:
            raise CannotCombine(
                "OFFSET and joined collections over several shards can't be combined with row locks",
                hint="Select the limited primary keys first, and lock the rows by them.",
            )
        found: list[Any] = []
        tried: list[Any] = []
        ahead: list[Any] = []
        while True:
            missing = how.limit - len(found)
            if not ahead:
                key, ahead = self._keys(statement, how, limit=missing + _AHEAD, without=tried)
            some, ahead = ahead[:missing], ahead[missing:]
            frozen = self._of_keys(statement, key, some).freeze()
            found += frozen().all()
            tried += some
            if len(found) >= how.limit or not some:
                return frozen.with_new_rows(found)()


def _value(row: Any) -> Any:
    """Return the value of a primary key: of its only column, or of all as a tuple."""
    return row[0] if len(row) == 1 else tuple(row)
