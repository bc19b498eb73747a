"""Prepared transactions on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from shardids.catalog.nodes import Answers, Nodes
from shardids.pg.gids import Gid
from shardids.pg.queries import rows
from shardids.pg.sqlfiles import read_sql


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prepared transaction of a node.

    Attributes:
        node: the node's name.
        name: the name that it was prepared under.
        gid: the parts of the name; ``None`` if the transaction is foreign: not of this cluster's sessions.
        owner: the role that prepared it.
        is_own: whether the role that asked may end it, without becoming another.
        age_s: how long ago it was prepared, by the server's clock, in seconds.
    """

    node: str
    name: str
    gid: Gid | None
    owner: str
    is_own: bool
    age_s: float


def read_prepared(nodes: Nodes, cluster: UUID) -> Answers[list[Prepared]]:
    """Read the prepared transactions of all nodes at once."""

    def ask(node: str, engine: Engine) -> list[Prepared]:
        def found(*, gid: str, **columns: Any) -> Prepared:
            parsed = Gid.parse(gid)
            ours = parsed if parsed is not None and parsed.cluster == cluster else None
            return Prepared(node=node, name=gid, gid=ours, **columns)

        with engine.connect() as connection:
            return rows(connection, read_sql("catalog/prepared.v1"), found)

    return nodes.each(ask)


def all_of(answers: Iterable[list[Prepared]]) -> list[Prepared]:
    """Return the prepared transactions of several nodes in one list."""
    return [one for answer in answers for one in answer]
