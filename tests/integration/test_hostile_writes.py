"""Code that others put where PostgreSQL runs it as the role that writes: refused, or trusted by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from shardids import Cluster, mover
from shardids.adopt.run import following as adopting
from shardids.adopt.run.sides import Side as AdoptSide
from shardids.catalog.nodes import administrative_engine
from shardids.catalog.rows import Catalog
from shardids.cli import app
from shardids.errors import ClusterConflict, CopyFailed, MissingPrivilege, MoveRefused
from shardids.pg.embedded import temporary_servers
from shardids.pg.schemas import administers, untrusted
from shardids.pg.sqlfiles import read_sql
from shardids.pg.urls import parse_url
from shardids.tables import references
from shardids.tables.load import LoadSettings, load
from tests.conftest import dsn, found_cluster
from tests.support.clusters import catalog_at, connected
from tests.support.planted_code import PLANTED, Recorded, owner_columns, plant, table_of

SHARDS = 32
PASSWORD = "p"
TABLE = "create table {s}.notes (id bigint primary key default {s}.next_id(), word text)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A cluster of two nodes; mallory planted what an ordinary role can in shard 0, on node a."""

    urls: dict[str, URL]
    catalog: Catalog
    recorded: tuple[Recorded, ...]
    unused: Mapping[str, Iterator[int]]

    def ran(self) -> set[str]:
        """The roles that planted functions ran as since the last call, on either node."""
        return {role for one in self.recorded for _, role, _ in one.new()}

    def url(self, role: str, node: str = "a") -> URL:
        return self.urls[node].set(username=role, password=PASSWORD)

    def shard(self, owner: str | None = "app", node: str = "a") -> tuple[int, str]:
        """A shard on a node that nobody else uses, with a table of a role, and its schema."""
        shard = next(n for n in self.unused[node] if self.catalog.node_of(n).name == node)
        schema = f"shard_{shard:04d}"
        with connected(self.urls[node]) as admin:
            admin.execute(TABLE.replace("{s}", schema).encode())
            if owner is not None:
                admin.execute(f"alter table {schema}.notes owner to {owner}".encode())
                admin.execute(f"grant usage on schema {schema} to {owner}".encode())
                admin.execute(f"select shardids.grant_usage(array[{shard}], '{owner}')".encode())
        return shard, schema


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("writes")
    folder.chmod(0o777)
    with temporary_servers(2, settings={"wal_level": "logical"}) as servers:
        urls = {name: parse_url(server.url()) for name, server in zip("ab", servers, strict=True)}
        found_cluster(urls["a"], urls, SHARDS)
        for url in urls.values():
            with connected(url) as admin:
                for role in ("mallory", "app", "loader"):
                    admin.execute(f"create role {role} login password '{PASSWORD}'".encode())
                admin.execute("grant create on database postgres to mallory")
        with connected(urls["a"]) as admin:
            # A load reads the table's columns in the first shard.
            admin.execute(TABLE.replace("{s}", "shard_0000").encode())
            admin.execute("grant create, usage on schema shard_0000 to mallory")
            admin.execute("select shardids.grant_usage(array[0], 'mallory')")
        with connected(urls["a"].set(username="mallory", password=PASSWORD)) as mallory:
            plant(mallory, "mallory", folder / "ran", "shard_0000")
        recorded = tuple(Recorded(server.directory) for server in servers)
        with catalog_at(urls["a"]) as catalog:
            unused = {name: iter(count(1)) for name in urls}
            yield Hostile(urls=urls, catalog=catalog, recorded=recorded, unused=unused)


@pytest.mark.parametrize("offline", [False, True])
def test_a_shard_with_tables_of_others_is_not_moved_and_none_of_their_code_runs(
    hostile: Hostile, offline: bool
) -> None:
    options = mover.Options(offline=offline)
    for act in (mover.plan_move, mover.move):
        with pytest.raises(MoveRefused, match='role "mallory" can change what table shard_0000') as refused:
            act(hostile.catalog, 0, "b", options=options)
        assert 'as role "postgres", which may do more' in refused.value.message
        assert "--trust mallory" in refused.value.hint
    assert hostile.ran() == set()
    assert hostile.catalog.node_of(0).name == "a"


