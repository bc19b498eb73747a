"""Migrates an application's tables over all shards of a cluster, with Alembic: ``shardids migrate``.

An application uses two names: its ``env.py`` calls :func:`run_environment`, and its revisions create primary
keys with :func:`key_column`. Of the modules, ``environment`` reads the revisions, ``compiled`` turns them
into SQL, ``migration`` plans a run from where the shards are (``plan``, ``status``), ``runner`` carries it
out with one ``player`` a worker, ``new_shards`` prepares shards that are being created; ``scaffold``,
``script`` and ``lint`` write and check revisions without running them.
"""

from shardids.migrate.environment import run_environment
from shardids.migrate.models import key_column

__all__ = ["key_column", "run_environment"]
