"""64-bit IDs born inside PostgreSQL shards, and the cluster around them."""

__version__ = "0.1.0"
