"""Alembic environment of the node tree."""

from shardids.install.trees import run_environment

run_environment("node")
