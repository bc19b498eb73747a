"""``manage.py migrate_shards``."""
