"""Settings for the tests: polls and a library in shards, Django's applications in the catalog's database."""

from __future__ import annotations

import os

from shardids.pg.urls import parse_url

_URL = parse_url(os.environ["SHARDIDS_CATALOG"])

SECRET_KEY = "of the tests"
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "shardids.django",
    "tests.support.django_project.polls",
    "tests.support.django_project.library",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
ROOT_URLCONF = "tests.support.django_project.urls"
TEST_RUNNER = "shardids.django.testing.ShardTestRunner"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _URL.database,
        "USER": _URL.username or "",
        "PASSWORD": _URL.password or "",
        "HOST": _URL.host or _URL.query.get("host", ""),
        "PORT": _URL.port or _URL.query.get("port", ""),
        "OPTIONS": {name: value for name, value in _URL.query.items() if name not in ("host", "port")},
    }
}
if "PLAIN_DATABASE" in os.environ:  # what plain `migrate` makes, to compare with
    DATABASES["plain"] = {**DATABASES["default"], "NAME": os.environ["PLAIN_DATABASE"]}
DATABASE_ROUTERS = ["shardids.django.ShardRouter"]
SHARDIDS = {
    "CATALOG": os.environ["SHARDIDS_CATALOG"],
    "POOL": {"max_size": 2, "timeout": 20},
    "LISTEN": "SHARDIDS_DEAF" not in os.environ,
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
