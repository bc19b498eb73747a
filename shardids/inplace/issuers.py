"""A function that has issued IDs so far: what it is, and whether a shard can go on with its IDs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardids.errors import AdoptionRefused, BadArgument
from shardids.ids.layout import Layout
from shardids.inplace.node import Shard, unable_to_draw

_AHEAD_MS: Final = 5_000  # of the old function's IDs; above LEAD_S they would pass the shard's first


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column; both names as SQL writes them."""

    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.table}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A PL/pgSQL function that issues IDs; ``output``: its OUT parameter, if it has one."""

    oid: int
    name: str
    definition: str
    source: str
    output: str | None


def find_function(shard: Shard, function: str) -> Function:
    """Finds a function by its name with its schema, as SQL writes it.

    Raises:
        BadArgument: there is none, or there are several.
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
    if not row.is_own:
        reasons.append("it belongs to another role, and only its owner can replace it")
    if reasons:
        raise AdoptionRefused(f"{row.name} can't be replaced: " + "; ".join(reasons))
    return Function(
        oid=row.oid, name=row.name, definition=row.definition, source=row.source, output=row.output
    )


def columns_of(shard: Shard, function: Function) -> list[Column]:
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
    return [Column(**row._mapping) for row in rows]


def examine(shard: Shard, function: Function, columns: Sequence[Column]) -> str:
    """Draws an ID from the function, which nobody gets; returns the sequence that it is made with.

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
    """Says how an ID differs from one that the shard would issue now, with that number in its sequence."""
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


def highest_id(shard: Shard, columns: Sequence[Column]) -> int | None:
    """The highest ID in the columns: in 64 unsigned bits, as IDs with their sign bit set are later ones."""
    found: list[int] = []
    with shard.connection.begin():
        shard.execute("set local statement_timeout = 0")
        for column in columns:
            for sign in (">=", "<"):
                # Names that PostgreSQL has quoted.
                query = f"select max({column.name}) from {column.table} where {column.name} {sign} 0"  # noqa: S608
                value = shard.execute(query).scalar()
                if value is not None:
                    found.append(int(value))
    return max(found, key=lambda id_: id_ & (1 << 64) - 1, default=None)
