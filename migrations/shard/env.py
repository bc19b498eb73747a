"""Alembic environment of the shard tree."""

from shardids.migrate.install.trees import run_environment

run_environment("shard")
