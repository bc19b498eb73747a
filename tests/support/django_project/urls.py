"""The admin of shard 1 beside that of the other models."""

from __future__ import annotations

from django.contrib.admin import ModelAdmin, TabularInline, site
from django.urls import path

from shardids.django.admin import ShardAdminSite
from tests.support.django_project.polls.models import Choice, Question


class ChoiceInline(TabularInline):
    model = Choice
    extra = 1


class QuestionAdmin(ModelAdmin):
    list_display = ("question_text", "pub_date")
    list_filter = ("pub_date",)
    ordering = ("pk",)
    search_fields = ("question_text",)
    inlines = (ChoiceInline,)


shard_1 = ShardAdminSite(1)
shard_1.register(Question, QuestionAdmin)
shard_1.register(Choice, list_display=("choice_text", "question"), autocomplete_fields=("question",))
urlpatterns = [path("admin/", site.urls), path("shards/1/", shard_1.urls)]
