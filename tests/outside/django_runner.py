"""Runs Django's own tests on shards: makes the tables, and counts what shards refuse as skipped."""

from __future__ import annotations

import re
import unittest
from typing import Any

from django.apps import apps
from django.db import ProgrammingError, connections
from django.db.models import ForeignKey
from django.test.runner import DiscoverRunner

from shardids.django.aliases import allow_tests, configuration
from shardids.django.sharded import is_sharded
from shardids.errors import BadArgument

OTHER_KEYS = "its model has another primary key than a ShardIdField, or its IDs are of no shard"


OF_SERVER = "the server has no pgcrypto, or no collations of ICU"


class Result(unittest.TextTestResult):
    def addError(self, test: Any, err: Any) -> None:
        if reason := refused(err[1]):
            self.addSkip(test, reason)
        else:
            super().addError(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None and (reason := refused(err[1])):
            self.addSkip(subtest, reason)
        else:
            super().addSubTest(test, subtest, err)


def refused(error: BaseException) -> str | None:
    """Returns why a test is not for shards, or not for this server."""
    reasons = ("has no table", "does not exist in this cluster")
    if isinstance(error, BadArgument) and any(reason in error.message for reason in reasons):
        return OTHER_KEYS
    if isinstance(error, ProgrammingError) and re.match(r"function (sha\d+|digest)\(|collation ", str(error)):
        return OF_SERVER
    return None


class Runner(DiscoverRunner):
    def get_resultclass(self) -> type[Result]:
        return Result

    def setup_databases(self, **_: Any) -> None:
        allow_tests(configuration()["CATALOG"])  # all of the cluster is for these tests
        models = [model for model in apps.get_models(include_auto_created=True) if is_sharded(model)]
        for model in models:
            for field in model._meta.local_fields:
                if isinstance(field, ForeignKey) and not is_sharded(field.remote_field.model):
                    field.db_constraint = False  # type: ignore[attr-defined]
        for alias in connections:
            with connections[alias].schema_editor() as editor:
                for model in models:
                    options = model._meta
                    if options.managed and not options.proxy and not options.auto_created:
                        editor.create_model(model)

    def teardown_databases(self, *_: Any, **_options: Any) -> None:
        pass
