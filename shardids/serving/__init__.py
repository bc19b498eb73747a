"""Serves HTTP for the console and the metrics: addresses, names of hosts, connections.

:mod:`~shardids.serving.addresses` has the address to listen at and the names to answer for,
:mod:`~shardids.serving.server` serves, and needs uvicorn, which both extras bring.
"""
