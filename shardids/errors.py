"""Every error that shardids raises on purpose: one root, and one class for each SQLSTATE of class ``SI``.

The database raises the ``SI`` states itself (``sql/``). :func:`from_database` turns each into the exception
of this module and keeps message and hint, so that users of Python and of psql read the same words.
"""

from __future__ import annotations

from collections.abc import Mapping


class ShardidsError(Exception):
    """Root of all errors that shardids raises.

    ``message`` describes the error, and names the thing, the shard and the node; ``hint`` gives the next
    step, and may be empty. ``sqlstate`` is the PostgreSQL error code, if the error has one.
    """

    sqlstate: str | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message}\n{hint}" if hint else message)
        self.message = message
        self.hint = hint

    def in_a_line(self, detail: str | None = None) -> str:
        """Return message and hint in one line; ``detail`` is what PostgreSQL adds to the message."""
        message = f"{self.message} ({detail})" if detail else self.message
        return f"{message}. {self.hint}" if self.hint else message


class BadArgument(ShardidsError, ValueError):
    """A value that cannot be used: out of range, malformed or unknown. Nothing was changed."""

    sqlstate = "SI007"


class UnknownId(BadArgument):
    """An ID that no row can have: of no shard, or an old one that no row had. Nothing was written."""


class WrongShard(BadArgument):
    """An object or row of two shards, or of another shard than the session's. Nothing was written."""


class FanOutRefused(BadArgument):
    """A statement that names no shard, in a session that may not ask all shards. It was not executed."""


class CannotCombine(BadArgument):
    """A statement whose answers from several shards cannot be combined into one. It was not executed."""


class UnsupportedKey(ShardidsError, TypeError):
    """A sharding key of a type that has no stable hash (only int, str, bytes and UUID have one)."""


class UnknownShard(ShardidsError, LookupError):
    """The shard is not in this cluster, or not on this node."""

    sqlstate = "SI001"


class ShardLost(ShardidsError):
    """The shard's node was replaced by a server that does not have the shard. Nothing was read or written."""


class ShardFenced(ShardidsError):
    """The shard is fenced: it issues no IDs until it is activated."""

    sqlstate = "SI002"


class ShardMoved(ShardFenced):
    """The shard lives on another node now."""

    sqlstate = "SI003"


class KeyMoved(ShardidsError):
    """The rows of a key live in another shard now; nothing was written.

    ``shard`` is that shard, as far as the old one knows it.
    """

    sqlstate = "SI017"
    shard: int | None = None


class CopyNotActivated(ShardidsError):
    """This database is a copy of the one that was activated; it issues no IDs until it is activated."""

    sqlstate = "SI004"


class TooFarAhead(ShardidsError):
    """The shard's ticks lead the clock by over ``max_ahead``, or an ID to go past by over ``max_past``.

    Also raised, for a few seconds, by a server that restarted several times within seconds: it waits for its
    clock, so that the jumps of the restarts do not add up.
    """

    sqlstate = "SI005"


class TimeExhausted(ShardidsError):
    """The layout's time bits can no longer express the current time."""

    sqlstate = "SI006"


class ShardBusy(ShardidsError):
    """Another command is changing the shard, or one that was interrupted keeps it. Nothing was changed."""

    sqlstate = "SI008"


class RevisionChanged(ShardidsError):
    """The shard is not at the revision that the migration starts from. Nothing was changed."""

    sqlstate = "SI009"


class RowsWouldBeLost(ShardidsError):
    """A revision drops a table or column that has rows, and nobody allowed it. Nothing was changed."""

    sqlstate = "SI016"


class TransactionEnded(ShardidsError):
    """``shardids transactions --resolve`` rolled the transaction on several nodes back before its COMMIT."""

    sqlstate = "SI010"


class RowsUnsettled(ShardidsError):
    """Rows of a key are just being moved: statements over several shards would see them twice or in part.

    Repeated a moment later, the statement is answered. If it has changed rows in some shards already, its
    transaction has failed. A transaction over several shards that is REPEATABLE READ or SERIALIZABLE, and
    began before rows were moved, is repeated as a whole.
    """


class NumbersExhausted(ShardidsError):
    """A counter's next number has more digits than its kind is padded to. No number was drawn."""

    sqlstate = "SI011"


