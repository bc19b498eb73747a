"""A schema of shardids is the engine's owner's with all that is in it, or it is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.engine import URL

from shardids import Cluster
from shardids.adopt.inplace.keys import change_key, status
from shardids.adopt.run.barrier import drop_barrier, is_closed, make_barrier, reopen
from shardids.adopt.run.relay import install
from shardids.adopt.run.sides import Sides
from shardids.catalog.lookups import claims_name
from shardids.errors import MissingPrivilege, ShardidsError
from shardids.ids.layout import DEFAULT
from shardids.migrate.install import provision
from shardids.pg.connections import open_engine
from shardids.pg.schemas import own_schema
from shardids.tables import lookups, views
from shardids.tables.load.sending import make_tables, read_marks
from shardids.watch import doctor
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.clusters import catalog_at, connected, objects
from tests.support.waiting import wait_for

ON_QUERY_NODE = ("shardids_query", "shardids_nodes", "shardids_foreign")
EVIL = """
    create function {name} returns {returns} language plpgsql as $$
    begin
      begin execute 'alter role "{role}" superuser'; exception when others then null; end;
      return {result};
    end $$"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A cluster of two nodes, in whose databases mallory may create schemas."""

    a: URL
    b: URL
    mallory: URL

    @property
    def role(self) -> str:
        return str(self.mallory.username)

    def admin(self, url: URL, *statements: str) -> None:
        with connected(url) as db:
            for statement in statements:
                db.execute(statement.replace("{mallory}", f'"{self.role}"').encode())

    def plant(self, url: URL, *statements: str) -> None:
        """As mallory."""
        with connected(self.mallory.set(database=url.database)) as db:
            for statement in statements:
                db.execute(statement.encode())

    def evil(self, name: str, returns: str = "text", result: str = "'x'") -> str:
        return EVIL.format(name=name, returns=returns, result=result, role=self.role)

    def has_run(self) -> bool:
        with connected(self.a) as db:
            row = db.execute("select rolsuper from pg_roles where rolname = %s", [self.role]).fetchone()
            return row == (True,)

    def owners(self) -> list[str]:
        """What the doctor finds of owners."""
        with catalog_at(self.a) as catalog:
            found = [one for one in doctor.examine(catalog).findings if one.check == "schema-owner"]
        assert not self.has_run()
        return [one.what for one in found]


@pytest.fixture
def bare(blank_database: Callable[[], URL], make_role: MakeRole) -> Iterator[Hostile]:
    """Two databases without anything of shardids."""
    there = Hostile(a=blank_database(), b=blank_database(), mallory=make_role("mallory"))
    for url in (there.a, there.b):
        there.admin(url, f'grant create on database "{url.database}" to {{mallory}}')
    yield there
    for url in (there.a, there.b):
        there.admin(url, "drop owned by {mallory} cascade")


@pytest.fixture
def hostile(bare: Hostile) -> Hostile:
    found_cluster(bare.a, {"a": bare.a, "b": bare.b}, 4)
    for url, shards in ((bare.a, (0, 1)), (bare.b, (2, 3))):
        for shard in shards:
            bare.admin(
                url,
                f"create table shard_{shard:04}.users"
                f" (id bigint primary key default shard_{shard:04}.next_id(), name text)",
                f"insert into shard_{shard:04}.users (name) values ('n')",
            )
    return bare


def make_query_node(there: Hostile, **options: object) -> views.Refreshed:
    with catalog_at(there.a) as catalog:
        # The servers of the tests ask for passwords, which postgres_fdw has only if they are stored.
        return views.create_query_node(catalog, node="a", store_password=True)


def refresh(there: Hostile) -> None:
    with catalog_at(there.a) as catalog:
        views.refresh_query_node(catalog)


def test_a_function_planted_on_the_query_node_is_refused_and_does_not_run(hostile: Hostile) -> None:
    hostile.plant(
        hostile.a,
        "create schema shardids_query",
        hostile.evil("shardids_query.shardids_placement()"),
    )
    before = objects(hostile.a)
    with pytest.raises(
        MissingPrivilege, match=r"shardids_query exists and belongs to role .mallory"
    ) as refused:
        make_query_node(hostile)
    assert refused.value.message.startswith('node "a": schema shardids_query exists')
    assert not hostile.has_run()
    assert objects(hostile.a) == before
    assert any("schema shardids_query" in what and hostile.role in what for what in hostile.owners())


