"""Decides which shards to move so that all nodes carry about the same, within a margin, with few moves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Final

from sqlalchemy import Engine, text
from sqlalchemy.engine import URL

from shardids.catalog.pins import nodes_of, pins
from shardids.catalog.regions import in_region, no_node_of_region
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Placement
from shardids.errors import ClusterConflict
from shardids.pg.locks import bounded_wait
from shardids.pg.notation import named_shards
from shardids.replication.sides import move_nodes


class By(StrEnum):
    """What to measure a shard's weight by."""

    SIZE = "size"
    """Bytes of tables and indexes."""
    ROWS = "rows"
    """Rows, as the last ANALYZE counted them."""
    WRITES = "writes"
    """Rows inserted, updated and deleted since the node's statistics were reset."""
    LOAD = "load"
    """Pages of tables and indexes that are read and written per second, from memory or disk."""


MARGIN: Final = 0.1
"""How far a node's load may be from the mean, as a fraction of the mean."""
OVER_S: Final = 10.0
"""How long load is measured, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One shard to move."""

    shard: int
    source: str
    target: str
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The shards to move, and what each node carries before and after."""

    transfers: tuple[Transfer, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]


def balance(
    weights: Mapping[int, float],
    node_of: Mapping[int, str],
    nodes: Collection[str],
    *,
    margin: float = MARGIN,
    drained: Collection[str] = (),
    fixed: Mapping[int, str] | None = None,
    sizes: Callable[[], Mapping[int, float]] | None = None,
) -> Balance:
    """Find a small number of moves that bring every node to within ``margin`` of the mean.

    Each step chooses the move that brings the nodes closest to the mean, so large shards go first. A shard
    that exceeds a node's share gets a node to itself: the one where this moves the fewest bytes.
    The other nodes then share the rest. If single shards are too large for the margin, the result is as even
    as choosing one move after another makes it.

    Args:
        weights: what each shard weighs; shards without an entry stay where they are.
        node_of: the node of each shard.
        nodes: the nodes to balance; shards on other nodes stay there.
        drained: those of ``nodes`` that are to carry nothing.
        fixed: the node of each shard that must be there.
        sizes: returns the size of each shard, if its weight is not its size.
    """
    fixed = fixed or {}
    owners = {shard: node_of[shard] for shard in weights if node_of[shard] in nodes}
    before = _loads(weights, owners, nodes)
    placed = owners | {shard: fixed[shard] for shard in owners if shard in fixed and fixed[shard] in nodes}
    open_nodes = [name for name in sorted(nodes) if name not in drained]
    apart = _apart(weights, placed, open_nodes, margin=margin, fixed=fixed, sizes=sizes)
    placed |= apart
    shared = [name for name in open_nodes if name not in apart.values()]
    for shard in sorted(owners, key=lambda shard: (-weights[shard], shard)):
        if placed[shard] not in shared and shard not in apart and shard not in fixed:
            loads = _loads(weights, placed, shared)
            placed[shard] = min(shared, key=lambda name: (loads[name], name))
    mean = sum(_loads(weights, placed, shared).values()) / len(shared)
    movable = owners.keys() - fixed.keys() - apart.keys()
    while (
        transfer := _best(weights, placed, movable, _loads(weights, placed, shared), mean * margin)
    ) is not None:
        placed[transfer.shard] = transfer.target
    transfers = tuple(
        Transfer(shard=shard, source=owners[shard], target=target, weight=weights[shard])
        for shard, target in sorted(placed.items())
        if owners[shard] != target
    )
    return Balance(transfers=transfers, before=before, after=_loads(weights, placed, nodes))


def _apart(
    weights: Mapping[int, float],
    placed: Mapping[int, str],
    nodes: Collection[str],
    *,
    margin: float,
    fixed: Mapping[int, str],
    sizes: Callable[[], Mapping[int, float]] | None,
) -> dict[int, str]:
    """Return the shards that exceed a node's share, and the node that each gets to itself.

    Where the others on its node weigh less than the margin they stay with it, and are also returned. With an
    infinite margin, as of a drain, any node will do.
    """
    found: dict[int, str] = {}
    left = [] if math.isinf(margin) else list(nodes)
    for shard in sorted(placed, key=lambda shard: (-weights[shard], shard)):
        if len(left) < 2:
            break
        mean = sum(weights[one] for one in placed if one not in found) / len(left)
        if weights[shard] <= mean:
            break
        costs: dict[str, float] = {}
        for name in left if shard not in fixed else [fixed[shard]]:
            others = [one for one, node in placed.items() if node == name and one not in (shard, *found)]
            is_here = placed[shard] == name
            if name not in left:
                continue
            if is_here and sum(weights[one] for one in others) <= margin * mean:
                found |= dict.fromkeys(others, name)
                costs = {name: 0.0}
                break
            if any(one in fixed for one in others):
                continue
            moved = others if is_here else [shard, *others]
            of_shard = weights if sizes is None else sizes()
            costs[name] = sum(of_shard.get(one, 0.0) for one in moved)
        if costs:
            found[shard] = min(costs, key=lambda name: (costs[name], placed[shard] != name, name))
            left.remove(found[shard])
    return found


def _loads(
    weights: Mapping[int, float], placed: Mapping[int, str], nodes: Collection[str]
) -> dict[str, float]:
    loads = dict.fromkeys(sorted(nodes), 0.0)
    for shard, name in placed.items():
        if name in loads:
            loads[name] += weights[shard]
    return loads


def _best(
    weights: Mapping[int, float],
    placed: Mapping[int, str],
    movable: Collection[int],
    loads: Mapping[str, float],
    tolerance: float,
) -> Transfer | None:
    """Return the move that reduces the distances to the mean most; ``None`` if none does or is needed."""
    mean = sum(loads.values()) / len(loads)
    if all(abs(load - mean) <= tolerance for load in loads.values()):
        return None

    def candidates() -> Iterator[tuple[float, float, int, str]]:
        for shard in movable:
            weight, excess = weights[shard], loads[placed[shard]] - mean
            for target, load in loads.items():
                lack = mean - load
                if excess <= 0 or lack <= 0 or weight <= 0:
                    continue
                after = abs(excess - weight) + abs(lack - weight)
                if after < (excess + lack) * (1 - 1e-9):
                    gain = excess + lack - after
                    yield -gain, max(abs(excess - weight), abs(lack - weight)), shard, target

    best = min(candidates(), default=None)
    if best is None:
        return None
    *_, shard, target = best
    return Transfer(shard=shard, source=placed[shard], target=target, weight=weights[shard])


_TABLES: Final = (
    "left join pg_class c on c.relnamespace = to_regnamespace(s.schema) and c.relkind in ('r', 'm')"
)
_WEIGHTS: Final[Mapping[By, tuple[str, str]]] = {
    By.SIZE: ("sum(pg_total_relation_size(c.oid))", _TABLES),
    By.ROWS: ("sum(greatest(c.reltuples, 0))", _TABLES),
    By.WRITES: (
        "sum(pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid)"
        " + pg_stat_get_tuples_deleted(c.oid))",
        _TABLES,
    ),
    By.LOAD: (
        "sum(pg_stat_get_blocks_fetched(c.oid)"
        " + case when c.reltoastrelid <> 0 then pg_stat_get_blocks_fetched(c.reltoastrelid) else 0 end)",
        "left join pg_class c on c.relnamespace = to_regnamespace(s.schema) and c.relkind in ('r', 'm', 'i')",
    ),
}
"""The sum over objects of a shard, and the join that finds these; load is a count that only grows."""


def weigh(placement: Placement, login: URL, by: By) -> dict[int, float]:
    """Return the weight of every shard, measured on its owner; ``login`` is the catalog's URL.

    By load it is a count since the node's statistics were reset: see :func:`rates`.

    Raises:
        StatementFailed: a table stays locked; the message names by whom.
    """
    weight, objects = _WEIGHTS[by]
    query = text(f"""
        select s.id, coalesce({weight}, 0)::double precision as weight
        from shardids.shard s {objects}
        where s.state = 'active' group by s.id""")  # noqa: S608 -- constants

    def ask(name: str, engine: Engine) -> dict[int, float]:
        with engine.connect() as connection:
            schemas = connection.scalars(text("select schema::text from shardids.shard")).all()
            with bounded_wait(connection, f'node "{name}"', schemas, ["AccessExclusiveLock"]):
                return {
                    row.id: row.weight
                    for row in connection.execute(query)
                    if placement.node_of.get(row.id) == name
                }

    with move_nodes(placement, login, name="shardids_weigh") as nodes:
        answers = nodes.each(ask).all()
    return {shard: weight for weights in answers.values() for shard, weight in weights.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The count of each shard's load, its node, and the time of reading by the monotonic clock, in s."""

    at: float
    node_of: Mapping[int, str]
    counts: Mapping[int, float]

    @classmethod
    def read(cls, placement: Placement, login: URL) -> Counts:
        """Read the counts of all shards on their owners."""
        return cls(
            counts=weigh(placement, login, By.LOAD), node_of=dict(placement.node_of), at=time.monotonic()
        )


