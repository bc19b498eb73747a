"""Executes statements in several shards: SELECT, UPDATE, DELETE in all that are named, INSERT by rows."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Result
from sqlalchemy.engine.result import IteratorResult, SimpleResultMetaData
from sqlalchemy.ext.horizontal_shard import set_shard_id
from sqlalchemy.orm import Mapper, ORMExecuteState

from shardids.catalog.topology import Node, Placement
from shardids.client.routing.criteria import Named, narrowed
from shardids.client.routing.fanout import Question, combined, compiled, gather
from shardids.client.routing.functions import kinds_on
from shardids.client.routing.models import Claimant, ShardFinder, facts_of, is_sharding_key
from shardids.client.routing.placing import shard_of_identity
from shardids.client.routing.plans import MergePlan, plan, tables_of
from shardids.client.routing.query_node import ENGINE, EngineChoice, by_views
from shardids.client.routing.replay import STAND_IN, Capture
from shardids.client.routing.shapes import check_change, check_select
from shardids.client.routing.streams import stream
from shardids.client.routing.twophase import Decisions
from shardids.errors import BadArgument, CannotCombine, FanOutRefused, WrongShard

FanOut = Literal["allow", "error"]
"""What becomes of a statement that names no shard: it asks all shards, or it is refused."""


def is_strict() -> bool:
    """Returns whether one node refuses what several would: ``SHARDIDS_STRICT``, by default under pytest."""
    return os.environ.get("SHARDIDS_STRICT", str(int("PYTEST_CURRENT_TEST" in os.environ))) == "1"


class Shards(ShardFinder, Protocol):
    """What a session over all shards asks the cluster."""

    @property
    def decisions(self) -> Decisions:
        """What sessions share that commit on several nodes."""

    @property
    def claims(self) -> Claimant:
        """Who claims the values of look-up keys."""

    @property
    def placement(self) -> Placement:
        """Which node holds which shard."""

    def node_of(self, shard: int) -> Node:
        """Returns the node that holds a shard now."""

    def engine(self, node: Node) -> Engine:
        """Returns the engine of a node."""

    def schema_of(self, shard: int) -> str:
        """Returns the schema of a shard."""

    def query_node(self) -> Node | None:
        """Returns the query node, if there is one."""

    def refresh(self) -> bool:
        """Reads the placement and the query node's address again."""


class Router(Protocol):
    """What statements need of the session over all shards."""

    shards: Shards
    fan_out: FanOut
    engine: EngineChoice
    begun: list[Connection]

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""

    def inserting(self, shard: int) -> AbstractContextManager[None]:
        """While rows are inserted into one shard."""


def execute(router: Router, context: ORMExecuteState, named: Named) -> Result[Any]:
    """Executes a statement that is not a matter of a single shard.

    Raises:
        FanOutRefused: it names no shard, and the session asks only those that are named.
        CannotCombine: the shards' answers to a SELECT can't be combined.
        BadArgument: it can't be sent to several shards.
    """
    if not (context.is_select or context.is_update or context.is_delete):
        raise BadArgument(
            f"a {type(context.statement).__name__} names no shard",
            hint='Name it: session.execute(statement, bind_arguments={"shard_id": number})',
        )
    if isinstance(context.parameters, Sequence):
        raise BadArgument(
            "UPDATE with a list of parameters can't be sent to several shards",
            hint="Change the objects and flush, or execute one update().where() after another.",
        )
    shards = _asked(router, context, named)
    if router.engine == "refuse":
        raise _refused(context, shards)
    if context.is_select:
        try:
            return _select(router, context, named, shards)
        except CannotCombine as error:
            if router.engine != "views":
                raise
            refused = error
        return by_views(router, context, refused, shards[0])
    connection = router.node_connection(shards[0])
    by_table = router.shards.old_ids is not None
    check_change(context.statement, connection.dialect, kinds_on(connection), by_table=by_table)
    results = [_changed(router, context, named, shard) for shard in shards]
    return results[0].merge(*results[1:])


def _refused(context: ORMExecuteState, shards: list[int]) -> FanOutRefused:
    return FanOutRefused(
        f"the statement concerns {len(shards)} shards, and this session sends statements to one",
        hint=f'Say whose rows it is about: {_criteria(context)}; or open the session with engine="merge".',
    )


def _asked(router: Router, context: ORMExecuteState, named: Named) -> list[int]:
    if named.shards is not None:
        return sorted(named.shards)
    if router.fan_out == "error":
        models = [mapper.class_.__name__ for mapper in context.all_mappers] or tables_of(context.statement)
        raise FanOutRefused(
            f"the statement on {', '.join(models)} names no shard, and this session does not ask all"
            f" {router.shards.shard_count} of them",
            hint=f"Say whose rows it is about: {_criteria(context)}; or name the shard:"
            ' bind_arguments={"shard_id": number}.',
        )
    return router.shards.placement.all_shards()


def _criteria(context: ORMExecuteState) -> str:
    """Criteria of the statement's models that would name a shard, as examples."""
    examples = [
        f"{mapper.class_.__name__}.{name} == …"
        for mapper in context.all_mappers
        for name, _ in facts_of(mapper).telling
    ]
    return ", ".join(examples) or "criteria on an ID or a sharding key"


