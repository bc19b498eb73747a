"""The groups ``shardids node`` and ``shardids shard``.

The module of a command is imported when that command is used: a move must not wait for Alembic to load.
"""

from __future__ import annotations

import typer

from shardids.cli.lazy import Entry, LazyGroup

NODE_COMMANDS = {
    "add": Entry("nodes:add_node", "Install the engine in a database and register it as a node. Idempotent."),
    "list": Entry("nodes:list_nodes", "List the nodes, their regions, and how many shards each holds."),
    "remove": Entry(
        "nodes:remove_node",
        "Remove the engine from a node that holds no shards, and the node from the catalog.",
    ),
    "replace": Entry("nodes:replace_node", "Point a node that was lost at its promoted standby."),
    "confirm-clock": Entry(
        "clocks:confirm",
        "Confirm that a node's clock is right, although it went ahead by more than max_step at once.",
    ),
    "drain": Entry("moves:drain_node", "Move all shards away from a node, so that it can be removed."),
}
SHARD_COMMANDS = {
    "create": Entry(
        "shards:create_shards", "Create shards on their nodes. Idempotent: creates what is missing."
    ),
    "list": Entry("shards:list_shards", "Show which node holds which shard."),
    "show": Entry("shards:show_shard", "Show what the catalog and the owner node know of a shard."),
    "move": Entry("moves:move_shards", "Move shards to another node while they are written to."),
    "moves": Entry("moves:list_moves", "List the moves of shards, those under way among them."),
    "reset-clock": Entry("clocks:reset", "Bring shards back that a wrong clock took into the future."),
    "purge": Entry("moves:purge_shards", "Drop the old copies of these shards."),
}


class _Node(LazyGroup):
    entries = NODE_COMMANDS


class _Shard(LazyGroup):
    entries = SHARD_COMMANDS


node_app = typer.Typer(cls=_Node, help="The PostgreSQL databases that hold shards.", no_args_is_help=True)
shard_app = typer.Typer(cls=_Shard, help="The logical shards.", no_args_is_help=True)
