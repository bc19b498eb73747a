"""Access to PostgreSQL: connections, URLs, locks, clocks, queries, and embedded servers.

``connections`` opens engines and translates errors, ``reader`` reads with no rights beyond reading,
``queries`` and ``sqlfiles`` run the files of ``sql/``, ``schemas`` refuses objects of roles that are not
trusted. ``locks`` lists the advisory locks, ``notation`` writes and parses shard ranges and durations.
"""
