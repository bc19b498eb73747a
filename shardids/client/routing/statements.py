"""Executes statements in several shards: SELECT, UPDATE, DELETE in all that are named, INSERT by rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol, get_args
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, Join, Result, inspect, select, tuple_
from sqlalchemy.ext.horizontal_shard import set_shard_id
from sqlalchemy.orm import LoaderCriteriaOption, Mapper, ORMExecuteState

from shardids.catalog.topology import Node, Placement
from shardids.client.routing.aggregates import folded
from shardids.client.routing.criteria import Named, Read, narrowed
from shardids.client.routing.fanout import (
    STAND_IN,
    Capture,
    MergePlan,
    Question,
    compiled,
    gather,
    plan,
    stream,
    tables_of,
)
from shardids.client.routing.models import Claimant, ShardFinder, facts_of, is_sharding_key
from shardids.client.routing.placing import shard_of_identity
from shardids.client.routing.query_node import ENGINE, by_views
from shardids.client.routing.sent import kinds_on
from shardids.client.routing.shapes import Check, conjuncts
from shardids.client.routing.twophase import Decisions
from shardids.errors import BadArgument, CannotCombine, FanOutRefused, WrongShard

FanOut = Literal["all", "named", "never"]
"""Which statements may concern several shards: all, those whose criteria name the shards, or none."""


def validated(fan_out: str) -> FanOut:
    """Returns the choice. Raises BadArgument if there is no such choice."""
    for known in get_args(FanOut):
        if fan_out == known:
            return known  # type: ignore[no-any-return]  # one of FanOut's
    raise BadArgument(f"fan_out={fan_out!r} is not known", hint='It is "all", "named" or "never".')


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

    @property
    def begun(self) -> list[Connection]:
        """The connections that the session's transaction uses."""

    def in_each(self, shards: Iterable[int], do: Callable[[int], Result[Any]]) -> list[Result[Any]]:
        """Returns ``do(shard)`` of each shard; an error after the first fails the transaction."""

    def node_connection(self, shard: int) -> Connection:
        """Returns the session's connection to the node that holds a shard, in its transaction."""

    def options_of(self, shard: int) -> dict[str, Any]:
        """Returns the execution options that send a statement into a shard."""

    def inserting(self, shard: int) -> AbstractContextManager[None]:
        """While rows are inserted into one shard."""

    def writing_to(self, shard: int) -> AbstractContextManager[None]:
        """While SQLAlchemy writes rows of one shard by their keys."""


def execute(router: Router, context: ORMExecuteState, named: Named) -> Result[Any]:
    """Executes a statement that is not a matter of a single shard.

    Raises:
        FanOutRefused: the session does not ask these shards with one statement.
        CannotCombine: neither the shards nor the query node can answer a SELECT.
        BadArgument: it can't be sent to several shards.
    """
    statement: Any = context.statement
    if not (context.is_select or context.is_update or context.is_delete):
        raise BadArgument(
            f"a {type(statement).__name__} names no shard",
            hint='Name it: session.execute(statement, bind_arguments={"shard_id": number})',
        )
    shards = asked(router, context, named)
    if context.is_select:
        return _select(router, context, statement, named, shards)
    try:
        check_of(router, statement).change()
    except CannotCombine as refused:
        statement = _by_keys(router, context, statement, refused)
        named = Read(statement, context.parameters, router.shards).named()
        shards = _named_or_all(router, named)
    results = router.in_each(shards, lambda shard: _changed(router, context, statement, named, shard))
    return results[0].merge(*results[1:])


def check_of(router: Router, statement: Any) -> Check:
    """Returns the check of a statement that goes to several shards."""
    connection = router.node_connection(0)
    by_table = router.shards.old_ids is not None
    return Check(statement, connection.dialect, by_table=by_table, kind_of=kinds_on(connection))


