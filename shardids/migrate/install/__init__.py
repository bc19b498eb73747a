"""Installs shardids' own objects in databases.

``trees`` runs their SQL files through Alembic; ``provision`` creates catalogs, nodes and shards; ``upgrade``
brings an existing cluster to the installed version. The application's tables are the business of
``shardids.migrate``.
"""
