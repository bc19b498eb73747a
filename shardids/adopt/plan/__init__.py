"""Reads a database, changes nothing, and plans how its rows are split over shards."""