@pytest.mark.parametrize("schema", [*ON_QUERY_NODE, "shardids_local"])
def test_an_empty_schema_of_another_role_is_refused(hostile: Hostile, schema: str) -> None:
    url = hostile.b if schema == "shardids_local" else hostile.a
    hostile.plant(url, f"create schema {schema}")
    with pytest.raises(MissingPrivilege, match=rf"schema {schema} exists and belongs to role .mallory"):
        make_query_node(hostile)
    assert any(f"schema {schema}" in what and hostile.role in what for what in hostile.owners())
    hostile.admin(url, f"drop schema {schema}")
    make_query_node(hostile)
    assert hostile.owners() == []


LATER = {
    "schema": "alter schema shardids_query owner to {mallory}",
    "create": "grant create on schema shardids_query to {mallory}",
    "function": "alter function shardids_query.shardids_placement() owner to {mallory}",
    "view": "alter view shardids_local.{view} owner to {mallory}",
    "local": """create function shardids_local.f() returns text language sql as 'select 1';
                alter function shardids_local.f() owner to {mallory}""",
    "server": """grant usage on foreign data wrapper postgres_fdw to {mallory};
                 alter server shardids_b owner to {mallory}""",
    "type": """create domain shardids_foreign.d as text;
               alter domain shardids_foreign.d owner to {mallory}""",
    "trigger": """create schema mal authorization {mallory};
                  create function mal.f() returns trigger language plpgsql as 'begin return null; end';
                  alter function mal.f() owner to {mallory};
                  create trigger t before insert on shardids_foreign.users
                    for each statement execute function mal.f()""",
}
"""What a role has in a query node that exists, and how it came there."""
NAMED = {
    "schema": "schema shardids_query",
    "create": "may create objects in schema shardids_query",
    "function": "function shardids_query.shardids_placement()",
    "view": "view shardids_local.v_",
    "local": "function shardids_local.f()",
    "server": "foreign server shardids_b",
    "type": "type shardids_foreign.d",
    "trigger": "function mal.f() of table shardids_foreign.users",
}


@pytest.mark.parametrize("planted", LATER)
def test_the_doctor_finds_it_on_a_cluster_that_has_it_and_a_refresh_is_refused(
    hostile: Hostile, planted: str
) -> None:
    make_query_node(hostile)
    views_there = """select relname from pg_class
                     where relkind = 'v' and relnamespace = 'shardids_local'::regnamespace"""
    with connected(hostile.a) as db:
        (view,) = db.execute(views_there).fetchone() or ("",)
    # The new owner of an object needs CREATE at that moment; left there, it would be a finding as well.
    schemas = ", ".join((*ON_QUERY_NODE, "shardids_local"))
    needs_create = planted in ("function", "view", "local", "type")
    hostile.admin(
        hostile.a,
        *([f"grant create on schema {schemas} to {{mallory}}"] if needs_create else []),
        LATER[planted].replace("{view}", view),
        *([f"revoke create on schema {schemas} from {{mallory}}"] if needs_create else []),
    )
    (what,) = hostile.owners()
    assert NAMED[planted] in what
    assert hostile.role in what
    with pytest.raises(MissingPrivilege, match=hostile.role):
        refresh(hostile)
    assert not hostile.has_run()


def test_an_extension_of_another_role_hides_nothing(hostile: Hostile) -> None:
    make_query_node(hostile)
    hostile.admin(hostile.a, "grant all on schema shardids_query to {mallory}")
    hostile.plant(
        hostile.a,
        "create schema mal",
        # Trusted: CREATE on the database is enough to be its owner.
        "create extension hstore schema mal",
        "create function shardids_query.f() returns text language sql as 'select 1'",
        "alter extension hstore add function shardids_query.f()",
    )
    hostile.admin(hostile.a, "revoke all on schema shardids_query from {mallory}")
    (what,) = hostile.owners()
    assert "function shardids_query.f()" in what


