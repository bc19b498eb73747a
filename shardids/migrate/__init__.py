"""Migrates an application's tables on all shards of a cluster, with Alembic: ``shardids migrate``.

An application uses two names: its ``env.py`` calls :func:`run_environment`, and its revisions create primary
keys with :func:`key_column`. Of the modules, ``environment`` reads the revisions, ``compiled`` turns them
into SQL, ``migration`` plans a run from where the shards are (``plan``, ``status``), stamps shards and
prepares new ones, ``runner`` carries a run out with one ``player`` per worker. ``node_revisions`` run first,
once on each node; ``scaffold``, ``script`` and ``lint`` write and check revisions. ``install`` has shardids'
own objects.
"""

from shardids.migrate.models import key_column, run_environment

__all__ = ["key_column", "run_environment"]