def _select(router: Router, context: ORMExecuteState, named: Named, shards: list[int]) -> Result[Any]:
    by_node: dict[str, list[int]] = defaultdict(list)
    node_of = router.shards.placement.node_of
    for shard in shards:
        # What is placed nowhere yet gets the cluster's error when its connection is asked for.
        by_node[node_of.get(shard, "")].append(shard)
    how = plan(context.statement, context.parameters, in_python=len(by_node) > 1 or is_strict())
    first = router.node_connection(shards[0])

    def captured(shard: int) -> Capture:
        return compiled(first, *narrowed(how.branch, context.parameters, named, shard))

    shared = captured(shards[0])
    if not _reads_tables(first, shared, how, by_table=router.shards.old_ids is not None):
        return _in_shard(router, context, context.statement, named, shards[0])
    if how.locks or (how.limit is not None and shared.multiplies_rows):
        return _one_by_one(router, context, named, shards)
    # Only now: what was refused has begun a transaction on one node, not on all.
    nodes = {router.node_connection(there[0]): there for there in by_node.values()}
    asked = {
        connection: [
            Question(
                schema=router.shards.schema_of(shard),
                compiled=captured(shard) if named.lists and shard != shards[0] else shared,
            )
            for shard in there
        ]
        for connection, there in nodes.items()
    }
    chunk = _chunk(context)
    replay = stream(how, asked, chunk) if chunk and not how.folds else gather(how, asked)
    return context.invoke_statement(
        bind_arguments={"shard_id": shards[0]},
        execution_options={STAND_IN: replay, ENGINE: "merge", **router.options_of(shards[0])},
    )


def _chunk(context: ORMExecuteState) -> int:
    """Returns how many rows a node is to give at once; 0 if all of them."""
    options = context.execution_options
    chunk = options.get("yield_per") or getattr(context.load_options, "_yield_per", None)
    if not chunk and options.get("stream_results"):
        chunk = options.get("max_row_buffer", 1000)
    return int(chunk or 0)


_READS: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()
"""What :func:`check_select` was told of IDs, and its answer, for what was compiled and found right."""


def _reads_tables(connection: Connection, capture: Capture, how: MergePlan, *, by_table: bool) -> bool:
    """Returns whether a statement, whose shape is checked here, reads tables."""
    told, known = _READS.get(capture.compiled, (None, False))
    if told is not by_table:
        branch = how.branch
        if capture.multiplies_rows:
            # SQLAlchemy puts a LIMIT into a subquery then, and each shard is asked by itself.
            branch = branch.limit(None).offset(None)
        dialect, kind_of = connection.dialect, kinds_on(connection)
        known = check_select(branch, dialect, folded=bool(how.folds), kind_of=kind_of, by_table=by_table)
        _READS[capture.compiled] = (by_table, known)
    return known


def _one_by_one(router: Router, context: ORMExecuteState, named: Named, shards: list[int]) -> Result[Any]:
    """Returns a SELECT that PostgreSQL does not take into a UNION, or whose objects are several rows each."""
    how = plan(context.statement, context.parameters, in_python=True)
    results = [_in_shard(router, context, how.branch, named, shard).unique() for shard in shards]
    names = list(results[0].keys())
    width = len(names) - len(how.keys)
    rows = combined(how, [result.all() for result in results], range(width, len(names)))
    return IteratorResult(SimpleResultMetaData(names[:width]), iter([tuple(row)[:width] for row in rows]))


def _in_shard(
    router: Router, context: ORMExecuteState, statement: Any, named: Named, shard: int, **options: Any
) -> Result[Any]:
    mine, parameters = narrowed(statement, context.parameters, named, shard)
    return context.invoke_statement(
        mine,
        parameters,
        bind_arguments={"shard_id": shard},
        execution_options={"_sa_shard_id": shard, **router.options_of(shard), **options},
    )


def _changed(router: Router, context: ORMExecuteState, named: Named, shard: int) -> Result[Any]:
    """Changes the rows of one shard, and the session's objects of these rows alone.

    By default SQLAlchemy looks for the objects in Python, in the whole session: it would add a relative
    change to each of them once a shard. ``fetch`` asks each shard for the keys of the rows that it changed.
    """
    wanted = context.execution_options.get("synchronize_session", "auto")
    if wanted in ("auto", "evaluate"):
        wanted = "fetch"
    # Beside the statement, where Query.update() says its own, which goes before what the statement says.
    return _in_shard(router, context, context.statement, named, shard, synchronize_session=wanted)


def check_assignments(context: ORMExecuteState) -> None:
    """Refuses an UPDATE that sets a sharding key: its rows would be looked for in another shard.

    Raises:
        WrongShard: it does.
    """
    statement: Any = context.statement
    keys = {column.key for column in statement.table.columns if is_sharding_key(column)}
    mapper = context.bind_mapper
    if isinstance(mapper, Mapper):
        keys.add(facts_of(mapper).key or "")
    # Like the parts of a SELECT, these have names for dialects only.
    ordered = dict(getattr(statement, "_ordered_values", None) or ())
    for column in (*(statement._values or ()), *ordered):
        name = getattr(column, "key", column)
        if name in keys:
            raise WrongShard(
                f"the sharding key {name} of {statement.table.name} is among what the UPDATE sets",
                hint="A row can't leave its shard: insert another row, and delete this one.",
            )


def named_beside(context: ORMExecuteState, finder: ShardFinder, inserting: int | None) -> int | None:
    """Returns the shard that is named beside a statement in one of SQLAlchemy's ways, or ``inserting``."""
    named = context.bind_arguments.get("shard_id")
    if named is None and context.is_column_load:
        # Of joined inheritance, for one, whose statement SQLAlchemy makes of the table's columns.
        state = context.load_options._refresh_state
        named = None if state is None else shard_of_identity(state, finder)
    if named is None:
        # SQLAlchemy has no public way to see the options of its own extension.
        options = context._non_compile_orm_options
        named = next((option.shard_id for option in options if isinstance(option, set_shard_id)), None)
    if named is None:
        named = context.execution_options.get("_sa_shard_id")
    if named is None and context.is_insert:
        named = inserting
    return None if named is None else int(named)
