"""The shard of each object of a flush: by its IDs, its sharding key, and its relatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState, PassiveFlag, Session
from sqlalchemy.orm.attributes import get_history
from sqlalchemy.sql.elements import ClauseElement

from shardids.client.routing.models import (
    ShardFinder,
    Tells,
    default_key,
    facts_of,
    refuse_reference,
    require_located,
)
from shardids.errors import BadArgument, ShardidsError, WrongShard

State = InstanceState[Any]


class Sign(NamedTuple):
    """Evidence of a shard: an attribute, or the object's identity if ``name`` is empty."""

    shard: int
    state: State
    name: str = ""

    def __str__(self) -> str:
        if not self.name:
            return f"{described(self.state)} lives in shard {self.shard}"
        value = shown_value(self.state.dict[self.name])
        return f"{self.name} {value} of {described(self.state)} names shard {self.shard}"


def place(session: Session, finder: ShardFinder) -> dict[State, int]:
    """Return the shard of each new or changed object of a session, and of objects that refer to it.

    It loads nothing.

    Raises:
        BadArgument: nothing determines an object's shard, or two attributes disagree, or an ID is of no
            shard of the cluster.
        UnsupportedKey: a sharding key that has no hash.
    """
    states: list[State] = [inspect(one) for one in (*session.new, *session.dirty)]
    for state in states:
        refuse_reference(state, session)
    states = [state for state in states if not facts_of(state.mapper).is_reference]
    for state in states:
        require_located(state.mapper)
        set_default_key(state)
    bound: dict[State, list[State]] = {}
    for state in states:
        for relative in new_relatives(state):
            bound.setdefault(state, []).append(relative)
            bound.setdefault(relative, []).append(state)
    placed: dict[State, int] = {}
    for state in states:
        if state not in placed:
            together = _bound_together(state, bound)
            shard = _agreed((sign for one in together for sign in signs_of(one, finder)), state)
            placed |= dict.fromkeys(together, shard)
    return placed


def shard_of_object(state: State, finder: ShardFinder) -> int:
    """Return the shard that an object's own attributes tell. Raises as :func:`place` does."""
    return _agreed(signs_of(state, finder), state)


def set_default_key(state: State) -> None:
    """Give a new object the sharding key that its column's default in Python makes."""
    if state.key is not None:
        return
    facts = facts_of(state.mapper)
    if facts.key_column is not None and facts.key not in state.dict:
        value = default_key(facts.key_column)
        if value is not None:
            setattr(state.obj(), str(facts.key), value)


def signs_of(state: State, finder: ShardFinder) -> Iterator[Sign]:
    """Yield the evidence of an object's shard. Raises as :func:`place` does."""
    if state.key is not None:
        shard = shard_of_identity(state, finder)
        if shard is not None:
            yield Sign(shard, state)
    values = state.dict
    for name, tells in facts_of(state.mapper).telling:
        value = values.get(name)
        if value is not None and not isinstance(value, ClauseElement):
            yield Sign(_told(state, name, tells, value, finder), state, name)


def shard_of_identity(state: State, finder: ShardFinder) -> int | None:
    """Return the shard of an object that is in the database already, where its identity tells it."""
    if state.key is None:
        return None
    if state.key[2] is not None:
        return int(state.key[2])
    return facts_of(state.mapper).shard_of_identity(state.key[1], finder)


def described(state: State) -> str:
    """Return an object as a message names it, by its primary key, or else by the evidence of its shard."""
    facts = facts_of(state.mapper)
    if state.key is not None:
        names = [state.mapper.get_property_by_column(column).key for column in state.mapper.primary_key]
        parts = dict(zip(names, state.key[1], strict=True))
    else:
        parts = {name: state.dict[name] for name, _ in facts.telling if state.dict.get(name) is not None}
    shown = ", ".join(f"{name}={shown_value(value)}" for name, value in parts.items())
    return f"{facts.name}({shown})" if shown else f"a new {facts.name}"


def shown_value(value: object) -> str:
    """Return a value for a message, of bounded length."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _told(state: State, name: str, tells: Tells, value: Any, finder: ShardFinder) -> int:
    try:
        return tells.shard(value, finder)
    except ShardidsError as error:
        what = f"{name} {shown_value(value)} of {facts_of(state.mapper).name}: {error.message}"
        raise type(error)(what, hint=error.hint) from None


def _agreed(signs: Iterable[Sign], about: State) -> int:
    first: Sign | None = None
    for sign in signs:
        if first is None:
            first = sign
        elif sign.shard != first.shard:
            raise WrongShard(
                f"{described(sign.state)} would belong to two shards: {first}, but {sign}",
                hint="Foreign keys can't cross shards: objects that refer to each other live in one shard."
                " Nothing was written.",
            )
    if first is not None:
        return first.shard
    facts = facts_of(about.mapper)
    raise BadArgument(
        f"cannot determine the shard of {described(about)}",
        hint=f"Set its sharding key, {facts.key}."
        if facts.key
        else "Give it a parent, a parent's ID or an ID; or mark a column of"
        f" {facts.name} with sharding_key().",
    )


def new_relatives(state: State) -> Iterator[State]:
    """Yield the objects that were attached by a relationship over a foreign key, at either end of it."""
    facts = facts_of(state.mapper)
    for name in facts.relatives:
        if name in state.dict or name in facts.streamed:
            added = get_history(state.obj(), name, PassiveFlag.PASSIVE_NO_INITIALIZE).added
            yield from (inspect(one) for one in added or () if one is not None)


def _bound_together(state: State, bound: Mapping[State, list[State]]) -> list[State]:
    """Return the object, and all that relationships bind to it, directly or through others."""
    seen = {state}
    together = [state]
    for here in together:
        for there in bound.get(here, ()):
            if there not in seen:
                seen.add(there)
                together.append(there)
    return together
