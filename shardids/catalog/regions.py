"""Regions: names for ranges of shards, which are to live only on the nodes of their region."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from shardids.catalog.topology import Placement, shard_for_key
from shardids.errors import BadArgument, ClusterConflict
from shardids.pg.notation import named_shards

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A name for consecutive shards. Its range is fixed: with another one, keys would be elsewhere.

    Attributes:
        name: its name: 1 to 40 of A-Z, a-z, 0-9, ``_ - .``, a letter first.
        first_shard: the first shard that belongs to it.
        last_shard: the last one.

    Raises:
        BadArgument: a name that is not allowed, or no shard.
    """

    name: str
    first_shard: int
    last_shard: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadArgument(
                f"{self.name!r} can't be a region's name: it takes 1 to 40 characters, first a letter (A-Z,"
                " a-z), then letters, digits, '_', '-' and '.'"
            )
        if not 0 <= self.first_shard <= self.last_shard:
            raise BadArgument(
                f'region "{self.name}" has no shards: {self.first_shard} to {self.last_shard}',
                hint="A region is a range of shards: --shards 0-1023",
            )

    @property
    def shards(self) -> range:
        """Its shards."""
        return range(self.first_shard, self.last_shard + 1)

    def shard_for(self, key: int | str | bytes | UUID) -> int:
        """Return the shard of a key among the region's shards.

        It is ``first_shard + shard_for_key(key, len(shards))``: see
        :func:`shardids.catalog.topology.shard_for_key`, also for the errors.
        """
        return self.first_shard + shard_for_key(key, len(self.shards))

    def __str__(self) -> str:
        last = "" if self.first_shard == self.last_shard else f"-{self.last_shard}"
        return f"{self.first_shard}{last}"


def existing_region(name: str, regions: Mapping[str, Region]) -> Region:
    """Return a region by name.

    Raises:
        BadArgument: the region does not exist.
    """
    if name not in regions:
        there = ", ".join(f'"{region}"' for region in sorted(regions)) or "none yet"
        raise BadArgument(f'there is no region "{name}"', hint=f"Regions: {there}.")
    return regions[name]


def in_region(region: str | None) -> str:
    """Return the words for a region, or for none: ``of region "eu"``, ``of no region``."""
    return "of no region" if region is None else f'of region "{region}"'


def require_region(placement: Placement, shard: int, node: str) -> None:
    """Require that a node takes a shard: both are of one region, or both of none.

    Raises:
        ClusterConflict: they are not; or the node does not exist any more.
    """
    region, there = placement.region_of(shard), placement.nodes.get(node)
    if there is None:
        raise ClusterConflict(f'there is no node "{node}" any more')
    if region != there.region:
        raise ClusterConflict(
            f'shard {shard} is {in_region(region)}, and node "{node}" is {in_region(there.region)}',
            hint=f"Choose a node without a region, or let it have none: shardids region assign --none {node}"
            + leaving(placement, node)
            if region is None
            else f'Choose a node of region "{region}", or assign this one to it:'
            f" shardids region assign {region} {node}" + leaving(placement, node),
        )


def leaving(placement: Placement, node: str) -> str:
    """Return an addition to the hint to take a node out of its region, if the region would have no other."""
    region = placement.nodes[node].region
    if region is None or placement.nodes_of_region(region) != [node]:
        return ""
    return f' (then no node is left to region "{region}")'


def without_node(placement: Placement) -> dict[str | None, list[int]]:
    """Return the regions without nodes, with their shards that have a place.

    ``None`` is among them if shards of no region have a place, and no node is without a region.
    """
    placed: dict[str | None, list[int]] = {name: [] for name in placement.regions}
    for shard in sorted(placement.owners()):
        placed.setdefault(placement.region_of(shard), []).append(shard)
    return {region: shards for region, shards in placed.items() if not placement.nodes_of_region(region)}


def no_node_of_region(region: str | None, shards: Collection[int], *, undone: str) -> ClusterConflict:
    """Return the error for shards whose region has no node that could take them; ``undone`` names the action
    that was done to no shard."""
    if region is None:
        message = "there is no node without a region to take"
        hint = "--url postgresql://…; to let one have none: shardids region assign --none NODE"
    else:
        message = f'there is no node of region "{region}" to take'
        hint = f"--url postgresql://… --region {region}; to assign one: shardids region assign {region} NODE"
    return ClusterConflict(
        f"{message} {named_shards(shards)}; no shard was {undone}",
        hint=f"To add one: shardids node add NAME {hint}",
    )
