"""Sources with many tables, and of older versions than the nodes: adopted and switched."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from shardids.adopt import adoption
from shardids.adopt.plan.document import read_plan
from shardids.cli import app
from shardids.pg.embedded import temporary_servers
from shardids.testing.devcluster import create_cluster
from tests.matrix import fetched
from tests.support.adoptions import Clients, assert_in_shards, new_shop
from tests.support.faults import scaled

TABLES = scaled(40, 200)
SHARDS = 4
MAKE = """
    create table {name} (
      id {serial} primary key, user_id int not null references users,
      before int references {parent}, at timestamptz default now(), what text unique);
    create index {name}_at on {name} (at);
    insert into {name} (user_id, what) values (1, '{name}'), (2, 'two')"""


def test_each_of_many_tables_is_adopted(tmp_path: Path) -> None:
    with temporary_servers(3) as servers:
        catalog_url = create_cluster(servers[1:], SHARDS)
        with psycopg.connect(servers[0].url(), autocommit=True) as source:
            if source.info.server_version < 150000:
                pytest.skip("PostgreSQL 14 has no row filters, and is refused: test_adopt_run.py")
            source.execute("create table users (id serial primary key, name text)")
            source.execute("insert into users (name) select 'n' from generate_series(1, 100)")
            for number in range(TABLES):
                serial = ("serial", "bigint generated always as identity")[number % 2]
                # Integers refer to integers.
                parent = f"t{number - 2}" if number > 3 and number % 2 == 0 else f"t{number}"
                made = MAKE.format(name=f"t{number}", serial=serial, parent=parent)
                source.execute(made if number % 2 == 0 else made.replace("before int", "before bigint"))
        for server in servers[1:]:
            with psycopg.connect(server.url(), autocommit=True) as node:
                node.execute("revoke create on schema public from public")
        with psycopg.connect(servers[1].url(), autocommit=True) as node:
            node.execute("create database relay")
        plan, folder = str(tmp_path / "plan.toml"), str(tmp_path / "migrations")
        for words in (
            ["plan", servers[0].url(), "--root=users", f"--shards={SHARDS}", "-o", plan],
            ["prepare", plan, "--dir", folder],
            ["migrate", "up", "--dir", folder],
            ["run", plan, "--via", servers[1].url("relay"), "--yes"],
            ["switch", "--yes"],
        ):
            command = words if words[0] == "migrate" else ["adopt", *words]
            done = CliRunner().invoke(app, command, env={"SHARDIDS_CATALOG": catalog_url})
            assert done.exit_code == 0, done.output
        assert len(read_plan(Path(plan)).tables) == TABLES + 1
        rows = dict.fromkeys((f"t{number}" for number in range(TABLES)), 0)
        for index, server in enumerate(servers[1:]):
            with psycopg.connect(server.url(), autocommit=True) as node:
                for shard in range(index * SHARDS // 2, (index + 1) * SHARDS // 2):
                    for table in rows:
                        count = f"select count(*) from shard_{shard:04}.{table}"
                        rows[table] += node.execute(count).fetchone()[0]
        assert set(rows.values()) == {2}


@pytest.mark.parametrize("version", scaled(["15"], ["15", "16", "17"]))
def test_nodes_adopt_a_source_of_an_older_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("SHARDIDS_PG_BIN", str(fetched(version)))
        sources = temporary_servers(1)
        (source,) = sources.__enter__()
    try:
        with temporary_servers(2) as nodes:
            shop = new_shop([source, *nodes])
            assert shop.plan.server_version // 10000 == int(version)
            with Clients(shop) as clients:
                adoption.run(shop.catalog, shop.plan)
                assert adoption.switch(shop.catalog).outcome == "adopted"
            assert_in_shards(shop, clients)
            shop.catalog.close()
    finally:
        sources.__exit__(None, None, None)
