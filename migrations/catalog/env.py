"""Alembic environment of the catalog tree."""

from shardids.migrate.install.trees import run_environment

run_environment("catalog")