def test_objects_on_the_query_node_have_the_engines_owner_whoever_refreshes(
    hostile: Hostile, make_role: MakeRole
) -> None:
    with connected(hostile.a) as db:
        engine = db.execute(
            "select relowner::regrole::text from pg_class where oid = 'shardids.node'::regclass"
        )
        (owner,) = engine.fetchone() or ("",)
    other = make_role("dba")
    hostile.admin(hostile.a, f'alter role "{other.username}" superuser')
    with catalog_at(other.set(database=hostile.a.database)) as catalog:
        views.create_query_node(catalog, node="a", store_password=True)
    assert hostile.owners() == []
    with connected(hostile.a) as db:
        (found,) = db.execute(
            "select array_agg(distinct nspowner::regrole::text) from pg_namespace where nspname = any (%s)",
            [[*ON_QUERY_NODE, "shardids_local"]],
        ).fetchone() or ([],)
    assert found == [owner]


# The engine and the catalog, where nothing can be trusted yet


PLANTED = {
    "function": ("create function shardids.node_name() returns text language sql as 'select 1'",),
    "table": ("create table shardids.stray (n integer)",),
    "type": ("create type shardids.mood as enum ('good')",),
    "operator": (
        "create operator shardids.@@ (function = pg_catalog.int4eq, leftarg = integer, rightarg = integer)",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_no_engine_is_installed_beside_an_object_of_another_role(bare: Hostile, planted: str) -> None:
    found_cluster(bare.a, {"a": bare.a}, 4)
    bare.admin(bare.b, "create schema shardids", "grant all on schema shardids to {mallory}")
    bare.plant(bare.b, *PLANTED[planted])
    bare.admin(bare.b, "revoke all on schema shardids from {mallory}")
    with catalog_at(bare.a) as catalog:
        with pytest.raises(MissingPrivilege, match=r"shardids\..* belongs to role .mallory"):
            provision.add_node(catalog, "b", dsn(bare.b))
        assert [*catalog.nodes()] == ["a"]


def test_no_engine_is_installed_where_others_may_create(bare: Hostile) -> None:
    found_cluster(bare.a, {"a": bare.a}, 4)
    bare.admin(bare.b, "create schema shardids", "grant create on schema shardids to {mallory}")
    with catalog_at(bare.a) as catalog:
        with pytest.raises(
            MissingPrivilege, match=r"mallory.* may create objects in schema shardids"
        ) as refused:
            provision.add_node(catalog, "b", dsn(bare.b))
        assert "REVOKE CREATE ON schema shardids FROM" in refused.value.hint
        bare.admin(bare.b, "revoke create on schema shardids from {mallory}")
        provision.add_node(catalog, "b", dsn(bare.b))


def test_default_privileges_let_no_other_role_create_in_our_schemas(hostile: Hostile) -> None:
    hostile.admin(hostile.a, "alter default privileges grant all on schemas to {mallory}, public")
    try:
        make_query_node(hostile)
    finally:
        hostile.admin(hostile.a, "alter default privileges revoke all on schemas from {mallory}, public")
    assert hostile.owners() == []


def test_a_member_installs_as_the_owner_of_the_schema(bare: Hostile, make_role: MakeRole) -> None:
    group, member = make_role("group"), make_role("member")
    names = {"group": sql.Identifier(str(group.username)), "member": sql.Identifier(str(member.username))}
    with connected(bare.a) as db:
        for statement in (
            "grant {group} to {member}",
            "create schema shardids authorization {group}",
            "create schema shardids_catalog authorization {group}",
            "grant create on database {database} to {group}",
        ):
            database = sql.Identifier(str(bare.a.database))
            db.execute(sql.SQL(statement).format(database=database, **names))
    as_member = member.set(database=bare.a.database)
    found_cluster(as_member, {"a": as_member}, 4)
    with catalog_at(as_member) as catalog:
        assert [one for one in doctor.examine(catalog).findings if one.check == "schema-owner"] == []
    with connected(bare.a) as db:
        owners = db.execute(
            """select distinct relowner::regrole::text from pg_class
               where relnamespace in ('shardids'::regnamespace, 'shardids_catalog'::regnamespace)"""
        ).fetchall()
        assert owners == [(f'"{group.username}"',)]
        # A superuser is a member of every role: it would run the code of any.
        with catalog_at(bare.a) as catalog, pytest.raises(MissingPrivilege, match=r"shardids_catalog exists"):
            provision.init(catalog, DEFAULT, 4)
        db.execute(sql.SQL("drop schema shardids cascade; drop schema shardids_ref").format(**names))
        db.execute(sql.SQL("drop owned by {group}, {member} cascade").format(**names))


def test_a_schema_that_comes_while_it_is_made_is_not_taken(hostile: Hostile) -> None:
    ended: list[ShardidsError] = []

    def make() -> None:
        engine = open_engine(hostile.a, what="the node", administrative=True)
        try:
            with engine.begin() as connection:
                own_schema(connection, "shardids_local")
        except ShardidsError as error:
            ended.append(error)
        finally:
            engine.dispose()

    with psycopg.connect(dsn(hostile.mallory.set(database=hostile.a.database))) as planting:
        planting.execute("create schema shardids_local")
        thread = threading.Thread(target=make)
        thread.start()
        with connected(hostile.a) as db:
            waiting = "select count(*) from pg_locks where not granted and locktype = 'transactionid'"
            wait_for(lambda: db.execute(waiting).fetchone() != (0,), "the installer to wait")
        planting.commit()
    thread.join()
    (error,) = ended
    assert "schema shardids_local exists and belongs to role" in str(error)


# Shards, which the application has objects in as well


@pytest.mark.parametrize(
    "planted",
    [
        "create function shard_0001.next_id() returns bigint language sql as 'select 1::bigint'",
        "create table shard_0001.shardids_version (version_num text)",
        "create sequence shard_0001.id_counter",
    ],
)
def test_no_shard_is_made_around_objects_of_another_role(bare: Hostile, planted: str) -> None:
    found_cluster(bare.a, {"a": bare.a}, 4, created=[0])
    bare.admin(bare.a, "create schema shard_0001", "grant all on schema shard_0001 to {mallory}")
    bare.plant(bare.a, planted, "create table shard_0001.theirs (n integer)")
    with pytest.raises(ShardidsError, match=r"shard_0001\.\w+(\(\))? belongs to role .mallory"):
        found_cluster(bare.a, {"a": bare.a}, 4)
    bare.admin(
        bare.a,
        planted.replace("create", "drop", 1)
        .partition(" as ")[0]
        .partition(" returns ")[0]
        .partition(" (")[0],
    )
    found_cluster(bare.a, {"a": bare.a}, 4)


def test_counters_are_not_kept_in_tables_of_another_role(hostile: Hostile) -> None:
    hostile.admin(hostile.a, "grant all on schema shard_0000 to {mallory}")
    hostile.plant(hostile.a, "create table shard_0000.shardids_counter (tenant text)")
    with (
        connected(hostile.a) as db,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="shardids_counter"),
    ):
        db.execute("select shardids.define_counter(0, 'order', 'day')")
    hostile.admin(hostile.a, "drop table shard_0000.shardids_counter")
    hostile.plant(hostile.a, hostile.evil('shard_0000."shardids_number_users.name"()', "trigger", "new"))
    with (
        connected(hostile.a) as db,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="shardids_number"),
    ):
        db.execute("select shardids.number_rows('shard_0000.users', 'name', 'name', 'order', 'day')")
    assert any("shardids_number_users.name" in what for what in hostile.owners())


