"""Django's migrations on all shards: ``manage.py migrate_shards``.

``history`` says which migrations shards have to run, ``rehearsal`` turns them into SQL and that into what the
runner of :mod:`shardids.migrate` plays, and ``run`` plans a run and carries it out.
"""
