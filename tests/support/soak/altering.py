"""Changes of the schema: migrations over all shards, some killed, and a DBA's own statements on one shard."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field

import psycopg

from tests.support.moves import schema
from tests.support.soak.field import READER
from tests.support.soak.scene import Action, Scene
from tests.support.soak.writers import MAY_END_WITH, sqlstate_of

LANE = "schema"
START = """
op.create_table(
    "entries",
    key_column(),
    sa.Column("writer", sa.Integer, nullable=False),
    sa.Column("value", sa.BigInteger, nullable=False),
)
entry = sa.ForeignKey("entries.id", ondelete="CASCADE")
op.create_table("parts", key_column(), sa.Column("entry_id", sa.BigInteger, entry, nullable=False))
op.create_index("parts_entry", "parts", ["entry_id"])
op.create_table(
    "loads",
    key_column(),
    sa.Column("writer", sa.Integer, nullable=False),
    sa.Column("value", sa.BigInteger, nullable=False),
)
"""
REVISIONS = (
    ('op.add_column("entries", sa.Column("{name}", sa.Integer))', 'op.drop_column("entries", "{name}")'),
    ('op.create_index("{name}", "parts", ["entry_id", "id"])', 'op.drop_index("{name}", "parts")'),
    (
        'op.create_check_constraint("{name}", "entries", "value >= 0")',
        'op.drop_constraint("{name}", "entries")',
    ),
    (
        'op.create_table("{name}", key_column(), sa.Column("of", sa.Integer, sa.CheckConstraint("of > 0")))',
        'op.drop_table("{name}")',
    ),
)
"""What a revision does, and what a later one does to undo that."""
KEPT = 4
"""How much of what revisions and the DBA have made stays at a time: the schema does not grow for ever."""
STATEMENTS = (
    "create index if not exists {name} on {s}.loads (writer, value)",
    "alter table {s}.parts drop constraint if exists {name}, add constraint {name} check (entry_id > 0)",
    "create or replace view {s}.{name} as select id from {s}.parts; grant select on {s}.{name} to {reader}",
    "create or replace function {s}.{name}() returns integer language sql as 'select 1'",
    "drop policy if exists {name} on {s}.parts; create policy {name} on {s}.parts to {reader} using (true)",
    "create statistics if not exists {s}.{name} on writer, value from {s}.loads",
)
UNDOING = (
    "drop index if exists {s}.{name}",
    "alter table {s}.parts drop constraint if exists {name}",
    "drop view if exists {s}.{name}",
    "drop function if exists {s}.{name}()",
    "drop policy if exists {name} on {s}.parts",
    "drop statistics if exists {s}.{name}",
)


@dataclass(slots=True)
class Migrations:
    """The application's revisions: each does something, or undoes what an earlier one did."""

    made: list[tuple[str, int]] = field(default_factory=list)
    count: int = 0

    def add(self, scene: Scene, chance: random.Random) -> str:
        """Writes another revision; its name."""
        self.count += 1
        name, before = f"m{self.count:03}", f"m{self.count - 1:03}" if self.count > 1 else "start"
        if len(self.made) >= KEPT and chance.random() < 0.7:
            old, kind = self.made.pop(0)
            scene.app.add(name, REVISIONS[kind][1].format(name=old), after=before)
        else:
            kind = chance.randrange(len(REVISIONS))
            scene.app.add(name, REVISIONS[kind][0].format(name=name), after=before)
            self.made.append((name, kind))
        return name


