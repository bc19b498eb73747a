"""The engine: layout, decoding, identity of the server, generator, administration."""

from shardids.migrator import run_sql

revision = "node_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql(
        "layout.v1.sql",
        "decode.v1.sql",
        "node.v1.sql",
        "identity.v1.sql",
        "engine.v1.sql",
        "admin.v1.sql",
        "moving.v1.sql",
    )


def downgrade() -> None:
    run_sql("node.v1.down.sql")
