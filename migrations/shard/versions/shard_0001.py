"""The generator of one shard."""

from shardids.migrate.install.trees import run_sql

revision = "shard_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql("engine/shard.v1.sql")


def downgrade() -> None:
    run_sql("engine/shard.v1.down.sql")
