"""The command ``shardids multimaster``, and the list of schemes."""

from __future__ import annotations

import json
from collections.abc import Callable

import psycopg
import pytest
from click.testing import Result
from sqlalchemy.engine import URL
from typer.testing import CliRunner

from shardids.cli import app, printing
from shardids.compare.schemes import SCHEMES
from tests.conftest import dsn

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(printing.out.console, "width", 250)
    return lambda *words: CliRunner().invoke(app, [*words])


@pytest.fixture
def urls(blank_database: Callable[[], URL]) -> list[str]:
    """Three databases with a table."""
    urls = [dsn(blank_database()) for _ in range(3)]
    for url in urls:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("create table photo (id bigint generated always as identity primary key)")
    return urls


def test_multimaster_from_plan_to_growth(run: Run, urls: list[str]) -> None:
    a, b, c = (f"{name}={url}" for name, url in zip("abc", urls, strict=True))
    two = ("--master", a, "--master", b)
    three = (*two, "--master", c)

    found = run("multimaster", "--verify", *two, "--json")
    assert found.exit_code == 3
    assert [(f["master"], f["problem"]) for f in json.loads(found.stdout)] == [
        ("a", "no-offset"),
        ("b", "no-offset"),
    ]
    planned = run("multimaster", "--dry-run", *two, "--headroom", "50")
    assert planned.exit_code == 0
    assert 'ALTER SEQUENCE "public"."photo_id_seq" MAXVALUE 51 NO CYCLE' in planned.stdout
    assert "SHARE ROW EXCLUSIVE on the sequence" in planned.stdout
    dry = run("multimaster", *two, "--headroom", "50", "--dry-run", "--json")
    steps = json.loads(dry.stdout)
    assert [(step["phase"], step["master"]) for step in steps] == [
        ("fence", "a"),
        ("fence", "b"),
        ("switch", "a"),
        ("switch", "b"),
    ]
    assert run("multimaster", "--verify", *two).exit_code == 3

    refused = run("multimaster", *two, "--new", c)
    assert refused.exit_code == 1
    assert "the masters have 2 faults; the first: public.photo.id on master" in refused.stderr
    applied = run("multimaster", *two, "--headroom", "50")
    assert applied.exit_code == 0
    assert "4 steps taken: 2 masters" in applied.stdout
    assert 'switch on master "b": public.photo.id' in applied.stderr
    assert run("multimaster", "--verify", *two).exit_code == 0
    assert "Nothing to do" in run("multimaster", *two).stdout

    grown = run("multimaster", *two, "--new", c, "--json")
    assert grown.exit_code == 0
    assert len(json.loads(grown.stdout)) == 6
    assert run("multimaster", "--verify", *three).stdout.startswith("No faults found: 3 masters")
    swapped = run("multimaster", "--verify", "--master", b, "--master", a, "--master", c, "--json")
    assert {(f["master"], f["problem"]) for f in json.loads(swapped.stdout)} == {
        ("a", "wrong-offset"),
        ("b", "wrong-offset"),
    }


def test_one_master_counts_by_one_again(run: Run, urls: list[str]) -> None:
    a, b = (f"{name}={url}" for name, url in zip("ab", urls[:2], strict=True))
    alone = ("multimaster", "--master", a)
    assert run(*alone).stdout == "Nothing to do: one master, counting by 1\n"
    assert run("multimaster", "--master", a, "--master", b).exit_code == 0
    found = run(*alone, "--verify", "--json")
    assert [f["problem"] for f in json.loads(found.stdout)] == ["wrong-increment"]
    refused = run(*alone)
    assert refused.exit_code == 2
    assert "A master counts by 2, and 1 is named" in refused.stderr
    assert "name it with --leaving" in refused.stderr
    assert json.loads(run(*alone, "--verify", "--json").stdout) == json.loads(found.stdout)
    done = run(*alone, "--yes")
    assert done.stdout == "2 steps taken: one master, counting by 1\n"
    assert run(*alone, "--verify").stdout == "No faults found: one master, counting by 1\n"
    assert run(*alone, "--leaving", b).stdout == "3 steps taken: one master, counting by 1\n"
    assert run(*alone, "--leaving", b).stdout == "Nothing to do: one master, counting by 1\n"


def test_wrong_words_are_refused_without_repeating_a_password(run: Run, urls: list[str]) -> None:
    ran = run("multimaster", "--dry-run", "--master", "postgresql://u:secret@host/x")
    assert ran.exit_code == 2
    assert "master 1 is not of the form NAME=URL" in ran.stderr
    assert "secret" not in ran.stderr
    checked = run("multimaster", "--verify", "--master", f"a={urls[0]}", "--leaving", f"b={urls[1]}")
    assert checked.exit_code == 2
    assert "--leaving does not apply to --verify" in checked.stderr
    mixed = run("multimaster", "--dry-run", "--master", f"a={urls[0]}", "--master", "b=mariadb://u:secret@h")
    assert mixed.exit_code == 2
    assert "all PostgreSQL or all MariaDB" in mixed.stderr
    gone = run(
        "multimaster",
        "--master",
        f"a={urls[0]}",
        "--master",
        "b=postgresql://u:secret@127.0.0.1:1/x",
    )
    assert gone.exit_code == 1
    assert 'master "b" can\'t be reached at postgresql://u@127.0.0.1:1/x' in gone.stderr
    assert "secret" not in gone.output


def test_list_describes_every_scheme(run: Run) -> None:
    listed = json.loads(run("compare", "--list", "--json").stdout)
    assert [about["name"] for about in listed] == list(SCHEMES)
    assert "Snowflake in the process" in run("compare", "--list").stdout
