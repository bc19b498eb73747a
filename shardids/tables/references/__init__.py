"""Reference tables: small tables with the same rows on every node; one is written to, the others follow it.

``tables`` makes and drops them, ``following`` lets a node follow the writer, ``moving`` changes the writer,
``deleting`` deletes rows that no node refers to, ``state`` shows and checks them, ``nodes`` repairs them. A
node that is to follow is always brought to the writer's rows at one position of the log, and follows from
there on: a new node, a promoted standby, one that has lost its replication slot.
``docs/decisions/0037-reference-tables.md`` says why that is right.
"""

from shardids.tables.references.deleting import delete_row
from shardids.tables.references.moving import move_writer
from shardids.tables.references.nodes import Repaired, add_node, follow, remove_node, repair, replace_node
from shardids.tables.references.state import Followed, Table, status, tables
from shardids.tables.references.tables import create_table, drop_table

__all__ = [
    "Followed",
    "Repaired",
    "Table",
    "add_node",
    "create_table",
    "delete_row",
    "drop_table",
    "follow",
    "move_writer",
    "remove_node",
    "repair",
    "replace_node",
    "status",
    "tables",
]
