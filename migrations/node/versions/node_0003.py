"""Transactions over several nodes: the decisions on them."""

from shardids.migrate.install.trees import run_sql

revision = "node_0003"
down_revision = "node_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql("engine/decisions.v1.sql")


def downgrade() -> None:
    run_sql("engine/decisions.v1.down.sql")
