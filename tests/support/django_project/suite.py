"""Tests of the project as its authors would write them; ``manage.py test`` runs them."""

from __future__ import annotations

from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connections, transaction
from django.test import TestCase, TransactionTestCase
from django.urls import reverse
from django.utils import timezone
from sqlalchemy import text

from shardids.django import get_cluster, in_shard
from tests.support.django_project.polls.models import Choice, Question


def ask(said: str) -> Question:
    question = Question(question_text=said, pub_date=timezone.now())
    question.save()
    return question


class RolledBack(TestCase):
    databases = {"default", "shard_0000", "shard_0001"}

    @classmethod
    def setUpTestData(cls) -> None:
        with in_shard(shard=0):
            cls.question = ask("of the class")

    def test_one(self) -> None:
        self._write()

    def test_again(self) -> None:
        self._write()

    def _write(self) -> None:
        self.assertEqual(get_cluster().shard_count, 4)
        for shard, count in ((0, 1), (1, 0)):
            with in_shard(shard=shard) as alias:
                self.assertEqual(Question.objects.count(), count)
                ask("of the test")
                with transaction.atomic(using=alias):
                    ask("rolled back by itself")
                    transaction.set_rollback(True, using=alias)
                self.assertEqual(Question.objects.count(), count + 1)
        self.question.choice_set.create(choice_text="of the test")
        self.assertEqual(self.question.choice_set.count(), 1)

    def test_sessions_of_the_cluster_are_rolled_back(self) -> None:
        self._write_in_sessions()

    def test_sessions_again(self) -> None:
        self._write_in_sessions()

    def _write_in_sessions(self) -> None:
        sent = text("insert into polls_question (question_text, pub_date) values (:said, now())")
        with in_shard(shard=1):
            ask("before")
        # Shard 3 is none of the databases: its node is.
        for shard in (1, 3):
            with get_cluster().session(shard=shard) as session:
                session.execute(text(f"set local search_path = {get_cluster().schema_of(shard)}"))
                there = session.scalar(text("select count(*) from polls_question"))
                self.assertEqual(there, 1 if shard == 1 else 0)
                session.execute(sent, {"said": "in a session"})
                session.commit()
        with in_shard(shard=1):
            found = Question.objects.order_by("pk").values_list("question_text", flat=True)
            self.assertEqual(list(found), ["before", "in a session"])

    def test_others_are_refused(self) -> None:
        with self.assertRaisesMessage(Exception, "Database queries to 'shard_0002' are not allowed"):
            Question.objects.using("shard_0002").count()

    def test_callbacks_and_queries_are_seen(self) -> None:
        called = []
        with self.captureOnCommitCallbacks(using="shard_0001", execute=True):
            transaction.on_commit(lambda: called.append(1), using="shard_0001")
        self.assertEqual(called, [1])
        with self.assertNumQueries(1, using="shard_0001"), in_shard(shard=1):
            Question.objects.count()


class Committed(TransactionTestCase):
    databases = "__all__"

    def test_one(self) -> None:
        self._write()

    def test_again(self) -> None:
        self._write()

    def _write(self) -> None:
        User.objects.create(username="ann")
        for shard in range(4):
            with in_shard(shard=shard):
                self.assertEqual(Question.objects.count(), 0)
                ask("committed").choice_set.create(choice_text="yes")
                connections.close_all()
                self.assertEqual(Choice.objects.count(), 1)


class AdminOfOneShard(TestCase):
    databases = {"default", "shard_0000", "shard_0001"}

    def setUp(self) -> None:
        self.client.force_login(User.objects.create_superuser("admin"))
        with in_shard(shard=0):
            ask("in another shard")
        with in_shard(shard=1):
            self.question = ask("in this shard")

    def url(self, view: str, *args: object, model: str = "question") -> str:
        return reverse(f"shard_admin_1:polls_{model}_{view}", args=args)

    def counts(self, model: type[Question] | type[Choice] = Question) -> list[int]:
        return [model.objects.using(f"shard_{shard:04}").count() for shard in (0, 1)]

    def test_list(self) -> None:
        for url in (self.url("changelist"), self.url("changelist") + "?q=shard"):
            page = self.client.get(url)
            self.assertContains(page, "in this shard")
            self.assertNotContains(page, "in another shard")
        self.assertContains(self.client.get(reverse("shard_admin_1:index")), "Shard 1")

    def test_add(self) -> None:
        self.client.get(self.url("add"))
        inline = {
            "choice_set-TOTAL_FORMS": 1,
            "choice_set-INITIAL_FORMS": 0,
            "choice_set-0-choice_text": "yes",
        }
        inline |= {"choice_set-0-votes": 0}
        sent = {"question_text": "new", "pub_date_0": "2026-01-01", "pub_date_1": "00:00", **inline}
        self.assertRedirects(self.client.post(self.url("add"), sent), self.url("changelist"))
        self.assertEqual(self.counts(), [1, 2])
        self.assertEqual(self.counts(Choice), [0, 1])
        entry = LogEntry.objects.get()
        made = Question.objects.using("shard_0001").get(pk=entry.object_id)
        self.assertEqual(get_cluster().decode(made.pk).shard, 1)

    def test_change(self) -> None:
        url = self.url("change", self.question.pk)
        self.assertContains(self.client.get(url), "in this shard")
        sent = {"question_text": "changed", "pub_date_0": "2026-01-01", "pub_date_1": "00:00"}
        sent |= {"choice_set-TOTAL_FORMS": 0, "choice_set-INITIAL_FORMS": 0}
        self.assertRedirects(self.client.post(url, sent), self.url("changelist"))
        self.question.refresh_from_db()
        self.assertEqual(self.question.question_text, "changed")
        self.assertContains(self.client.get(self.url("history", self.question.pk)), "Changed")

    def test_delete(self) -> None:
        self.question.choice_set.create(choice_text="goes, too")
        url = self.url("delete", self.question.pk)
        self.assertContains(self.client.get(url), "goes, too")
        self.assertRedirects(self.client.post(url, {"post": "yes"}), self.url("changelist"))
        self.assertEqual(self.counts(), [1, 0])

    def test_delete_selected(self) -> None:
        sent = {"action": "delete_selected", "_selected_action": [self.question.pk]}
        self.assertContains(self.client.post(self.url("changelist"), sent), "in this shard")
        self.client.post(self.url("changelist"), {**sent, "post": "yes"})
        self.assertEqual(self.counts(), [1, 0])

    def test_choices_of_a_foreign_key_are_of_the_shard(self) -> None:
        page = self.client.get(
            reverse("shard_admin_1:autocomplete"),
            {"app_label": "polls", "model_name": "choice", "field_name": "question", "term": "shard"},
        )
        self.assertEqual([one["id"] for one in page.json()["results"]], [str(self.question.pk)])
        self.assertContains(self.client.get(self.url("add", model="choice")), "choice_text")

    def test_an_object_of_another_shard_is_not_there(self) -> None:
        other = Question.objects.using("shard_0000").get()
        page = self.client.get(self.url("change", other.pk), follow=True)
        self.assertContains(page, "doesn’t exist")
