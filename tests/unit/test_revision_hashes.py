"""The hash of a revision: the same after reformatting, another after what may change its SQL."""

from __future__ import annotations

import pytest

from shardids.migrate.environment import hash_of_source

REVISION = '''
"""add likes

Create Date: 2026-01-01
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "two"
down_revision = "one"


def upgrade() -> None:
    """Adds."""
    for name in ["likes", "views"]:
        op.add_column("photos", sa.Column(name, sa.Integer, server_default=f"{0}"))


def downgrade() -> None:
    op.drop_column("photos", "likes")
'''


def test_layout_comments_docstrings_imports_and_the_downgrade_do_not_count() -> None:
    reformatted = """
from alembic import op
import sqlalchemy as sa
revision = 'two'  # of three
down_revision = ('one')
def upgrade() -> None:
    for name in [
        'likes',
        "vie" "ws",
    ]:
        # A counter.
        op.add_column('photos', sa.Column(
            name, sa.Integer, server_default = f'{0}',))
def downgrade() -> None:
    pass
"""
    assert hash_of_source(reformatted) == hash_of_source(REVISION)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"likes", "views"', '"likes"'),
        ('down_revision = "one"', 'down_revision = "zero"'),
        ('"photos", sa.Column', '"users", sa.Column'),
        ("sa.Integer", "sa.BigInteger"),
        ("import sqlalchemy as sa", "import others as sa"),
        ("{0}", "{1}"),
        ("{0}", "{0:d}"),
        ('server_default=f"{0}"', "server_default=sa.true()"),
        ('    """Adds."""\n', "    op.execute('select 1')\n"),
    ],
)
def test_what_may_change_the_statements_counts(before: str, after: str) -> None:
    assert before in REVISION
    assert hash_of_source(REVISION.replace(before, after)) != hash_of_source(REVISION)


def test_the_hash_is_the_same_with_every_version_of_python() -> None:
    assert hash_of_source(REVISION) == "1de7718dc8cf"
