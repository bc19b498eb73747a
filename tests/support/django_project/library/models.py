"""A library: what its migrations end with."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from shardids.django import ShardIdField


class Writer(models.Model):
    id = ShardIdField()
    name = models.CharField(max_length=200, db_index=True)
    born = models.DateField(null=True)


class Book(models.Model):
    id = ShardIdField()
    writer = models.ForeignKey(Writer, models.SET_NULL, null=True)
    heading = models.CharField(max_length=300, db_index=True, db_comment="what readers see")
    price = models.DecimalField(max_digits=10, decimal_places=2, default=0)
    pages = models.BigIntegerField(db_default=1)
    slug = models.SlugField(default="it's new")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["writer", "heading"], name="one_of_each"),
            models.CheckConstraint(condition=Q(price__gte=0), name="price_is_paid"),
        ]
        indexes = [models.Index(fields=["slug"], name="book_slug_there", condition=~Q(slug=""))]


class Copy(models.Model):
    id = ShardIdField()
    book = models.ForeignKey(Book, models.CASCADE)
    owner_id = models.BigIntegerField(null=True)

    class Meta:
        db_table = "library_copies"