# In place


@pytest.mark.parametrize(
    "extra", [(), ("create table shardids_inplace.key_change (relid oid, document jsonb)",)]
)
def test_no_key_is_changed_by_a_journal_of_another_role(hostile: Hostile, extra: Sequence[str]) -> None:
    hostile.admin(hostile.a, "create table public.orders (id serial primary key)")
    hostile.plant(hostile.a, "create schema shardids_inplace", *extra)
    with catalog_at(hostile.a) as catalog:
        for command in (status, change_key):
            with pytest.raises(
                MissingPrivilege, match=r"shardids_inplace exists and belongs to role .mallory"
            ):
                command(catalog, "public.orders", 0)
        assert not hostile.has_run()
        hostile.admin(hostile.a, "drop schema shardids_inplace cascade")
        change_key(catalog, "public.orders", 0)
    assert hostile.owners() == []


# Loads and adoptions


def test_a_load_does_not_count_in_a_table_of_another_role(hostile: Hostile) -> None:
    hostile.admin(hostile.a, "grant all on schema shard_0000, shard_0001 to {mallory}")
    hostile.plant(
        hostile.a,
        "create table shard_0000.shardids_load (load text primary key, source text not null,"
        " rows bigint not null, rejected bigint not null, at timestamptz default now())",
        hostile.evil("shard_0000.count()", "trigger", "new"),
        "create trigger t before insert on shard_0000.shardids_load"
        " for each row execute function shard_0000.count()",
        "alter table shard_0000.shardids_load enable row level security",
    )
    with Cluster.connect(hostile.a) as cluster:
        assert read_marks(cluster, "x", "y") == {}
        with cluster.at(shard=0).engine.begin() as connection:
            connection.execute(text("set local search_path = shard_0000, pg_catalog"))
            with pytest.raises(
                psycopg.errors.InsufficientPrivilege,
                match=r"shard_0000.shardids_load belongs to role .mallory",
            ):
                make_tables(connection, ["shard_0000"])
        with cluster.at(shard=1).engine.begin() as connection:
            make_tables(connection, ["shard_0001"])
            make_tables(connection, ["shard_0001"])
    assert not hostile.has_run()


