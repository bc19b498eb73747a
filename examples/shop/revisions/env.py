"""Runs the shop's revisions on its one database."""

import os

from alembic import context
from sqlalchemy import create_engine, make_url

engine = create_engine(make_url(os.environ["SHOP_DATABASE"]).set(drivername="postgresql+psycopg"))
with engine.connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
