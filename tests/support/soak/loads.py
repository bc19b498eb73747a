"""Bulk loads, some with triggers disabled, and prepared transactions that are resolved later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from tests.support.moves import schema
from tests.support.soak.records import Tried
from tests.support.soak.writers import MAY_END_WITH, Refused, Writer, sqlstate_of

Session = psycopg.Connection[Any]


class Direct(Writer):
    """Writes over connections of its own to the node that the placement names."""

    every_s = 0.3

    @contextmanager
    def connected(self, node: str) -> Iterator[Session]:
        connection = psycopg.connect(self.cluster.placement.nodes[node].url, connect_timeout=5)
        try:
            yield connection
        finally:
            connection.close()

    def directly(self, shard: int, work: Callable[[Session, Tried], None]) -> None:
        """Runs ``work`` and COMMIT."""
        tried, is_committing = Tried(), False
        try:
            with self.connected(self.cluster.node_of(shard).name) as connection:
                try:
                    work(connection, tried)
                finally:
                    self.record.tried(self.operation, shard, tried)
                is_committing = True
                connection.commit()
        except Refused:
            self.record.ended(self.operation, "no")
        except psycopg.Error as error:
            if sqlstate_of(error) not in MAY_END_WITH:
                raise
            is_uncertain = is_committing and sqlstate_of(error).startswith("57P")
            self.record.ended(self.operation, "maybe" if is_uncertain else "no")
            time.sleep(0.05)
        else:
            self.record.ended(self.operation, "ok")
            self.keep(shard, tried)

    def require_owner(self, connection: Session, shard: int) -> None:
        """Whoever goes past the triggers has to look for himself whether the shard is here."""
        row = connection.execute("select state from shardids.shard where id = %s", [shard]).fetchone()
        if row != ("active",):
            raise Refused

    def draw(self, connection: Session, shard: int, tried: Tried, count: int) -> list[int]:
        rows = connection.execute(f"select {schema(shard)}.next_ids(%s)", [count]).fetchall()
        tried.drawn += [id_ for (id_,) in rows]
        return [id_ for (id_,) in rows]

    def copy(self, connection: Session, shard: int, tried: Tried, ids: list[int]) -> None:
        """COPY of rows under these IDs."""
        into = f"copy {schema(shard)}.loads (id, writer, value) from stdin"
        with connection.cursor() as cursor, cursor.copy(into) as copying:
            for id_ in ids:
                copying.write_row((id_, self.number, self.operation))
        tried.drawn = [id_ for id_ in tried.drawn if id_ not in set(ids)]
        tried.made += [("loads", id_, self.operation) for id_ in ids]


class Loader(Direct):
    """COPY, as an application does it, and as restoring programs do: with triggers disabled in three ways."""

    def __init__(self, number: int, **rest: Any) -> None:
        super().__init__(number, **rest)
        self._disabled: set[int] = set()
        """Shards in which the triggers were disabled and not enabled again."""

    def step(self, shard: int) -> None:
        if self._disabled:
            self._enable(min(self._disabled))
            return
        way = self.random.choice([self._plain, self._as_replica, self._in_one_transaction, self._in_three])
        size, pause_s = (
            self.random.randint(20, 150),
            self.random.choice([0.0, 0.0, self.random.uniform(0, 4)]),
        )
        way(shard, size, pause_s)
        # As many go as come.
        gone = [*self.own[shard]][:-300]
        if gone:
            self.operation += 1
            self.directly(shard, lambda connection, tried: self._remove(connection, shard, tried, gone))

    def calm(self) -> None:
        until = time.monotonic() + 30
        while self._disabled and time.monotonic() < until:
            self._enable(min(self._disabled))

    def _plain(self, shard: int, size: int, pause_s: float) -> None:
        def load(connection: Session, tried: Tried) -> None:
            self.copy(connection, shard, tried, self.draw(connection, shard, tried, size))
            self._ends.wait(pause_s)

        self.directly(shard, load)

    def _as_replica(self, shard: int, size: int, pause_s: float) -> None:
        def load(connection: Session, tried: Tried) -> None:
            connection.execute("set session_replication_role = replica")
            ids = self.draw(connection, shard, tried, size)
            self._ends.wait(pause_s)
            self.copy(connection, shard, tried, ids)
            self.require_owner(connection, shard)

        self.directly(shard, load)

    def _in_one_transaction(self, shard: int, size: int, pause_s: float) -> None:
        """IDs that were drawn before, so that nothing in the load itself asks the generator."""
        is_early = self.random.random() < 0.5

        def load(connection: Session, tried: Tried) -> None:
            ids = self.draw(connection, shard, tried, size)
            connection.commit()
            self._ends.wait(pause_s)
            connection.execute("set local lock_timeout = '5s'")
            connection.execute(f"alter table {schema(shard)}.loads disable trigger all")
            self.require_owner(connection, shard)
            self.copy(connection, shard, tried, ids)
            self._ends.wait(pause_s if is_early else 0)
            connection.execute(f"alter table {schema(shard)}.loads enable trigger all")

        self.directly(shard, load)

    def _in_three(self, shard: int, size: int, pause_s: float) -> None:
        """As ``pg_restore --disable-triggers`` does, each statement a transaction."""

        def load(connection: Session, tried: Tried) -> None:
            ids = self.draw(connection, shard, tried, size)
            self.require_owner(connection, shard)
            connection.commit()
            self._disabled.add(shard)
            self._switch(connection, shard, "disable")
            self._ends.wait(pause_s / 4)
            self.copy(connection, shard, tried, ids)
            self.require_owner(connection, shard)

        self.directly(shard, load)
        self._enable(shard)

    def _enable(self, shard: int) -> None:
        """Enables the triggers wherever the shard is."""
        if shard in self._disabled:
            with (
                suppress(psycopg.OperationalError),
                self.connected(self.cluster.node_of(shard).name) as there,
            ):
                self._switch(there, shard, "enable")
                self._disabled.discard(shard)

    @staticmethod
    def _switch(connection: Session, shard: int, how: str) -> None:
        connection.execute("set local lock_timeout = '5s'")
        connection.execute(f"alter table {schema(shard)}.loads {how} trigger all")
        connection.commit()

    def _remove(self, connection: Session, shard: int, tried: Tried, gone: list[int]) -> None:
        connection.execute("set local lock_timeout = '10s'")
        connection.execute(f"delete from {schema(shard)}.loads where id = any (%s)", [gone])
        tried.gone += [("loads", id_) for id_ in gone]
        # Whether it was acknowledged or not, nobody touches them again.
        self.forget(shard, tried)


class Preparer(Direct):
    """Transactions that are prepared, left over, and committed or rolled back seconds later."""

    every_s = 0.5

    def __init__(self, number: int, **rest: Any) -> None:
        super().__init__(number, **rest)
        self._doubtful: list[tuple[str, str]] = []
        """Nodes and names of those whose PREPARE was not answered: it may still arrive."""

    def calm(self) -> None:
        for node, gid in self._doubtful:
            self._resolve(node, gid, "rollback")

    def step(self, shard: int) -> None:
        self.calm()
        node, tried = self.cluster.node_of(shard).name, Tried()
        gid = f"soak {self.number} {self.operation}"
        try:
            with self.connected(node) as connection:
                try:
                    ids = self.draw(connection, shard, tried, 3)
                    self.copy(connection, shard, tried, ids)
                finally:
                    self.record.tried(self.operation, shard, tried)
                connection.execute(f"prepare transaction '{gid}'")
                connection.commit()
        except psycopg.Error as error:
            if sqlstate_of(error) not in MAY_END_WITH:
                raise
            # It is perhaps prepared, or will be, and never committed.
            self._doubtful = [*self._doubtful[-20:], (node, gid)]
            self._resolve(node, gid, "rollback")
            self.record.ended(self.operation, "no")
            return
        self._ends.wait(self.random.choice([0.0, 0.2, self.random.uniform(0, 6)]))
        is_kept = self.random.random() < 0.7
        self._resolve(node, gid, "commit" if is_kept else "rollback")
        self.record.ended(self.operation, "ok" if is_kept else "no")
        if is_kept:
            self.keep(shard, tried)

    def _resolve(self, node: str, gid: str, how: str) -> None:
        """Commits or rolls back until nothing is prepared any more, wherever the node is now."""
        while True:
            try:
                with self.connected(node) as connection:
                    connection.autocommit = True
                    connection.execute("set statement_timeout = '5s'")
                    is_left = "select count(*) from pg_prepared_xacts where gid = %s"
                    if connection.execute(is_left, [gid]).fetchone() == (0,):
                        return
                    connection.execute(f"{how} prepared '{gid}'")
            except psycopg.Error as error:
                if sqlstate_of(error) not in (*MAY_END_WITH, "42704", "55000"):
                    raise
            time.sleep(0.1)
