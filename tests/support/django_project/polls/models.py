"""The models of Django's tutorial, with the primary keys of shards."""

from __future__ import annotations

import datetime
from typing import Any

from django.contrib import admin
from django.db import models
from django.utils import timezone

from shardids.django import ShardIdField


class Question(models.Model):
    id: Any = ShardIdField()
    question_text: Any = models.CharField(max_length=200)
    pub_date: Any = models.DateTimeField("date published")
    choice_set: Any

    def __str__(self) -> str:
        return str(self.question_text)

    @admin.display(boolean=True, ordering="pub_date", description="Published recently?")
    def was_published_recently(self) -> bool:
        now = timezone.now()
        return bool(now - datetime.timedelta(days=1) <= self.pub_date <= now)


class Choice(models.Model):
    id: Any = ShardIdField()
    question: Any = models.ForeignKey(Question, on_delete=models.CASCADE)
    question_id: int
    choice_text: Any = models.CharField(max_length=200)
    votes: Any = models.IntegerField(default=0)

    def __str__(self) -> str:
        return str(self.choice_text)
