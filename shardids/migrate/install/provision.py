"""Creates catalogs, nodes and shards. Each step is idempotent: it finds what exists and creates the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from uuid import uuid4

from psycopg import sql
from sqlalchemy import Connection, Engine, text

from shardids.catalog.keys.copies import bring_to
from shardids.catalog.nodes import Nodes
from shardids.catalog.recorded import contract_of, write_contract
from shardids.catalog.references import references_of, require_none
from shardids.catalog.rows import SCHEMA_PREFIX, Catalog, Description, Engines, describe_in
from shardids.catalog.skipped import bring, skipped_ranges
from shardids.catalog.topology import REFERENCE_SCHEMA, Node, validate_node_name, validate_schema_prefix
from shardids.errors import BadArgument, ClusterConflict, StatementFailed
from shardids.ids.layout import Layout
from shardids.logs import logger
from shardids.migrate.install import trees
from shardids.migrate.recording import recording
from shardids.pg.connections import require_create
from shardids.pg.notation import named_shards, shown_shards
from shardids.pg.reader import HINT, install_reader, remove_reader
from shardids.pg.urls import shown_url

log = logger("install")

_BATCH = 64
"""How many shards to create between two updates of the catalog: a crash leaves at most these to recheck."""


def init(
    catalog: Catalog,
    layout: Layout,
    shard_count: int,
    schema_prefix: str = SCHEMA_PREFIX,
    *,
    engine: Engines = "postgresql",
    dry_run: bool = False,
) -> Description:
    """Create the catalog, or return the existing one if it has exactly this description.

    With ``dry_run`` the transaction is rolled back. For ``engine`` "citus":
    :func:`shardids.beside.citus.setup.init`, which calls this.

    Raises:
        BadArgument: ``shard_count`` does not fit the layout, the layout's time has ended, or the prefix is
            not allowed.
        MissingPrivilege: schema ``shardids_catalog`` exists and belongs to another role.
        ClusterConflict: the database holds a cluster with another description, or is a template.
    """
    validate_schema_prefix(schema_prefix)
    trees.check_shard_count(layout, shard_count)
    if layout.last_time <= datetime.now(UTC):
        raise BadArgument(
            f"layout {layout} ended at {layout.last_time:%Y-%m-%d %H:%M} UTC: it has no IDs left",
            hint="Choose more time bits, or a later epoch: T-S-Q@EPOCH_MS.",
        )
    settings = trees.layout_settings(layout, schema_prefix) | {
        "cluster": str(uuid4()),
        "shard_count": str(shard_count),
        "engine": engine,
    }
    with catalog.engine.connect() as connection, connection.begin() as transaction:
        require_create(connection, "the catalog")
        _refuse_template(connection, "the catalog")
        trees.upgrade(connection, "catalog", settings)
        there = describe_in(connection, catalog.url)
        if dry_run:
            transaction.rollback()
    for what, wanted, found in (
        ("layout", layout, there.layout),
        ("number of shards", shard_count, there.shard_count),
        ("schema prefix", schema_prefix, there.schema_prefix),
        ("engine", engine, there.engine),
    ):
        if wanted != found:
            raise ClusterConflict(
                f"{shown_url(catalog.url)} holds a cluster whose {what} is {found}, not {wanted}",
                hint="It can't be changed. Use that cluster, or another database.",
            )
    return there


def add_node(
    catalog: Catalog,
    name: str,
    url: str,
    *,
    region: str | None = None,
    with_references: bool = False,
    dry_run: bool = False,
) -> None:
    """Install the engine in a database and add it to the catalog as a node.

    ``region`` is the region whose shards it takes; one that is there keeps its region without it. With
    ``dry_run`` the transaction is rolled back. ``with_references``: the caller gives the node the
    reference tables, as :func:`shardids.tables.references.add_node` does.

    Raises:
        ClusterConflict: the database is a template, a node of another cluster, or another node of this one;
            or it has the extension citus in a cluster that is not on Citus; or it has another region; or the
            cluster has reference tables, the name is new, and not ``with_references``.
        MissingPrivilege: the role may not create a schema there, or schema ``shardids`` belongs to another.
        ConnectionFailed, UnsupportedServer, BadArgument: as their own descriptions say.
    """
    if not with_references and name not in catalog.nodes():
        require_none(catalog, "add_node")
    description = catalog.describe()
    node = Node(name=validate_node_name(name), url=url, region=region)
    catalog.check_node(node)
    settings = trees.layout_settings(description.layout, description.schema_prefix)
    settings |= {"cluster": str(description.cluster), "node": name, "engine": description.engine}
    with (
        Nodes({name: node}, catalog.url) as nodes,
        nodes[name].connect() as connection,
        connection.begin() as transaction,
    ):
        require_create(connection, f'node "{name}"')
        _refuse_template(connection, f'node "{name}"')
        if description.engine == "postgresql":
            _refuse_citus(connection, f'node "{name}"')
        trees.upgrade(connection, "node", settings)
        _check_claim(connection, name, description)
        if fault := install_reader(connection):
            log.warning('node "%s" has no reader: %s. %s', name, fault, HINT)
        if dry_run:
            transaction.rollback()
        else:
            # Comes before the commit of the engine: a name that the catalog refuses leaves no engine behind.
            catalog.add_node(node)
            # After that: a range that is written later is brought to this node, too.
            bring(connection, skipped_ranges(catalog))
            with catalog.engine.begin() as recording_it:
                bring_to(recording_it, connection)
                write_contract(recording_it, name, contract_of(connection), "node add", anew=False)


def _refuse_template(connection: Connection, where: str) -> None:
    """Refuse a template: each database that CREATE DATABASE made from it would be a copy of its shards."""
    template = text("""
        select datname from pg_database where datname = current_database()
        and (datistemplate or datname in ('template0', 'template1'))""")
    if (name := connection.scalar(template)) is not None:
        hint = "Create another database (createdb NAME), and use that."
        if name not in ("template0", "template1"):
            quoted = sql.Identifier(name).as_string()
            hint += f" If no database is made from it: ALTER DATABASE {quoted} IS_TEMPLATE false"
        raise ClusterConflict(
            f'{where}: database "{name}" is a template: CREATE DATABASE copies it with all that is in it',
            hint=hint,
        )


def _refuse_citus(connection: Connection, where: str) -> None:
    """Refuse a database that is part of Citus as a plain node: Citus would take the engine to its workers."""
    if connection.scalar(text("select exists (select from pg_extension where extname = 'citus')")):
        raise ClusterConflict(
            f"{where}: the database has the extension citus",
            hint="Make a cluster on Citus, with the catalog in its coordinator: shardids init --engine citus",
        )


def _check_claim(connection: Connection, name: str, description: Description) -> None:
    claim = connection.execute(text("select name, cluster from shardids.node")).one()
    if claim.cluster != description.cluster:
        raise ClusterConflict(
            f"that database is a node of another cluster ({claim.cluster})",
            hint="A database holds the shards of one cluster. Use another database.",
        )
    if claim.name != name:
        raise ClusterConflict(f'that database is already node "{claim.name}"', hint="A database is one node.")


def require_no_shards(catalog: Catalog, name: str) -> None:
    """Raise ClusterConflict if a node has copies of shards, or as :meth:`Catalog.check_unused` does."""
    catalog.check_unused(name)
    with Nodes(catalog.nodes(), catalog.url) as nodes, nodes[name].connect() as connection:
        there = connection.scalars(text("select id from shardids.shard")).all()
    if there:
        raise ClusterConflict(
            f'node "{name}" has copies of {named_shards(there)}, which live on other nodes',
            hint=f"To drop those that moves left: shardids shard purge {shown_shards(there)}."
            " To examine others: shardids doctor",
        )


def remove_node(catalog: Catalog, name: str, *, with_references: bool = False, dry_run: bool = False) -> None:
    """Drop the engine of a node that holds no shards, and the node's entry in the catalog.

    With ``dry_run`` the transaction is rolled back. ``with_references``: the caller has taken the reference
    tables away, as :func:`shardids.tables.references.remove_node` does.

    Raises:
        ClusterConflict: the node is unknown, or it holds shards or copies of them; or the cluster has
            reference tables, and not ``with_references``.
    """
    require_no_shards(catalog, name)
    if not with_references:
        require_none(catalog, "remove_node")
    description = catalog.describe()
    settings = trees.layout_settings(description.layout, description.schema_prefix)
    with (
        Nodes(catalog.nodes(), catalog.url) as nodes,
        nodes[name].connect() as connection,
        connection.begin() as transaction,
    ):
        if dry_run:
            # The caller takes them away before, and has not yet.
            connection.execute(text("select set_config('lock_timeout', '10s', true)"))
            if known := references_of(catalog).states:
                tables = sql.SQL(", ").join(sql.Identifier(REFERENCE_SCHEMA, table) for table in known)
                dropping = sql.SQL("drop table if exists {}").format(tables)
                connection.exec_driver_sql(dropping.as_string())
        remove_reader(connection)
        trees.downgrade(connection, "node", settings)
        if dry_run:
            transaction.rollback()
    if not dry_run:
        catalog.remove_node(name)


def create_shards(
    catalog: Catalog,
    shards: Iterable[int],
    *,
    node: str | None = None,
    migrate: Callable[[str, Sequence[int]], None] = lambda _node, _shards: None,
    on_progress: Callable[[str, int], None] = lambda _node, _count: None,
    on_plan: Callable[[dict[str, int]], None] = lambda _counts: None,
) -> dict[int, str]:
    """Create the shards that do not exist yet, on all nodes at once, with one connection per node.

    Args:
        catalog: where the shards are planned and recorded.
        shards: their numbers.
        node: the node for those that are not placed yet; by default they are spread evenly.
        migrate: called with a node and new shards on it, before the catalog routes anybody to them; from
            several threads. It may be called again for the same shards.
        on_plan: called once with the number of shards to create on each node.
        on_progress: called with a node and the number of shards created since its last call, from several
            threads.

    Returns:
        The new shards and their nodes.

    Raises:
        BadArgument, ClusterConflict: see :meth:`Catalog.plan_shards`; nothing was created.
        ShardidsError: a node failed. Shards created before stay, and a repeated call creates the rest.
    """
    plan = catalog.plan_shards(shards, node)
    per_node: dict[str, list[int]] = {}
    for shard, name in plan.items():
        per_node.setdefault(name, []).append(shard)
    on_plan({name: len(numbers) for name, numbers in per_node.items()})

    ranges = skipped_ranges(catalog, list(plan))

    def create_on(name: str, engine: Engine) -> None:
        with engine.connect() as connection:
            with connection.begin():
                bring(connection, (one for one in ranges if plan[one.shard] == name))
            for start in range(0, len(per_node[name]), _BATCH):
                batch = per_node[name][start : start + _BATCH]
                for shard in _missing(connection, batch):
                    try:
                        create_shard(connection, shard)
                    except StatementFailed as error:
                        message = f"shard {shard} can't be created on {error.message}"
                        raise StatementFailed(message, hint=error.hint) from error
                    on_progress(name, 1)
                migrate(name, batch)
                catalog.mark_active(batch)

    with Nodes(catalog.nodes(), catalog.url) as nodes:
        nodes.each(create_on, per_node).all()
    return plan


def _missing(connection: Connection, shards: Sequence[int]) -> list[int]:
    there = set(connection.scalars(text("select id from shardids.shard")))
    connection.rollback()
    return [shard for shard in shards if shard not in there]


def create_shard(connection: Connection, shard: int) -> None:
    """Create one shard's schema, generator and version table, and activate it, in one transaction.

    Does nothing if the shard exists, also if another session created it while this one waited for the lock.
    """
    with connection.begin():
        make_shard(connection, shard)


def make_shard(connection: Connection, shard: int) -> None:
    """Do what :func:`create_shard` does, in the connection's transaction, and set its ``search_path``."""
    connection.execute(text("select shardids.enter_shard(:shard)"), {"shard": shard})
    # A separate statement, so that its snapshot comes after the lock that enter_shard waited for.
    there = connection.execute(
        text("""select exists (select from shardids.shard where id = :shard),
                       set_config('search_path', shardids.schema_of(:shard), true)"""),
        {"shard": shard},
    ).one()[0]
    if not there:
        raw = connection.execution_options(no_parameters=True)
        raw.exec_driver_sql(trees.shard_sql())


