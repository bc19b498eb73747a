"""Auto-increment offsets on MariaDB masters that replicate in a ring.

On MariaDB increment and offset belong to the server, not to a table, and replicated rows push every
server's counter ahead. So no bound can separate the values drawn before a switch from those drawn after
it, as on PostgreSQL. To change the offsets, shardids stops writes on all masters, lets all catch up,
switches all, and ends the sessions that began before, as they keep the old values.

The values of a server are lost when it starts without its option file. Triggers are not: each table has a
guard, which refuses rows from a session that counts differently from the master that the guard names.

Only growth to a multiple (2 to 4, 4 to 8) needs no stop: the new classes are parts of the old ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from shardids.compare.multimaster.postgresql import OffsetFinding, OffsetProblem, OffsetStep, Phase
from shardids.errors import (
    ClusterConflict,
    ConnectionFailed,
    MissingLibrary,
    ShardidsError,
    StatementFailed,
)

_CONNECT_TIMEOUT_S: Final = 3
_ANSWER_TIMEOUT_S: Final = 30
_LOCK_WAIT_S: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Where a server other than PostgreSQL listens, and who logs in."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)


def pymysql() -> Any:
    """Return the driver.

    Raises:
        MissingLibrary: PyMySQL is not installed.
    """
    try:
        return importlib.import_module("pymysql")
    except ImportError as error:
        raise MissingLibrary(
            "pymysql is not installed", hint='Install it with: pip install "shardids[compare]"'
        ) from error


def connect(login: Login, database: str | None = None) -> Any:
    """Open an autocommit session.

    Raises:
        ConnectionFailed: the server can't be reached, or refuses the login.
        MissingLibrary: PyMySQL is not installed.
    """
    driver = pymysql()
    with lost_as_such(login):
        return driver.connect(
            host=login.host,
            port=login.port,
            user=login.user,
            password=login.password,
            database=database,
            autocommit=True,
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_ANSWER_TIMEOUT_S,
        )


@contextlib.contextmanager
def lost_as_such(login: Login) -> Iterator[None]:
    """Turn the driver's errors about a lost or refused connection into ConnectionFailed."""
    errors = pymysql().err
    try:
        yield
    except (errors.OperationalError, errors.InterfaceError) as error:
        raise ConnectionFailed(f"MariaDB at {login.host}:{login.port}: {error}") from error


def rows(connection: Any, query: str, parameters: tuple[object, ...] = ()) -> list[Any]:
    """Run a query and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return list(cursor.fetchall())


def offset_settings(offset: int, masters: int) -> dict[str, str]:
    """Return the settings of the server with this offset, from 1, among that many."""
    return {"auto-increment-increment": str(masters), "auto-increment-offset": str(offset)}


def check_offset(connection: Any, login: Login, offset: int, masters: int) -> None:
    """Refuse a server whose settings differ from :func:`offset_settings`.

    Raises:
        ClusterConflict: its sessions would number rows differently.
    """
    ((increment, found),) = rows(
        connection, "select @@global.auto_increment_increment, @@global.auto_increment_offset"
    )
    if (increment, found) != (masters, offset):
        raise ClusterConflict(
            f"MariaDB at {login.host}:{login.port} has auto_increment_increment {increment} and"
            f" auto_increment_offset {found}, not {masters} and {offset}",
            hint="Set both in its option file, so that they survive a restart, and restart it.",
        )


_PHASES: Final[tuple[Phase, ...]] = ("stop", "catch-up", "switch", "end-sessions", "guard", "resume")
_SYSTEM_COMMANDS: Final = ("Binlog Dump", "Daemon", "Slave_IO", "Slave_SQL", "Slave_worker")


CATCH_UP_S: Final = 60.0
"""The time that masters have to apply the others' writes from before writes were stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbMaster:
    """A server of the ring; ``login`` needs the privileges for the statements of a plan."""

    name: str
    login: Login
    leaves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that the server numbers, or numbered, with the trigger that guards it, if it has one."""

    schema: str
    name: str
    guard: str | None
    guard_body: str | None

    @property
    def title(self) -> str:
        """The table in words."""
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbState:
    """What decides on the keys of one master; ``offset`` is the one that its place gives, 0 if it leaves."""

    name: str
    offset: int
    found_increment: int
    found_offset: int
    server_id: int
    passes_on: bool
    read_only: bool
    replicates: bool
    replication_error: str
    tables: tuple[Table, ...]


def read_ring(masters: Sequence[MariaDbMaster]) -> list[MariaDbState]:
    """Read all masters; the order of those that stay gives their offsets. Raises ConnectionFailed."""
    staying = [master for master in masters if not master.leaves]
    offsets = {master.name: offset for offset, master in enumerate(staying, 1)}
    return [_read(master, offsets.get(master.name, 0)) for master in masters]


def verify_ring(states: Sequence[MariaDbState]) -> list[OffsetFinding]:
    """Find wrong offsets, tables without a guard, and what keeps a master's rows from the others."""
    staying = [state for state in states if state.offset]
    return [finding for state in staying for finding in _findings(state, staying)]


