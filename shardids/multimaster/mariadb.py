"""Auto-increment offsets on MariaDB masters that replicate in a ring.

On MariaDB increment and offset belong to the server, not to a table, and replicated rows push every
server's counter ahead. So no bound can separate the values drawn before a switch from those drawn after
it, as on PostgreSQL. To change the offsets, shardids stops writes on all masters, lets all catch up,
switches all, and ends the sessions that began before, as they keep the old values.

Only growth to a multiple (2 to 4, 4 to 8) needs no stop: the new classes are parts of the old ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from shardids.errors import BadArgument, ShardidsError, StatementFailed
from shardids.multimaster.mariadb_session import Login, connect, lost_as_such, offset_settings, pymysql, rows
from shardids.multimaster.plan import OffsetStep, Phase
from shardids.multimaster.verify import OffsetFinding, OffsetProblem

_PHASES: Final[tuple[Phase, ...]] = ("stop", "catch-up", "switch", "end-sessions", "resume")
_SYSTEM_COMMANDS: Final = ("Binlog Dump", "Daemon", "Slave_IO", "Slave_SQL", "Slave_worker")


CATCH_UP_S: Final = 60.0
"""How long masters may take to apply what the others wrote before writes were stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbMaster:
    """A server of the ring; ``login`` needs the privileges for the statements of a plan."""

    name: str
    login: Login


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbState:
    """What decides on the keys of one master; ``offset`` is the one that its place gives."""

    name: str
    offset: int
    found_increment: int
    found_offset: int
    server_id: int
    passes_on: bool
    read_only: bool
    replicates: bool
    replication_error: str


def read_ring(masters: Sequence[MariaDbMaster]) -> list[MariaDbState]:
    """Reads all masters; their order gives their offsets. Raises ConnectionFailed."""
    return [_read(master, offset) for offset, master in enumerate(masters, 1)]


def verify_ring(states: Sequence[MariaDbState]) -> list[OffsetFinding]:
    """Finds wrong offsets, and what keeps a master's rows from the others."""
    return [finding for state in states for finding in _findings(state, states)]


def plan_ring(masters: Sequence[MariaDbMaster]) -> list[OffsetStep]:
    """Returns the steps that switch all masters to their offsets for the present number of masters.

    Raises:
        BadArgument: fewer than two masters.
    """
    if len(masters) < 2:
        raise BadArgument(f"{len(masters)} masters need no offsets")
    return [
        OffsetStep(phase=phase, master=master.name, column="*", statement=statement, locks=locks)
        for phase in _PHASES
        for offset, master in enumerate(masters, 1)
        for statement, locks in _statements(phase, offset, len(masters))
    ]


def carry_out_ring(
    masters: Sequence[MariaDbMaster],
    steps: Sequence[OffsetStep],
    on_step: Callable[[OffsetStep], None] = lambda _step: None,
) -> None:
    """Takes the steps in order, connected to all masters before the first.

    Raises:
        ConnectionFailed: a master can't be reached, and nothing was done; or the connection to one was lost.
        StatementFailed: a step failed, or masters did not catch up in time. If no master was switched
            yet, all take writes again; else all stay read-only until the steps are taken once more.
    """
    with ExitStack() as stack:
        connections = {}
        for master in masters:
            connections[master.name] = stack.enter_context(connect(master.login))
        switching = False
        for step in steps:
            switching = switching or step.phase == "switch"
            try:
                _take(step, connections)
            except Exception as error:
                if not switching:
                    _resume(connections.values())
                raise _failed(step, error, switching=switching) from error
            on_step(step)


def _resume(connections: Iterable[Any]) -> None:
    for connection in connections:
        # A lost connection may be the cause.
        with contextlib.suppress(pymysql().err.MySQLError):
            rows(connection, "set global read_only = 0")


def _take(step: OffsetStep, connections: dict[str, Any]) -> None:
    connection = connections[step.master]
    if step.phase == "catch-up":
        _catch_up(connection, list(connections.values()))
    elif step.phase == "end-sessions":
        _end_sessions(connection)
    else:
        rows(connection, step.statement)


def _catch_up(connection: Any, all_: Sequence[Any]) -> None:
    for other in all_:
        ((domain,),) = rows(other, "select @@global.gtid_domain_id")
        # Each master's own writes, by whichever way they arrived.
        written = last_written(other).get(domain)
        if other is connection or written is None:
            continue
        ((late,),) = rows(connection, "select master_gtid_wait(%s, %s)", (written, CATCH_UP_S))
        if late:
            raise StatementFailed(f"it has not applied {written} within {CATCH_UP_S:g} s")


