"""Watching a cluster: doctor, metrics, console and statistics of IDs."""
