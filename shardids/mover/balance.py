"""Decides which shards to move so that all nodes carry about the same, within a margin, with few moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Engine, text
from sqlalchemy.engine import URL

from shardids.catalog.regions import in_region, no_node_of_region
from shardids.catalog.rows import Catalog, unknown_node
from shardids.catalog.topology import Placement
from shardids.errors import ClusterConflict
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


MARGIN = 0.1
"""How far a node's load may be from the mean, as a fraction of the mean."""


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
) -> Balance:
    """Find a small number of moves that bring every node to within ``margin`` of the mean.

    Each step chooses the move that brings the nodes closest to the mean, so large shards go first. If single
    shards are too large for the margin, the result is as even as choosing one move after another makes it.

    Args:
        weights: what each shard weighs; shards without an entry stay where they are.
        node_of: the node of each shard.
        nodes: the nodes to balance; shards on other nodes stay there.
        drained: those of ``nodes`` that are to carry nothing.
    """
    owners = {shard: node_of[shard] for shard in weights if node_of[shard] in nodes}
    open_nodes = [name for name in sorted(nodes) if name not in drained]
    before = _loads(weights, owners, nodes)
    placed = dict(owners)
    for shard in sorted(owners, key=lambda shard: (-weights[shard], shard)):
        if owners[shard] in drained:
            loads = _loads(weights, placed, open_nodes)
            placed[shard] = min(open_nodes, key=lambda name: (loads[name], name))
    mean = sum(before.values()) / len(open_nodes)
    while (transfer := _best(weights, placed, open_nodes, mean, margin)) is not None:
        placed[transfer.shard] = transfer.target
    transfers = tuple(
        Transfer(shard=shard, source=owners[shard], target=target, weight=weights[shard])
        for shard, target in sorted(placed.items())
        if owners[shard] != target
    )
    return Balance(transfers=transfers, before=before, after=_loads(weights, placed, nodes))


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
    nodes: Collection[str],
    mean: float,
    margin: float,
) -> Transfer | None:
    """Return the move that reduces the distances to the mean most; ``None`` if none does or is needed."""
    loads = _loads(weights, placed, nodes)
    if all(abs(load - mean) <= margin * mean for load in loads.values()):
        return None

    def candidates() -> Iterator[tuple[float, float, int, str]]:
        for shard, source in placed.items():
            weight, excess = weights[shard], loads[source] - mean
            for target in nodes:
                lack = mean - loads[target]
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


_WEIGHTS: Mapping[By, str] = {
    By.SIZE: "sum(pg_total_relation_size(c.oid))",
    By.ROWS: "sum(greatest(c.reltuples, 0))",
    By.WRITES: "sum(pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid)"
    " + pg_stat_get_tuples_deleted(c.oid))",
}


def weigh(placement: Placement, login: URL, by: By) -> dict[int, float]:
    """Return the weight of every shard, measured on its owner; ``login`` is the catalog's URL."""
    query = text(f"""
        select s.id, coalesce({_WEIGHTS[by]}, 0)::double precision as weight
        from shardids.shard s
        left join pg_class c on c.relnamespace = to_regnamespace(s.schema) and c.relkind in ('r', 'm')
        where s.state = 'active' group by s.id""")  # noqa: S608 -- one of three constants

    def ask(name: str, engine: Engine) -> dict[int, float]:
        with engine.connect() as connection:
            return {
                row.id: row.weight
                for row in connection.execute(query)
                if placement.node_of.get(row.id) == name
            }

    with move_nodes(placement, login, name="shardids_weigh") as nodes:
        answers = nodes.each(ask).all()
    return {shard: weight for weights in answers.values() for shard, weight in weights.items()}


def plan_balance(
    catalog: Catalog,
    by: By,
    *,
    margin: float = MARGIN,
    exclude: Collection[str] = (),
    drained: str | None = None,
) -> Balance:
    """Find the moves that balance a cluster; nodes in ``exclude`` keep their shards and get no others.

    Each region is balanced for itself, and so are the shards and nodes of none: what lives outside of its
    region is brought home. With ``drained`` only that node is emptied.

    Raises:
        ClusterConflict: a node is unknown, or no node is left to move shards to, or none of their region.
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
    weights = {
        shard: weight
        for shard, weight in weigh(placement, catalog.url, by).items()
        if placement.node_of[shard] in nodes
    }
    of_region: dict[str | None, dict[int, float]] = {}
    for shard, weight in weights.items():
        of_region.setdefault(placement.region_of(shard), {})[shard] = weight
    parts = [
        _balance_region(region, placement, held, nodes, margin=margin, drained=drained)
        for region, held in of_region.items()
    ]
    transfers = sorted((one for part in parts for one in part), key=lambda one: one.shard)
    after = {**placement.node_of} | {one.shard: one.target for one in transfers}
    return Balance(
        transfers=tuple(transfers),
        before=_loads(weights, {shard: placement.node_of[shard] for shard in weights}, nodes),
        after=_loads(weights, {shard: after[shard] for shard in weights}, nodes),
    )


def _balance_region(
    region: str | None,
    placement: Placement,
    weights: Mapping[int, float],
    nodes: Collection[str],
    *,
    margin: float,
    drained: str | None,
) -> tuple[Transfer, ...]:
    """Balance shards of a region over its nodes, and empty ``drained``, or else all other nodes."""
    own = set(placement.nodes_of_region(region)) & set(nodes)
    leaving = {placement.node_of[shard] for shard in weights} - own if drained is None else {drained}
    on_the_way = [shard for shard in weights if placement.node_of[shard] in leaving]
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
    return balance(weights, placement.node_of, own | leaving, margin=margin, drained=leaving).transfers
