"""The directory of keys: keys whose rows live in another shard than that of their hash.

``known`` finds keys in memory and knows no database, ``homes`` reads and writes the catalog's entries, and
``copies`` brings them to the nodes.
"""
