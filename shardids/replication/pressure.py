"""How busy a server is: the time that it takes for a statement, and followers that are behind its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, text

from shardids.replication.subscriptions import flush

_PROBES: Final = 5
"""How many statements measure how fast a server answers: the median counts."""
_LOOK_S: Final = 0.25


def answer_s(connection: Connection) -> float:
    """Return how long the server takes for a statement that reads no table: the median of five, in s."""

    def timed() -> float:
        started = time.monotonic()
        connection.scalar(text("select 1"))
        return time.monotonic() - started

    return sorted(timed() for _ in range(_PROBES))[_PROBES // 2]


# Of a standby that is connected, its position counts; of one that has a slot and is not, nobody knows it. A
# receiver that only writes the log, such as pg_receivewal, never replays it. A role that may not see a
# standby's position gets null.
_FOLLOWERS: Final = text("""
    with here as (
      select d.oid from pg_database d where d.datname = current_database()),
    followers as (
      select format('standby "%s"', r.application_name) as name,
             coalesce(r.replay_lsn, r.write_lsn) as position
      from pg_stat_replication r
      left join pg_replication_slots s on s.active_pid = r.pid
      where s.slot_type is distinct from 'logical' and r.state is distinct from 'backup'
      union all
      select format('slot "%s"', s.slot_name), case s.slot_type when 'logical' then s.confirmed_flush_lsn end
      from pg_replication_slots s
      where (s.datoid is null or s.datoid = (select h.oid from here h))
        and not s.temporary and s.wal_status is distinct from 'lost'
        and (s.slot_type = 'logical' or not s.active))
    select name, position is null as is_unknown from followers
    where position is null or position < cast(:wanted as pg_lsn)
    order by 1""")


def followers_behind(
    connection: Connection, within_s: float, pause: Callable[[float], object] = time.sleep
) -> list[str]:
    """Return the standbys and subscribers that do not confirm the server's present position in time.

    The connection is in autocommit mode. Lag is measured by this, not by the clock of a standby. A standby
    whose slot has no connection, or whose position the role may not see, counts as behind, and so does a
    logical slot without a reader. If ``pause`` returns true, the caller waits no longer.
    """
    wanted, deadline = flush(connection), time.monotonic() + within_s
    while late := connection.execute(_FOLLOWERS, {"wanted": wanted}).all():
        if pause(_LOOK_S) or time.monotonic() > deadline:
            return [f"{row.name} (position unknown)" if row.is_unknown else row.name for row in late]
        # A standby reports what it has replayed when it gets more of the log.
        flush(connection)
    return []
