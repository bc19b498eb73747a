"""shardids' own objects in databases: SQL files, Alembic trees, provisioning and upgrades."""
