"""Every error that shardids raises on purpose: one root, and one class per SQLSTATE of class ``SI``.

The database raises the ``SI`` states itself (``sql/``); :func:`from_database` turns one into the
exception of this module, message and hint untouched, so that Python and psql users read the same words.
"""

from __future__ import annotations


class ShardidsError(Exception):
    """Root of all errors raised by shardids.

    ``message`` says what is wrong, with the thing, the shard and the node; ``hint`` says what to do
    next, and may be empty. ``sqlstate`` is the PostgreSQL error code where there is one.
    """

    sqlstate: str | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint


class BadArgument(ShardidsError, ValueError):
    """A value that can't be used: out of range, of the wrong form, or unknown. Nothing was changed."""

    sqlstate = "SI007"


class WrongShard(BadArgument):
    """An object, or a row, that would belong to two shards, or not to the session's. Nothing was written."""


class FanOutRefused(BadArgument):
    """A statement that names no shard, in a session that does not ask all. It was not executed."""


class CannotCombine(BadArgument):
    """A statement whose answers from several shards can't be made one. It was not executed."""


class UnsupportedKey(ShardidsError, TypeError):
    """A sharding key of a type that has no stable hash (only int, str, bytes and UUID have one)."""


class UnknownShard(ShardidsError, LookupError):
    """The shard is not in this cluster, or not on this node."""

    sqlstate = "SI001"


class ShardFenced(ShardidsError):
    """The shard is stopped: it issues no IDs until it is activated."""

    sqlstate = "SI002"


class ShardMoved(ShardFenced):
    """The shard lives on another node now."""

    sqlstate = "SI003"


class CopyNotActivated(ShardidsError):
    """This database is a copy of the one that was activated; it issues no IDs until it is activated."""

    sqlstate = "SI004"


class TooFarAhead(ShardidsError):
    """The shard's ticks are ahead of the server's clock by more than ``max_ahead``."""

    sqlstate = "SI005"


class TimeExhausted(ShardidsError):
    """The layout's time bits can't express the present time any more."""

    sqlstate = "SI006"


class ShardBusy(ShardidsError):
    """Another session migrates the shard."""

    sqlstate = "SI008"


class RevisionChanged(ShardidsError):
    """The shard is at another revision than the migration was made for; nothing was changed."""

    sqlstate = "SI009"


class ConnectionFailed(ShardidsError):
    """A server can't be reached or refuses the login. The message never holds a password."""


class CommitUncertain(ConnectionFailed):
    """The connection was lost while the transaction was ended: a COMMIT may have been carried out, or not."""


class MissingPrivilege(ShardidsError):
    """The role that was used lacks a privilege; the message says which role and what."""


class StatementFailed(ShardidsError):
    """A statement of shardids' own failed; the message says on which server and what PostgreSQL said."""

    def __init__(self, message: str, *, hint: str = "", sqlstate: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class UnsupportedServer(ShardidsError):
    """The server is older than the oldest supported PostgreSQL, or can't be written to."""


class ClusterConflict(ShardidsError):
    """What was asked contradicts what the cluster already is. Nothing was changed."""


class MoveRefused(ShardidsError):
    """A shard can't be moved as things are. The message gives every reason; nothing was changed."""


class MoveFailed(ShardidsError):
    """A move of a shard stopped on its way. Its journal knows where: it can be resumed or aborted."""


class ServerStartFailed(ShardidsError):
    """A throw-away server could not be made or started."""


class MissingLibrary(ShardidsError, ImportError):
    """A library of an extra is not installed; the hint says how to install it."""


class ClockMovedBack(ShardidsError):
    """The clock shows less than it did, by more than the generator may wait for. Nothing was issued."""


class LeaseLost(ShardidsError):
    """A worker number is not, or no longer, the generator's own. Nothing was issued."""


BY_SQLSTATE: dict[str, type[ShardidsError]] = {
    cls.sqlstate: cls
    for cls in (
        UnknownShard,
        ShardFenced,
        ShardMoved,
        CopyNotActivated,
        TooFarAhead,
        TimeExhausted,
        BadArgument,
        ShardBusy,
        RevisionChanged,
    )
    if cls.sqlstate is not None
}


def from_database(sqlstate: str | None, message: str, hint: str = "") -> ShardidsError | None:
    """The exception for an error that the database raised, or ``None`` if the state is not ours."""
    cls = BY_SQLSTATE.get(sqlstate or "")
    return cls(message, hint=hint) if cls else None
