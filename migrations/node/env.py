"""Alembic environment of the node tree."""

from shardids.migrate.install.trees import run_environment

run_environment("node")
