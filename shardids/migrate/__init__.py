"""Migrates an application's tables on all shards of a cluster, with Alembic: ``shardids migrate``.

An application uses two names: its ``env.py`` calls :func:`run_environment`, and its revisions create primary
keys with :func:`key_column`. Of the modules, ``environment`` reads the revisions, ``compiled`` turns them
into SQL, ``migration`` plans a run from where the shards are (``plan``, ``status``), ``runner`` carries it
out with one ``player`` per worker. ``node_revisions`` run first, once on each node; ``new_shards`` prepares
new shards; ``scaffold``, ``script``, ``stamp`` and ``lint`` write, record and check revisions.
"""

from shardids.migrate.models import key_column, run_environment

__all__ = ["key_column", "run_environment"]