def test_each_kind_of_planted_code_is_found_in_a_table_of_the_engines_owner(hostile: Hostile) -> None:
    # A cast of the table's type, and a trigger, are not of the table's owner any more.
    engine = administrative_engine(hostile.urls["a"], what="node")
    try:
        with engine.connect() as connection, connection.begin() as transaction:
            for kind in PLANTED:
                table = f"shard_0000.{table_of(kind)}"
                connection.exec_driver_sql(f"alter table {table} owner to postgres")
                for part in ("_rows", "_part"):
                    connection.exec_driver_sql(f"alter table if exists {table}{part} owner to postgres")
                found = untrusted(connection, [table])
                assert [one.role for one in found] == ["mallory"], kind
                assert untrusted(connection, [table], trusted=["mallory"]) == []
            transaction.rollback()
    finally:
        engine.dispose()
    assert "postgres" not in hostile.ran()


@pytest.mark.parametrize("owner", ["pg_monitor", "pg_database_owner"])
def test_predefined_roles_are_not_trusted_since_others_act_as_them(hostile: Hostile, owner: str) -> None:
    shard, schema = hostile.shard(owner=None)
    for url in hostile.urls.values():
        with connected(url) as admin:
            admin.execute(
                f"create schema of_{owner}; grant usage on schema of_{owner} to public;"
                f"create function of_{owner}.ok(text) returns boolean language plpgsql as $f$ begin"
                " raise warning 'planted: % as % of %', 'check', current_user, session_user;"
                " return true; end $f$;"
                f"alter function of_{owner}.ok(text) owner to {owner}".encode()
            )
    with connected(hostile.urls["a"]) as admin:
        admin.execute(f"alter table {schema}.notes add check (of_{owner}.ok(word))".encode())
        admin.execute(f"insert into {schema}.notes (word) values ('w')".encode())
    assert hostile.ran() == {"postgres"}
    refused = f'role "{owner}" can change what function of_{owner}.ok'
    with pytest.raises(MoveRefused, match=refused):
        mover.move(hostile.catalog, shard, "b", options=mover.Options(offline=True))
    with connected(hostile.urls["a"]) as admin:
        admin.execute(f"alter function of_{owner}.ok(text) owner to postgres".encode())
        admin.execute(f"alter table {schema}.notes owner to {owner}".encode())
    with pytest.raises(MoveRefused, match=f'role "{owner}" can change what table {schema}.notes'):
        mover.move(hostile.catalog, shard, "b", options=mover.Options(offline=True))
    assert hostile.ran() == set()


def test_the_owner_of_each_kind_of_object_is_read_from_its_catalog(hostile: Hostile) -> None:
    with connected(hostile.urls["a"]) as admin:
        there = owner_columns(admin)
    shared = {"spcowner", "subowner"}
    for file, others in (
        ("owners", {"nspowner", "lomowner", "evtowner", "pubowner"}),
        ("state", {"lomowner"}),
    ):
        query = read_sql(f"reading/{file}.v1")
        assert {column for column in there if f"select t.{column} from" not in query} == shared | others


def test_a_shard_of_a_role_that_is_trusted_by_name_moves(hostile: Hostile) -> None:
    shard, schema = hostile.shard()
    with pytest.raises(MoveRefused, match='role "app" can change what table'):
        mover.move(hostile.catalog, shard, "b")
    with connected(hostile.url("app")) as owner:
        owner.execute(f"insert into {schema}.notes (word) values ('w')".encode())
    options = mover.Options(trusted=("app",))
    assert mover.move(hostile.catalog, shard, "b", options=options).outcome == "moved"
    # Members of the engine's owner can do all of that anyway.
    with connected(hostile.urls["a"]) as admin, connected(hostile.urls["b"]) as other:
        other.execute("grant postgres to app")
        admin.execute("grant postgres to app")
        try:
            assert mover.move(hostile.catalog, shard, "a", back=True).outcome == "moved"
        finally:
            admin.execute("revoke postgres from app")
            other.execute("revoke postgres from app")


