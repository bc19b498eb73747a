"""Alembic environment of the node tree."""

from shardids.migrator import run_environment

run_environment("node")
