"""Logical replication of shards: two sides, their subscriptions, write barriers, and work in steps.

``sides`` has the two nodes of a move or an adoption, ``subscriptions`` the copy of the rows and the changes
after it, ``barrier`` stops writers and holds locks of the catalog, ``programs`` runs pg_dump and psql, and
``steps`` takes, repeats and undoes the steps of such work, each recorded before it is taken.
"""
