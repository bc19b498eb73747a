"""A cluster to be damaged by hand, and damages: the doctor examines it, and its remedies are pasted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace

import psycopg

from shardids.catalog.rows import Catalog
from shardids.migrate import recording
from shardids.pg.embedded import temporary_servers
from shardids.tables.views import drop_query_node
from shardids.testing import devcluster
from shardids.watch import doctor
from shardids.watch.doctor.findings import Command, Finding, Severity, Where
from tests.support.clusters import catalog_at, command_here

CHECKS = [check.name for check in doctor.CHECKS if check.name != "tick-rate"]
S = "shard_0005"

TABLES = """
    create table {s}.users (id bigint primary key default {s}.next_id(), name text not null,
                            age integer default 0 constraint positive check (age >= 0));
    create table {s}.photos (id bigint primary key default {s}.next_id(), user_id bigint references {s}.users,
                             title varchar(40));
    create index photos_user on {s}.photos (user_id);
    create view {s}.names as select id, name from {s}.users;
    create sequence {s}.numbers;
    create function {s}.touch() returns trigger language plpgsql as 'begin return new; end';
    create trigger touched before update on {s}.users for each row execute function {s}.touch();
    alter table {s}.users enable row level security;
    create policy own on {s}.users using (name = current_user);
    create table {s}.alembic_version (version_num varchar(32) primary key);
    insert into {s}.alembic_version values ('0001');
    insert into {s}.users (name) select 'x' from generate_series(1, 20);
    select shardids.define_counter(id, 'order', 'day') from shardids.shard where schema = '{s}';
    grant usage on schema {s} to reader;
    grant select on {s}.users to reader;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What is done to a node or the catalog, the checks that find it, and what ends it if no command does.

    ``stays``: the session that does it stays connected, idle for over five seconds when the doctor comes.
    """

    done: str
    found: tuple[str, ...]
    undo: str = ""
    on: str = "b"
    undo_on: str = ""
    since: int = 14
    stays: bool = False

    def to(self, shard: int) -> Damage:
        """The same damage, done to another shard than 5."""
        done, undo = (
            re.sub(r"\b5\)", f"{shard})", text.replace(S, f"shard_{shard:04}"))
            for text in (self.done, self.undo)
        )
        return replace(self, done=done, undo=undo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """A cluster of two servers, whose node a holds the catalog too."""

    urls: dict[str, str]

    def run(self, on: str, *statements: str) -> None:
        """Runs statements on a node, each as psql would, in one session."""
        with self.session(on, *statements):
            pass

    @contextmanager
    def session(self, on: str, *statements: str) -> Iterator[None]:
        """The same, in a session that lasts as long as the block; the statements need not be all of it."""
        with closing(
            psycopg.connect(self.urls["a" if on == "catalog" else on], autocommit=True)
        ) as connection:
            for statement in statements:
                for one in statement.split("; "):
                    connection.execute(one.encode())
            yield

    @contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Does a damage, and in the end undoes what no command of the findings ends."""
        with self.session(damage.on, damage.done) if damage.stays else nullcontext():
            if not damage.stays:
                self.run(damage.on, damage.done)
            try:
                yield
            finally:
                if damage.undo:
                    self.run(damage.undo_on or damage.on, damage.undo)

    def paste(self, remedies: Sequence[Command]) -> None:
        """Runs the commands, those for a database in one session a place, as a DBA has it."""
        for remedy in remedies:
            if remedy.where is Where.SHELL:
                _, *arguments = shlex.split(remedy.text)
                # The answer of a DBA who knows that the original is dead, or that nobody needs the rows.
                arguments += ["--yes"] if arguments[:2] in (["shard", "activate"], ["shard", "purge"]) else []
                done = command_here(*arguments, SHARDIDS_CATALOG=self.urls["a"])
                assert done.returncode == 0, (remedy.text, done.stderr)
        for place in sorted({remedy.place for remedy in remedies if remedy.where is not Where.SHELL}):
            there = [remedy for remedy in remedies if remedy.place == place]
            self.run(there[0].node or "catalog", *(remedy.text for remedy in there))

    def accept(self) -> None:
        """Records the state of its shards."""
        with catalog_at(self.urls["a"]) as catalog:
            recording.accept(catalog, recording.plan_acceptance(catalog), "test")

    def findings(self) -> list[Finding]:
        """What is wrong with it."""
        with catalog_at(self.urls["a"]) as catalog:
            found = doctor.examine(catalog, CHECKS).findings
        return [finding for finding in found if finding.severity is not Severity.INFO]


@contextmanager
def admitted() -> Iterator[Patient]:
    """Yields a cluster of 8 shards with tables, whose state is recorded: 0-3 on node a, 4-7 on node b."""
    settings = {"wal_level": "logical", "max_prepared_transactions": "5"}
    with temporary_servers(2, settings=settings) as servers:
        urls = {name: server.url() for name, server in zip("ab", servers, strict=True)}
        catalog = Catalog(devcluster.create_cluster(servers, 8))
        node_of = catalog.placement().node_of
        # It would be out of date after most damages.
        drop_query_node(catalog)
        catalog.close()
        there = Patient(urls=urls)
        for name in "ab":
            there.run(name, "create role reader")
        for shard, name in node_of.items():
            with psycopg.connect(urls[name], autocommit=True) as connection:
                connection.execute(TABLES.format(s=f"shard_{shard:04}").encode())
        there.accept()
        yield there