def plan_ring(states: Sequence[MariaDbState]) -> list[OffsetStep]:
    """Return the steps that give the masters their offsets, and guards to tables that lack theirs.

    Writes stop only if a master counts wrongly, or one that leaves still takes writes.
    """
    staying = sum(1 for state in states if state.offset)
    wrong = {"no-offset", "wrong-increment", "wrong-offset", "limited"}
    stops = any(finding.problem in wrong for finding in verify_ring(states))
    stops = stops or any(not (state.offset or state.read_only) for state in states)
    return [
        OffsetStep(phase=phase, master=state.name, column=column, statement=statement, locks=locks)
        for phase in (_PHASES if stops else ("guard",))
        for state in states
        for column, statement, locks in _statements(phase, state, staying)
    ]


def carry_out_ring(
    masters: Sequence[MariaDbMaster],
    steps: Sequence[OffsetStep],
    on_step: Callable[[OffsetStep], None] = lambda _step: None,
) -> None:
    """Take the steps in order, connected to all masters before the first.

    Raises:
        ConnectionFailed: a master can't be reached, and nothing was done; or the connection to one was lost.
        StatementFailed: a step failed, or masters did not catch up in time. If no master was switched
            yet, all take writes again; else all stay read-only until the steps are taken once more.
    """
    with ExitStack() as stack:
        connections = {}
        for master in masters:
            connection = stack.enter_context(connect(master.login))
            # Each master has guards of its own, so the others must not replay them.
            rows(connection, "set session sql_log_bin = 0, session lock_wait_timeout = %s", (_LOCK_WAIT_S,))
            connections[master.name] = connection
        switching = False
        for step in steps:
            switching = switching or step.phase == "switch"
            try:
                _take(step, connections)
            except Exception as error:
                stopped = any(taken.phase == "stop" for taken in steps)
                if stopped and not switching:
                    _resume(masters)
                raise _failed(step, error, stopped=stopped, switching=switching) from error
            on_step(step)


def _resume(masters: Iterable[MariaDbMaster]) -> None:
    for master in masters:
        # The connection of the failed step may be lost, so each gets a new one.
        with contextlib.suppress(pymysql().err.MySQLError, ConnectionFailed), connect(master.login) as again:
            rows(again, "set global read_only = 0")


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
        deadline = time.monotonic() + CATCH_UP_S
        # No call may last longer than the driver waits for an answer.
        while rows(connection, "select master_gtid_wait(%s, %s)", (written, _ANSWER_TIMEOUT_S / 4))[0][0]:
            if time.monotonic() > deadline:
                raise StatementFailed(f"it has not applied {written} within {CATCH_UP_S:g} s")


def last_written(connection: Any) -> dict[int, str]:
    """Return the last GTID in a server's binary log, by domain."""
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


def _failed(step: OffsetStep, error: Exception, *, stopped: bool, switching: bool) -> ShardidsError:
    if switching:
        hint = "The masters are read-only, and must stay so until the same steps were taken on all."
    elif stopped:
        hint = "The masters take writes again, with their old offsets."
    else:
        hint = "The masters take writes, with their offsets. Run it again to guard the other tables."
    message = f'{step.phase} on master "{step.master}": {error}'
    return StatementFailed(message, hint=hint)


def _statements(phase: Phase, state: MariaDbState, masters: int) -> Iterator[tuple[str, str, str]]:
    """Yield the table, the statement and the locks of each step of a phase on one master."""
    if phase == "stop":
        yield (
            "*",
            "SET GLOBAL read_only = 1",
            "waits for running statements; COMMIT of open transactions fails",
        )
    elif phase == "end-sessions":
        yield "*", "KILL …  -- each session, as it keeps the values that it began with", "none"
    elif phase == "guard":
        yield from _guards(state, masters)
    elif not state.offset:
        return  # It stays read-only, with its old values.
    elif phase == "catch-up":
        yield "*", "SELECT MASTER_GTID_WAIT(…)  -- what each of the others has written", "none"
    elif phase == "switch":
        settings = offset_settings(state.offset, masters)
        values = ", ".join(f"GLOBAL {name.replace('-', '_')} = {value}" for name, value in settings.items())
        yield "*", f"SET {values}", "none; not kept over a restart"
    else:
        yield "*", "SET GLOBAL read_only = 0", "none"