def rates(before: Counts, after: Counts) -> dict[int, float] | None:
    """Return the load of each shard between two readings, per second.

    ``None`` if a count fell, or a shard was elsewhere: a server has lost its statistics, or a move has copied
    rows, which counts as well.
    """
    if before.node_of != after.node_of or after.at <= before.at:
        return None
    found = {
        shard: (count - before.counts[shard]) / (after.at - before.at)
        for shard, count in after.counts.items()
        if shard in before.counts
    }
    return None if any(rate < 0 for rate in found.values()) else found


def measure(catalog: Catalog, by: By, over_s: float = OVER_S) -> dict[int, float]:
    """Return the weight of every shard now; by load it takes ``over_s`` seconds.

    Raises:
        ClusterConflict: shards were moved, or a server has lost its statistics, while load was measured.
    """
    placement = catalog.placement()
    if by is not By.LOAD:
        return weigh(placement, catalog.url, by)
    before = Counts.read(placement, catalog.url)
    time.sleep(over_s)
    found = rates(before, Counts.read(catalog.placement(), catalog.url))
    if found is None:
        raise ClusterConflict(
            "the load could not be measured: a shard was moved meanwhile, or statistics were reset",
            hint="Run the command again.",
        )
    return found


def plan_balance(
    catalog: Catalog,
    by: By,
    *,
    margin: float = MARGIN,
    exclude: Collection[str] = (),
    drained: str | None = None,
    weights: Mapping[int, float] | None = None,
    resting: Collection[int] = (),
    least_gain: float = 0.0,
) -> Balance:
    """Find the moves that balance a cluster; nodes in ``exclude`` keep their shards and get no others.

    Each region is balanced for itself, and so are the shards and nodes of none: what lives outside of its
    region is brought home, and pinned shards to their nodes. With ``drained`` only that node is emptied.

    Args:
        weights: the weights of the shards, if they were measured already.
        resting: shards that stay where they are, as pinned ones do.
        least_gain: moves that are only for balance are made if they take at least this part of the mean
            from a node.

    Raises:
        ClusterConflict: a node is unknown, or no node is left to move shards to, or none of their region; or
            pinned shards can't leave ``drained``.
    """
    placement = catalog.placement()
    for name in (*exclude, *([drained] if drained else [])):
        if name not in placement.nodes:
            raise unknown_node(name, placement.nodes)
    nodes = set(placement.nodes) - set(exclude)
    if not nodes - {drained}:
        raise ClusterConflict(
            "no node can take shards in",
            hint="To add one: shardids node add NAME --url postgresql://…",
        )
    fixed = _pinned(catalog, placement, drained)
    # Also of those that a pin takes to another node: a move that fails is not begun again at once.
    fixed |= {shard: placement.node_of[shard] for shard in resting if shard in placement.node_of}
    measured = measure(catalog, by) if weights is None else weights
    weights = {shard: weight for shard, weight in measured.items() if placement.node_of.get(shard) in nodes}

    @cache
    def sizes() -> Mapping[int, float]:
        return weigh(placement, catalog.url, By.SIZE)

    of_region: dict[str | None, dict[int, float]] = {}
    for shard, weight in weights.items():
        of_region.setdefault(placement.region_of(shard), {})[shard] = weight
    parts = [
        _balance_region(
            region,
            placement,
            held,
            nodes,
            margin=margin,
            drained=drained,
            fixed=fixed,
            sizes=None if by is By.SIZE else sizes,
            least_gain=least_gain,
        )
        for region, held in of_region.items()
    ]
    transfers = sorted((one for part in parts for one in part), key=lambda one: one.shard)
    after = {**placement.node_of} | {one.shard: one.target for one in transfers}
    return Balance(
        transfers=tuple(transfers),
        before=_loads(weights, {shard: placement.node_of[shard] for shard in weights}, nodes),
        after=_loads(weights, {shard: after[shard] for shard in weights}, nodes),
    )


