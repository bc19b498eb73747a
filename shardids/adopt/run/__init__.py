"""Brings the rows of a plan into the shards, compares them, and lets the shards take over."""
