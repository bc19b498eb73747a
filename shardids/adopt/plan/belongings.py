"""Functions, views, triggers and policies of a source: which the shards and nodes can have, and why not.

Triggers, and policies and views that name split tables, go into each shard; functions, and views and policies
of reference tables, onto each node. PostgreSQL records the names in a view, trigger or policy. The body of a
function is a text to it, so every word of the body counts as a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from sqlalchemy import Connection

from shardids.adopt.plan.document import Kind
from shardids.pg.definitions import Grant
from shardids.pg.queries import rows
from shardids.pg.sqlfiles import read_sql

POLICY: Final = "policy"
FUNCTION: Final = "function"
TRIGGER: Final = "trigger"
VIEW: Final = "view"
_NAME: Final = re.compile(r'"(?:[^"]|"")+"|[^".]+')


@dataclass(frozen=True, kw_only=True)
class Belonging:
    """A function, view, trigger or policy. Names are SQL, those of relations with their schemas.

    Attributes:
        kind: one of them, or ``relation``: a table, sequence or materialized view; only its name is read.
        relation: the table or view that a trigger or policy belongs to; the view itself.
        name: bare, of a trigger and a policy; of a function with its arguments.
        definition: the statement that makes it; of a view the query, of a policy all after the table.
        body: of a function whose body PostgreSQL keeps as a text.
        problem: why the shards can't have it, whatever it names.
        options: of a view; ``disabled`` for a trigger that is.
        names: relations that it is known to name. ``calls``: the functions, by OID.
        has_grants: its privileges are other than by default; ``grants``: those of other roles than its owner.
    """

    kind: str
    oid: int
    relation: str | None
    name: str
    definition: str | None
    body: str | None
    problem: str | None
    options: str | None
    comment: str | None
    roles: tuple[str, ...]
    names: tuple[str, ...]
    calls: tuple[int, ...]
    has_grants: bool
    grants: tuple[Grant, ...]

    @property
    def key(self) -> tuple[str, int]:
        """Returns what no other object of the source has."""
        return self.kind, self.oid

    @property
    def schema(self) -> str:
        """Returns the schema of a function or view; SQL."""
        return str(_NAME.findall(self.name)[0])

    @property
    def bare(self) -> str:
        """Returns the name of a view without its schema; SQL."""
        return str(_NAME.findall(self.name)[-1])

    @property
    def shown(self) -> str:
        """Returns its name for messages."""
        return f"{self.relation}, {self.name}" if self.kind in (TRIGGER, POLICY) else self.name

    @cached_property
    def words(self) -> Sequence[str]:
        """Returns the names, and other words, of a function's body, with the points between them."""
        return [
            word[1:-1].replace('""', '"') if word.startswith('"') else word.lower()
            for word in re.findall(r'"(?:[^"]|"")+"|[\w$]+|\.', self.body or "")
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorting:
    """The objects that come along, and those that stay.

    ``in_shards`` and ``on_nodes``: in an order for making them. ``left``: the others that belong to tables
    that are copied, and all other functions and views, each with the reason.
    """

    in_shards: Sequence[Belonging]
    on_nodes: Sequence[Belonging]
    left: Sequence[tuple[Belonging, str]]


def read_belongings(connection: Connection) -> list[Belonging]:
    """Read the objects of the source, in the open transaction."""
    # Statements are made of the names.
    connection.exec_driver_sql("set local quote_all_identifiers = off")
    return [
        Belonging(
            **row
            | {name: tuple(row[name]) for name in ("roles", "names", "calls")}
            | {"grants": tuple(Grant(**one) for one in row["grants"])}
        )
        for row in rows(connection, read_sql("adopt/belongings.v1"), dict[str, Any])
    ]


def sort_belongings(
    belongings: Iterable[Belonging],
    kinds: Mapping[str, Kind],
    refused: Mapping[tuple[str, int], str] | None = None,
) -> Sorting:
    """Sort the objects of a source whose tables are of these kinds; other tables count as loose.

    ``refused``: objects that a node could not have, by their keys, each with the reason.
    """
    return _Sorter(list(belongings), kinds, refused or {}).sorted()


class _Sorter:
    def __init__(
        self,
        belongings: Sequence[Belonging],
        kinds: Mapping[str, Kind],
        refused: Mapping[tuple[str, int], str],
    ) -> None:
        self._all = [one for one in belongings if one.kind != "relation"]
        self._kinds = kinds
        self._left = dict(refused)
        self._functions = {one.oid: one for one in self._all if one.kind == FUNCTION}
        self._views = {one.name: one for one in self._all if one.kind == VIEW}
        names = [one.name for one in belongings if one.kind == "relation"]
        split = {name for name in kinds if kinds[name].is_split}
        self._other = {_parts(name)[-1]: name for name in names if name not in split}
        self._split = {(*_parts(name)[:-1], ".", _parts(name)[-1]): name for name in split}

    def sorted(self) -> Sorting:
        """Return all, sorted: an object that names another one that is left is also left."""
        while found := dict(self._found()):
            self._left |= found
        made = [one for one in self._all if one.key not in self._left and self._is_ours(one)]
        functions = [one for one in made if one.kind == FUNCTION]
        views = self._in_order([one for one in made if one.kind == VIEW])
        rest = [one for one in made if one.kind in (TRIGGER, POLICY)]
        shards = [one for one in (*views, *rest) if self._is_in_shards(one.relation)]
        nodes = [one for one in (*views, *rest) if not self._is_in_shards(one.relation)]
        return Sorting(
            in_shards=shards,
            on_nodes=[*functions, *nodes],
            left=[
                (one, self._left[one.key])
                for one in self._all
                if one.key in self._left and self._is_ours(one)
            ],
        )

    def _is_ours(self, one: Belonging) -> bool:
        """Return whether a plan speaks of it: not of objects of tables that stay."""
        if one.kind == VIEW:
            return not one.names or any(map(self._is_copied, one.names))
        return one.kind == FUNCTION or self._is_copied(one.relation or "")

    def _is_copied(self, name: str) -> bool:
        """Return whether rows of a table or view are copied."""
        if (view := self._views.get(name)) is not None:
            return self._is_ours(view)
        return self._kind(name) is not Kind.LOOSE

    def _kind(self, name: str | None) -> Kind:
        return self._kinds.get(name or "", Kind.LOOSE)

    def _is_in_shards(self, name: str | None) -> bool:
        """Return whether a table or view is one of each shard's."""
        if (view := self._views.get(name or "")) is not None:
            return any(self._is_in_shards(one) for one in view.names)
        return self._kind(name).is_split

    def _found(self) -> Iterator[tuple[tuple[str, int], str]]:
        """Yield the objects that are to be left, and are not yet, with the reason."""
        for one in self._all:
            if one.key not in self._left and (reason := self._reason(one)) is not None:
                yield one.key, reason
        policies: dict[str | None, Belonging] = {
            one.relation: one for one in self._all if one.kind == POLICY and one.key in self._left
        }
        # Without a restrictive one clients would see rows that they don't see at the source.
        for one in self._all:
            if one.kind == POLICY and one.key not in self._left and one.relation in policies:
                yield one.key, f"policy {policies[one.relation].name} of its table is not carried"

    def _reason(self, one: Belonging) -> str | None:
        """Return why an object can't come along, as far as is known until now."""
        if one.problem is not None:
            return one.problem
        for oid in one.calls:
            if (FUNCTION, oid) in self._left:
                return f"it calls {self._functions[oid].name}, which is not carried"
        return next(self._reasons_of_function(one) if one.kind == FUNCTION else self._reasons(one), None)

    def _reasons(self, one: Belonging) -> Iterator[str]:
        names = one.names if one.kind == VIEW else (*one.names, one.relation or "")
        for name in names:
            if name in self._views:
                if self._views[name].key in self._left:
                    yield f"it names {name}, which is not carried"
            elif self._kind(name) is Kind.LOOSE:
                yield f"it names {name}, which stays at the source"
        if one.kind != VIEW and not self._is_in_shards(one.relation):
            if one.kind == TRIGGER:
                yield "rows of reference tables come by replication: it would not fire"
            elif any(map(self._is_in_shards, names)):
                yield "it belongs to a reference table and names rows that are split"

    def _reasons_of_function(self, one: Belonging) -> Iterator[str]:
        if one.names:
            yield f"it is bound to {one.names[0]}"
        words = one.words
        if "execute" in words:
            yield "it may make statements of texts: EXECUTE"
        for three in zip(words, words[1:], words[2:], strict=False):
            if (name := self._split.get(three)) is not None:
                yield f"it names {name} with its schema"
        for word in words:
            if (name := self._other.get(word)) is not None:
                is_reference = self._kind(name) is Kind.REFERENCE
                where = "is a reference table" if is_reference else "stays at the source"
                yield f"it names {name}, which {where}"
        for other in (*self._functions.values(), *self._views.values()):
            bare = _parts(other.name.partition("(")[0])[-1]
            if other.key in self._left and other is not one and bare in words:
                yield f"it names {other.name}, which is not carried"

    def _in_order(self, views: Sequence[Belonging]) -> list[Belonging]:
        """Return views so that those that others name come first."""
        ordered: dict[str, Belonging] = {}

        def add(view: Belonging) -> None:
            if view.name not in ordered:
                for name in view.names:
                    if name in self._views:
                        add(self._views[name])
                ordered[view.name] = view

        for view in views:
            add(view)
        return list(ordered.values())


def _parts(name: str) -> list[str]:
    """Return the parts of a name of SQL, without quotes."""
    return [part[1:-1].replace('""', '"') if part.startswith('"') else part for part in _NAME.findall(name)]


def in_shards(text: str, names: Mapping[str, str]) -> str:
    """Return what PostgreSQL has printed, with other names of relations in place of those with schemas.

    ``names``: of each relation the name that the text has, and that which it gets.
    """
    if not names:
        return text
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = rf"""'(?:[^']|'')*'|(?<![\w.$"])(?P<name>{known})(?![\w$"])|"(?:[^"]|"")*\""""
    return re.sub(pattern, lambda found: names[found["name"]] if found["name"] else found[0], text)
