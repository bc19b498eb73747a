"""The commands: the table that lists them, the options that they share, and the modules that they load."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main

from shardids import mover
from shardids.beside.citus.refusals import REFUSED
from shardids.catalog import counters as catalog_counters
from shardids.catalog.rows import SCHEMA_PREFIX
from shardids.cli import COMMANDS, app, rebalance
from shardids.cli.tables import counters
from shardids.compare.multimaster import HEADROOM
from shardids.tables import transactions

ROOT = Path(__file__).parents[2]
MOST_COMMANDS = 90
ON_CITUS = {
    *("init", "grant", "upgrade", "doctor", "console", "metrics", "routes", "rebalance", "transactions"),
    *("node list", "node accept-contract", "node confirm-clock", "region list"),
    *(
        "shard create",
        "shard list",
        "shard accept-schema",
        "shard move",
        "shard reset-clock",
    ),
    *("migrate revision", "migrate up", "migrate down", "migrate stamp", "migrate status", "migrate check"),
    *("id stats", "id decode", "id encode", "id range", "id next"),
}
"""The commands with a catalog that a cluster on Citus does not refuse."""
SQL_STACK = ("sqlalchemy", "psycopg", "alembic", "mako", "numpy", "tomlkit")
OUR_OWN = (
    "shardids.adopt",
    "shardids.beside",
    "shardids.catalog",
    "shardids.client",
    "shardids.compare",
    "shardids.migrate",
    "shardids.models",
    "shardids.mover",
    "shardids.tables",
    "shardids.testing",
    "shardids.watch",
)
NOT_LOADED = {
    "id decode --json 1234567": (*SQL_STACK, *OUR_OWN, "rich"),
    "id decode 1234567": (*SQL_STACK, *OUR_OWN),
    "id encode --shard 5 --time 2026-11-21": (*SQL_STACK, *OUR_OWN, "rich"),
    "--version": (*SQL_STACK, *OUR_OWN, "rich"),
    "sql --json": (*SQL_STACK, "rich"),
    "--help": (
        *SQL_STACK,
        *OUR_OWN,
        *(f"shardids.cli.{entry.where.split(':')[0]}" for entry in COMMANDS.values()),
    ),
}
"""Modules that take longer to import than these commands to run."""
LOADED = """
import sys
from shardids.cli import app
try:
    app(sys.argv[1:], prog_name="shardids")
except SystemExit as stopped:
    assert not stopped.code, stopped.code
print(*sys.modules, file=sys.stderr)
"""
HELP = """
import contextlib, io, json, sys
from shardids.cli import app
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        app([*words, "--help"], prog_name="shardids")
    assert "Usage: " in said.getvalue(), words
print(json.dumps(list(sys.modules)))
"""


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each command and group with its path."""
    yield path, command
    for name in getattr(command, "commands", ()):
        yield from commands(command.get_command(None, name), *path, name)


ALL = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("arguments", NOT_LOADED)
def test_a_command_loads_no_module_that_it_does_not_need(arguments: str) -> None:
    command = [sys.executable, "-c", LOADED, *arguments.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    loaded = ran.stderr.splitlines()[-1].split()
    assert "shardids.cli" in loaded
    assert not {*loaded} & {*NOT_LOADED[arguments]}


def test_no_help_text_loads_what_only_a_run_needs() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HELP],
        input=json.dumps([list(path) for path in ALL]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    loaded = json.loads(ran.stdout)
    assert "shardids.cli.migrate" in loaded
    assert not {*loaded} & {*SQL_STACK, *OUR_OWN, "rich.progress"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_of_a_command_what_its_own_help_says(name: str) -> None:
    command = ALL[name,]
    assert command.name == name
    assert COMMANDS[name].help == " ".join(command.help.split("\n\n")[0].split())


def test_the_help_has_five_groups_in_one_piece_each() -> None:
    panels = [entry.panel for entry in COMMANDS.values()]
    assert len({*panels}) == 5
    assert sorted(panels, key=list(dict.fromkeys(panels)).index) == panels


@pytest.mark.parametrize(
    "path", [path for path, one in ALL.items() if not hasattr(one, "commands")], ids=" ".join
)
def test_a_help_text_leaves_the_line_ends_to_the_terminal(path: tuple[str, ...]) -> None:
    assert "\n" not in ALL[path].help.replace("\n\n", " ")


def test_a_user_can_survey_the_commands() -> None:
    assert sum(not hasattr(command, "commands") for command in ALL.values()) <= MOST_COMMANDS


def test_each_command_applies_to_a_cluster_on_citus_or_is_refused_there() -> None:
    of_a_cluster = {
        " ".join(path)
        for path, command in ALL.items()
        if any(one.name == "catalog" for one in command.params)
    }
    assert {*REFUSED} | ON_CITUS == of_a_cluster
    assert not {*REFUSED} & ON_CITUS


def test_the_pages_of_the_commands_say_what_each_is_for_in_full(tmp_path: Path) -> None:
    write = runpy.run_path(str(ROOT / "docs/commands.py"))["write"]
    index, *pages = sorted(
        (path.read_text() for path in write(tmp_path)), key=lambda text: "toctree" not in text
    )
    assert len(pages) == 5
    assert "…" not in index
    for path, command in ALL.items():
        if not hasattr(command, "commands"):
            words = command.help.split("\n\n")[0].replace("`", "").split()
            assert " ".join(words) in index.replace("`", ""), path
            assert f"## {' '.join(path)}\n" in "".join(pages)


def test_defaults_and_choices_are_those_of_the_package() -> None:
    """Help texts name them without importing the rooms that have them."""

    def shown(*path: str) -> dict[str, Any]:
        return {one.opts[0]: getattr(one, "show_default", None) or one.default for one in ALL[path].params}

    assert ALL["init",].params[2].default == SCHEMA_PREFIX
    assert {one.opts[0]: one.default for one in ALL["multimaster",].params}["--headroom"] == HEADROOM
    assert shown("rebalance")["--margin"] == str(mover.MARGIN)
    assert shown("rebalance")["--max-pause"] == f"{mover.MAX_PAUSE_S:g}s"
    assert shown("transactions")["--older-than"] == f"{transactions.OLDER_THAN_S:g}s"
    within = next(one for one in ALL["restore-point",].params if "--within" in one.opts)
    assert within.default == f"{transactions.WITHIN_S:g}s"
    assert [*get_args(rebalance.By)] == [*mover.By]
    assert get_args(counters.Period) == get_args(catalog_counters.Period)
