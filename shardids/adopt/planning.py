"""Makes a plan: reads a source, changes nothing there, and says what becomes of each table and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.engine import URL

from shardids.adopt.checks import check_rows
from shardids.adopt.facts import Facts, id_column
from shardids.adopt.findings import find_all
from shardids.adopt.inventory import Table, read_inventory
from shardids.adopt.paths import parents_first, sort_tables
from shardids.adopt.plan import Hop, OldIds, Plan, TablePlan
from shardids.adopt.reasons import reasons
from shardids.adopt.source import Source
from shardids.adopt.spread import Reader
from shardids.adopt.statements import SAMPLE_ROWS
from shardids.adopt.suggest import Forecast, forecast
from shardids.adopt.wishes import read_wishes
from shardids.catalog.urls import parse_url, shown_url
from shardids.errors import StatementFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and why it is so: ``comments``, by the table's name, and by ``""`` those of the whole."""

    plan: Plan
    forecast: Forecast
    comments: Mapping[str, Sequence[str]]

    @property
    def is_blocked(self) -> bool:
        """Returns whether a finding keeps the plan from being run."""
        return any(self.plan.is_blocked_by(finding) for finding in self.plan.findings)


def make_plan(
    source: str | URL,
    *,
    root: str,
    keys: Sequence[str] = (),
    references: Sequence[str] = (),
    loose: Sequence[str] = (),
    shard_count: int | None = None,
    sample_rows: int = SAMPLE_ROWS,
    via: str | URL | None = None,
    reader: str | URL | None = None,
) -> Planned:
    """Reads a source as of one moment, in transactions that can't write, and returns a plan for it.

    ``root``, ``keys``, ``references`` and ``loose`` name tables and columns as SQL writes them: see
    :func:`shardids.adopt.wishes.read_wishes`. ``sample_rows``: how many rows of a table are read. ``via``:
    the relay's URL; it is not connected to. ``reader``: the source's URL with a role that can only read, and
    does. A role that can write reads no rows where other roles own objects: findings say so.

    Raises:
        BadArgument: a name is not found, the root has no key that rows can be split by, or ``reader`` is
            another database.
        ConnectionFailed, StatementFailed: the source can't be read.
        UnsupportedServer: it is older than PostgreSQL 14.
    """
    with Source(source, reader) as opened:
        try:
            with opened.transaction() as connection:
                inventory = read_inventory(connection)
        except StatementFailed as error:
            raise opened.explained(error) from error
        wishes = read_wishes(inventory, root=root, keys=keys, references=references, loose=loose)
        tables = sort_tables(inventory, wishes)
        checked = check_rows(opened, inventory, tables, sample_rows)
        facts = Facts(inventory=inventory, wishes=wishes, sorted=tables, checked=checked, skips=opened.skips)
        spread = Reader(source=opened, inventory=inventory, sorted=tables, sample_rows=sample_rows)
        expected = forecast(facts, spread, shard_count)
    order = parents_first(list(inventory.tables), tables, inventory.foreign_keys)
    plan = Plan(
        source=shown_url(parse_url(source)),
        server_version=inventory.server.version,
        root=wishes.root,
        shard_count=expected.shard_count,
        tables=tuple(_table_plan(facts, inventory.tables[name]) for name in order),
        findings=tuple(find_all(facts)),
        via=None if via is None else shown_url(parse_url(via)),
    )
    comments = {name: [why] for name, why in reasons(facts).items()}
    return Planned(plan=plan, forecast=expected, comments=comments | {"": _about(facts, expected)})


def _table_plan(facts: Facts, table: Table) -> TablePlan:
    way, one = facts.sorted.ways.get(table.sql), id_column(table)
    old_ids = None
    if way is not None and one is not None:
        # A number takes 2 bytes in the directory; a UUID, which has no order to be packed by, 16.
        others = OldIds.DIRECTORY if one.family == "integer" else OldIds.FAN_OUT
        old_ids = OldIds.KEY if not way.path and one.name == way.key else others
    return TablePlan(
        name=table.sql,
        kind=facts.sorted.kind(table.sql),
        key=None if way is None else way.key,
        path=()
        if way is None
        else tuple(
            Hop(columns=key.columns, table=key.referenced_table, referenced=key.referenced)
            for key in way.path
        ),
        id=None if one is None else one.name,
        old_ids=old_ids,
        rows=table.rows,
        size_bytes=table.size_bytes,
    )


def _about(facts: Facts, expected: Forecast) -> list[str]:
    """Returns what is said of the whole plan: what was read, and why there are as many shards."""
    read = [one for one in facts.checked.values() if not one.problem]
    exact = sum(one.is_exact for one in read)
    lines = [
        f"Foreign keys were checked on all rows of {exact} tables, and on a sample of"
        f" {len(read) - exact} larger ones.",
        *([f"No row was read: {facts.skips}."] if facts.skips is not None else []),
        f"Growth is computed from {expected.growth_from}."
        if expected.bytes_a_day
        else "Growth is not known.",
    ]
    return [*lines, *(f"Rule: {rule}." for rule in expected.rules)]
