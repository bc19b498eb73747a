"""Settings of Django's own tests: the databases ``default`` and ``other`` are shards 0 and 1."""

from __future__ import annotations

import os

SECRET_KEY = "of the tests"
USE_TZ = False
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
DEFAULT_AUTO_FIELD = "shardids.django.ShardIdField"
SHARDIDS = {"CATALOG": os.environ["SHARDIDS_CATALOG"]}
DATABASES = {
    alias: {
        "ENGINE": "shardids.django.backend",
        "NAME": alias,
        "SHARD": shard,
        "DISABLE_SERVER_SIDE_CURSORS": True,
    }
    for shard, alias in enumerate(("default", "other"))
}
TEST_RUNNER = "tests.outside.django_runner.Runner"
