"""One page that shows a cluster as it is: served by ``shardids console``, which needs the extra ``ops``.

``watching`` reads the cluster once an interval for all viewers and
keeps the last hour, ``figures`` makes values for JSON of both.
``databases`` asks what a viewer wants to know beside that.
``guard`` refuses who may not ask, ``app`` answers the others. The
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
        hint="To install them: pip install 'shardids[ops]'",
    ) from error
