"""Migrations of many shards: their revisions, the start of a shard's transaction, what a shard holds."""

from shardids.migrate.install.trees import run_sql

revision = "node_0002"
down_revision = "node_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql("migrate/migrate.v1.sql")


def downgrade() -> None:
    run_sql("migrate/migrate.v1.down.sql")
