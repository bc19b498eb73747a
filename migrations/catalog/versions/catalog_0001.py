"""The cluster, its nodes, the placement of its shards, and the query node."""

from shardids.migrate.install.trees import run_sql

revision = "catalog_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql(
        "catalog/catalog.v1.sql",
        "catalog/old_ids.v1.sql",
        "catalog/lookups.v1.sql",
        "catalog/homes.v1.sql",
        "catalog/moved_ids.v1.sql",
        "catalog/adoption.v1.sql",
        "catalog/references.v1.sql",
        "catalog/recorded.v1.sql",
        "catalog/key_moves.v1.sql",
        "catalog/pins.v1.sql",
        "views/query_node.v1.sql",
        "catalog/routes.v1.sql",
        "catalog/engine.v1.sql",
    )


def downgrade() -> None:
    run_sql("catalog/catalog.v1.down.sql")
