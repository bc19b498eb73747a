"""``pin`` and ``unpin`` of ``shardids shard`` and of ``shardids tenant``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardids.cli.command import Run, takes
from shardids.cli.copies import ShardsArgument
from shardids.cli.printing import printable
from shardids.errors import BadArgument
from shardids.pg.notation import parse_shards

if TYPE_CHECKING:
    from shardids.catalog.pins import Pin

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The value of the sharding key.")]
KindOption = Annotated[
    str, typer.Option(help="The type of the key: text, bigint, uuid or bytea; of a region's key: text@eu.")
]


def shown_pin(pin: Pin) -> str:
    """Return a pin as tables show it."""
    if pin.key is not None:
        return f"key {printable(pin.key)}"
    return "here" if pin.node is None else f"to {pin.node}"


@takes("catalog", "dry-run", "json")
def pin_shards(
    run: Run,
    shards: ShardsArgument = None,
    node: Annotated[
        str | None, typer.Option(help="The node to keep them on; the next rebalance moves them there.")
    ] = None,
) -> None:
    """Keep shards on their node: neither "rebalance" nor "shard move" takes them away."""
    from shardids.catalog.pins import pin_shard

    numbers = _numbers(run, shards)
    done = [pin_shard(run.catalog, shard, node, dry_run=run.dry) for shard in numbers]
    run.print_rows([{"shard": one.shard, "node": one.node} for one in done])


@takes("catalog", "dry-run", "json")
def unpin_shards(run: Run, shards: ShardsArgument = None) -> None:
    """Let shards move again."""
    from shardids.catalog.pins import unpin_shard

    numbers = _numbers(run, shards)
    done = [shard for shard in numbers if unpin_shard(run.catalog, shard, dry_run=run.dry)]
    run.print_rows([{"shard": shard} for shard in done], empty="Nothing to do: they were not pinned")


@takes("catalog", "dry-run", "json")
def pin_tenant(run: Run, key: KeyArgument, kind: KindOption = "text") -> None:
    """Keep the shard where a key lives, now and later, on its node."""
    from shardids.catalog.pins import pin_key

    done = pin_key(run.catalog, kind, key, dry_run=run.dry)
    run.print_rows([{"key": printable(done.key or ""), "kind": kind, "shard": done.shard}])


@takes("catalog", "dry-run", "json")
def unpin_tenant(run: Run, key: KeyArgument, kind: KindOption = "text") -> None:
    """Let the shard where a key lives move again."""
    from shardids.catalog.pins import unpin_key

    done = unpin_key(run.catalog, kind, key, dry_run=run.dry)
    run.print_rows(
        [{"key": printable(key), "kind": kind}] if done else [], empty="Nothing to do: it was not pinned"
    )


def _numbers(run: Run, shards: list[str] | None) -> list[int]:
    if not shards:
        raise BadArgument("which shards?", hint="For example: shardids shard pin 5")
    return parse_shards(",".join(shards), run.catalog.shard_total())
