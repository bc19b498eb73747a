"""Django's management commands on a shard, each scene in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from shardids.django import alias_for, in_shard
from tests.support.django_project.polls.models import Question

QUESTION = {
    "model": "polls.question",
    "fields": {"question_text": "?", "pub_date": "2026-01-01T00:00:00Z"},
}


def called(*words: str, **options: Any) -> tuple[str, str]:
    """Runs a command; returns what it printed, and its notices."""
    printed, noticed = StringIO(), StringIO()
    call_command(*words, stdout=printed, stderr=noticed, **options)
    return printed.getvalue(), noticed.getvalue()


@contextmanager
def fixture() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "one.json"
        file.write_text(json.dumps([QUESTION]), encoding="utf-8")
        yield str(file)


def commands_take_a_shard() -> None:
    there = {"database": alias_for(1)}
    printed, _ = called("migrate", "polls", "--plan", **there)
    assert printed.startswith("Shard 1, from nothing:\n  polls.0001_initial\n"), printed
    with pytest.raises(CommandError, match="--run-syncdb is not for shards"):
        called("migrate", "--run-syncdb", **there)
    printed, _ = called("migrate", "polls", **there)
    assert "1 done, 0 failed" in printed
    assert "[ ] 0001_initial" in called("showmigrations", "polls", database=alias_for(2))[0]
    called("migrate_shards")
    with fixture() as file:
        assert called("loaddata", file) == (
            "Installed 0 object(s) (of 1) from 1 fixture(s)\n",
            "polls.Question: in shards, as --database shard_0000 is\n",
        )
        assert called("loaddata", file, **there) == ("Installed 1 object(s) from 1 fixture(s)\n", "")
    printed, _ = called("dumpdata", "polls", **there)
    (dumped,) = json.loads(printed)
    assert dumped["fields"] == QUESTION["fields"]
    with pytest.raises(CommandError, match=r"polls\.Question, polls\.Choice: in shards"):
        called("dumpdata", "polls")
    with pytest.raises(CommandError, match=r"auth\.Permission, .*: not in shard_0001"):
        called("dumpdata", "auth", **there)

    printed, _ = called("sqlmigrate", "polls", "0001", **there)
    assert printed.startswith("BEGIN;\n")
    assert 'CREATE TABLE "polls_question"' in printed
    printed, _ = called("sqlmigrate", "library", "0003", **there)
    assert 'ALTER TABLE "library_author" RENAME TO "library_writer"' in printed
    with pytest.raises(CommandError, match=r"polls\.Question, polls\.Choice: in shards"):
        called("sqlmigrate", "polls", "0001")
    with pytest.raises(CommandError, match="4 migrations of library begin with '0'"):
        called("sqlmigrate", "library", "0", **there)

    assert called("showmigrations", "polls", **there)[0] == "polls\n [X] 0001_initial\n"
    assert "[X]  library.0004_more\n" in called("showmigrations", "--plan", **there)[0]

    printed, _ = called("inspectdb", "polls_choice", "polls_question", **there)
    assert "import shardids.django\n" in printed
    assert "    id = shardids.django.ShardIdField(primary_key=True)\n" in printed
    assert "    question = models.ForeignKey('PollsQuestion', models.DO_NOTHING)\n" in printed
    with connections[alias_for(1)].cursor() as cursor:
        cursor.execute("show search_path")
        assert cursor.fetchone() == ('"$user", public',)
    called("check", databases=[alias_for(1)])

    with patch.object(subprocess, "run") as ran:
        called("dbshell", **there)
    (command,), options = ran.call_args
    assert command[0] == "psql"
    assert options["env"]["PGOPTIONS"] == "-c search_path=shard_0001"
    assert command[-1].startswith("shardids_test")

    called("flush", interactive=False, **there)
    with in_shard(shard=1):
        assert not Question.objects.exists()
    assert "No migrations to run" in called("migrate", **there)[0]


def the_command_line_names_shards() -> None:
    called("migrate_shards")
    for words in (["--database", "shard_0003"], ["--database=shard_0003"]):
        done = subprocess.run(
            [sys.executable, "-m", "django", "dumpdata", "polls", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "django", "dumpdata", "polls", "--database", "shard_0099"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "invalid choice: 'shard_0099'" in done.stderr


def plain_transactions_are_the_chosen_shards() -> None:
    called("migrate_shards")
    ends = list[str]()

    def count() -> int:
        with in_shard(shard=2):
            return Question.objects.count()

    @transaction.atomic
    def write(fails: bool) -> None:
        Question.objects.create(question_text="?", pub_date="2026-01-01T00:00:00Z")
        assert connections[alias_for(2)].in_atomic_block
        assert not connections["default"].in_atomic_block
        before = list(ends)
        transaction.on_commit(lambda: ends.append("committed"))
        assert ends == before
        if fails:
            raise ValueError

    with in_shard(shard=2):
        write(fails=False)
        with pytest.raises(ValueError, match=r"^$"):
            write(fails=True)
        assert (count(), ends) == (1, ["committed"])
        with transaction.atomic():
            with in_shard(shard=3), transaction.atomic():
                assert connections[alias_for(3)].in_atomic_block
            Question.objects.create(question_text="?", pub_date="2026-01-01T00:00:00Z")
            with transaction.atomic(using="default"):
                assert connections["default"].in_atomic_block
            transaction.set_rollback(True)
        assert count() == 1
    with transaction.atomic():
        assert connections["default"].in_atomic_block
        with in_shard(shard=2):
            assert not connections[alias_for(2)].in_atomic_block
