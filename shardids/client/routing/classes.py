"""Session classes of applications, joined with those of shardids."""

from __future__ import annotations

from functools import cache

from sqlalchemy.orm import Session


@cache
def session_class(ours: type[Session], theirs: type[Session] | None) -> type[Session]:
    """Returns a class with what a session class of shardids does and what the application's own adds."""
    if theirs is None or issubclass(ours, theirs):
        return ours
    if issubclass(theirs, ours):
        return theirs
    return type(theirs.__name__, (ours, theirs), {"__doc__": theirs.__doc__})
