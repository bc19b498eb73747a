"""``shardids compare``: all key schemes measured side by side on real servers, and the report of it."""
