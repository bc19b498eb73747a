"""The models as they are today: items, tags and notes in shards, settings and orders elsewhere."""

from __future__ import annotations

from typing import Any

from django.db import models

from shardids.django import ShardIdField


class Tag(models.Model):
    id = ShardIdField()
    name: Any = models.CharField(max_length=40)


class Item(models.Model):
    id = ShardIdField()
    name: Any = models.CharField(max_length=40)
    slug: Any = models.CharField(max_length=40, default="")
    owner: Any = models.ForeignKey("auth.User", models.DO_NOTHING, null=True, db_constraint=False)
    tags: Any = models.ManyToManyField(Tag, through="Tagged")


class Tagged(models.Model):
    id = ShardIdField()
    item: Any = models.ForeignKey(Item, models.CASCADE)
    tag: Any = models.ForeignKey(Tag, models.CASCADE)

    class Meta:
        db_table = "crm_item_tags"


class Note(models.Model):
    id = ShardIdField()
    item: Any = models.ForeignKey(Item, models.CASCADE)


class Setting(models.Model):
    id = models.BigAutoField(primary_key=True)
    name: Any = models.CharField(max_length=40)
    item: Any = models.ForeignKey(Item, models.DO_NOTHING, null=True, db_constraint=False)
