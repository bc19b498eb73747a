"""A page that shows a cluster as it is: ``shardids console`` serves it, and needs the extra ``ops``.

``watching`` reads the cluster once per interval for all viewers and keeps the last hour; ``figures`` converts
both to JSON. ``databases`` answers a viewer's other questions. ``guard`` refuses requests without
permission, ``app`` answers the rest. The page itself is in ``static``.
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