def _pinned(catalog: Catalog, placement: Placement, drained: str | None) -> dict[int, str]:
    """Return the node of each pinned shard, if none of them keeps ``drained`` from being emptied."""
    found = pins(catalog)
    nodes = nodes_of(found, placement.node_of)
    for one in found:
        if drained is not None and nodes.get(one.shard) == drained:
            raise ClusterConflict(
                f'node "{drained}" can\'t be emptied: {one}; no shard was moved',
                hint=f"To let it move: {one.remedy}",
            )
    return nodes


def _balance_region(
    region: str | None,
    placement: Placement,
    weights: Mapping[int, float],
    nodes: Collection[str],
    *,
    margin: float,
    drained: str | None,
    fixed: Mapping[int, str],
    sizes: Callable[[], Mapping[int, float]] | None,
    least_gain: float,
) -> tuple[Transfer, ...]:
    """Balance shards of a region over its nodes, and empty ``drained``, or else all other nodes."""
    own = set(placement.nodes_of_region(region)) & set(nodes)
    leaving = {placement.node_of[shard] for shard in weights} - own if drained is None else {drained}
    on_the_way = [
        shard for shard in weights if placement.node_of[shard] in leaving and fixed.get(shard) not in leaving
    ]
    if not own - leaving:
        if on_the_way:
            if left_out := sorted(set(placement.nodes_of_region(region)) - leaving):
                raise ClusterConflict(
                    f"{named_shards(on_the_way)} can only go to a node {in_region(region)}, and"
                    f" {', '.join(left_out)} {'is' if len(left_out) == 1 else 'are'} excluded;"
                    " no shard was moved",
                    hint=f"Leave {left_out[0]} in.",
                )
            raise no_node_of_region(region, on_the_way, undone="moved")
        return ()
    if drained is not None and not on_the_way:
        return ()
    found = balance(
        weights,
        placement.node_of,
        own | leaving,
        margin=margin,
        drained=leaving,
        fixed=fixed,
        sizes=sizes,
    )
    mean = sum(found.before.values()) / len(own - leaving)
    relief = max((load - found.after[name] for name, load in found.before.items()), default=0.0)
    if relief >= least_gain * mean:
        return found.transfers
    return tuple(
        one for one in found.transfers if one.source in leaving or fixed.get(one.shard) == one.target
    )
