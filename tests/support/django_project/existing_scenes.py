"""An existing application that comes into shards with its migrations, each scene in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.db import connections, migrations, models

from shardids.django import alias_for, get_cluster, in_shard
from tests.support.django_project.crm.models import Item, Note, Setting, Tag, Tagged
from tests.support.django_project.migration_scenes import asked, history_of, recorded, run

ALL = ["crm.0001_initial", "crm.0002_code", "crm.0003_sharded"]


def its_migrations_run_where_its_models_are_today() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
    said = run("crm", "--plan")
    assert (
        "  crm.0001_initial\n    not in shards: Create model Draft\n    not in shards: Create model Setting"
        in said
    )
    assert (
        "  crm.0002_code: it runs Python code, on each shard\n    not in shards: Raw SQL operation" in said
    ), said
    assert "8 done, 0 failed" in run()
    call_command("migrate", verbosity=0)
    elsewhere = [one for one in connections["default"].introspection.table_names() if one.startswith("crm")]
    assert elsewhere == ["crm_setting"]
    assert [one.name for one in Setting.objects.all()] == ["one"]
    for shard in range(8):
        assert [one for one in recorded(shard) if one.startswith("crm")] == ALL
        tables = connections[alias_for(shard)].introspection.table_names()
        assert [one for one in tables if one.startswith("crm")] == [
            "crm_item",
            "crm_item_tags",
            "crm_note",
            "crm_tag",
        ]
        with in_shard(shard=shard):
            item = Item.objects.get(name="first of all", slug="first", owner=None)
            made = Item.objects.create(name="new", owner_id=5)
            tagged = Tagged.objects.create(item=made, tag=item.tags.get(name="OLD"))
            rows = [one for model in (Item, Tag, Tagged) for one in model.objects.all()]
            keys = {one.pk for one in rows}
            assert len(keys) == len(rows) == 6, rows
            assert tagged.pk in keys
            assert {get_cluster().shard_of(key) for key in keys} == {shard}
            Setting.objects.create(name="two", item=made)
            Note.objects.create(item=made)
        columns = asked(
            shard,
            "select count(*) from pg_attribute where attidentity <> '' and attrelid in"
            " (select oid from pg_class where relnamespace = '{s}'::regnamespace)",
        )
        assert columns == [(0,)]
    assert run().startswith("No migrations to run")


def the_default_key_issues_ids_in_shards_only() -> None:
    for alias in ("default", "lite"):
        call_command("migrate", database=alias, verbosity=0)
        user = User.objects.using(alias).create(username="ann")
        user.groups.add(Group.objects.using(alias).create(name="readers"))
        assert [one.pk for one in User.groups.through.objects.using(alias).all()] == [1]


def code_that_fails_leaves_its_shard_as_it_was() -> None:
    run()
    seen = list[str]()

    def code(_apps: Any, editor: Any) -> None:
        alias = editor.connection.alias
        seen.append(alias)
        Tag.objects.create(name="of the code")
        editor.execute("create table crm_more (id bigint)")
        if alias == "shard_0005":
            raise ValueError("not here")

    def counted(shard: int) -> int:
        with in_shard(shard=shard):
            return Tag.objects.filter(name="of the code").count()

    with history_of("crm", migrations.RunPython(code, hints={"shards": True})):
        with pytest.raises(CommandError, match="--shards 5"):
            run("--continue-on-error")
        assert len(set(seen)) == 8
        assert (counted(4), counted(5)) == (1, 0)
        assert asked(5, "select to_regclass('{s}.crm_more')") == [(None,)]
        assert ("crm.0009_next" in recorded(4), "crm.0009_next" in recorded(5)) == (True, False)
    with history_of("crm", migrations.RunPython(lambda *_: None, hints={"shards": True})):
        assert "1 done" in run()


def code_outside_a_transaction_is_begun_again() -> None:
    run()
    calls = list[str]()

    def code(_apps: Any, editor: Any) -> None:
        calls.append(editor.connection.alias)
        Tag.objects.create(name="of the code")
        if len(calls) == 1:
            raise KeyboardInterrupt

    with history_of("crm", migrations.RunPython(code, hints={"shards": True}), atomic=False):
        with pytest.raises(KeyboardInterrupt):
            run()
        assert asked(0, "select obj_description('{s}.alembic_version'::regclass)")[0][0].startswith(
            "shardids: up crm.0009"
        )
        assert "8 done" in run()
    assert calls[:2] == ["shard_0000", "shard_0000"]
    assert asked(0, "select obj_description('{s}.alembic_version'::regclass)") == [(None,)]
    with in_shard(shard=0):
        assert Tag.objects.filter(name="of the code").count() == 2


def numbers_are_drawn_by_a_trigger_of_a_migration() -> None:
    def number(_apps: Any, editor: Any) -> None:
        editor.execute("select shardids.number_rows('crm_item', 'number', 'slug', 'item', 'day')")

    column = migrations.AddField("Item", "number", models.CharField(max_length=40, null=True))
    with history_of("crm", column, migrations.RunPython(number, hints={"shards": True})):
        assert "8 done" in run()
    with in_shard(shard=5):
        Item.objects.create(name="one", slug="ann")
        Item.objects.create(name="two", slug="ann")
    found = asked(5, "select number from {s}.crm_item where slug = 'ann' order by id")
    assert [number.rpartition("-")[2] for (number,) in found] == ["0001", "0002"]
