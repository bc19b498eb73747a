"""A function that issues IDs of the cluster's layout lets a shard issue them from now on.

A transaction that draws holds a lock on the old sequence until it ends. A session that holds it exclusively
knows that no ID is under way except those of calls that wait for this lock: the shard starts ``LEAD_S`` above
them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from psycopg import sql

from shardids.adopt.inplace.node import Shard, opened_shard, unable_to_draw, with_short_locks
from shardids.catalog.rows import Catalog
from shardids.catalog.shards import ISSUES_IDS
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.errors import AdoptionRefused, BadArgument, ClusterConflict
from shardids.ids.layout import Layout
from shardids.pg.locks import holders_of_tables
from shardids.replication.steps import Event, OnEvent, Waiting, ignore

_AHEAD_MS: Final = 5_000  # of the old function's IDs; above LEAD_S they would pass the shard's first


Columns = Sequence[tuple[str, str]]
"""Columns: the table and the name of each, as SQL writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A PL/pgSQL function that issues IDs; ``output``: its OUT parameter, if it has one."""

    oid: int
    name: str
    definition: str
    source: str
    output: str | None


def find_function(shard: Shard, function: str) -> Function:
    """Find a function by its name with its schema, as SQL writes it.

    Raises:
        BadArgument: not exactly one exists.
        AdoptionRefused: it is of another kind, or another role's.
    """
    if "." not in function:
        raise BadArgument(f"{function!r} has no schema", hint=f"For example: public.{function}")
    rows = shard.execute(
        """select p.oid, p.oid::regprocedure::text as name, pg_get_functiondef(p.oid) as definition,
                  p.prosrc as source, p.proargnames[1] as output, l.lanname as language,
                  p.prorettype = 'bigint'::regtype and not p.proretset and p.pronargs = 0 and p.prokind = 'f'
                    and p.provolatile = 'v' as fits,
                  pg_has_role(current_user, p.proowner, 'usage') as is_own
           from pg_proc p join pg_language l on l.oid = p.prolang
           where p.oid = to_regproc(:function)""",
        function=function,
    ).all()
    if not rows:
        raise BadArgument(
            f"there is no function {function} on node {shard.node!r}, or there are several of that name",
            hint="Write it without parentheses, quoted as in SQL.",
        )
    row: Any = rows[0]
    reasons = []
    if row.language != "plpgsql" or not row.fits:
        reasons.append("it is not a volatile PL/pgSQL function without arguments that returns one bigint")
    if "\r" in row.source.replace("\r\n", "\n"):
        reasons.append("its body has a carriage return within a line, and could not be kept as a comment")
    if not row.is_own:
        reasons.append("it belongs to another role, and only its owner can replace it")
    if reasons:
        raise AdoptionRefused(f"{row.name} can't be replaced: " + "; ".join(reasons))
    return Function(
        oid=row.oid, name=row.name, definition=row.definition, source=row.source, output=row.output
    )


def columns_of(shard: Shard, function: Function) -> Columns:
    """The columns with the function in their default."""
    rows = shard.execute(
        """select a.attrelid::regclass::text as table, quote_ident(a.attname) as name
           from pg_depend d join pg_attrdef f on f.oid = d.objid
           join pg_attribute a on a.attrelid = f.adrelid and a.attnum = f.adnum
           join pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p')
           where d.classid = 'pg_attrdef'::regclass and d.refclassid = 'pg_proc'::regclass
             and d.refobjid = :function and a.atttypid = 'bigint'::regtype
           order by 1, 2""",
        function=function.oid,
    )
    return [(row.table, row.name) for row in rows]


def examine(shard: Shard, function: Function, columns: Columns) -> str:
    """Draw an ID from the function, which nobody gets; return the sequence that it is made with.

    Raises:
        AdoptionRefused: a shard can't go on with its IDs. The message gives every reason.
    """
    # A name that PostgreSQL has quoted.
    draw = f"select {function.name} as id, shardids.ms_of(clock_timestamp()) as ms"
    reasons = []
    with shard.connection.begin():
        id_, ms = shard.execute(draw).one()
        sequences: list[Any] = shard.execute(
            """select c.oid::regclass::text as name, currval(c.oid) as number,
                      array(select grantee from aclexplode(coalesce(c.relacl, acldefault('s', c.relowner)))
                            where privilege_type in ('USAGE', 'UPDATE')) as roles
               from pg_locks l join pg_class c on c.oid = l.relation and c.relkind = 'S'
               where l.pid = pg_backend_pid() and l.mode = 'RowExclusiveLock'
                 and l.database = (select oid from pg_database where datname = current_database())"""
        ).all()
        if len(sequences) != 1:
            reasons.append(f"it draws from {len(sequences)} sequences, not from one")
        else:
            reasons += _differences(shard, id_, ms, sequences[0].number)
        unable = unable_to_draw(shard, sorted({role for one in sequences for role in one.roles}))
    if unable:
        roles = ", ".join(f'"{name}"' for name in unable)
        reasons.append(
            f"role {roles} may draw from its sequence, but not from the shard (shardids grant ROLE; of PUBLIC"
            " and of roles that write no more, take the privilege away)"
        )
    if not columns:
        reasons.append("no column has it as its default")
    if reasons:
        raise AdoptionRefused(f"{function.name} can't be replaced: " + "; ".join(reasons))
    return str(sequences[0].name)


def _differences(shard: Shard, id_: int, ms: int, number: int) -> Iterator[str]:
    """Say how an ID differs from one that the shard would issue now, with that number in its sequence."""
    layout: Layout = shard.layout
    try:
        one = layout.decode(id_)
    except BadArgument as error:
        yield error.message
        return
    if one.shard != shard.number or one.ms < ms - 60_000 or one.ms > ms + _AHEAD_MS:
        when = one.time.isoformat(" ", "seconds")
        yield (
            f"by layout {layout}, its ID {id_} is one of shard {one.shard} and of {when}, not one of shard"
            f" {shard.number} and of now: at most {_AHEAD_MS // 1000} s ahead of the clock"
        )
    elif one.sequence != number % layout.sequence_limit:
        yield f"its ID {id_} does not end with the number of its sequence, {number}"


def highest_id(shard: Shard, columns: Columns) -> int | None:
    """The highest ID in the columns: in 64 unsigned bits, as IDs with their sign bit set are later ones."""
    found: list[int] = []
    with shard.connection.begin():
        shard.execute("set local statement_timeout = 0")
        for table, column in columns:
            for sign in (">=", "<"):
                # Names that PostgreSQL has quoted.
                query = f"select max({column}) from {table} where {column} {sign} 0"  # noqa: S608
                value = shard.execute(query).scalar()
                if value is not None:
                    found.append(int(value))
    return max(found, key=lambda id_: id_ & (1 << 64) - 1, default=None)


LEAD_S: Final = 20
"""How far above the clock the shard starts: time for calls of the old function that are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """What became of a function.

    ``first_id``: no ID that the shard issues is below it; all of the old function's are. ``highest_id``: the
    highest in the columns that have the function as their default. ``is_new``: this call replaced it.
    """

    function: str
    shard: int
    columns: tuple[str, ...]
    highest_id: int | None
    first_id: int
    is_new: bool = True


