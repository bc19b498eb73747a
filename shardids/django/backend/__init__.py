"""Django's database backend for one shard: its own for PostgreSQL, with the shard's schema before tables."""