@dataclass(slots=True)
class Dba:
    """A DBA who changes a shard by hand, and the others later; what was acknowledged where."""

    made: list[tuple[str, int]] = field(default_factory=list)
    due: list[tuple[str, int | None]] = field(default_factory=list)
    """Statements that not all shards have yet, with the shard that has, if it was acknowledged."""
    fresh: list[tuple[str, int]] = field(default_factory=list)
    count: int = 0

    def change(self, scene: Scene, chance: random.Random) -> None:
        """A statement on one shard, one that is being moved if there is any."""
        statement = self._next(chance)
        moving = [move.shard for move in scene.field.open_moves()]
        shard = chance.choice(moving or [*scene.field.shards])
        wait_s = chance.choice([0.0, 0.0, chance.uniform(0, 3)])
        is_done = self.apply(scene, shard, statement, wait_s)
        self.due.append((statement, shard if is_done else None))

    def _next(self, chance: random.Random) -> str:
        self.count += 1
        name = f"dba_{self.count}"
        if len(self.made) >= KEPT and chance.random() < 0.7:
            name, kind = self.made.pop(0)
            return UNDOING[kind].format(name=name, s="{s}", reader=READER)
        kind = chance.randrange(len(STATEMENTS))
        self.fresh.append((name, kind))
        return STATEMENTS[kind].format(name=name, s="{s}", reader=READER)

    def apply(self, scene: Scene, shard: int, statement: str, wait_s: float = 0.0) -> bool:
        """Whether it was acknowledged, on the shard's owner."""
        node, lock = scene.field.owner(shard), "set local lock_timeout = '3s'"
        try:
            with psycopg.connect(scene.field.url(node), connect_timeout=5) as connection:
                connection.execute(lock)
                connection.execute(statement.replace("{s}", schema(shard)))
                time.sleep(wait_s)
                # Last: what it changed is seen by whoever stops the shard from here on.
                state = connection.execute("select state from shardids.shard where id = %s", [shard])
                if state.fetchone() != ("active",):
                    connection.rollback()
                    scene.log.write(LANE, f"DBA: shard {shard} is not on {node} any more")
                    return False
        except psycopg.Error as error:
            if sqlstate_of(error) not in MAY_END_WITH:
                raise
            scene.log.write(LANE, f"DBA, shard {shard}: {sqlstate_of(error)} for {statement}")
            return False
        scene.log.write(LANE, f"DBA, shard {shard} on {node}: {statement}")
        scene.log.count("statements by the DBA")
        return True

    def complete(self, scene: Scene) -> None:
        """Brings what one shard has to the others. What was acknowledged is not repeated."""
        for statement, done in self.due:
            for shard in scene.field.shards:
                if shard != done:
                    assert self.apply(scene, shard, statement), statement
        self.due.clear()
        self.made += self.fresh
        self.fresh.clear()


class Altering:
    """The actions of this lane, which remember what they did."""

    def __init__(self) -> None:
        self.migrations, self.dba = Migrations(), Dba()
        self.actions = (
            Action(name="migrate", weight=3, act=self.migrate),
            Action(name="kill a migration", weight=2, act=self.kill_a_migration),
            Action(name="stop a migration", weight=1, act=self.stop_a_migration),
            Action(name="DBA", weight=2, act=self.dba.change),
            Action(name="doctor", weight=1, act=self.examine),
            Action(name="nothing", weight=4, act=self.rest),
        )

    def migrate(self, scene: Scene, chance: random.Random) -> None:
        ran = scene.ran(LANE, scene.launcher.start(*self._up(scene, chance)))
        scene.log.count("migrations" if ran.code == 0 else "migrations refused or failed")

    def kill_a_migration(self, scene: Scene, chance: random.Random) -> None:
        running = scene.launcher.start(*self._up(scene, chance))
        until = time.monotonic() + chance.uniform(0.3, 2.0)
        while running.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        running.signal(signal.SIGKILL)
        if scene.ran(LANE, running).code is None:
            scene.log.count("migrations killed")

    def stop_a_migration(self, scene: Scene, chance: random.Random) -> None:
        running = scene.launcher.start(*self._up(scene, chance))
        time.sleep(chance.uniform(0.3, 1.5))
        running.signal(signal.SIGSTOP)
        time.sleep(chance.uniform(1, 6))
        running.signal(signal.SIGCONT)
        scene.ran(LANE, running)
        scene.log.count("migrations stopped and woken")

    def _up(self, scene: Scene, chance: random.Random) -> tuple[str, ...]:
        if chance.random() < 0.7:
            self.migrations.add(scene, chance)
        return ("migrate", "up", *chance.choice([(), ("--jobs", "2"), ("--continue-on-error",)]))

    def examine(self, scene: Scene, _chance: random.Random) -> None:
        scene.ran(LANE, scene.launcher.start("doctor"))
        scene.log.count("examinations")

    def rest(self, scene: Scene, chance: random.Random) -> None:
        scene.ends.wait(chance.uniform(1, 5))

    def settle(self, scene: Scene) -> None:
        """All shards at the newest revision, with what the DBA has made."""
        assert not scene.field.open_moves()
        ran = scene.ran(LANE, scene.launcher.start("migrate", "up"))
        assert ran.code == 0, f"{ran}\n{ran.out}{ran.err}"
        self.dba.complete(scene)
