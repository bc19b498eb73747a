"""Locales that know ASCII alone: in containers, in cron, and where the named locale is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import ROOT, command, connected, environment

ASCII_LOCALES = ("C", "POSIX", "en_XX.UTF-8")
"""Where PYTHONUTF8=0 keeps Python from taking UTF-8 all the same. Nobody has the last one."""
FOLDER = "größe 大"
MODELS = """
import sqlalchemy as sa
metadata = sa.MetaData()
sa.Table("users", metadata, sa.Column("id", sa.BigInteger, primary_key=True))
"""
EVERY_HELP = """
import os, typer
from shardids.cli import app

def show(command, path):
    try:
        app([*path, "--help"], prog_name="shardids")
    except SystemExit as stopped:
        assert not stopped.code, path
    for name in getattr(command, "commands", {}):
        show(command.get_command(typer.Context(command), name), (*path, name))

show(typer.main.get_command(app), ())
"""


def in_locale(name: str) -> dict[str, str]:
    """The variables of a process in this locale."""
    return {"LC_ALL": name, "PYTHONUTF8": "0"}


@pytest.mark.long
@pytest.mark.parametrize("name", ASCII_LOCALES)
def test_a_cluster_is_made_examined_and_removed(name: str, tmp_path: Path) -> None:
    locale = in_locale(name)
    folder = str(tmp_path / FOLDER)
    up = command("dev", "up", "--dir", folder, "--shards", "4", **locale)
    assert (up.returncode, up.stderr) == (0, "")
    catalog = up.stdout.rstrip().splitlines()[-1].partition("=")[2].strip("'")
    try:
        for words in (
            ("dev", "status", "--dir", folder),
            ("init", "--shards", "4"),
            ("shard", "list"),
            ("doctor",),
        ):
            named = {} if words[0] == "dev" else {"SHARDIDS_CATALOG": catalog}
            ran = command(*words, **locale, **named)
            assert (ran.returncode, ran.stderr) == (0, ""), words
    finally:
        down = command("dev", "down", "--dir", folder, "--remove", "--yes", **locale)
    assert (down.returncode, down.stderr) == (0, "")


def test_migrations_with_text_that_is_not_ascii_are_run(cluster_url: URL, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    (tmp_path / "models.py").write_text(MODELS, "ascii")
    named = {
        **in_locale("C"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]]),
        "SHARDIDS_CATALOG": dsn(cluster_url),
        "SHARDIDS_MIGRATIONS": str(folder),
    }
    assert command("migrate", "init", str(folder), "--models", "models:metadata", **named).returncode == 0
    assert command("migrate", "revision", "-m", "size", **named).returncode == 0
    (revision,) = (folder / "versions").glob("*size*.py")
    text = revision.read_text("utf-8")
    upgrade = "def upgrade() -> None:\n"
    table = '    op.execute("create table größe (id bigint)")\n'
    revision.write_text(text.replace(upgrade, upgrade + table), "utf-8")
    ran = command("migrate", "up", **named)
    assert ran.returncode == 0, ran.stderr
    with connected(cluster_url) as connection:
        connection.execute("select from shard_0000.größe")


def test_what_the_encoding_lacks_is_printed_as_an_escape() -> None:
    ran = command("sql", "größe", **in_locale("C"))
    assert ran.returncode == 2
    assert ran.stderr.isascii()


@pytest.mark.long
def test_every_help_page_is_ascii() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", EVERY_HELP],
        capture_output=True,
        check=False,
        timeout=120,
        env=environment(**in_locale("C")),
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    ran.stdout.decode("ascii")


def test_files_that_others_read_are_ascii() -> None:
    for folder in ("sql", "migrations", "shardids/migrate/template"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".sql", ".ini", ".mako", ".template"):
                assert file.read_bytes().isascii(), file
