"""What a session on one shard refuses: objects, rows and criteria of other shards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState, Mapper, ORMExecuteState, Session

from shardids.client.routing.criteria import shards_named
from shardids.client.routing.inserts import rows_of, shard_of_row, what_tells
from shardids.client.routing.models import ShardFinder, facts_of
from shardids.client.routing.placing import described, new_relatives, set_default_key, signs_of
from shardids.errors import WrongShard

State = InstanceState[Any]


def refuse_objects(session: Session, finder: ShardFinder, only: int) -> None:
    """Refuses a flush that holds an object of another shard than the session's only one.

    Raises:
        BadArgument: an object of another shard, or an ID of no shard of the cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    silent: dict[Mapper[Any], frozenset[str] | None] = {}
    for one in chain(session.new, session.dirty):
        state: State = inspect(one)
        # Most objects of a large flush say nothing yet; this finds them in a microsecond.
        mapper = state.mapper
        if mapper not in silent:
            facts = facts_of(mapper)
            silent[mapper] = None if facts.streamed else facts.of_interest
        names = silent[mapper]
        set_default_key(state)
        if state.key is None and names is not None and names.isdisjoint(state.dict):
            continue
        for sign in chain(signs_of(state, finder), *(signs_of(r, finder) for r in new_relatives(state))):
            if sign.shard != only:
                raise WrongShard(
                    f"{described(state)} can't be written in a session of shard {only}: {sign}",
                    hint="Foreign keys can't cross shards. Open the session on the object's own shard, or on"
                    " all of them: cluster.sharded_session(). Nothing was written.",
                )


def refuse_statement(context: ORMExecuteState, finder: ShardFinder, only: int) -> None:
    """Refuses a statement that is about rows of other shards than ``only``, the session's.

    Raises:
        WrongShard: its criteria name other shards, or a row that it writes belongs to one.
        BadArgument: an ID of no shard of the cluster.
    """
    statement: Any = context.statement
    given = context.parameters
    if context.is_insert or (context.is_update and isinstance(given, Sequence)):
        telling, name = what_tells(context)
        for row in rows_of(statement, given):
            shard_of_row(row, telling, name, finder, only)
    where = getattr(statement, "whereclause", None)
    if where is None:
        return
    named = shards_named(where, given, finder).shards
    writes = context.is_update or context.is_delete
    if named and (only not in named or (writes and len(named) > 1)):
        others = ", ".join(str(shard) for shard in sorted(named - {only})[:3])
        raise WrongShard(
            f"the statement's criteria name shard {others}, and this session is on shard {only}",
            hint="Open the session on the rows' own shard, or on all of them: cluster.sharded_session().",
        )
