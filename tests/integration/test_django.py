"""Django's tutorial application over two nodes and eight shards."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL, make_url

from shardids.pg.embedded import temporary_servers
from tests.conftest import dsn
from tests.support.client_programs import Dumper
from tests.support.clusters import environment
from tests.support.lengths import sampled
from tests.support.moves import TwoNodes, two_nodes

ROOT = Path(__file__).parents[2]
PROJECT = "tests.support.django_project"
SETTINGS = f"{PROJECT}.settings"
SUITE = f"{PROJECT}.suite"


def run(url: URL, scene: str, *, before: str = "pass", module: str = "scenes", **more: str) -> None:
    """Runs a scene of the project for tests, in a process of its own: it has one configuration of Django."""
    script = (
        f"import django; django.setup(); from tests.support.django_project import {module} as scenes;"
        f" {before}; scenes.{scene}()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(**{"SHARDIDS_CATALOG": dsn(url), "DJANGO_SETTINGS_MODULE": SETTINGS, **more}),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "scene",
    sampled(
        [
            "keys_come_from_the_shard",
            "forms_and_json_keep_every_digit",
            "statements_name_the_shards_schema_and_set_nothing",
            "the_backend_is_djangos_own_for_postgresql",
            "look_up_keys_are_refused_until_they_are_claimed",
            "the_router_finds_the_shard_or_refuses",
            "aliases_of_a_node_share_its_pool",
            "routers_after_it_are_asked",
            "tests_get_no_shard_of_the_application",
        ],
        every=6,
    ),
)
def test_polls_in_shards(cluster_url: URL, scene: str) -> None:
    run(cluster_url, scene, before="scenes.make_tables()")


@pytest.mark.parametrize(
    "scene",
    sampled(
        [
            "a_part_first_and_the_rest_later",
            "a_shard_that_fails_is_as_it_was",
            "killed_between_the_parts",
            "killed_with_a_default_that_is_called",
            "an_application_without_sharded_models_any_more",
            "what_cannot_be_sql_is_refused",
            "a_squashed_migration_takes_the_place_of_what_it_replaces",
        ],
        every=7,
    ),
)
def test_migrations(cluster_url: URL, scene: str) -> None:
    run(cluster_url, scene, module="migration_scenes")


@pytest.mark.parametrize(
    "scene",
    sampled(
        [
            "its_migrations_run_where_its_models_are_today",
            "the_default_key_issues_ids_in_shards_only",
            "code_that_fails_leaves_its_shard_as_it_was",
            "code_outside_a_transaction_is_begun_again",
            "numbers_are_drawn_by_a_trigger_of_a_migration",
        ],
        every=5,
    ),
)
def test_an_existing_application(cluster_url: URL, scene: str) -> None:
    run(cluster_url, scene, module="existing_scenes", DJANGO_SETTINGS_MODULE=f"{PROJECT}.existing_settings")


@pytest.mark.parametrize(
    "scene",
    sampled(
        [
            "commands_take_a_shard",
            "the_command_line_names_shards",
            "plain_transactions_are_the_chosen_shards",
        ],
        every=3,
    ),
)
def test_commands(cluster_url: URL, scene: str) -> None:
    run(cluster_url, scene, module="command_scenes")


@pytest.mark.long
def test_the_tables_are_those_that_migrate_makes(
    cluster_url: URL, blank_database: Callable[[], URL], admin: psycopg.Connection
) -> None:
    plain = blank_database()
    run(
        cluster_url,
        "tables_are_made_as_by_migrate",
        module="migration_scenes",
        PLAIN_DATABASE=str(plain.database),
    )
    dumper = Dumper(admin.info.server_version)

    def dumped(url: URL, schema: str) -> list[str]:
        text = dumper.dump(dsn(url), "--schema-only", "-t", f"{schema}.library_*", "-t", f"{schema}.polls_*")
        lines = re.sub(r"^(--.*|\\.*)$", "", text, flags=re.MULTILINE).replace(f"{schema}.", "")
        return [line for line in lines.splitlines() if line]

    there = dumped(plain, "public")
    assert sum(line.startswith("CREATE TABLE") for line in there) == 5
    assert dumped(cluster_url, "shard_0003") == there


@pytest.mark.long
def test_manage_py_test(cluster_url: URL, admin: psycopg.Connection) -> None:
    done = manage(cluster_url, "test", SUITE)
    assert done.returncode == 0, done.stderr
    assert "Ran 15 tests" in done.stderr
    left = admin.execute(
        "select datname from pg_database where datname ~ '^(shardids_tests|test)_'"
    ).fetchall()
    assert left == []
    refused = manage(cluster_url, "test", "--parallel", "2", SUITE)
    assert refused.stderr.endswith("--parallel is not there yet\n")


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, 8)
        yield nodes
        nodes.catalog.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("scene", "more"),
    sampled(
        [
            ("writers_go_on_while_shards_move", {}),
            ("the_next_statement_goes_to_the_new_node", {}),
            ("who_does_not_listen_learns_it_from_the_error", {"SHARDIDS_DEAF": "1"}),
            ("a_lost_shard_is_an_error_that_names_it", {}),
        ],
        every=4,
    ),
)
def test_moves_and_losses(nodes: TwoNodes, scene: str, more: dict[str, str]) -> None:
    url = make_url(nodes.catalog_url)
    run(url, scene, module="moving_scenes", before="scenes.make_tables()", **more)


def test_a_dead_node_is_refused_at_once(nodes: TwoNodes) -> None:
    url = make_url(nodes.catalog_url)
    before = "scenes.make_tables()"
    run(url, "a_dead_node_is_refused_at_once", module="moving_scenes", before=before)


def manage(url: URL, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``manage.py``."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "django", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment(SHARDIDS_CATALOG=dsn(url), DJANGO_SETTINGS_MODULE=SETTINGS),
    )


@pytest.mark.long
def test_the_page_prints_what_it_says(cluster_url: URL, tmp_path: Path) -> None:
    source = (ROOT / "docs" / "how-to" / "django.md").read_text(encoding="utf-8")
    fences = [token for token in MarkdownIt().parse(source) if token.type == "fence"]
    script = "import django\n\ndjango.setup()\n"
    for fence in fences:
        file = re.match(r"# (\S+\.py)\n", fence.content)
        if fence.info == "python" and file:
            (tmp_path / file[1]).parent.mkdir(exist_ok=True)
            (tmp_path / file[1]).write_text(fence.content, encoding="utf-8")
        elif fence.info == "python":
            script += fence.content
    ran = partial(_ran, cluster_url, tmp_path)
    assert "8 done" not in ran("-m", "django", "makemigrations", "polls").stdout
    shown = [line.strip() for line in source.splitlines() if line.startswith("    ")]
    for line in (
        *ran("-m", "django", "migrate_shards", "--plan").stdout.splitlines(),
        *ran("-m", "django", "migrate_shards").stdout.splitlines()[:1],
    ):
        assert line.strip() in shown
    done = ran("-c", script)
    assert done.stdout == "".join(fence.content for fence in fences if fence.info == "text")
    tested = ran("-m", "django", "test", "polls")
    assert "Ran 1 test" in tested.stderr


def _ran(url: URL, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env=environment(SHARDIDS_CATALOG=dsn(url), DJANGO_SETTINGS_MODULE="mysite.settings"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" or "test" in words
    return done
