"""Measures shardids against its alternatives: key schemes, servers to run them on, measures, and a report.

``schemes`` holds the ways to make keys, ``testbed`` the servers and clients, ``measures`` the measures of
each scheme, ``report`` the page, the tables and the advice. :mod:`~shardids.compare.run` runs a comparison;
:mod:`~shardids.compare.results` defines its results. Only the command line imports this package.
"""
