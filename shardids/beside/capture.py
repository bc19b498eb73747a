"""Change capture: one publication and one logical slot per node, whose changes are those of one stream.

A plain consumer would see every row of a moved shard again: the copy writes it on the target. Rows of a copy
carry a replication origin. So consumers ask for ``origin = none``, an option of pgoutput since PostgreSQL 16.
It belongs to the connection: neither the publication nor the slot keeps it.

The publication is for all tables, so that a shard which arrives is in it before its first write, and table
``shardids.shard`` is in it, whose changes say in the stream itself when a shard leaves a node or arrives.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from shardids.beside.routes import read_routes
from shardids.catalog.nodes import Nodes
from shardids.catalog.rows import Catalog, Description
from shardids.errors import ClusterConflict, MissingPrivilege
from shardids.pg.queries import quoted, read
from shardids.pg.schemas import require_own_replication

PUBLICATION: Final = "shardids_cdc"
_OLDEST: Final = 16
_NAMED: Final = 5
"""How many tables a message names at most."""

Origin = Literal["none", "any", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The publication and the slot of a node: the row of ``beside/capture.v1.sql``.

    Attributes:
        node: the node.
        slot: the name of its slot.
        published: whether the publication is there.
        there: whether the slot is.
        is_ours: whether the slot decodes this database by pgoutput.
        lost: whether the server has removed log that the slot needs.
        pid: the process that serves its consumer now, or ``None``.
        kept_bytes: the log that the slot keeps.
        failover: whether standbys also get the slot; ``None`` before PostgreSQL 17.
        asked: the command that the consumer's session runs.
    """

    node: str
    slot: str
    published: bool
    there: bool
    is_ours: bool
    lost: bool
    pid: int | None
    kept_bytes: int | None
    failover: bool | None
    asked: str

    @property
    def origin(self) -> Origin:
        """The origin that the connected consumer asked for.

        ``unknown`` without a consumer, or with one that reads by SQL: no view shows it then.
        """
        command = re.match(r"\s*START_REPLICATION\s.*?\((.*)\)", self.asked, re.IGNORECASE | re.DOTALL)
        if command is None:
            return "unknown"
        origin = re.search(r"\borigin\"?\s+'(\w+)'", command[1], re.IGNORECASE)
        return "none" if origin is not None and origin[1].lower() == "none" else "any"

    @property
    def fault(self) -> str:
        """The reason why the stream lacks or repeats changes; empty if none is known."""
        if not self.there:
            return f'node "{self.node}" has no slot, so its changes are not in the stream'
        if not self.published:
            return (
                f'slot {self.slot} of node "{self.node}" can\'t be read: publication {PUBLICATION} was'
                " dropped"
            )
        if self.lost:
            return f'slot {self.slot} of node "{self.node}" has lost changes: the server removed its log'
        if self.origin == "any":
            return (
                f'the consumer of slot {self.slot} of node "{self.node}" (process {self.pid}) did not ask for'
                " origin = none: it reads rows of moved shards twice"
            )
        return ""

    @property
    def remedy(self) -> str:
        """The next step after :attr:`fault`."""
        if self.there and (self.lost or not self.published):
            return "Begin anew, with a new snapshot: shardids cdc drop, then shardids cdc create"
        if self.origin == "any":
            return "Configure the consumer as shardids cdc create prints it, and start it again"
        return "Run shardids cdc create, before a shard moves there"


def slot_of(cluster: UUID, node: str) -> str:
    """Return the name of a node's slot, which no other node on the same server has."""
    digest = hashlib.md5(f"{cluster}/{node}".encode(), usedforsecurity=False).hexdigest()
    return f"shardids_cdc_{digest[:20]}"


_SERVER: Final = text("""
    select current_setting('server_version_num')::integer / 10000 as major,
           current_setting('wal_level') as wal_level,
           current_setting('max_replication_slots')::integer
             - (select count(*) from pg_replication_slots) as slots,
           (select r.rolsuper from pg_roles r where r.rolname = current_user) as is_super,
           current_user as role,
           array(select c.oid::regclass::text from pg_class c
                 where c.relkind = 'r' and c.relpersistence = 'p' and c.relreplident in ('d', 'n')
                   and c.oid >= 16384 and c.relnamespace <> 'information_schema'::regnamespace
                   and (c.relreplident = 'n' or not exists (
                     select from pg_index i where i.indrelid = c.oid and i.indisprimary))
                 order by 1) as keyless""")


def read_capture(connection: Connection, cluster: UUID, node: str) -> Capture:
    """Return the publication and the slot of a node."""
    (found,) = read(connection, "beside/capture.v1", Capture, node=node, slot=slot_of(cluster, node))
    return found


def _each(catalog: Catalog, ask: Callable[[str, Engine], Any]) -> dict[str, Any]:
    with Nodes(catalog.nodes(), catalog.url, application_name="shardids cdc") as nodes:
        return dict(sorted(nodes.each(ask).all().items()))


def status(catalog: Catalog) -> list[Capture]:
    """Return the publication and the slot of each node.

    Raises:
        ShardidsError: a node does not answer.
    """
    cluster = catalog.describe().cluster

    def ask(name: str, engine: Engine) -> Capture:
        with engine.connect() as connection:
            return read_capture(connection, cluster, name)

    return list(_each(catalog, ask).values())


