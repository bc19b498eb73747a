"""A target whose standby has taken over in the midst of a move.

It may lack changes, or all of the copy, that the old server had confirmed and that the source does not send
again. In place of the copy it may have the one that an earlier move left behind, with rows from back then.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from shardids.errors import MoveRefused
from shardids.mover.sides import Sides

_THERE = text("""
    select state, arrived, timeline is not distinct from shardids.timeline() as is_own
    from shardids.shard where id = :shard for update""")


def refuse_other_copy(target: Connection, sides: Sides, *, is_begun: bool) -> None:
    """Refuses a target that has another copy of the shard than this move's, or one from before a promotion.

    ``is_begun``: the move's copy was made, in place of any old one.

    Raises:
        MoveRefused: it has.
    """
    there = target.execute(_THERE, {"shard": sides.shard}).one_or_none()
    if there is None or there.state == "moved":
        if is_begun:
            raise _refusal(sides)
    elif not there.is_own:
        raise _refusal(sides)


def refuse_unfit_home(target: Connection, sides: Sides) -> None:
    """Refuses a target that has not all of this move's copy; locks the shard's row.

    To be called in the transaction that makes it the home: there the server can't become another any more.

    Raises:
        MoveRefused: it has not.
    """
    there = target.execute(_THERE, {"shard": sides.shard}).one_or_none()
    is_whole = there is not None and (
        there.state == "active" or (there.state == "fenced" and there.arrived == "all")
    )
    if there is None or not is_whole or not there.is_own:
        raise _refusal(sides)


def _refusal(sides: Sides) -> MoveRefused:
    return MoveRefused(
        f'the move of shard {sides.shard} can\'t go on: on node "{sides.target.node.name}" a standby'
        " was promoted meanwhile, which may lack a part of the copy",
        hint="Undo the move with --abort, then begin it anew.",
    )
