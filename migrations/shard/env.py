"""Alembic environment of the shard tree."""

from shardids.migrator import run_environment

run_environment("shard")