@pytest.mark.parametrize("schema", ["shardids_adopt", "shardids_relay"])
def test_an_adoption_uses_no_schema_of_another_role(bare: Hostile, schema: str) -> None:
    bare.plant(
        bare.a,
        f"create schema {schema}",
        "create schema mal",
        bare.evil(f"{schema}.pass_barrier()", "trigger", "new") if schema == "shardids_adopt" else "select 1",
    )
    engine = open_engine(bare.a, what="the source", administrative=True)
    side = SimpleNamespace(
        begin=engine.begin, autocommit=engine.execution_options(isolation_level="AUTOCOMMIT").connect
    )
    sides = cast(Sides, SimpleNamespace(source=side))

    def make() -> None:
        if schema == "shardids_adopt":
            make_barrier(sides, [], lambda _attempt, _why: None)
        else:
            with engine.begin() as connection:
                install(connection, "x")

    try:
        if schema == "shardids_adopt":
            # It can't be told to be closed, and an abort goes on.
            assert not is_closed(sides)
            reopen(sides)
            drop_barrier(sides)
        with pytest.raises(MissingPrivilege, match=rf"{schema} exists and belongs to role .mallory"):
            make()
        assert not bare.has_run()
        bare.admin(bare.a, f"drop schema {schema} cascade")
        make()
    finally:
        engine.dispose()


def test_rows_of_an_adoption_arrive_in_no_schema_of_another_role(hostile: Hostile) -> None:
    hostile.plant(hostile.a, 'create schema "The Shop"')
    stage = """select shardids.stage(%s, 'users', 'shard_0000.users', 'shardids.shard_of(id)', 'x')"""
    with connected(hostile.a) as db:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=r"belongs to role .mallory"):
            db.execute(stage, ["The Shop"])
        for schema in ("public", "other"):
            db.execute(stage, [schema])


# Look-ups


def test_a_refused_look_up_leaves_nothing_in_any_shard_and_its_dry_run_is_refused_alike(
    hostile: Hostile,
) -> None:
    for url, shards in ((hostile.a, (0, 1)), (hostile.b, (2, 3))):
        for shard in shards:
            hostile.admin(
                url, f"alter table shard_{shard:04}.users alter name set not null, add unique (name)"
            )
    # In the place of the index of the claims, in the last shard.
    claims = claims_name("users", "name")
    hostile.admin(hostile.b, "grant all on schema shard_0003 to {mallory}")
    hostile.plant(hostile.b, f'create table shard_0003."{claims}_pkey" (n integer)')
    before = objects(hostile.a), objects(hostile.b)
    with catalog_at(hostile.a) as catalog:
        messages = set()
        for dry_run in (True, False):
            with pytest.raises(ShardidsError, match=r"belongs to role .mallory") as refused:
                lookups.create(catalog, "users.name", dry_run=dry_run)
            messages.add(refused.value.message)
            assert (objects(hostile.a), objects(hostile.b)) == before
            assert catalog.lookups() == {}
        assert len(messages) == 1
        hostile.admin(hostile.b, f'drop table shard_0003."{claims}_pkey"')
        before = objects(hostile.a), objects(hostile.b)
        assert lookups.create(catalog, "users.name", dry_run=True) == [0, 1, 2, 3]
        assert (objects(hostile.a), objects(hostile.b)) == before
        assert lookups.create(catalog, "users.name") == [0, 1, 2, 3]
