"""No command and no function of ours runs what others named like something of PostgreSQL's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.engine import make_url

from shardids.migrate.status import unlike
from shardids.pg.embedded import temporary_servers
from tests.support.generator import DEFAULT, connect
from tests.support.hostile import Names, plant, plant_words
from tests.support.migrations import App
from tests.support.moves import TwoNodes, two_nodes

SHARDS = 4
COMMANDS = f"""
init --shards {SHARDS}
node add b --url {{b}}
shard create
node list
shard list
shard list 0
grant app
migrate up one
migrate up one:two --sql --out scripts
migrate up
migrate down
migrate up
migrate status
migrate revision --list
migrate check --lint
migrate check --all
migrate stamp one --shards 1
migrate stamp two --shards 1
doctor --key users.id
upgrade
query-node create --on b --store-password
query-node status
query-node create --on a --store-password
query-node status
shard move 0 --to b --verify
shard move --list
shard purge all --yes
shard move 3 --to a --offline
rebalance --dry-run
rebalance --drain a --dry-run
shard pin 3
tenant pin cat
rebalance --watch --over 1s --dry-run
shard unpin 3
tenant unpin cat
query-node refresh
query-node drop
"""
POOLED = """
node list
shard create
shard list
shard list 0
shard move --list
grant app
upgrade
doctor
query-node status
rebalance --dry-run
"""
KNOWN = {
    # Alembic's bookkeeping in its version table runs with the shard's schema on the path, as revisions do.
    # Our own statements are sent along with it, so nothing else may be called.
    "migrate (up|down)": r"\.= \(character varying, character varying\) in: .*UPDATE alembic_version SET",
}
"""Commands and what hostile functions are called by there: see docs/explanation/security.md."""
REFLECTION = "could run code of other roles"
"""What a comparison with models is refused with: SQLAlchemy reads a shard with its schema on the path."""

ENVIRONMENT = """
import sqlalchemy as sa
from shardids.migrate import key_column, run_environment

