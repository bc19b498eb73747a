"""Alembic environment of the catalog tree."""

from shardids.install.trees import run_environment

run_environment("catalog")
