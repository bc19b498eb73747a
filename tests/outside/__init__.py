"""Other people's code on shards, fetched from PyPI: `make test-django test-sqlalchemy`."""