metadata = sa.MetaData()
sa.Table("users", metadata, key_column(), sa.Column("name", sa.Text, nullable=False))
run_environment(metadata)
"""


class Hits:
    """What the logs of both servers say of hostile functions, statement by statement."""

    def __init__(self, nodes: TwoNodes) -> None:
        self._logs = [path for server in nodes.servers.values() for path in _logs(server.directory)]
        assert self._logs
        self._read = [0] * len(self._logs)
        self.new()

    def new(self) -> list[str]:
        found = []
        for number, path in enumerate(self._logs):
            text = path.read_bytes()[self._read[number] :]
            self._read[number] += len(text)
            found += re.findall(r"hostile: (.*)", text.decode(errors="replace"))
        return list(dict.fromkeys(found))


def _logs(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*log*") if path.is_file() and "pg_wal" not in path.parts)


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    """Two nodes where an application's role has planted what it can, shard 0's schema first on the path."""
    with temporary_servers(2) as servers:
        for server in servers:
            with connect(server.url()) as db:
                db.execute("create role app login; grant create, usage on schema public to app")
                db.execute("grant create on database postgres to app")
                db.execute("alter database postgres set search_path = shard_0000, shard_0003, public")
                names = Names(db)
                db.execute("set role app")
                planted = plant(db, "public", names)
                plant_words(db, "public", names)
                assert planted > 3000
        nodes = two_nodes(servers, SHARDS)
        for node, schema in (("a", "shard_0000"), ("b", "shard_0003")):
            with nodes.connected(node) as db:
                db.execute(f"grant create, usage on schema {schema} to app".encode())
                db.execute("set role app")
                # Few: they go where the shards go.
                plant(db, schema, names, most=3, symbols="= <> ||")
        with nodes.connected("b") as db:
            db.execute("grant create, usage on schema shard_0002 to app; set role app")
            plant(db, "shard_0002", names)
        yield nodes
        nodes.catalog.close()


def test_the_plants_are_found_where_nothing_guards_against_them(nodes: TwoNodes) -> None:
    hits = Hits(nodes)
    with nodes.connected("a") as db:
        db.execute("select format('%s', 1), 'a'::name = 'b'::varchar, to_regclass('x'::name)")
        db.execute("select 1::oid = 'int4'::regtype")
    assert len(hits.new()) >= 4


@pytest.mark.long
def test_no_command_runs_them(
    nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SHARDIDS_CATALOG", nodes.catalog_url)
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path / "migrations"))
    monkeypatch.chdir(tmp_path)
    app = App(tmp_path / "migrations", make_url(nodes.catalog_url), capsys)
    app.add_two()
    (app.folder / "env.py").write_text(ENVIRONMENT, encoding="utf-8")
    hits, ran_into = Hits(nodes), []
    for words in COMMANDS.format(b=nodes.servers["b"].url()).strip().splitlines():
        ran = app.command(*words.split())
        expected = (0, 3) if words.startswith(("doctor", "migrate check --lint")) else (0,)
        if ran.code not in expected and not (words.startswith("migrate check") and REFLECTION in ran.err):
            ran_into.append(f"{words}: {ran}")
        ran_into += [f"{words}: {hit}" for hit in hits.new() if not is_known(words, hit)]
    with app.migration() as migration:
        shards = migration.choose()
        unlike(migration.nodes, migration.placement, shards[0], shards)
    assert (ran_into, hits.new()) == ([], [])


def test_no_command_runs_them_behind_a_pooler(
    nodes: TwoNodes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDIDS_CATALOG", nodes.catalog_url)
    # As a pooler says: a process number of its own. No session keeps a search_path then.
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", property(lambda _: 0))
    app = App(tmp_path / "migrations", make_url(nodes.catalog_url), capsys)
    hits, ran_into = Hits(nodes), []
    for words in POOLED.strip().splitlines():
        ran = app.command(*words.split())
        if ran.code not in (0, 3):
            ran_into.append(f"{words}: {ran}")
        ran_into += [f"{words}: {hit}" for hit in hits.new()]
    assert ran_into == []


def is_known(words: str, hit: str) -> bool:
    return any(re.match(commands, words) and re.search(called, hit) for commands, called in KNOWN.items())


VALUES = {
    "integer": "1",
    "bigint": "1",
    "smallint": "1",
    "boolean": "false",
    "name": "'shard_0001'",
    "text": "'SI001'",
    "text[]": "null",
    "interval": "'100ms'",
    "timestamp with time zone": "'2026-07-01'",
}
REFUSALS = {"42883", "42725", "42703", "42804", "42P17", "42846"}
"""What a statement is refused with whose names mean something else: undefined, ambiguous, of another type."""
_CALLABLE = """
    select n.nspname::text || '.' || quote_ident(p.proname),
           array(select t::regtype::text
                 from unnest(p.proargtypes::oid[]) with ordinality as u (t, k) order by k)
    from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where n.nspname in ('shardids', 'shardids_catalog', 'shard_0001') and p.prorettype <> 'trigger'::regtype
    order by p.proname in ('fence', 'stop'), 1"""
PATHS = ("pg_temp, shard_0000, public, pg_catalog", "shard_0000, public")


@pytest.mark.parametrize("path", PATHS)
def test_no_function_runs_them(nodes: TwoNodes, path: str) -> None:
    hits, ran_into = Hits(nodes), []
    with nodes.connected("a") as db:
        db.execute(
            "create table if not exists shard_0001.kept (id bigint default shard_0001.next_id(), at text)"
        )
        db.execute("set search_path = pg_catalog")
        db.execute("select shardids.define_counter(1, 'shard_0001', 'day')")
        functions = db.execute(_CALLABLE.encode()).fetchall()
        names = Names(db)
    with nodes.connected("a") as db:
        db.execute("set role app")
        plant_words(db, "pg_temp", names)
        db.execute("reset role")
        db.execute("set statement_timeout = '5s'")
        db.execute(f"set search_path = {path}".encode())
        hits.new()
        statements = ["insert into shard_0001.kept (at) values ('x') returning id"]
        for name, types in functions:
            values = [VALUES.get(one, "'shard_0001.id_offset'") for one in types]
            statements.append(f"select * from {name}({', '.join(values)})")
        ahead = DEFAULT.min_id(datetime.now(UTC) + timedelta(minutes=5))
        statements += [
            # What a draw does when the usual path does not do.
            "select shardids.current_id(null, 'shard_0001.id_counter', 'shard_0001.id_offset', 1)",
            "select shardids.lagging_id('shard_0001.id_counter', 'shard_0001.id_offset', 1)",
            "select shard_0001.next_ids(5000)",
            "select shardids.reserve(1, 5)",
            f"select shardids.advance_past(1, {ahead})",
            "select shardids.activate(1)",
            # Numbers for people.
            "select shardids.define_counter(1, 'order', 'day', lanes => 4)",
            "select shard_0001.next_number('x', 'shard_0001'), shard_0001.next_number('x', 'shard_0001')",
            "select shardids.number_rows('shard_0001.kept', 'at', 'id', 'order', 'day', lanes => 4);"
            " insert into shard_0001.kept default values; insert into shard_0001.kept default values",
            "select shardids.set_number(1, 'x', 'shard_0001', 5, 'x'), shardids.counters(1)",
            "select shardids.counter_changes(1), shardids.set_counter_zone(1, 'x', 'Europe/Berlin')",
        ]
        for statement in statements:
            error = None
            db.execute("begin")
            try:
                db.execute(statement.encode())
            except psycopg.Error as failure:
                error = failure
            db.execute("rollback")
            if error is not None and error.sqlstate in REFUSALS:
                ran_into.append(f"{statement}: {error}")
            ran_into += [f"{statement}: {hit}" for hit in hits.new()]
        db.execute("select shardids.activate(1)")
    assert ran_into == []


def test_functions_that_are_parsed_when_they_run_set_a_safe_search_path(
    nodes: TwoNodes,
) -> None:
    with nodes.connected("a") as db:
        db.execute("set search_path = pg_catalog")
        unsafe: list[Any] = db.execute("""
            select p.oid::regprocedure::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace
            where n.nspname in ('shardids', 'shardids_catalog', 'shard_0001')
              and p.prosqlbody is null
              and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)""").fetchall()
    # Draws go through them, and a setting would slow each. Every name in them has a schema.
    assert sorted(name for (name,) in unsafe) == [
        "shardids.catch_up(bigint,regclass,regclass,integer)",
        "shardids.catch_up_on_citus(bigint,regclass,regclass,integer)",
        "shardids.current_id(bigint,regclass,regclass,integer)",
        "shardids.lagging_id(regclass,regclass,integer)",
        "shardids.reserve(integer,integer)",
    ]