def _by_keys(router: Router, context: ORMExecuteState, statement: Any, refused: CannotCombine) -> Any:
    """Returns an UPDATE or DELETE of the rows whose keys its criteria find, read in a statement before it.

    What the shards can test by themselves is tested again when the rows are changed.

    Raises:
        CannotCombine: the query node is not asked, or what is set depends on rows of other shards.
    """
    key = tuple(statement.table.primary_key)
    if statement.whereclause is None or not key:
        raise refused
    column = key[0] if len(key) == 1 else tuple_(*key)
    found = _route_select(router, context, select(*key).where(statement.whereclause))
    rows = {row[0] if len(key) == 1 else tuple(row) for row in found}

    def where(*criteria: Any) -> Any:
        copy = statement.where()
        copy._where_criteria = ()
        return copy.where(*criteria)

    def is_bound(criterion: Any) -> bool:
        try:
            check_of(router, where(criterion)).change()
        except CannotCombine:
            return False
        return True

    mine = where(*filter(is_bound, conjuncts([statement.whereclause])), column.in_(rows))
    try:
        check_of(router, mine).change()
    except CannotCombine:
        raise refused from None
    return mine


def asked(router: Router, context: ORMExecuteState, named: Named) -> list[int]:
    """Returns the shards that a statement asks.

    Raises:
        FanOutRefused: the session does not ask these shards with one statement.
    """
    if router.fan_out == "never":
        count = router.shards.shard_count if named.shards is None else len(named.shards)
        raise FanOutRefused(
            f"the statement concerns {count} shards, and this session sends statements to one",
            hint=f'Say whose rows it is about: {_criteria(context)}; or open the session with fan_out="all".',
        )
    if router.fan_out == "named" and named.shards is None:
        models = [mapper.class_.__name__ for mapper in context.all_mappers] or tables_of(context.statement)
        raise FanOutRefused(
            f"the statement on {', '.join(models)} names no shard, and this session does not ask all"
            f" {router.shards.shard_count} of them",
            hint=f"Say whose rows it is about: {_criteria(context)}; or name the shard:"
            ' bind_arguments={"shard_id": number}.',
        )
    return _named_or_all(router, named)


def _criteria(context: ORMExecuteState) -> str:
    """Criteria of the statement's models that would name a shard, as examples."""
    examples = [
        f"{mapper.class_.__name__}.{name} == …"
        for mapper in context.all_mappers
        for name, _ in facts_of(mapper).telling
    ]
    return ", ".join(examples) or "criteria on an ID or a sharding key"


def _select(
    router: Router, context: ORMExecuteState, statement: Any, named: Named, shards: list[int]
) -> Result[Any]:
    by_node: dict[str, list[int]] = defaultdict(list)
    node_of = router.shards.placement.node_of
    for shard in shards:
        # What is placed nowhere yet gets the cluster's error when its connection is asked for.
        by_node[node_of.get(shard, "")].append(shard)
    first = router.node_connection(shards[0])
    try:
        how = plan(statement, context.parameters)
        shared = compiled(first, *narrowed(how.branch, context.parameters, named, shards[0]))
        reads_tables = _checked(first, shared, how, by_table=router.shards.old_ids is not None)
    except CannotCombine as refused:
        return by_views(router, context, statement, refused, shards[0])
    if not reads_tables:
        return _in_shard(router, context, statement, named, shards[0])
    if how.limit is not None or how.offset:
        if how.locks:
            return _lock_some(router, context, statement, how, is_joined=shared.multiplies_rows)
        if shared.multiplies_rows:
            key, rows = _keys(router, context, statement, how, limit=how.limit)
            return _select_by_keys(router, context, statement, key, rows)
    # Only now: what was refused has begun a transaction on one node, not on all.
    asked: dict[Connection, list[Question]] = {}
    for there in by_node.values():
        asked[router.node_connection(there[0])] = [
            Question(
                schema=router.shards.schema_of(shard),
                compiled=compiled(first, *narrowed(how.branch, context.parameters, named, shard))
                if named.lists and shard != shards[0]
                else shared,
            )
            for shard in there
        ]
    chunk = _chunk(context)
    replay = stream(how, asked, chunk) if chunk and not how.folds else gather(how, asked)
    return context.invoke_statement(
        statement,
        bind_arguments={"shard_id": shards[0]},
        execution_options={STAND_IN: replay, ENGINE: "merge", **router.options_of(shards[0])},
    )


def _route_select(router: Router, context: ORMExecuteState, statement: Any) -> Result[Any]:
    named = Read(statement, context.parameters, router.shards).named()
    return _select(router, context, statement, named, _named_or_all(router, named))


def _named_or_all(router: Router, named: Named) -> list[int]:
    # Criteria that contradict each other find nothing, wherever they are asked.
    return router.shards.placement.all_shards() if named.shards is None else sorted(named.shards) or [0]


# A SELECT with LIMIT that the shards can't limit by themselves: first the keys of its rows, then the rows.