def create(catalog: Catalog, *, dry_run: bool = False) -> list[Capture]:
    """Make the publication and the slot of each node that lacks them; return the state before. Idempotent.

    All nodes are examined before the first is changed. A slot keeps log until it is read or dropped.

    Raises:
        ClusterConflict: a server is older than 16, does not log what decoding needs, or has no slot left; a
            table can't be published; an object of the name is another's.
        MissingPrivilege: the role is not a superuser, whom a publication for all tables needs.
    """
    cluster = catalog.describe().cluster

    def examine(name: str, engine: Engine) -> Capture:
        with engine.connect() as connection:
            capture = read_capture(connection, cluster, name)
            _require(connection, capture)
            return capture

    before = list(_each(catalog, examine).values())
    if dry_run:
        return before
    with Nodes(catalog.nodes(), catalog.url, application_name="shardids cdc", autocommit=True) as nodes:
        for capture in before:
            with nodes[capture.node].connect() as connection:
                _make(connection, capture)
    return before


def _require(connection: Connection, capture: Capture) -> None:
    node, server = capture.node, connection.execute(_SERVER).one()
    if server.major < _OLDEST:
        raise ClusterConflict(
            f'node "{node}" has PostgreSQL {server.major}, whose pgoutput has no option origin: every row of'
            " a moved shard would come again",
            hint=f"Change capture takes PostgreSQL {_OLDEST} or later on every node.",
        )
    if not server.is_super:
        raise MissingPrivilege(
            f'role "{server.role}" is not a superuser on node "{node}", and only those publish all tables',
            hint="Run the command with a superuser's URL as --catalog, or let one create it:"
            f" {_publication()};",
        )
    require_own_replication(connection, "publication", PUBLICATION)
    if not capture.is_ours:
        raise ClusterConflict(
            f'replication slot {capture.slot} on the server of node "{node}" was not made for it',
            hint=f"See whose it is, then: select pg_drop_replication_slot('{capture.slot}')",
        )
    if capture.there and (capture.lost or not capture.published):
        raise ClusterConflict(capture.fault, hint=f"{capture.remedy}.")
    if server.wal_level != "logical":
        raise ClusterConflict(
            f'the server of node "{node}" has wal_level = {server.wal_level}',
            hint="alter system set wal_level = logical, and restart that server",
        )
    if not capture.there and server.slots < 1:
        raise ClusterConflict(
            f'the server of node "{node}" has no free replication slot',
            hint="Raise max_replication_slots there, and restart that server.",
        )
    if not capture.published and server.keyless:
        more = f" and {len(server.keyless) - _NAMED} more" if len(server.keyless) > _NAMED else ""
        raise ClusterConflict(
            f'node "{node}" has tables without a replica identity: {", ".join(server.keyless[:_NAMED])}'
            f"{more}. UPDATE and DELETE would fail there once they are published",
            hint=f"Give each a primary key, or: alter table {server.keyless[0]} replica identity full",
        )


def _publication() -> str:
    return f"create publication {quoted(PUBLICATION)} for all tables with (publish_via_partition_root = true)"


def _make(connection: Connection, capture: Capture) -> None:
    # The publication first: decoding looks for it in the catalogs as they were at each change.
    if not capture.published:
        connection.execute(text(_publication()))
    if not capture.there:
        more = ", false, false, true" if _has_failover(connection) else ""
        connection.execute(
            text(f"select pg_create_logical_replication_slot(:slot, 'pgoutput'{more})"),
            {"slot": capture.slot},
        )


def _has_failover(connection: Connection) -> bool:
    return bool(connection.scalar(text("select current_setting('server_version_num')::integer >= 170000")))


def drop(catalog: Catalog, *, dry_run: bool = False) -> list[Capture]:
    """Drop the publications and slots of all nodes, and return those that were there. Idempotent.

    Raises:
        ClusterConflict: a consumer reads a slot.
        MissingPrivilege: a publication of the name is another role's.
    """
    there = [one for one in status(catalog) if one.published or one.there]
    for one in there:
        if one.pid is not None:
            raise ClusterConflict(
                f'a consumer reads slot {one.slot} of node "{one.node}": process {one.pid}',
                hint="Stop the consumer first; where it is gone for good, end its session with"
                f" pg_terminate_backend({one.pid}).",
            )
    with Nodes(catalog.nodes(), catalog.url, application_name="shardids cdc", autocommit=True) as nodes:
        for one in there:
            with nodes[one.node].connect() as connection:
                require_own_replication(connection, "publication", PUBLICATION)
                if dry_run:
                    continue
                connection.execute(
                    text(
                        "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                        " where slot_name = :slot"
                    ),
                    {"slot": one.slot},
                )
                connection.execute(text(f"drop publication if exists {quoted(PUBLICATION)}"))
    return there


def connectors(catalog: Catalog) -> list[dict[str, object]]:
    """Return the configuration of a Debezium connector for each node that holds shards, without a login."""
    description = catalog.describe()
    nodes = {route.node: route for route in read_routes(catalog)}
    return [
        _connector(description, name, host=route.host, port=route.port, database=route.database)
        for name, route in sorted(nodes.items())
    ]


def _connector(
    description: Description, node: str, *, host: str, port: int, database: str
) -> dict[str, object]:
    schemas = re.escape(description.schema_prefix) + "[0-9]+"
    return {
        "name": f"shardids-{node}",
        "config": {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.hostname": host,
            "database.port": str(port),
            "database.dbname": database,
            "plugin.name": "pgoutput",
            "publication.name": PUBLICATION,
            "publication.autocreate.mode": "disabled",
            "slot.name": slot_of(description.cluster, node),
            "slot.stream.params": "origin=none",
            "schema.include.list": schemas,
            "table.exclude.list": rf"{schemas}\.shardids_.*",
            "topic.prefix": f"shardids-{node}",
            "transforms": "shards",
            "transforms.shards.type": "org.apache.kafka.connect.transforms.RegexRouter",
            "transforms.shards.regex": rf"shardids-{re.escape(node)}\.{schemas}\.(.*)",
            "transforms.shards.replacement": "shardids.$1",
        },
    }
