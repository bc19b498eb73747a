"""The commands for tables and rows: references, look-ups, counters, views, loads, transactions."""