_GUARD: Final = "shardids_offset_"
_GUARD_LOCKS: Final = f"exclusive on the table, for an instant, after at most {_LOCK_WAIT_S} s"


def _guards(state: MariaDbState, masters: int) -> Iterator[tuple[str, str, str]]:
    body = _guard_body(state.offset, masters)
    taken = {(table.schema, table.guard) for table in state.tables}
    for table in state.tables:
        if table.guard_body == body:
            continue
        name = table.guard
        if name is None:
            # A table that was renamed has kept the name of its guard.
            digests = (
                hashlib.sha256(f"{table.name}/{n}".encode()).hexdigest()[:12] for n in itertools.count()
            )
            name = next(_GUARD + digest for digest in digests if (table.schema, _GUARD + digest) not in taken)
        guard = f"{_quoted(table.schema)}.{_quoted(name)}"
        if body is None:
            yield table.title, f"DROP TRIGGER IF EXISTS {guard}", _GUARD_LOCKS
        else:
            on = f"{_quoted(table.schema)}.{_quoted(table.name)}"
            statement = f"CREATE OR REPLACE TRIGGER {guard} BEFORE INSERT ON {on} FOR EACH ROW {body}"
            yield table.title, statement, _GUARD_LOCKS


def _guard_body(offset: int, masters: int) -> str | None:
    """Return the statement of the guards of a master, or None: a lone master needs none."""
    # Rows that a replica applies are numbered already, and come with the server_id of their master.
    here = "@@server_id = @@global.server_id"
    if not offset:
        return _refusal(here, "shardids: this master has left the others and takes no rows")
    if masters == 1:
        return None
    settings = {name.replace("-", "_"): value for name, value in offset_settings(offset, masters).items()}
    differs = " OR ".join(f"@@{name} <> {value}" for name, value in settings.items())
    values = " and ".join(f"{name} = {value}" for name, value in settings.items())
    return _refusal(
        f"{here} AND ({differs})",
        f"shardids: this master counts with {values}, this session does not: set both in the option file"
        " and restart, or run shardids multimaster",
    )


def _refusal(condition: str, message: str) -> str:
    return f"IF {condition} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{message}'; END IF"


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


_TABLES: Final = """
select c.table_schema, c.table_name, t.trigger_name, t.action_statement
from (
  select table_schema, table_name from information_schema.columns
  join information_schema.tables using (table_schema, table_name)
  where extra like '%%auto_increment%%' and table_type = 'BASE TABLE'
    and table_schema not in ('information_schema', 'mysql', 'performance_schema', 'sys')
  union
  select event_object_schema, event_object_table from information_schema.triggers
  where locate(%s, trigger_name) = 1
) c
left join information_schema.triggers t
  on t.event_object_schema = c.table_schema and t.event_object_table = c.table_name
  and locate(%s, t.trigger_name) = 1
order by 1, 2
"""


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
        tables = [
            Table(schema=schema, name=name, guard=guard, guard_body=body)
            for schema, name, guard, body in rows(connection, _TABLES, (_GUARD, _GUARD))
        ]
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
        tables=tuple(tables),
    )


def _findings(state: MariaDbState, states: Sequence[MariaDbState]) -> Iterator[OffsetFinding]:
    masters = len(states)

    def found(problem: OffsetProblem, detail: str, remedy: str) -> OffsetFinding:
        return OffsetFinding(master=state.name, column="*", problem=problem, detail=detail, remedy=remedy)

    switch = "shardids multimaster; and set both values in its option file."
    if state.found_increment != masters and state.found_increment == 1:
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
    if masters > 1 and not state.replicates:
        detail = state.replication_error or "it replicates from no other master"
        yield found("replication", detail, "See SHOW SLAVE STATUS.")
    if state.read_only:
        yield found("limited", "is read-only: a switch was interrupted", "Take its steps again.")
    for column, _, _ in _guards(state, masters):
        detail = (
            "has no guard: rows that are counted wrongly would not be refused"
            if masters > 1
            else "has a guard from the time when there were several masters"
        )
        yield OffsetFinding(
            master=state.name, column=column, problem="guard", detail=detail, remedy="shardids multimaster"
        )
