"""One page that shows a cluster as it is: served by ``shardids console``, which needs the extra ``console``.

:mod:`~shardids.console.watching` reads the cluster once an interval for all viewers,
:mod:`~shardids.console.history` keeps the last hour, :mod:`~shardids.console.figures` makes values for JSON
of both. :mod:`~shardids.console.databases` asks what a viewer wants to know beside that.
:mod:`~shardids.console.guard` refuses who may not ask, :mod:`~shardids.console.app` answers the others. The
page itself is in ``static``.
"""

from shardids.errors import MissingLibrary

try:
    import numpy as _numpy  # noqa: F401 -- here, so that what is missing is told before anything is asked
    import starlette as _starlette  # noqa: F401 -- as above
    import uvicorn as _uvicorn  # noqa: F401 -- as above
except ImportError as error:
    raise MissingLibrary(
        "the console needs Starlette, uvicorn and numpy",
        hint="To install them: pip install 'shardids[console]'",
    ) from error
