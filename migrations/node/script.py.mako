"""${message}

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from shardids.migrate.install.trees import run_sql

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    ${upgrades if upgrades else 'run_sql("NAME.sql")'}


def downgrade() -> None:
    ${downgrades if downgrades else 'run_sql("NAME.down.sql")'}
