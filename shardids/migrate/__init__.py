"""Migrations of an application's tables over all shards of a cluster, on Alembic.

:func:`run_environment` is what the application's ``env.py`` calls, :func:`key_column` the primary key in
its revisions. The command is ``shardids migrate``.
"""

from shardids.migrate.environment import run_environment
from shardids.migrate.models import key_column

__all__ = ["key_column", "run_environment"]
