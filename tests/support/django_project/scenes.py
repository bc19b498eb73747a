"""What the tests do with the polls application, each in a process of its own, after ``django.setup()``."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from threading import Thread
from typing import Any
from unittest.mock import patch

import django
import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.core.serializers import deserialize, serialize
from django.db import Error, connection, connections, router, transaction
from django.db.backends.postgresql import base as djangos
from django.db.backends.postgresql import compiler as djangos_compiler
from django.db.models import Count, Exists, F, FilteredRelation, Max, OuterRef, Sum
from django.forms import modelform_factory
from django.http import JsonResponse
from django.test.utils import override_settings, setup_test_environment, teardown_test_environment
from django.utils import timezone

from shardids.catalog.region_changes import create_region, drop_region
from shardids.catalog.regions import Region
from shardids.django import (
    NextId,
    ShardIdJSONEncoder,
    ShardRouter,
    alias_for,
    get_cluster,
    in_shard,
    run_in_shard,
)
from shardids.django.backend import operations
from shardids.django.backend.base import DatabaseWrapper
from shardids.django.choice import chosen_shard
from shardids.django.testing import shards_for_tests
from shardids.errors import BadArgument, FanOutRefused, WrongShard
from shardids.tables import lookups
from tests.support.django_project.polls.models import Choice, Question


def make_tables() -> None:
    for shard in range(8):
        with connections[alias_for(shard)].schema_editor() as editor:
            editor.create_model(Question)
            editor.create_model(Choice)


def question(text: str = "?", **more: Any) -> Question:
    return Question(question_text=text, pub_date=timezone.now(), **more)


def origins(*ids: int) -> set[int]:
    return {get_cluster().decode(id_).shard for id_ in ids}


def keys_come_from_the_shard() -> None:
    with in_shard(shard=5):
        one = question()
        assert one.pk is None
        one.save()
        two = Question.objects.create(question_text="2", pub_date=timezone.now())
        many = Question.objects.bulk_create([question(str(n)) for n in range(1000)])
        kept = [one.pk, two.pk, *(each.pk for each in many)]
        assert kept == sorted(set(kept))
        assert origins(*kept) == {5}
        assert Question.objects.count() == 1002
        assert not Question.objects.get_or_create(pk=one.pk, defaults={})[1]
        Question.objects.bulk_create(
            [question("again", pk=one.pk)],
            update_conflicts=True,
            unique_fields=["pk"],
            update_fields=["question_text"],
        )
        one.refresh_from_db()
        assert one.question_text == "again"
        assert Question.objects.get(pk=str(one.pk)) == one
        assert origins(Question.objects.annotate(new=NextId()).first().new) == {5}
    answers_sort_after_what_they_answer(one.pk)


def answers_sort_after_what_they_answer(early: int) -> None:
    def ask() -> int:
        return Question.objects.create(question_text="so?", pub_date=timezone.now()).pk

    layout = get_cluster().layout
    asked, too_late = (
        layout.encode(ms=layout.decode(early).ms + s * 1000, shard=2, sequence=0) for s in (60, 7200)
    )
    assert run_in_shard(ask, shard=5) < asked
    block = list(get_cluster().at(shard=5).reserve(2))
    for write in (
        lambda: question("early", pk=block[0]).save(),
        lambda: question("early", pk=block[0]).save(force_insert=True),
        lambda: Question.objects.create(pk=str(block[0]), question_text="early", pub_date=timezone.now()),
        lambda: Question.objects.bulk_create([question("early", pk=block[0])]),
    ):
        with pytest.raises(BadArgument, match=f"id {block[0]} of a new row of polls.Question does not sort"):
            run_in_shard(write, shard=5, after=asked)
    # The row that is answered is older; so may be one that is changed.
    run_in_shard(lambda: question("later", pk=early).save(), shard=5, after=asked)
    run_in_shard(lambda: Choice.objects.create(question_id=early).delete(), shard=5, after=asked)
    (kept,) = get_cluster().at(shard=5, after=asked).reserve(1)
    run_in_shard(lambda: question("kept", pk=kept).save(), shard=5, after=asked)
    run_in_shard(lambda: question("early", pk=block[1]).save(), shard=5)
    assert run_in_shard(ask, shard=5, after=[asked, early]) > asked
    with pytest.raises(Error, match=f"shard 5 can't go past ID {too_late}"):
        run_in_shard(ask, shard=5, after=too_late)


def forms_and_json_keep_every_digit() -> None:
    assert Choice._meta.get_field("question").db_type(connection) == "bigint"
    with in_shard(shard=5):
        q = question()
        q.save()
        assert q.pk > 1 << 53
        form = modelform_factory(Choice, fields="__all__")
        filled = form({"question": str(q.pk), "choice_text": "yes", "votes": "0"})
        assert filled.is_valid(), filled.errors
        assert filled.save().question_id == q.pk
        assert not form({"question": str(q.pk + 1), "choice_text": "yes", "votes": "0"}).is_valid()
        assert next(deserialize("json", serialize("json", [q]))).object.pk == q.pk
        for bad in (1.0, True):
            with pytest.raises(TypeError, match="its digits"):
                Question.objects.get(pk=bad)
            with pytest.raises(ValidationError):
                Question._meta.pk.to_python(bad)
    answer = JsonResponse({"id": q.pk, "votes": 3, "all": [(q.pk, True)]}, encoder=ShardIdJSONEncoder)
    assert answer.content.decode() == f'{{"id": "{q.pk}", "votes": 3, "all": [["{q.pk}", true]]}}'


def statements_name_the_shards_schema_and_set_nothing() -> None:
    asked: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        asked.append(sql)
        return execute(sql, params, many, context)

    with ExitStack() as noted:
        for shard in range(8):
            noted.enter_context(connections[alias_for(shard)].execute_wrapper(note))
            with in_shard(shard=shard) as alias:
                _statements(str(shard), alias)
    assert len(asked) > 100
    assert not [sql for sql in asked if sql.lower().startswith("set ") or "search_path" in sql.lower()]
    assert all('"shard_' in sql for sql in asked if "polls_" in sql)
    for shard in range(8):
        using = Question.objects.using(alias_for(shard))
        assert [str(q) for q in using] == [str(shard)]
        assert using.get().choice_set.count() == 2
        assert using.all().delete()[0] == 3


def _statements(text: str, alias: str) -> None:
    q = question(text)
    q.save()
    q.choice_set.create(choice_text="a")
    Choice.objects.bulk_create([Choice(question=q, choice_text=name) for name in "bc"])
    mine = Choice.objects.filter(question__question_text=text)
    assert mine.count() == 3
    assert mine.update(votes=F("votes") + 1) == 3
    with transaction.atomic(using=alias):
        locked = Choice.objects.select_related("question").select_for_update(of=("self", "question"))
        assert locked.get(choice_text="b").question == q
    questions = Question.objects.annotate(n=Count("choice"), top=Max("choice__votes"))
    assert questions.get(n=3, top=1) == q
    assert Question.objects.filter(Exists(Choice.objects.filter(question=OuterRef("pk")))).get() == q
    joined_twice = Question.objects.filter(choice__choice_text="a").filter(choice__choice_text="b")
    assert joined_twice.get() == q
    assert Choice.objects.aggregate(Sum("votes")) == {"votes__sum": 3}
    names = Choice.objects.values_list("choice_text", flat=True).order_by("question__pub_date", "pk")
    assert list(names.iterator()) == ["a", "b", "c"]
    assert names.filter(votes=1).union(names.filter(votes=2)).count() == 3
    Choice.objects.get(choice_text="c").delete()


def the_backend_is_djangos_own_for_postgresql() -> None:
    for name, part in vars(djangos.DatabaseWrapper).items():
        if name.endswith("Class") or name.endswith("_class"):
            assert issubclass(getattr(DatabaseWrapper, name), part), name
    for name in djangos_compiler.__all__:
        assert issubclass(getattr(operations, name), getattr(djangos_compiler, name)), name
    with in_shard(shard=5) as alias:
        for bad in ("a$b", 'a"b', "a b", "a;b", "a--b", "a$tag$"):
            asked = Question.objects.alias(**{"kept": F("pk")})
            outcomes = list[Any]()
            for using in ("default", alias):
                try:
                    # CVE-2025-13372: the name of a relation becomes the name of a joined table.
                    relation = {bad: FilteredRelation("choice")}
                    named = asked.using(using).annotate(**relation).values(f"{bad}__votes")
                    named.query.get_compiler(using).as_sql()
                    outcomes.append(None)
                except (ValueError, BadArgument) as error:
                    outcomes.append((type(error), str(error)))
            assert outcomes[0] == outcomes[1], bad
            # Django 6.1 quotes the name of a joined table.
            assert outcomes[0] is not None or (django.VERSION >= (6, 1) and "$" in bad)
        sent: list[str] = []

        def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            sent.append(sql)
            return execute(sql, params, many, context)

        q = question()
        q.save()
        with connections[alias].execute_wrapper(note):
            made = Choice.objects.bulk_create(
                [Choice(question=q, choice_text=str(n), votes=n) for n in range(1000)]
            )
        (insert,) = (sql for sql in sent if "INSERT" in sql)
        assert insert.count("%s") == 3
        assert "SELECT * FROM UNNEST((%s)::bigint[], (%s)::varchar[], (%s)::integer[])" in insert
        assert origins(*(one.pk for one in made)) == {5}
        assert [one.votes for one in Choice.objects.order_by("pk")] == list(range(1000))


def look_up_keys_are_refused_until_they_are_claimed() -> None:
    name = "polls_question.question_text"
    catalog = get_cluster()._catalog
    for shard in range(8):
        with connections[alias_for(shard)].cursor() as cursor:
            cursor.execute(f"alter table shard_{shard:04}.polls_question add unique (question_text)")
    with in_shard(shard=5):
        question("before").save()
        lookups.create(catalog, name)
        lookups.backfill(catalog, name)
        for write in (
            lambda: question("after").save(),
            lambda: Question.objects.bulk_create([question("after"), question("and")]),
            lambda: Question.objects.update(question_text="after"),
        ):
            with pytest.raises(Error, match=r"without a claim writes shard_0005\.polls") as refused:
                write()
            assert refused.value.__cause__.sqlstate == "SI014"
        Question.objects.update(pub_date=timezone.now())
        with transaction.atomic(using=alias_for(5)), connections[alias_for(5)].cursor() as cursor:
            cursor.execute("set local shardids.unclaimed_writes = 'allowed'")
            question("after").save()
        assert lookups.backfill(catalog, name).claimed == 1
        Question.objects.all().delete()


def the_router_finds_the_shard_or_refuses() -> None:
    call_command("migrate", "auth", verbosity=0)
    call_command("check")
    for wrong in (
        Question.objects.count,
        lambda: question().save(),
        lambda: Question.objects.bulk_create([question()]),
        lambda: Question.objects.all().delete(),
    ):
        with pytest.raises(FanOutRefused, match=r"polls\.Question is sharded"):
            wrong()
    of_ann = get_cluster().shard_for("ann")
    with in_shard(key="ann") as alias:
        assert alias == alias_for(of_ann)
        assert User.objects.create(username="ann")._state.db == "default"
        q = question()
        q.save()
    with in_shard(shard=(of_ann + 1) % 8):
        assert not Question.objects.filter(pk=q.pk).exists()
        q.question_text = "changed"
        q.save()  # where it is, not where the block is
        assert [new._state.db for new in _children(q)] == [alias, alias]
        other = question()
        other.save()
        with pytest.raises(ValueError, match="the current database router prevents"):
            Choice(question=q).question = other
        for wrong in (
            lambda: question(pk=q.pk).save(force_insert=True),
            lambda: Question.objects.bulk_create([question(pk=q.pk)]),
            lambda: Choice.objects.create(question_id=str(q.pk), choice_text="x", pk=other.pk),
        ):
            with pytest.raises(WrongShard, match=f"Question {q.pk} is of shard {of_ann}|is of shard"):
                wrong()
        with pytest.raises(WrongShard, match="can't be written or referred to"):
            Choice.objects.update(question=q.pk)
        assert Question.objects.get() == other
    with in_shard(id=q.pk):
        assert Question.objects.get().question_text == "changed"
        Question.objects.create(pk=q.pk + 1, question_text="its own", pub_date=timezone.now()).delete()
    again = pickle.loads(pickle.dumps(q))
    again.save()
    assert again._state.db == alias
    with pytest.raises(BadArgument, match="has no table auth_user"):
        User.objects.using(alias).count()
    with pytest.raises(BadArgument, match="shard 8 does not exist"):
        alias_for(8)
    catalog = get_cluster()._catalog
    create_region(catalog, Region(name="us", first_shard=6, last_shard=7))
    try:
        get_cluster().refresh()
        with in_shard(key="ann", region="us") as alias:
            assert alias == alias_for(get_cluster().shard_for("ann", region="us"))
            assert alias in {"shard_0006", "shard_0007"}
        assert run_in_shard(chosen_shard, key="ann", region="us") in {6, 7}
    finally:
        drop_region(catalog, "us")
    with pytest.raises(BadArgument, match="exactly one"), in_shard():
        pass
    with in_shard(id=q.pk, of="polls_question") as alias:
        assert alias == alias_for(of_ann)


def routers_after_it_are_asked() -> None:
    class Later:
        def db_for_read(self, model: Any, **_: Any) -> str:
            return "of later"

    mine = ShardRouter()
    q = question()
    q._state.db = alias_for(1)
    with patch.object(router, "routers", [mine, Later()]):
        assert router.db_for_read(User, instance=q) == "of later"
        assert router.db_for_write(User, instance=q) == "default"
        assert router.db_for_read(Question, instance=q) == alias_for(1)


def tests_get_no_shard_of_the_application() -> None:
    with in_shard(shard=1):
        assert Question.objects.count() == 0
        setup_test_environment()
        for _again in range(2):
            with pytest.raises(BadArgument, match="the application's, and not for tests"):
                Question.objects.count()
            connections.close_all()
        for words in (["--plan"], []):
            with pytest.raises(CommandError, match="the application's, and not for tests"):
                call_command("migrate_shards", *words)
        with pytest.raises(BadArgument, match="the application's, and not for tests"):
            get_cluster()
        teardown_test_environment()
        assert Question.objects.count() == 0
    for wrong in ("many", None):
        sizes = {**settings.SHARDIDS, "TEST": {"SHARDS": wrong}}
        with override_settings(SHARDIDS=sizes), pytest.raises(BadArgument, match="it takes a number"):
            shards_for_tests().__enter__()


def _children(q: Question) -> list[Choice]:
    """New objects, which follow their parent: by the object, and by its ID."""
    made = [Choice(question=q, choice_text="x"), Choice(question_id=q.pk, choice_text="y")]
    for choice in made:
        choice.save()
    return made


def aliases_of_a_node_share_its_pool() -> None:
    for shard in range(8):  # a pool has two connections
        assert Question.objects.using(alias_for(shard)).count() == 0
    assert len(_held()) == 2
    first = alias_for(0)
    with transaction.atomic(using=first):
        question("0").save(using=first)
        for shard in (1, 2, 3):  # beside the transaction, which stays what it is
            assert Question.objects.using(alias_for(shard)).count() == 0
            question("x").save(using=alias_for(shard))
        assert Question.objects.using(first).count() == 1
        transaction.set_rollback(True, using=first)
    assert [Question.objects.using(alias_for(shard)).count() for shard in range(4)] == [0, 1, 1, 1]
    connections.close_all()
    errors = _in_threads()
    assert not errors, errors
    written = [
        Question.objects.using(alias_for(shard)).filter(question_text="t").count() for shard in range(8)
    ]
    assert written == [8] * 8


def _held() -> list[DatabaseWrapper]:
    return [
        one
        for one in connections.all(initialized_only=True)
        if isinstance(one, DatabaseWrapper) and one.connection is not None
    ]


def _in_threads() -> list[Exception]:
    errors: list[Exception] = []

    def work() -> None:
        try:
            for shard in range(8):
                with in_shard(shard=shard) as alias, transaction.atomic(using=alias):
                    Question.objects.bulk_create([question("t")])
        except Exception as error:  # noqa: BLE001 -- told to the test
            errors.append(error)
        finally:
            connections.close_all()

    threads = [Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
