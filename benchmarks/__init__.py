"""Measures of shardids' own speed: ``make bench``, or ``python -m benchmarks [NAME…]``."""
