"""Tables over several shards: reference tables, look-ups, counters, views, loads, transactions."""
