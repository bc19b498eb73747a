"""Which shard an ID, a key or a row is in, and where that shard is: what the cluster tells sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from sqlalchemy import BindParameter
from sqlalchemy.sql import operators

from shardids.catalog.regions import existing_region
from shardids.catalog.rows import Description
from shardids.catalog.topology import Node, Placement, schema_name, shard_for_key
from shardids.client.listener import FollowedPlacement
from shardids.client.lookups import Claims
from shardids.client.old_ids import KnownOldIds, WithinShard, how_ids_tell
from shardids.client.routing import After, Key
from shardids.client.routing.claiming import shown as shown_value
from shardids.client.routing.models import ShardFinder, Tells, claimed_value
from shardids.errors import BadArgument, UnknownId, UnknownValue
from shardids.ids import DecodedId, Layout
from shardids.ids.text import as_integer, checked_integer, shown
from shardids.models.lookups import lookup_of


class ShardsOfCluster:
    """The part of :class:`shardids.Cluster` that finds shards; but for old IDs it asks no server."""

    def __init__(
        self, description: Description, followed: FollowedPlacement, old_ids: KnownOldIds, claims: Claims
    ) -> None:
        self._description = description
        self._followed = followed
        self._old_ids = old_ids
        self._claims = claims

    @property
    def claims(self) -> Claims:
        """What claims the values of look-up keys, and finds the shards of those that are claimed."""
        return self._claims

    @property
    def layout(self) -> Layout:
        """How the cluster's IDs are split."""
        return self._description.layout

    @property
    def shard_count(self) -> int:
        """The number of logical shards, which are 0 … shard_count - 1."""
        return self._description.shard_count

    @property
    def placement(self) -> Placement:
        """Which node holds which shard, as last read from the catalog."""
        return self._followed.current

    @property
    def old_ids(self) -> KnownOldIds | None:
        """What is known of IDs that were issued before the cluster; ``None`` if no table was adopted."""
        return None if self._followed.old_ids is None else self._old_ids

    def shard_for(self, key: Key, *, region: str | None = None) -> int:
        """Returns the shard of a key: the same on every machine and in every version.

        With ``region`` it is one of that region's shards, as long as there is the region; without, one of
        all. See :func:`shardids.catalog.topology.shard_for_key` for the hash.

        Raises:
            BadArgument: the placement as last read has no such region.
            UnsupportedKey: a key of another type; ``bool`` and ``float`` among them.
        """
        if region is None:
            return shard_for_key(key, self.shard_count)
        return existing_region(region, self.placement.regions).shard_for(key)

    def decode(self, id_: int) -> DecodedId:
        """Returns the time, the origin and the sequence of an ID.

        Raises:
            BadArgument: it cannot be one, or it was issued before the cluster and has none of these.
        """
        if self._followed.old_ids is not None and self._old_ids.has(id_):
            raise BadArgument(
                f"ID {id_} was issued before this cluster: it tells neither a time nor a shard",
                hint="The shard of a row: cluster.shard_of(id, of=User)",
            )
        return self.layout.decode(id_)

    def shard_of(self, id_: int | UUID, *, of: Any = None) -> int:
        """Returns the shard in which an ID was born; of an old one, the shard of its row.

        An old ID was issued before the cluster, and rows of several tables may have it: ``of`` is the mapped
        class, the table or its name. For new IDs it may be left out. The catalog or, by rule ``fan-out``,
        every shard is asked for what is not known yet. With ``of``, the primary key may be a sharding key.

        Raises:
            BadArgument: it is not an ID of this cluster, or an old one of a table that is not named or was
                not adopted.
            UnknownId: an ID of no shard of this cluster, or an old one that no row had.
        """
        if self._followed.old_ids is None and (of is None or type(of) is str):
            return self._origin(id_)  # type: ignore[arg-type]  # refuses what is not an integer
        told = how_ids_tell(of)
        if isinstance(told, Tells):
            if told.kind is not None:
                return told.shard(id_, self)
            told = told.table
        if self._followed.old_ids is not None and self._old_ids.has(id_):  # type: ignore[arg-type]  # see above
            return self._old_ids.shard_of(id_, told)  # type: ignore[arg-type]  # see above
        return self._origin(id_)  # type: ignore[arg-type]  # see above

    def _origin(self, id_: int) -> int:
        if type(id_) is int:
            try:
                return self._checked(self.layout.shard_of(id_))
            except BadArgument as error:
                # An integer that is not an ID of a shard is a value that no row has, not a wrong type.
                raise UnknownId(error.message, hint=error.hint) from None
        return self._checked(self.layout.shard_of(id_))

    def node_of(self, shard: int) -> Node:
        """Returns the node that holds a shard now.

        Raises:
            BadArgument: the number is not in the cluster.
            UnknownShard: no node holds it yet.
        """
        return self.placement.locate(self._checked(shard))

    def schema_of(self, shard: int) -> str:
        """Returns the name of a shard's schema."""
        return schema_name(self._description.schema_prefix, shard)

    def _within(self, shard: int) -> ShardFinder:
        return self if self._followed.old_ids is None else WithinShard(self, self._old_ids, shard)

    def _pick(
        self,
        key: Key | None,
        id_: int | UUID | None,
        shard: int | None,
        of: Any,
        *,
        lookup: Any = None,
        region: str | None = None,
    ) -> int:
        # A criterion has no truth value, so it is not compared.
        if sum(one is not None for one in (key, id_, shard, lookup)) != 1:
            raise BadArgument("a session takes exactly one of key=, id=, shard= and lookup=")
        if of is not None and id_ is None:
            raise BadArgument("of= says whose ID it is, and goes with id=")
        if region is not None and key is None:
            raise BadArgument("region= says among which shards a key is, and goes with key=")
        if key is not None:
            return self.shard_for(key, region=region)
        if lookup is not None:
            return shard_of_criterion(lookup, self._claims)
        if id_ is not None:
            return self.shard_of(id_, of=of)
        return self._checked(shard)

    def _latest(self, after: After | None) -> int | None:
        """Returns the latest of the IDs that a session's are to sort after; ``None`` if there are none.

        Raises:
            BadArgument: one is no ID of this cluster, or was issued before it.
        """
        if after is None:
            return None
        given = after if isinstance(after, Iterable) else (after,)
        ids = [checked_integer("an ID", one, -1 << 63, (1 << 63) - 1) for one in given]
        for id_ in ids:
            self._checked(self.decode(id_).shard)
        return max(ids, default=None)

    def _checked(self, shard: int | None) -> int:
        number = shard if type(shard) is int else as_integer("a shard", shard)
        if not 0 <= number < self.shard_count:
            raise BadArgument(
                f"there is no shard {shown(number)} in this cluster",
                hint=f"Shards are numbered 0 to {self.shard_count - 1}.",
            )
        return number


