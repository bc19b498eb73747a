"""Plays Django's migrations on a shard: those with Python code run in it, the others as SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

import psycopg
from django.db import DatabaseError
from sqlalchemy import Engine

from shardids.django.aliases import alias_for
from shardids.django.choice import in_shard
from shardids.django.migrating.history import ShardHistory
from shardids.django.migrating.on_node import NodeConnection
from shardids.django.migrating.rehearsal import DjangoStage
from shardids.migrate.compiled import Compiled
from shardids.migrate.plan import Position, Start
from shardids.migrate.player import Player, enter_session, finished_parts
from shardids.pg.connections import statement_failed, translate

_UP: Final = "up"


class DjangoPlayer(Player):
    """Plays routes on the shards of one node. Threads must not share one.

    A migration with Python code is one transaction, or with ``atomic = False`` none: if that is interrupted,
    the next run begins it again.

    Args:
        history: the migrations of the code.
        engine: as for the others.
    """

    def __init__(self, history: ShardHistory, engine: Engine, *others: Any, **options: Any) -> None:
        super().__init__(engine, *others, **options)
        self._history = history

    def play(self, position: Position, compiled: Compiled) -> None:
        """Run a route on a shard. Raises as :meth:`shardids.migrate.player.Player.play`."""
        if not compiled.reason:
            super().play(position, compiled)
            return
        now, preface = position, compiled.preface
        for is_code, group in groupby(compiled.stages, lambda stage: bool(stage.reason)):
            stages = tuple(group)
            here = replace(compiled, preface=preface, stages=stages, sql="")
            if is_code:
                self._run_stages(now, here)
            else:
                super().play(now, replace(here, reason=""))
            now, preface = replace(now, heads=stages[-1].end, unfinished=None), ""

    def _run_stages(self, position: Position, compiled: Compiled) -> None:
        done = finished_parts(position, compiled)
        heads, preface = position.heads, compiled.preface
        for stage in compiled.stages:
            if not isinstance(stage, DjangoStage):
                raise TypeError(f"{stage.revision} is of another history")
            with self._on_shard(position, stage) as connection:
                if len(stage.parts) == 1:
                    self._run_in_transaction(connection, position.shard, heads, preface, stage)
                else:
                    with self._locked(self._connection(), position):
                        self._run_outside(
                            connection, position.shard, heads, preface, stage, begun=done is not None
                        )
            heads, preface, done = stage.end, "", None

    def _run_in_transaction(
        self, connection: NodeConnection, shard: int, heads: Start, preface: str, stage: DjangoStage
    ) -> None:
        with connection.schema_editor() as editor, connection.cursor() as cursor:
            cursor.execute(self._enter(shard, heads) + preface)
            self._apply(stage, editor)
            for statement in editor.deferred_sql:
                editor.execute(statement, None)
            editor.deferred_sql.clear()
            cursor.execute(stage.parts[0].sql + self._mark(_UP, stage, 1))

    def _run_outside(
        self,
        connection: NodeConnection,
        shard: int,
        heads: Start,
        preface: str,
        stage: DjangoStage,
        *,
        begun: bool,
    ) -> None:
        if not begun:
            if preface:
                self._send(self._enter(shard, heads) + preface)
                heads = ()
            self._send(self._enter(shard, heads) + self._mark(_UP, stage, 0))
        with connection.cursor() as cursor:
            cursor.execute(enter_session(shard, self._limits, waits=False))
        with connection.schema_editor(atomic=False) as editor:
            self._apply(stage, editor)
        self._send(self._enter(shard, heads) + stage.parts[1].sql + self._mark(_UP, stage, 2))

    def _apply(self, stage: DjangoStage, editor: Any) -> None:
        before: Any = stage.before
        self._history.of_shards[stage.revision].apply(before.clone(), editor)

    @contextmanager
    def _on_shard(self, position: Position, stage: DjangoStage) -> Iterator[NodeConnection]:
        """Yield the connection that is the shard's alias for a block; say what failed, and where."""
        alias = alias_for(position.shard)
        node = f'node "{position.node}"'
        try:
            with (
                in_shard(shard=position.shard),
                NodeConnection(self._engine, alias, position.shard).used() as made,
            ):
                yield made
        except DatabaseError as error:
            cause = error.__cause__
            if not isinstance(cause, psycopg.Error):
                raise
            url = self._engine.url
            ours = translate(cause, what=node, url=url)
            raise ours or statement_failed(cause, f"{stage.revision}, {node}", url) from cause
