"""Entries outside of the directory of keys that name the shard of a row: claims of look-ups, and old IDs.

They are changed when the key lives in the target, before its old rows are removed. Until then each leads to a
row, and claims say of a shard with the value that it has it: see ``docs/decisions/0055-moving-keys.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from psycopg import sql
from sqlalchemy import Connection, text

from shardids.catalog import lookups
from shardids.catalog.keys.moved_ids import move_old_ids
from shardids.catalog.lookups import SQL_TYPES
from shardids.catalog.rows import Catalog
from shardids.catalog.topology import BY_DIRECTORY, Placement, RegisteredLookup
from shardids.errors import ShardidsError
from shardids.pg.queries import batches
from shardids.replication.sides import Side
from shardids.replication.subscriptions import Refusal
from shardids.tables.lookups.reading import Opened, opened
from shardids.tenants.family import Family, Part, run

_AT_ONCE: Final = 20_000
"""How many entries are changed together."""
_FOUND: Final = 200_000
"""How many IDs are looked for at once: a search may read the whole table."""
_ALL: Final = sql.SQL("")


def refuse_unfit(
    catalog: Catalog, placement: Placement, family: Family, shards: Sequence[int]
) -> Iterator[Refusal]:
    """Yield the reasons why claims for the source and the target can't be changed. It changes nothing."""
    for _, lookup in _lookups(placement, family):
        if not lookup.is_ready:
            yield Refusal(
                reason=f"look-up {lookup} is not ready: some rows are not claimed for their shard",
                remedy=f"Claim them first: shardids lookup backfill {lookup}",
            )
            continue
        try:
            with opened(catalog, str(lookup)) as one:
                _require_rights(one, shards)
        except ShardidsError as error:
            yield Refusal(
                reason=f"claims of look-up {lookup} can't be changed: {error.message}",
                remedy=error.hint or f"shardids lookup create {lookup}",
            )


def redirect(
    catalog: Catalog,
    side: Side,
    family: Family,
    source: int,
    target: int,
    *,
    require: Callable[[], object],
) -> None:
    """Let claims and old IDs of the key's rows lead to the target. Idempotent.

    ``side`` has the source, with the rows as of the switch. ``require`` is called before each change: the
    move of a process that has slept may have ended, and the key moved on.
    """
    placement = catalog.placement()
    changed = False
    for part, lookup in _lookups(placement, family):
        with opened(catalog, str(lookup)) as one:
            claims = one.claims(None)
            for values in batches(_values(side, family, part, lookup.column), _AT_ONCE):
                require()
                claims.redirect(one.lookup, values, source, target)
        changed = True
    for part, column in _old_ids(placement, family):
        rules = placement.old_ids
        old = [id_ for id_ in _values(side, family, part, column) if rules is not None and rules.has(id_)]
        for some in batches(old, _AT_ONCE):
            require()
            with catalog.engine.begin() as connection:
                move_old_ids(connection, part.name, dict.fromkeys(some, target))
        changed = True
    if changed:
        with catalog.engine.begin() as connection:
            # Those who were refused by the source look for the shard again.
            connection.execute(text("update shardids_catalog.key_home set shard = shard where false"))


def keys_of_others(
    source: Connection, family: Family, part: Part, ids: Sequence[int], among: sql.Composable = _ALL
) -> dict[int, str]:
    """Return those IDs whose rows of a part are other keys' in the source, each with its key.

    ``among`` joins the rows, as ``a``, with those that are looked through.
    """
    found: dict[int, str] = {}
    for column in part.ids:
        for some in batches(ids, _FOUND):
            query = sql.SQL(
                "select a.{0} as id, {1} as key from {2} a {3} where a.{0} = any ({4}::bigint[])"
                " and ({5}) is not true"
            ).format(
                sql.Identifier(column),
                family.key_of(part, "a", family.schema),
                sql.Identifier(family.schema, part.name),
                among,
                sql.Literal(f"{{{','.join(map(str, some))}}}"),
                family.owns(part, "a", family.schema),
            )
            found |= {row.id: row.key for row in run(source, query) if row.key is not None}
    return found


def _lookups(placement: Placement, family: Family) -> Iterator[tuple[Part, RegisteredLookup]]:
    for lookup in placement.lookups.values():
        if (part := family.part(lookup.table)) is not None:
            yield part, lookup


def _old_ids(placement: Placement, family: Family) -> Iterator[tuple[Part, str]]:
    rules = placement.old_ids.of_table if placement.old_ids is not None else {}
    for part in family.parts:
        if part.name in rules and rules[part.name].rule == BY_DIRECTORY:
            yield part, rules[part.name].column


def _values(side: Side, family: Family, part: Part, column: str) -> list[Any]:
    query = sql.SQL("select a.{} from {} a where {} and a.{} is not null").format(
        sql.Identifier(column),
        sql.Identifier(family.schema, part.name),
        family.owns(part, "a", family.schema),
        sql.Identifier(column),
    )
    with side.begin() as connection:
        return list(run(connection, query).scalars().all())


def _require_rights(one: Opened, ends: Sequence[int]) -> None:
    """Require that this role may change claims for shards, on every node: by a change of none."""
    claims = one.claims(None)
    type_ = SQL_TYPES[one.lookup.kind.__name__]
    for shards in one.shards_of.values():
        if shards:
            statement = lookups.take(one.schema_of(shards[0]), one.registered.claims, type_)
            claims.ask(shards[0], statement, [], [], list(ends))