def replace_function(
    catalog: Catalog,
    function: str,
    shard: int,
    *,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> Replaced:
    """Let a function issue the IDs of a shard, all above those that it issued before.

    ``function``: its name with its schema, as SQL writes it. Its tables, their defaults and what calls it
    stay as they are. Repeating the call changes nothing. A shard that is fenced because the function was
    restored is opened again.

    Raises:
        BadArgument: the function does not exist.
        AdoptionRefused: its IDs are not of the shard's layout, or a role that may draw from it may not draw
            from the shard. The message gives every reason; nothing was changed.
        AdoptionFailed: transactions that have drawn from it do not end; nothing was changed.
    """
    purpose = "change of a function"
    with opened_shard(catalog, shard, purpose=purpose, dry_run=dry_run, may_be_fenced=True) as its:
        with its.connection.begin():
            found = find_function(its, function)
            columns = columns_of(its, found)
        if not (its.state == "fenced" and _is_issuer(its, found)):
            its.require_active()
            if _is_replaced(its, found):
                return _done(its, found, columns, is_new=False)
            _refuse_used(its)
        sequence = examine(its, found, columns)
        highest = highest_id(its, columns)
        if dry_run:
            return Replaced(
                function=found.name,
                shard=shard,
                columns=tuple(map(".".join, columns)),
                highest_id=highest,
                first_id=_start(its, highest)[1],
            )
        with its.connection.begin():
            bring(its.connection, skipped_ranges(catalog, [shard]))
        _start_ahead(its, highest)

        def wait(event: Event) -> None:
            _keep_ahead(its)
            on_event(event)

        with_short_locks(
            its,
            f"replacing {found.name}",
            lambda: _replace(its, found, sequence),
            tables=[sequence],
            on_event=wait,
        )
        _await_callers(its, sequence, on_event)
        return _done(its, found, columns, is_new=True)


def _start_ahead(shard: Shard, highest: int | None) -> None:
    """Activate the shard above the clock and above the highest ID, and release it.

    In separate transactions: one that is open now, and sees the shard's row as it was, can draw.
    """
    with shard.connection.begin():
        above = _start(shard, highest)[0]
        shard.execute("select shardids.activate(:shard, :above)", shard=shard.number, above=above)
    with shard.connection.begin():
        shard.execute(
            "select shardids.advance(id, id_offset) from shardids.shard where id = :shard", shard=shard.number
        )


def _lead_s(shard: Shard) -> float:
    """How far the shard's next tick is above the clock, in seconds."""
    lead: Any = shard.execute(
        """select shardids.offset_ms(pg_sequence_last_value(id_offset))
                  + (coalesce(pg_sequence_last_value(id_counter), 0) >> shardids.sequence_bits())
                  - shardids.ms_of(clock_timestamp())
           from shardids.shard where id = :shard""",
        shard=shard.number,
    ).scalar()
    return float(lead) / 1000


def _keep_ahead(shard: Shard) -> None:
    """Raise the shard while it is in use, if the clock comes near."""
    while True:
        with shard.connection.begin():
            if _lead_s(shard) > LEAD_S / 2:
                return
            shard.execute(
                """select shardids.advance(s.id, s.id_offset, n.max_reserve)
                   from shardids.shard s, shardids.node n where s.id = :shard""",
                shard=shard.number,
            )


def _replace(shard: Shard, function: Function, sequence: str) -> None:
    """Take the sequence from everybody, and replace the function before it is given back."""
    owner: Any = shard.execute(
        "select pg_get_userbyid(relowner) from pg_class where oid = cast(:name as regclass)", name=sequence
    ).scalar()
    # Changes nothing, and waits for all transactions that have drawn. PostgreSQL has quoted the name.
    shard.execute(sql.SQL("alter sequence {} owner to {}").format(sql.SQL(sequence), sql.Identifier(owner)))
    if find_function(shard, function.name.removesuffix("()")) != function or _lead_s(shard) < LEAD_S / 4:
        raise ClusterConflict(
            f"{function.name} was changed meanwhile, or the server was too slow",
            hint="Run the command again.",
        )
    former = _as_comment(_MARK.sub("", function.source))
    _set_body(shard, function, f"{_draw(shard, function)}{_FORMER}{former}")
    shard.execute("update shardids.shard set issuer = null where id = :shard", shard=shard.number)


def _set_body(shard: Shard, function: Function, body: str) -> None:
    head, separator, rest = function.definition.partition("\nAS $function")
    if not separator or function.source not in rest:
        raise AdoptionRefused(f"{function.name}: its definition is not understood")
    quoted = sql.Literal(body).as_string(None)
    shard.connection.execution_options(no_parameters=True).exec_driver_sql(f"{head}\nAS {quoted}")


def _await_callers(shard: Shard, sequence: str, on_event: OnEvent) -> None:
    """Keep the shard ahead of the clock until nobody is in a call of the old function any more."""
    for attempt in count(1):
        _keep_ahead(shard)
        with shard.connection.begin():
            callers = len(holders_of_tables(shard.connection, [sequence]))
        if not callers:
            return
        reason = f"{callers} transactions end that have drawn from {sequence}"
        on_event(Waiting(attempt=attempt, reason=reason))
        time.sleep(0.5)


def _done(shard: Shard, function: Function, columns: Columns, *, is_new: bool) -> Replaced:
    highest = highest_id(shard, columns)
    with shard.connection.begin():
        tick: Any = shard.execute(
            "select coalesce(high_water_tick, 0) + 1 from shardids.shard where id = :shard",
            shard=shard.number,
        ).scalar()
    return Replaced(
        function=function.name,
        shard=shard.number,
        columns=tuple(map(".".join, columns)),
        highest_id=highest,
        first_id=_id_at(shard, tick),
        is_new=is_new,
    )


def _id_at(shard: Shard, tick: int) -> int:
    layout = shard.layout
    return layout.encode(
        ms=tick >> layout.sequence_bits, shard=shard.number, sequence=tick & (layout.sequence_limit - 1)
    )


def _draw(shard: Shard, function: Function) -> str:
    """The body that draws from the shard. It stays PL/pgSQL: a running statement has its language cached."""
    call = shard.next_id.as_string(None)
    if function.output is None:
        return f"begin return {call}; end"
    return f"begin {sql.Identifier(function.output).as_string(None)} := {call}; end"


_FORMER: Final = "\n-- Its body before, which shardids key function --back restores:\n"


def _as_comment(body: str) -> str:
    return "\n".join(f"-- {line}" for line in body.split("\n"))


def _is_replaced(shard: Shard, function: Function) -> bool:
    return function.source.partition(_FORMER)[0] == _draw(shard, function)


def _former_body(shard: Shard, function: Function) -> str:
    """The body that the function had before it was replaced.

    Raises:
        AdoptionRefused: it was not replaced, or its body was changed since.
    """
    if not _is_replaced(shard, function):
        raise AdoptionRefused(
            f"{function.name} does not draw from shard {shard.number}: nothing to take back"
        )
    _, _, kept = function.source.partition(_FORMER)
    lines = kept.split("\n")
    if not all(line.startswith("-- ") for line in lines):
        raise AdoptionRefused(
            f"{function.name} no longer holds its former body, which was a comment in it",
            hint="Replace the function by hand once the shard is fenced, and the clock above its last ID.",
        )
    return _MARK.sub("", "\n".join(line.removeprefix("-- ") for line in lines))


_MARK: Final = re.compile(rf"\n-- {ISSUES_IDS}\d+\n$")
"""The last line of a body that was restored before."""


def _mark(shard: Shard) -> str:
    return f"\n-- {ISSUES_IDS}{shard.number}\n"


def _is_issuer(shard: Shard, function: Function) -> bool:
    """Return whether the function issues the shard's IDs since it was restored, and the shard is fenced."""
    return function.source.endswith(_mark(shard))


_MOST_AHEAD_S: Final = 60.0
_CLOSE_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A function that has its former body again.

    ``last_id``: no ID that the shard has issued is above it, and none of the function's will be below; in a
    dry run as of now. The shard is fenced.
    """

    function: str
    shard: int
    columns: tuple[str, ...]
    last_id: int


def restore_function(
    catalog: Catalog,
    function: str,
    shard: int,
    *,
    dry_run: bool = False,
    on_event: OnEvent = ignore,
) -> Restored:
    """Give a function the body that it had before :func:`replace_function`, and fence the shard.

    Both happen in one transaction, once the clock is above the shard's last ID. A draw in these milliseconds
    fails, as from any fenced shard. The last line of the body, a comment, keeps the shard from being
    activated beside it.

    Raises:
        BadArgument: the function does not exist.
        AdoptionRefused: it does not draw from the shard; its former body is gone; other columns draw from the
            shard; the shard is ahead of the clock by more than a minute. Nothing was changed.
    """
    with opened_shard(catalog, shard, purpose="change of a function", dry_run=dry_run) as its:
        with its.connection.begin():
            found = find_function(its, function)
            columns = columns_of(its, found)
            body = _former_body(its, found)
            _refuse_other_columns(its)
        _await_clock(its, on_event)
        if dry_run:
            with its.connection.begin():
                tick: Any = its.execute(_HIGHEST, shard=shard).scalar()
        else:
            tick = _restore(its, found, body)
        return Restored(
            function=found.name,
            shard=shard,
            columns=tuple(map(".".join, columns)),
            last_id=_id_at(its, tick),
        )


_HIGHEST: Final = """
    select (shardids.offset_ms(pg_sequence_last_value(id_offset)) << shardids.sequence_bits())
           + coalesce(pg_sequence_last_value(id_counter), 0)
    from shardids.shard where id = :shard"""


def _refuse_other_columns(shard: Shard) -> None:
    others = shard.execute(
        """select format('%s.%I', a.attrelid::regclass, a.attname)
           from pg_depend d join pg_attrdef f on f.oid = d.objid
           join pg_attribute a on a.attrelid = f.adrelid and a.attnum = f.adnum
           where d.classid = 'pg_attrdef'::regclass and d.refclassid = 'pg_proc'::regclass
             and d.refobjid = format('%I.next_id()', cast(:schema as text))::regprocedure
           order by 1""",
        schema=shard.schema,
    ).scalars()
    if names := list(others):
        raise AdoptionRefused(
            f"{', '.join(names)} would have no IDs: their default draws from shard {shard.number} itself",
            hint="Give them the function as their default first, or drop them.",
        )


def _await_clock(shard: Shard, on_event: OnEvent) -> None:
    """Wait until the clock is close to the shard's next ID, which follows it."""
    for attempt in count(1):
        with shard.connection.begin():
            lead_s = _lead_s(shard)
        if lead_s <= _CLOSE_S:
            return
        if lead_s > _MOST_AHEAD_S:
            raise AdoptionRefused(
                f"shard {shard.number} is {lead_s:,.0f} s ahead of the clock: its IDs would be made again",
                hint=f"Run the command again in {lead_s:,.0f} s.",
            )
        reason = f"the clock comes up to shard {shard.number}, which is {lead_s:.1f} s ahead"
        on_event(Waiting(attempt=attempt, reason=reason))
        time.sleep(min(lead_s, 1.0))


def _restore(shard: Shard, function: Function, body: str) -> int:
    """Fence the shard and replace the function; return the shard's highest tick."""
    try:
        with shard.connection.begin():
            shard.execute("set local lock_timeout = '2s'")
            tick: Any = shard.execute("select shardids.fence(:shard)", shard=shard.number).scalar()
            ms = tick >> shard.layout.sequence_bits
            shard.execute(
                """select pg_sleep(greatest(cast(:ms as bigint) + 1 - shardids.ms_of(clock_timestamp()), 0)
                                   / 1000.0 + 0.001)""",
                ms=ms,
            )
            clock: Any = shard.execute("select shardids.ms_of(clock_timestamp())").scalar()
            if clock <= ms or find_function(shard, function.name.removesuffix("()")) != function:
                raise ClusterConflict(
                    f"{function.name} was changed meanwhile, or the clock went back",
                    hint="Run the command again.",
                )
            _set_body(shard, function, f"{body}{_mark(shard)}")
            shard.execute(
                "update shardids.shard set issuer = :name where id = :shard",
                name=function.name,
                shard=shard.number,
            )
    except BaseException:
        # A rollback brings the shard's row back, and not its sequence. What its row says stays.
        with shard.connection.begin():
            opened = shard.execute(
                """select shardids.activate(id) from shardids.shard
                   where id = :shard and state = 'active' and pg_sequence_last_value(id_offset) < 0""",
                shard=shard.number,
            ).all()
        if opened:
            with shard.connection.begin():
                shard.execute("select shardids.release(:shard)", shard=shard.number)
        raise
    return int(tick)


def _refuse_used(shard: Shard) -> None:
    with shard.connection.begin():
        is_used = shard.execute(
            "select pg_sequence_last_value(id_counter) is not null from shardids.shard where id = :shard",
            shard=shard.number,
        ).scalar()
    if is_used:
        raise AdoptionRefused(
            f"shard {shard.number} has issued IDs already, and the function may have issued the same",
            hint="Take a shard that was not drawn from, in a cluster that nobody uses yet.",
        )


def _start(shard: Shard, highest: int | None) -> tuple[int, int]:
    """The tick that the shard is to start above, and the lowest ID above it."""
    layout = shard.layout
    clock: Any = shard.execute("select shardids.ms_of(clock_timestamp())").scalar()
    ms = int(clock) + LEAD_S * 1000
    if highest is not None:
        ms = max(ms, layout.decode(highest).ms + 1)
    tick = ms << layout.sequence_bits
    return tick, layout.encode(ms=ms, shard=shard.number, sequence=1)
