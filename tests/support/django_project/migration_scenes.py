"""What the tests do with ``migrate_shards``, each in a process of its own, after ``django.setup()``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest
from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.core.management import CommandError, call_command
from django.db import connections, migrations, models, router
from django.db.migrations.loader import MigrationLoader
from django.utils import timezone

from shardids.django import ShardIdField, alias_for, in_shard
from shardids.migrate.player import Player
from tests.support.django_project.library.models import Book, Writer


def run(*words: str, **options: Any) -> str:
    """Runs ``migrate_shards``; returns what it printed."""
    said = StringIO()
    try:
        call_command("migrate_shards", *words, stdout=said, stderr=said, **options)
    except CommandError as error:
        error.add_note(said.getvalue())
        raise
    return said.getvalue()


def fails(*words: str) -> str:
    """Runs ``migrate_shards``, which is to fail; returns why."""
    with pytest.raises(CommandError) as error:
        run(*words)
    return str(error.value)


def asked(shard: int, query: str) -> list[Any]:
    with connections[alias_for(shard)].cursor() as cursor:
        cursor.execute(query.replace("{s}", f"shard_{shard:04}"))
        return cursor.fetchall()


def do(shard: int, statement: str) -> None:
    with connections[alias_for(shard)].cursor() as cursor:
        cursor.execute(statement.replace("{s}", f"shard_{shard:04}"))


def recorded(shard: int) -> list[str]:
    return [name for (name,) in asked(shard, "select version_num from {s}.alembic_version order by 1")]


ALL = [
    "library.0001_initial",
    "library.0002_rows",
    "library.0003_changes",
    "library.0004_more",
    "polls.0001_initial",
]


def tables_are_made_as_by_migrate() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
    with connections["plain"].cursor() as cursor:
        cursor.execute("create sequence ids")
        cursor.execute("create function next_id() returns bigint language sql as $$select nextval('ids')$$")
    plain: Any = connections["plain"]
    plain.schema = None  # as a shard has it in a migration
    with patch.object(router, "routers", []):
        for app in ("library", "polls"):
            call_command("migrate", app, database="plain", verbosity=0)
    said = run()
    assert "8 done, 0 failed, 0 not started" in said, said
    for shard in range(8):
        assert recorded(shard) == ALL
        with in_shard(shard=shard):
            assert Book.objects.filter(writer__name="100% ann", pages=1, slug="it's new").count() == 1
            assert Writer.objects.create(name="new").pk
    assert run() == "No migrations to run: 8 shards have them.\n"
    # Sharded models' tables are nowhere else, and others' not in shards.
    call_command("migrate", verbosity=0)
    assert not [one for one in connections["default"].introspection.table_names() if "library" in one]
    assert not [one for one in connections[alias_for(5)].introspection.table_names() if "auth" in one]
    said = StringIO()
    call_command("migrate", database=alias_for(5), stdout=said)
    assert said.getvalue().startswith("No migrations to run"), said.getvalue()


def a_part_first_and_the_rest_later() -> None:
    alias_for(5)
    said = run("library", "0001", "--database", "shard_0005")
    assert "Shard 5: nothing -> library.0001_initial" in said, said
    assert fails("--check").startswith("there are migrations to run")
    said = run("--plan", "--sql", "--shards", "4-5")
    assert "Shard 4, from nothing:\n  library.0001_initial\n  library.0002_rows" in said, said
    assert "Shard 5, from library.0001_initial:\n  library.0002_rows" in said, said
    assert 'CREATE TABLE "library_author"' in said
    assert "-- outside a transaction\nCREATE INDEX CONCURRENTLY" in said
    run("--shards", "4-5")
    assert recorded(4) == recorded(5) == ALL
    assert asked(4, "select to_regclass('shard_0003.library_book')") == [(None,)]
    run("polls", "--fake", "--database", "shard_0000")
    assert recorded(0) == ["polls.0001_initial"]
    assert "is not a range of shards" in fails("--shards", "9")
    assert "default is not a shard" in fails("--database", "default")
    assert fails("nothing").startswith("no application 'nothing' has sharded models")
    assert fails("library", "000").startswith("4 migrations of library begin with '000'")
    assert run("--jobs", "4").count(" -> ") == 2
    run("--check")


def sessions_are_refused_behind_a_pooler() -> None:
    assert "8 done" in run("library", "0002", "--jobs", "4")
    assert "8 done" in run("polls", "--jobs", "4")
    before = [*ALL[:2], ALL[-1]]
    with pytest.raises(CommandError) as error:
        run("--jobs", "4")
    (said,) = error.value.__notes__
    assert "shard 0 failed: revisions with statements outside of a transaction" in said
    assert 'and node "a" is behind a pooler. While they run, give it the server\'s own address' in said
    assert all(recorded(shard) == before for shard in range(8)), said
    assert asked(0, "select obj_description('{s}.alembic_version'::regclass)") == [(None,)]


def what_was_refused_behind_a_pooler() -> None:
    assert "8 done" in run("--jobs", "4")
    assert all(recorded(shard) == ALL for shard in range(8))


def a_shard_that_fails_is_as_it_was() -> None:
    run("library", "0002")
    do(6, "alter table {s}.library_book add column slug text")
    with pytest.raises(CommandError, match=r"To run the rest: manage\.py migrate_shards --shards 6") as error:
        run("--continue-on-error")
    assert "--shards 6" in str(error.value)
    assert recorded(6) == ALL[:2]
    assert recorded(7) == ALL
    do(6, "alter table {s}.library_book drop column slug")
    assert "1 done" in run("--shards", "6")


def killed_between_the_parts() -> None:
    run("library", "0003")
    with _stopping():
        run("--shards", "0")
    assert recorded(0) == ALL[:3]
    assert asked(0, "select to_regclass('shard_0000.copy_tmp')") != [(None,)]
    run()
    assert recorded(0) == ALL
    assert asked(0, "select to_regclass('shard_0000.copy_tmp')") == [(None,)]


def killed_with_a_default_that_is_called() -> None:
    run()
    index = models.Index(fields=["votes"], name="choice_votes")
    operations = [
        migrations.AddField("choice", "at", models.DateTimeField(default=timezone.now)),
        AddIndexConcurrently("choice", index),
        migrations.RunSQL("comment on column polls_choice.votes is 'here' -- at the end;"),
        RemoveIndexConcurrently("choice", "choice_votes"),
    ]
    with history_of("polls", *operations, atomic=False):
        with _stopping():
            run("--shards", "0")
        run("--shards", "0")
        assert recorded(0) == [*ALL, "polls.0009_next"]
    more = [*operations, migrations.RunSQL("select 1"), AddIndexConcurrently("choice", index)]
    with history_of("polls", *more, atomic=False), _stopping():
        run("--shards", "2")
    with history_of("polls", *operations, atomic=False):
        said = StringIO()
        with pytest.raises(CommandError):
            call_command("migrate_shards", shards="2", stdout=said, stderr=said)
        assert "which was edited since" in said.getvalue()
        assert "manage.py migrate_shards APP MIGRATION --shards N --fake" in said.getvalue()
        run("--fake", "--shards", "2")
        assert recorded(2) == [*ALL, "polls.0009_next"]
        assert asked(2, "select obj_description('{s}.alembic_version'::regclass)") == [(None,)]


@contextmanager
def _stopping() -> Iterator[None]:
    """Has a run stop before its second statement outside a transaction."""
    outside, calls = Player._play_outside, list[Any]()

    def stops(self: Player, *args: Any, **options: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        outside(self, *args, **options)

    with patch.object(Player, "_play_outside", stops), pytest.raises(KeyboardInterrupt):
        yield


@contextmanager
def history_of(app: str, *operations: Any, atomic: bool = True, **attributes: Any) -> Iterator[None]:
    """Adds a migration ``0009_next`` with these operations to the newest of an application."""
    load = MigrationLoader.load_disk

    def more(self: MigrationLoader) -> None:
        load(self)
        newest = max(name for label, name in self.disk_migrations if label == app)
        found = {"operations": list(operations), "dependencies": [(app, newest)], "atomic": atomic}
        made = type("Migration", (migrations.Migration,), {**found, **attributes, "__module__": __name__})
        self.disk_migrations[app, "0009_next"] = made("0009_next", app)

    with patch.object(MigrationLoader, "load_disk", more):
        yield


class Cursors(migrations.operations.base.Operation):
    """Goes round the schema editor."""

    def __init__(self, sql: str) -> None:
        self.sql = sql

    def state_forwards(self, app_label: str, state: Any) -> None:
        pass

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(self.sql)


def what_cannot_be_sql_is_refused() -> None:
    run()
    named = r"polls\.0009_next \(.*\) can't be turned into SQL for shards: "
    code = migrations.RunPython(lambda _apps, _editor: pytest.fail("it ran"))
    by_cursor = Cursors("update polls_question set question_text = ''")
    for operation in (code, migrations.SeparateDatabaseAndState([code]), by_cursor):
        with history_of("polls", operation):
            assert re.search(r"polls\.0009_next: it (runs|sends) .*, on each shard", run("--plan"))
    refused: Sequence[tuple[Any, str]] = (
        (migrations.RunSQL("COMMIT"), named + "it has BEGIN or COMMIT"),
        (migrations.RunSQL("select nothing from polls_question"), named + 'column "nothing" does not exist'),
        (migrations.RunSQL("vacuum polls_question"), named + "VACUUM cannot run inside"),
        (Cursors("COMMIT"), named + "it has BEGIN or COMMIT"),
        (migrations.RunSQL("create extension citext"), "changes an extension, which is not a shard's"),
        (migrations.RunSQL("create table public.x ()"), "changes an object of another schema"),
        (
            migrations.RunSQL("create index concurrently x on polls_question (id)"),
            r"polls\.0009_next can't .* CONCURRENTLY in a transaction",
        ),
    )
    for operation, why in refused:
        with history_of("polls", operation), pytest.raises(CommandError, match=why):
            run("--plan")
    with history_of("auth", code):
        assert run("--plan") == "No migrations to run.\n"
    with history_of("polls", migrations.RunPython(lambda *_: pytest.fail("it ran"), hints={"shards": False})):
        assert "8 done" in run()
    assert "has run polls.0009_next, which this code does not have" in fails()


def an_application_without_sharded_models_any_more() -> None:
    run()
    made = migrations.CreateModel("Gone", [("id", ShardIdField(primary_key=True))])
    with history_of("sessions", made, migrations.DeleteModel("Gone")):
        assert "CREATE TABLE" in run("sessions", "--plan", "--sql")
    with history_of("sessions", made, migrations.RunSQL("select 1")):
        assert "the operation doesn't say which it is for" in fails("sessions")
    do(0, "insert into {s}.alembic_version values ('left.0001_initial')")
    assert run().startswith("No migrations to run")
    do(0, "insert into {s}.alembic_version values ('e2f1')")
    assert "has run e2f1, which this code does not have" in fails()


def a_squashed_migration_takes_the_place_of_what_it_replaces() -> None:
    run()
    replaced = [("library", name) for name in ("0001_initial", "0002_rows", "0003_changes", "0004_more")]
    with _squashed(replaced):
        said = run("--plan", "--shards", "0")
        assert "library.0005_squashed" in said
        run("library")
        assert recorded(0) == ["library.0005_squashed", "polls.0001_initial"]
        assert run("library").startswith("No migrations to run")
    assert "which this code does not have" in fails()


@contextmanager
def _squashed(replaced: list[tuple[str, str]]) -> Iterator[None]:
    load = MigrationLoader.load_disk

    def more(self: MigrationLoader) -> None:
        load(self)
        made = type("Migration", (migrations.Migration,), {"replaces": replaced, "__module__": __name__})
        self.disk_migrations["library", "0005_squashed"] = made("0005_squashed", "library")

    with patch.object(MigrationLoader, "load_disk", more):
        yield
