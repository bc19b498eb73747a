"""Alembic environment of the shard tree."""

from shardids.install.trees import run_environment

run_environment("shard")
