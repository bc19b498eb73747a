"""Settings for the tests, with shards by default, and an application whose migrations are older than that."""

from __future__ import annotations

from tests.support.django_project.settings import *  # noqa: F403 -- all of them
from tests.support.django_project.settings import DATABASES, INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.django_project.crm"]
DEFAULT_AUTO_FIELD = "shardids.django.ShardIdField"
DATABASES["lite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
