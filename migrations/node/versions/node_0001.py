"""The engine: layout, decoding, identity of the server, generator, administration; moves; counters."""

from shardids.migrate.install.trees import run_sql

revision = "node_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    run_sql(
        "engine/layout.v1.sql",
        "engine/schemas.v1.sql",
        "engine/decode.v1.sql",
        "engine/keys.v1.sql",
        "engine/node.v1.sql",
        "engine/homes.v1.sql",
        "engine/identity.v1.sql",
        "engine/engine.v1.sql",
        "engine/admin.v1.sql",
        "engine/generator.v1.sql",
        "engine/leases.v1.sql",
        "mover/objects.v1.sql",
        "mover/moving.v1.sql",
        "adopt/staging.v1.sql",
        "adopt/back.v1.sql",
        "counters/counters.v1.sql",
        "reference/reference.v1.sql",
        "lookups/node.v1.sql",
        "tenants/leaving.v1.sql",
        "tenants/arrivals.v1.sql",
    )


def downgrade() -> None:
    run_sql("engine/node.v1.down.sql")