class ClockUnconfirmed(ShardidsError):
    """The server's clock went ahead by over ``max_step`` at once, and nobody has confirmed it.

    ``shardids node confirm-clock`` compares it with other clocks, and frees all shards of the node.
    """

    sqlstate = "SI012"


class LookupBusy(ShardidsError):
    """Another shard has claimed a value, and whether it will have the row is not decided yet."""


class UnclaimedWrite(ShardidsError):
    """A statement that claims no value writes a look-up key. Nothing was written."""

    sqlstate = "SI014"


class UnknownValue(BadArgument):
    """No row has the value of a look-up key. Nothing was written."""


class ReferenceRefused(ShardidsError):
    """A reference table is written to on another node than its writer, or would lose what rows may refer to.

    Also: a move or an adoption can't begin while a row of one is being deleted on all nodes.
    """

    sqlstate = "SI013"


class ReferencesBehind(ShardidsError):
    """A change of reference tables is committed, and not all nodes have confirmed it in time."""


class ConnectionFailed(ShardidsError):
    """A server cannot be reached, or refuses the login. The message never holds a password.

    ``has_answered``: a server is there, and said no.
    """

    has_answered = False


class NodeDown(ConnectionFailed):
    """A node was not asked, as the last attempts to connect to it failed. A probe may find it again."""


class CommitUncertain(ConnectionFailed):
    """The connection was lost during COMMIT or ROLLBACK: it is unknown whether the transaction committed."""


class CopyFailed(ShardidsError):
    """A copy of rows into shards stopped; its cause is the error that stopped it.

    ``copied`` has the number of rows that are committed, by shard: in each shard the first of its rows, in
    the order given. ``shard``, ``node`` and ``row`` say where it stopped, as far as that is known; rows count
    from 1.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        copied: Mapping[int, int],
        shard: int | None = None,
        node: str | None = None,
        row: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.copied = dict(copied)
        self.shard, self.node, self.row = shard, node, row


class MissingPrivilege(ShardidsError):
    """The role lacks a privilege; the message names the role and the privilege."""


class StatementFailed(ShardidsError):
    """A statement of shardids itself failed; the message names the server and quotes PostgreSQL."""

    def __init__(self, message: str, *, hint: str = "", sqlstate: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class UnsupportedServer(ShardidsError):
    """The server is older than the oldest supported PostgreSQL, is read-only, or has a setting too low."""


class ClusterConflict(ShardidsError):
    """The request contradicts the state of the cluster. Nothing was changed."""


class MoveRefused(ShardidsError):
    """A shard cannot be moved in its present state. The message gives every reason. Nothing was changed."""


class MoveFailed(ShardidsError):
    """A move stopped halfway. Its journal records the step: it can be resumed or aborted."""


class AdoptionRefused(ShardidsError):
    """A database cannot be adopted as it is. The message gives every reason. Nothing was changed."""


class AdoptionFailed(ShardidsError):
    """An adoption stopped halfway. Its journal records the step: it can be resumed or aborted."""


class ServerStartFailed(ShardidsError):
    """A temporary server could not be created or started."""


class MissingLibrary(ShardidsError, ImportError):
    """An optional library is not installed; the hint says how to install it."""


class ClockMovedBack(ShardidsError):
    """The clock stepped back by more than the generator may wait. Nothing was issued."""


class LeaseLost(ShardidsError):
    """A command no longer holds the shard's lease, or a generator its worker number. Nothing was changed."""

    sqlstate = "SI015"


BY_SQLSTATE: dict[str, type[ShardidsError]] = {
    cls.__dict__["sqlstate"]: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, ShardidsError) and cls.__dict__.get("sqlstate")
}
"""The class of each SQLSTATE: the one that names the state itself, not those that inherit it."""


def from_database(
    sqlstate: str | None, message: str, hint: str = "", detail: str = ""
) -> ShardidsError | None:
    """Return the exception for an error that the database raised; ``None`` if it is not of class SI.

    ``detail`` ends with the new shard, as in ``shard 900``, where a key has moved.
    """
    cls = BY_SQLSTATE.get(sqlstate or "")
    if cls is None:
        return None
    error = cls(message, hint=hint)
    if isinstance(error, KeyMoved):
        _, _, number = detail.rpartition(" ")
        error.shard = int(number) if number.isascii() and number.isdecimal() and len(number) < 6 else None
    return error