def last_written(connection: Any) -> dict[int, str]:
    """Returns the last GTID in a server's binary log, by domain."""
    ((position,),) = rows(connection, "select @@global.gtid_binlog_pos")
    return {int(gtid.partition("-")[0]): gtid for gtid in position.split(",") if gtid}


def _end_sessions(connection: Any) -> None:
    errors = pymysql().err.MySQLError
    others = rows(
        connection,
        "select id from information_schema.processlist"
        " where id <> connection_id() and user <> 'system user' and command not in %s",
        (_SYSTEM_COMMANDS,),
    )
    for (number,) in others:
        with contextlib.suppress(errors):  # It may have ended by itself by now.
            rows(connection, "kill %s", (number,))


def _failed(step: OffsetStep, error: Exception, *, switching: bool) -> ShardidsError:
    hint = (
        "The masters are read-only, and must stay so until the same steps were taken on all."
        if switching
        else "The masters take writes again, with their old offsets."
    )
    message = f'{step.phase} on master "{step.master}": {error}'
    return StatementFailed(message, hint=hint)


def _statements(phase: Phase, offset: int, masters: int) -> Iterator[tuple[str, str]]:
    if phase == "stop":
        yield "SET GLOBAL read_only = 1", "waits for running statements; COMMIT of open transactions fails"
    elif phase == "catch-up":
        yield "SELECT MASTER_GTID_WAIT(…)  -- what each of the others has written", "none"
    elif phase == "switch":
        settings = ", ".join(
            f"{name.replace('-', '_')} = {value}" for name, value in offset_settings(offset, masters).items()
        )
        yield "SET GLOBAL " + settings.replace(", ", ", GLOBAL "), "none; not kept over a restart"
    elif phase == "end-sessions":
        yield "KILL …  -- each session, as it keeps the values that it began with", "none"
    else:
        yield "SET GLOBAL read_only = 0", "none"


def _read(master: MariaDbMaster, offset: int) -> MariaDbState:
    connection = connect(master.login)
    with lost_as_such(master.login), connection:
        ((increment, found, server_id, passes_on, read_only),) = rows(
            connection,
            "select @@global.auto_increment_increment, @@global.auto_increment_offset, @@server_id,"
            " @@log_slave_updates, @@read_only",
        )
        with connection.cursor() as cursor:
            cursor.execute("show slave status")
            names = [column[0] for column in cursor.description]
            replicas = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    running = bool(replicas) and all(
        replica[thread] == "Yes"
        for replica in replicas
        for thread in ("Slave_IO_Running", "Slave_SQL_Running")
    )
    errors = [replica["Last_SQL_Error"] or replica["Last_IO_Error"] for replica in replicas]
    return MariaDbState(
        name=master.name,
        offset=offset,
        found_increment=increment,
        found_offset=found,
        server_id=server_id,
        passes_on=bool(passes_on),
        read_only=bool(read_only),
        replicates=running,
        replication_error="; ".join(error for error in errors if error),
    )


def _findings(state: MariaDbState, states: Sequence[MariaDbState]) -> Iterator[OffsetFinding]:
    masters = len(states)

    def found(problem: OffsetProblem, detail: str, remedy: str) -> OffsetFinding:
        return OffsetFinding(master=state.name, column="*", problem=problem, detail=detail, remedy=remedy)

    switch = "Switch all masters, and set both values in the option file, too."
    if state.found_increment == 1:
        yield found("no-offset", f"counts by 1, as if it were alone among {masters} masters", switch)
    elif state.found_increment != masters:
        yield found("wrong-increment", f"counts by {state.found_increment}, not by {masters}", switch)
    elif state.found_offset != state.offset:
        yield found("wrong-offset", f"has offset {state.found_offset}, not {state.offset}", switch)
    twins = [other.name for other in states if other.server_id == state.server_id and other is not state]
    if twins:
        yield found(
            "server-id",
            f"has server_id {state.server_id}, as has {twins[0]}: neither takes the other's rows",
            "Give each its own, and restart.",
        )
    if masters > 2 and not state.passes_on:
        yield found(
            "replication", "log_slave_updates is off: the ring ends here", "Set it in the option file."
        )
    if not state.replicates:
        detail = state.replication_error or "it replicates from no other master"
        yield found("replication", detail, "See SHOW SLAVE STATUS.")
    if state.read_only:
        yield found("limited", "is read-only: a switch was interrupted", "Take its steps again.")
