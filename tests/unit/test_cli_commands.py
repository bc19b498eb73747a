"""The table of commands: what it says, and that a command loads no more than it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from shardids.cli import COMMANDS
from shardids.cli.groups import NODE_COMMANDS, SHARD_COMMANDS
from shardids.cli.lazy import Entry

SQL_STACK = (
    "sqlalchemy",
    "psycopg",
    "alembic",
    "mako",
    "shardids.catalog",
    "shardids.client",
    "shardids.migrate",
)
NOT_LOADED = {
    "id decode --json 1234567": (*SQL_STACK, "rich"),
    "id decode 1234567": SQL_STACK,
    "id encode --shard 5 --time 2026-11-21": (*SQL_STACK, "rich"),
    "--version": (*SQL_STACK, "rich"),
    "shard move --help": ("alembic", "mako", "sqlalchemy.orm", "shardids.migrate", "shardids.install"),
    "--help": (*SQL_STACK, *(f"shardids.cli.{entry.where.split(':')[0]}" for entry in COMMANDS.values())),
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


@pytest.mark.parametrize("arguments", NOT_LOADED)
def test_a_command_loads_no_module_that_it_does_not_need(arguments: str) -> None:
    command = [sys.executable, "-c", LOADED, *arguments.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    loaded = ran.stderr.splitlines()[-1].split()
    assert "shardids.cli" in loaded
    assert not {*loaded} & {*NOT_LOADED[arguments]}


@pytest.mark.parametrize(
    ("table", "name"),
    [(table, name) for table in (COMMANDS, NODE_COMMANDS, SHARD_COMMANDS) for name in table],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_table_says_of_a_command_what_its_own_help_says(table: Mapping[str, Entry], name: str) -> None:
    command = table[name].load(name)
    assert command.name == name
    assert table[name].help == " ".join(command.help.split("\n\n")[0].split())