def shard_of_criterion(criterion: Any, claims: Claims) -> int:
    """Returns the shard of the row that a criterion on a look-up key finds, ``User.email == "…"``.

    Raises:
        BadArgument: it is no such criterion, or the look-up is not ready.
        UnknownValue: no row has the value.
    """
    sides = (getattr(criterion, "left", None), getattr(criterion, "right", None))
    bases = getattr(sides[0], "base_columns", ())
    lookup = lookup_of(next(iter(bases))) if len(bases) == 1 else None
    is_equal = getattr(criterion, "operator", None) is operators.eq
    if lookup is None or not is_equal or not isinstance(sides[1], BindParameter):
        raise BadArgument(
            f"lookup={criterion} is not a look-up key that equals a value",
            hint='lookup=User.email == "…", where email was made by lookup_key().',
        )
    value = claimed_value(lookup, sides[1].effective_value, sides[1].type)
    found = claims.shards_of(lookup, [value])
    if found is None and claims.refresh(lookup):
        found = claims.shards_of(lookup, [value])
    if found is None:
        raise BadArgument(
            f"rows of {lookup} can't be looked up yet: not all that were there are claimed",
            hint=f"To claim them: shardids lookup backfill {lookup}",
        )
    if value not in found and claims.claims_are_elsewhere(lookup, value):
        found = claims.shards_of(lookup, [value]) or {}
    if value not in found:
        raise UnknownValue(f"no row has the {lookup} {shown_value(value)}")
    return found[value]
