"""Where the shop's data is."""

import os

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import sessionmaker

engine = create_engine(make_url(os.environ["SHOP_DATABASE"]).set(drivername="postgresql+psycopg"))
Session = sessionmaker(engine)