def _keys(
    router: Router,
    context: ORMExecuteState,
    statement: Any,
    how: MergePlan,
    *,
    limit: int | None,
    without: Sequence[Any] = (),
) -> tuple[Any, Sequence[Any]]:
    """Returns the primary key of a SELECT's only table, and its values of the rows, in order and limited.

    Raises:
        CannotCombine: its rows are not those of one table.
    """
    entity = inspect(statement.column_descriptions[0].get("entity"), raiseerr=False)
    source = statement.columns_clause_froms[0] if entity is None else entity.selectable
    key = tuple(getattr(source, "primary_key", ()))
    # Without loader options, which need their objects; criteria for all of a class's rows stay.
    bare = statement.options()
    bare._with_options = tuple(o for o in statement._with_options if isinstance(o, LoaderCriteriaOption))
    bare._for_update_arg = None
    keys = bare.with_only_columns(*key).limit(limit)
    (only, *others) = keys.get_final_froms()
    if others or not key or (isinstance(only, Join) and not only.compare(source)):
        raise CannotCombine(
            "LIMIT of locked rows, or of objects that are several rows each, works for one table",
            hint="Select the limited primary keys first, and then the rows by them.",
        )
    column = key[0] if len(key) == 1 else tuple_(*key)
    if without:
        keys = keys.where(column.not_in(without))
    rows = _route_select(router, context, keys).all()
    return column, [row[0] if len(key) == 1 else tuple(row) for row in rows]


def _select_by_keys(
    router: Router, context: ORMExecuteState, statement: Any, key: Any, values: Sequence[Any]
) -> Result[Any]:
    """Returns the rows of a SELECT that have these primary keys, without its LIMIT."""
    return _route_select(router, context, statement.limit(None).offset(None).where(key.in_(values)))


def _lock_some(
    router: Router, context: ORMExecuteState, statement: Any, how: MergePlan, *, is_joined: bool
) -> Result[Any]:
    """Returns a SELECT with LIMIT that locks rows: those that it returns, and no others.

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
            key, keys = _keys(router, context, statement, how, limit=missing + _AHEAD, without=tried)
            ahead = list(keys)
        some, ahead = ahead[:missing], ahead[missing:]
        frozen = _select_by_keys(router, context, statement, key, some).freeze()
        found += frozen().all()
        tried += some
        if len(found) >= how.limit or not some:
            return frozen.with_new_rows(found)()


_AHEAD: Final = 50
"""How many keys more than are wanted are read at once, in case that others hold rows."""


def _chunk(context: ORMExecuteState) -> int:
    """Returns how many rows a node is to give at once; 0 if all of them."""
    options = context.execution_options
    chunk = options.get("yield_per") or (
        getattr(context.load_options, "_yield_per", None) if context.is_select else None
    )
    if not chunk and options.get("stream_results"):
        chunk = options.get("max_row_buffer", 1000)
    return int(chunk or 0)


_READS: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()
"""For what was compiled and found right: was it checked with old IDs, and does it read tables?"""


def _checked(connection: Connection, capture: Capture, how: MergePlan, *, by_table: bool) -> bool:
    """Returns whether a statement, whose shape is checked here, reads tables."""
    with_old_ids, reads_tables = _READS.get(capture.compiled, (None, False))
    if with_old_ids is not by_table:
        # SQLAlchemy puts a LIMIT into a subquery where objects are several rows each.
        branch = how.branch.limit(None).offset(None)
        check = Check(branch, connection.dialect, by_table=by_table, kind_of=kinds_on(connection))
        reads_tables = check.select(folded if how.folds else None)
        _READS[capture.compiled] = (by_table, reads_tables)
    return reads_tables


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


def _changed(
    router: Router, context: ORMExecuteState, statement: Any, named: Named, shard: int
) -> Result[Any]:
    """Changes the rows of one shard, and the session's objects of these rows alone.

    By default SQLAlchemy looks for the objects in Python, in the whole session: it would add a relative
    change to each of them once a shard. ``fetch`` asks each shard for the keys of the rows that it changed.
    """
    wanted = context.execution_options.get("synchronize_session", "auto")
    if wanted in ("auto", "evaluate"):
        wanted = "fetch"
    # Beside the statement, where Query.update() says its own, which goes before what the statement says.
    return _in_shard(router, context, statement, named, shard, synchronize_session=wanted)


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
