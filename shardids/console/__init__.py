"""One page that shows a cluster as it is: served by ``shardids console``, which needs the extra ``console``.

:mod:`~shardids.console.watching` reads the cluster once an interval for all viewers,
:mod:`~shardids.console.history` keeps the last hour, :mod:`~shardids.console.figures` makes JSON of both,
:mod:`~shardids.console.app` answers requests. The page itself is in ``static``.
"""
