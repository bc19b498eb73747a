"""A function that issues IDs of the cluster's layout lets a shard issue them from now on.

Who draws holds a lock on the old sequence until the transaction ends. Whoever holds it alone knows that no
ID is under way but those of calls that wait for this lock: the shard starts ``LEAD_S`` above them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg import sql

from shardids.catalog.rows import Catalog
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.errors import AdoptionRefused, ClusterConflict
from shardids.inplace.issuers import Column, Function, columns_of, examine, find_function, highest_id
from shardids.inplace.node import OnWait, Shard, opened_shard, with_short_locks

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
    on_wait: OnWait = lambda _text: None,
) -> Replaced:
    """Lets a function issue the IDs of a shard, all above those that it issued before.

    ``function``: its name with its schema, as SQL writes it. Its tables, their defaults and what calls it
    stay as they are. Repeating the call changes nothing.

    Raises:
        BadArgument: there is no such function.
        AdoptionRefused: what it issues is not what the shard issues, or who may draw from it may not draw
            from the shard. The message gives every reason; nothing was changed.
        AdoptionFailed: transactions that have drawn from it do not end; nothing was changed.
    """
    with opened_shard(catalog, shard) as its:
        with its.connection.begin():
            found = find_function(its, function)
            columns = columns_of(its, found)
        if found.source == _source(its, found):
            return _done(its, found, columns, is_new=False)
        _refuse_used(its)
        sequence = examine(its, found, columns)
        highest = highest_id(its, columns)
        if dry_run:
            return Replaced(
                function=found.name,
                shard=shard,
                columns=tuple(map(str, columns)),
                highest_id=highest,
                first_id=_start(its, highest)[1],
            )
        with its.connection.begin():
            bring(its.connection, skipped_ranges(catalog, [shard]))
        _start_ahead(its, highest)

        def wait(text: str) -> None:
            _keep_ahead(its)
            on_wait(text)

        with_short_locks(
            its,
            f"replacing {found.name}",
            lambda: _replace(its, found, sequence),
            tables=[sequence],
            on_wait=wait,
        )
        _await_callers(its, sequence, on_wait)
        return _done(its, found, columns, is_new=True)


def _start_ahead(shard: Shard, highest: int | None) -> None:
    """Activates the shard above the clock and above the highest ID, and releases it.

    In transactions of their own: one that is open now, and sees the shard's row as it was, can draw.
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
    """Raises the shard while it is in use, if the clock comes near."""
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
    """Takes the sequence from everybody, and replaces the function before it is given back."""
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
    head, separator, body = function.definition.partition("\nAS $function")
    if not separator or function.source not in body:
        raise AdoptionRefused(f"{function.name}: its definition is not understood")
    quoted = sql.Literal(_source(shard, function)).as_string(None)
    shard.connection.execution_options(no_parameters=True).exec_driver_sql(f"{head}\nAS {quoted}")


def _await_callers(shard: Shard, sequence: str, on_wait: OnWait) -> None:
    """Keeps the shard ahead of the clock until nobody is in a call of the old function any more."""
    while True:
        _keep_ahead(shard)
        with shard.connection.begin():
            callers: Any = shard.execute(
                """select count(*) from pg_locks where relation = cast(:name as regclass)
                   and database = (select oid from pg_database where datname = current_database())""",
                name=sequence,
            ).scalar()
        if not callers:
            return
        on_wait(f"{callers} transactions end that have drawn from {sequence}")
        time.sleep(0.5)


def _done(shard: Shard, function: Function, columns: Sequence[Column], *, is_new: bool) -> Replaced:
    highest = highest_id(shard, columns)
    with shard.connection.begin():
        tick: Any = shard.execute(
            "select coalesce(high_water_tick, 0) + 1 from shardids.shard where id = :shard",
            shard=shard.number,
        ).scalar()
    layout = shard.layout
    first = layout.encode(
        ms=tick >> layout.sequence_bits, shard=shard.number, sequence=tick & (layout.sequence_limit - 1)
    )
    return Replaced(
        function=function.name,
        shard=shard.number,
        columns=tuple(map(str, columns)),
        highest_id=highest,
        first_id=first,
        is_new=is_new,
    )


def _source(shard: Shard, function: Function) -> str:
    """The body that draws from the shard. It stays PL/pgSQL: a running statement has its language cached."""
    call = shard.next_id.as_string(None)
    if function.output is None:
        return f"begin return {call}; end"
    return f"begin {sql.Identifier(function.output).as_string(None)} := {call}; end"


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