def test_the_command_line_takes_roles_to_trust(
    hostile: Hostile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shard, schema = hostile.shard()
    words = ["shard", "move", str(shard), "--to", "b", "--dry-run", "--catalog", dsn(hostile.urls["a"])]
    for more, code in (([], 1), (["--trust", "mallory"], 1), (["--trust", "mallory", "--trust", "app"], 0)):
        with pytest.raises(SystemExit) as ended:
            app([*words, *more], prog_name="shardids")
        assert (ended.value.code or 0) == code
        told = capsys.readouterr()
        assert (f'role "app" can change what table {schema}.notes runs' in told.err) is (code == 1)


@pytest.mark.parametrize(
    "how",
    [
        "when (old.* is distinct from new.*) execute function suppress_redundant_updates_trigger()",
        "execute function tsvector_update_trigger('words', 'pg_catalog.simple', 'word')",
        "execute function suppress_redundant_updates_trigger()",
    ],
)
def test_who_may_make_a_trigger_on_a_table_that_has_one_has_to_be_trusted(hostile: Hostile, how: str) -> None:
    shard, schema = hostile.shard(owner=None)
    with connected(hostile.urls["a"]) as admin:
        admin.execute(f"create table {schema}.lines (id bigint primary key, note bigint)".encode())
        admin.execute(f"alter table {schema}.lines add foreign key (note) references {schema}.notes".encode())
        admin.execute(f"grant all on {schema}.notes, {schema}.lines to app".encode())
        admin.execute(f"select shardids.add_barriers({shard})".encode())
        # Those of foreign keys and of the engine are nobody's.
        mover.plan_move(hostile.catalog, shard, "b")
        admin.execute(f"create trigger own before update on {schema}.notes for each row {how}".encode())
    with pytest.raises(MoveRefused, match=f'role "app" can change what trigger own on table {schema}.notes'):
        mover.plan_move(hostile.catalog, shard, "b")
    with connected(hostile.urls["a"]) as admin:
        admin.execute(f"revoke trigger on {schema}.notes from app".encode())
        mover.plan_move(hostile.catalog, shard, "b")
        admin.execute(f"grant trigger on {schema}.notes to public".encode())
    with pytest.raises(MoveRefused, match="--trust public"):
        mover.plan_move(hostile.catalog, shard, "b")
    mover.plan_move(hostile.catalog, shard, "b", options=mover.Options(trusted=("public",)))


def _load(hostile: Hostile, folder: Path, role: URL, shard: int, table: str, *trusted: str) -> int:
    path = folder / "words.csv"
    path.write_text("word\nv\nw\n")
    settings = LoadSettings(
        table=table,
        shard=shard,
        name=f"{role.username} {trusted}",
        rejects=folder / "rejects.csv",
        trusted=trusted,
    )
    with Cluster.connect(dsn(role), listen=False) as cluster, path.open("rb") as file:
        return load(cluster, file, settings).rows


@pytest.mark.filterwarnings("ignore:Did not recognize type")
def test_an_administrator_loads_no_rows_into_tables_of_others(hostile: Hostile, tmp_path: Path) -> None:
    for kind in PLANTED:
        with pytest.raises(CopyFailed, match='role "mallory" can change what') as refused:
            _load(hostile, tmp_path, hostile.urls["a"], 0, table_of(kind))
        assert "--trust mallory" in refused.value.hint
    assert "postgres" not in hostile.ran()


def test_a_load_goes_on_with_trust_and_as_a_role_that_administers_nothing(
    hostile: Hostile, tmp_path: Path
) -> None:
    shard, schema = hostile.shard()
    with pytest.raises(CopyFailed, match=f'role "app" can change what table {schema}.notes runs'):
        _load(hostile, tmp_path, hostile.urls["a"], shard, "notes")
    assert _load(hostile, tmp_path, hostile.urls["a"], shard, "notes", "app") == 2
    for url, is_asked in ((hostile.url("loader"), False), (hostile.urls["a"], True)):
        engine = administrative_engine(url, what="node")
        with engine.connect() as connection:
            assert administers(connection) is is_asked
        engine.dispose()


def test_the_role_that_the_databases_owner_sets_for_all_sessions_is_not_trusted(
    hostile: Hostile, tmp_path: Path
) -> None:
    shard, schema = hostile.shard(node="b")
    with connected(hostile.urls["b"]) as admin:
        admin.execute("alter database postgres owner to app")
        try:
            with connected(hostile.url("app", "b")) as app:
                app.execute("alter database postgres set role = app")
                # PostgreSQL sets it before, and keeps it.
                app.execute("alter database postgres set session_authorization = app")
            refused = f'role "app" can change what table {schema}.notes runs, .* as role "postgres"'
            with connected(hostile.urls["b"]) as other:
                row = other.execute("select current_user, session_user").fetchone()
                assert row == ("app", "postgres")
            with pytest.raises(CopyFailed, match=refused):
                _load(hostile, tmp_path, hostile.urls["a"], shard, "notes")
        finally:
            admin.execute("alter database postgres reset all")
            admin.execute("alter database postgres owner to postgres")


def test_a_role_that_is_set_is_trusted_for_a_user_who_administers_nothing(hostile: Hostile) -> None:
    _, schema = hostile.shard()
    with connected(hostile.urls["a"]) as admin:
        admin.execute("create role keeper")
        admin.execute("create role deploy login password 'p' in role app, keeper")
        admin.execute("alter role deploy set role = app")
    engine = administrative_engine(hostile.url("deploy"), what="node")
    for change, administers_, roles in (
        ("alter role keeper login", False, []),
        ("alter role keeper createrole", True, ["app"]),
        ("alter role keeper nocreaterole; grant postgres to keeper", True, ["app"]),
    ):
        with connected(hostile.urls["a"]) as admin:
            admin.execute(change.encode())
        with engine.begin() as connection:
            assert connection.exec_driver_sql("select current_user").scalar() == "app"
            assert administers(connection) is administers_
            found = untrusted(connection, [f"{schema}.notes"])
            assert [(one.role, one.as_role) for one in found] == [(role, "deploy") for role in roles]
    engine.dispose()


def test_no_reference_table_is_made_of_a_table_of_others(hostile: Hostile) -> None:
    with connected(hostile.urls["a"]) as admin:
        admin.execute("create table shardids_ref.lands (id bigint primary key, name text)")
        admin.execute("alter table shardids_ref.lands owner to app")
    with pytest.raises(MissingPrivilege, match='role "app" can change what table shardids_ref') as no:
        references.create_table(hostile.catalog, "lands", writer="a")
    assert no.value.hint.endswith("--trust app")
    references.create_table(hostile.catalog, "lands", writer="a", trusted=["app"])


@pytest.mark.parametrize("kind", ["publication", "slot", "subscription"])
def test_what_others_made_under_the_name_of_a_move_is_refused(hostile: Hostile, kind: str) -> None:
    shard, _ = hostile.shard(owner=None)
    with connected(hostile.urls["a"]) as admin:
        row = admin.execute("select coalesce(max(id), 0) + 1 from shardids_catalog.move").fetchone()
        assert row is not None
        name = f"shardids_move_{hostile.catalog.describe().cluster.hex[:8]}_{row[0]}_{shard}"
    if kind == "publication":
        node, error, drop = "a", MissingPrivilege, f"drop publication {name}"
        with connected(hostile.url("mallory")) as mallory:
            mallory.execute(f"create publication {name}".encode())
    elif kind == "slot":
        node, error, drop = "a", ClusterConflict, f"select pg_drop_replication_slot('{name}')"
        with connected(hostile.urls["a"]) as admin:
            admin.execute(f"select pg_create_logical_replication_slot('{name}', 'test_decoding')".encode())
    else:
        node, error, drop = "b", MissingPrivilege, f"drop subscription {name}"
        with connected(hostile.urls["b"]) as admin:
            admin.execute(
                f"create subscription {name} connection 'dbname=none password=x' publication none"
                " with (connect = false, slot_name = none)".encode()
            )
            admin.execute("alter role mallory superuser")
            admin.execute(f"alter subscription {name} owner to mallory".encode())
            admin.execute("alter role mallory nosuperuser")
    with pytest.raises(error, match=f"{kind} {name} exists") as refused:
        mover.move(hostile.catalog, shard, "b")
    with connected(hostile.urls[node]) as admin:
        for statement in drop.split(";"):
            admin.execute(statement.encode())
    assert "resume" in refused.value.hint
    assert mover.resume(hostile.catalog, shard).outcome == "moved"


def test_what_others_made_under_the_name_of_an_adoption_is_refused(hostile: Hostile) -> None:
    engine = administrative_engine(hostile.urls["a"], what="source")
    with connected(hostile.url("mallory")) as mallory:
        mallory.execute("create publication shardids_adopt_planted")
    try:
        side = AdoptSide(name="source", engine=engine)
        with pytest.raises(MissingPrivilege, match="publication shardids_adopt_planted exists"):
            adopting.publish_tables(side, "shardids_adopt_planted", ["shardids_catalog.cluster"])
        with connected(hostile.urls["a"]) as admin:
            found = admin.execute("select slot_name from pg_replication_slots where slot_name ~ 'adopt'")
            assert found.fetchall() == []
    finally:
        engine.dispose()