def _require_role(connection: Connection, role: str, where: str) -> None:
    there = text("select exists (select from pg_roles where rolname = :role)")
    if not connection.execute(there, {"role": role}).scalar_one():
        raise ClusterConflict(f'{where} has no role "{role}"', hint="Create it on every server first.")


def grant(catalog: Catalog, role: str, shards: Iterable[int] | None = None, *, dry_run: bool = False) -> int:
    """Let a role read the catalog, and draw, reserve and decode IDs on the shards (default: all).

    Returns the number of shards. Runs one transaction per node, and commits them once all have succeeded;
    with ``dry_run`` it rolls all of them back.

    Raises:
        ClusterConflict: a server has no such role; nothing was changed.
    """
    placement = catalog.placement()
    per_node = placement.by_node(shards)
    is_everywhere = {*chain.from_iterable(per_node.values())} == {*placement.node_of}
    with ExitStack() as stack:
        if is_everywhere:
            stack.enter_context(recording(catalog, f"grant {role}", dry_run=dry_run))
        transactions = []
        reading = stack.enter_context(catalog.engine.connect())
        transactions.append(reading.begin())
        _require_role(reading, role, "the catalog's server")
        reading.execute(text("select shardids_catalog.grant_usage(:role)"), {"role": role})
        nodes = stack.enter_context(Nodes(placement.nodes, catalog.url))
        for name, numbers in per_node.items():
            connection = stack.enter_context(nodes[name].connect())
            transactions.append(connection.begin())
            _require_role(connection, role, f'node "{name}"')
            connection.execute(
                text("select shardids.grant_usage(:shards, :role)"),
                {"shards": numbers, "role": role},
            )
        for transaction in transactions:
            if not dry_run:
                transaction.commit()
    return sum(map(len, per_node.values()))
