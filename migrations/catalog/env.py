"""Alembic environment of the catalog tree."""

from shardids.migrator import run_environment

run_environment("catalog")
