"""Checks of the places of shards: the catalog's placement and regions, compared with the nodes' shards."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from shardids.catalog.regions import in_region
from shardids.errors import ConnectionFailed
from shardids.pg.notation import counted, named_nodes, named_shards, shown_shards
from shardids.pg.queries import DROPPED_MEANWHILE, quoted
from shardids.pg.urls import parse_url, shown_url
from shardids.watch.doctor.findings import (
    Command,
    Found,
    Severity,
    call,
    check,
    grouped,
    in_shell,
    literal,
    on_catalog,
    on_node,
    step,
)
from shardids.watch.facts.cluster import ClusterFacts, ServerFacts, ShardState


@check(
    "node-unreachable",
    Severity.ERROR,
    remedy="Start it or correct its address; if it is lost, promote its standby: `shardids node replace`.",
)
def node_unreachable(facts: ClusterFacts) -> Iterator[Found]:
    """A node does not answer, or refuses the login."""
    for name, node in facts.nodes.items():
        if isinstance(node.error, ConnectionFailed):
            held = tuple(sorted(shard for shard, placed in facts.placed.items() if placed.node == name))
            is_refused = node.error.has_answered
            yield Found(
                what=f"{node.error.message}; it holds {counted(len(held), 'shard')}",
                to_do=node.error.hint
                if is_refused
                else "If its server is only stopped, start it. If it is lost, keep it off the network,"
                " promote its standby, and follow these steps, with $STANDBY as the URL of the node's"
                " database there (docs/how-to/lost-node.md)",
                commands=() if is_refused else _take_over(name),
                nodes=(name,),
                shards=held,
            )


def _take_over(name: str) -> Commands:
    """Return the steps that put a promoted standby in a lost node's place."""
    replace = f'shardids node replace {shlex.quote(name)} --url "$STANDBY"'
    return (
        step(
            "Is the standby promoted? It answers f then", 'psql "$STANDBY" -Atc "select pg_is_in_recovery()"'
        ),
        step("See the plan", f"{replace} --dry-run"),
        step("Put the standby in its place: applications follow", replace),
        step("Examine the cluster", "shardids doctor"),
    )


@check(
    "node-mistaken", Severity.ERROR, remedy="Correct the URL in the catalog, or restore the right database."
)
def node_mistaken(facts: ClusterFacts) -> Iterator[Found]:
    """The database at a node's URL is not that node: no engine, another name, another cluster."""
    for name, node in facts.nodes.items():
        url = shown_url(parse_url(node.node.url))
        if node.server is None:
            if node.error is not None and not isinstance(node.error, ConnectionFailed):
                yield Found(
                    what=f"{url} cannot be read as a node: {node.error.message}",
                    to_do=node.error.hint
                    or f"To put a new, empty node in its place: shardids node add {name} --url {url}",
                    nodes=(name,),
                )
        elif (node.server.name, node.server.cluster) != (name, facts.description.cluster):
            yield Found(
                what=f'{url} calls itself node "{node.server.name}" of cluster {node.server.cluster}, where'
                f' the catalog expects node "{name}" of cluster {facts.description.cluster}',
                to_do="Correct the node's URL in shardids_catalog.node, or restore the right database there.",
                nodes=(name,),
            )


@check("node-unread", Severity.WARNING, remedy="Correct the cause that the message names, and examine again.")
def node_unread(facts: ClusterFacts) -> Iterator[Found]:
    """Not all of a node could be read, so not all of it was checked."""
    for name, node in facts.nodes.items():
        if node.server and (error := node.error) and not isinstance(error, ConnectionFailed):
            is_passing = error.sqlstate in DROPPED_MEANWHILE and (facts.is_migrating or facts.moves)
            yield Found(
                what=f"the node could not be read completely: {error.message}",
                to_do=error.hint or "Examine again, as a role that may read it",
                nodes=(name,),
                severity=Severity.INFO if is_passing else None,
            )


@check("node-read-only", Severity.ERROR, remedy="Point its URL at the primary, or promote it.")
def node_read_only(facts: ClusterFacts) -> Iterator[Found]:
    """A node is a standby, or accepts no writes."""
    for name, node in facts.nodes.items():
        if node.server and (node.server.is_standby or node.server.is_read_only):
            standby = node.server.is_standby
            yield Found(
                what="is a standby"
                if standby
                else "has default_transaction_read_only on, so it accepts no writes"
                f" (set by: {node.server.read_only_source})",
                to_do="Point the node's URL at the primary, or promote this server if the primary is gone"
                if standby
                else "Reset the setting; sessions that are connected keep it until they reconnect",
                commands=on_node(name, "select pg_promote();")
                if standby
                else _allow_writes(name, node.server),
                nodes=(name,),
            )


def _allow_writes(name: str, server: ServerFacts) -> Commands:
    """Reset default_transaction_read_only where it is set; in a file that this can't know, nowhere."""
    setting = "default_transaction_read_only"
    # In a session that may write: these statements are writes, too.
    may_write = f"set {setting} = off;"
    match server.read_only_source:
        case "database":
            reset = f"alter database {quoted(server.database)} reset {setting};"
        case "user":
            reset = f"alter role {quoted(server.role)} reset {setting};"
        case "database user":
            reset = f"alter role {quoted(server.role)} in database {quoted(server.database)} reset {setting};"
        case "configuration file":
            return on_node(name, f"alter system set {setting} = off;", "select pg_reload_conf();")
        case _:
            return ()
    return on_node(name, may_write, reset)


Names = tuple[str, ...]
Commands = tuple[Command, ...]


def _active_on(facts: ClusterFacts) -> dict[int, Names]:
    """Return the nodes where each shard may issue IDs; leave out copies that were not activated."""
    nodes: dict[int, Names] = {}
    for name, node in facts.nodes.items():
        for shard, local in node.states.items():
            if local.state == "active" and local.is_activated_here and local.has_schema:
                nodes[shard] = (*nodes.get(shard, ()), name)
    return nodes


def _settled(facts: ClusterFacts) -> Iterator[tuple[int, str, ShardState | None]]:
    """Yield every shard whose owner answers and that is not being moved: shard, node, state there."""
    for shard, placed in facts.placed.items():
        node = facts.nodes[placed.node]
        is_known = node.server is not None and (shard in node.states or node.has_all_states)
        if is_known and placed.state == "active" and shard not in facts.moving:
            yield shard, placed.node, node.states.get(shard)


@check("shard-on-two-nodes", Severity.ERROR, remedy="Fence it on the node that the catalog does not name.")
def shard_on_two_nodes(facts: ClusterFacts) -> Iterator[Found]:
    """A shard is active on more than one node."""
    twice = ((names, shard) for shard, names in _active_on(facts).items() if len(names) > 1)
    for names, shards in grouped(twice).items():
        yield Found(
            what=f"{named_shards(shards)}: active on {named_nodes(names)}; both issue IDs, and rows may be"
            " written to either",
            to_do="Fence it on the node that the catalog does not name, compare the rows with those of its"
            " owner, and drop that schema or keep it as an old copy",
            commands=tuple(
                command
                for name in names
                if (others := [shard for shard in shards if not facts.owns(name, shard)])
                for command in on_node(name, call("fence", others))
            ),
            nodes=names,
            shards=shards,
        )


@check(
    "shard-on-no-node",
    Severity.ERROR,
    remedy="Restore its schema from a backup, and activate it; or accept the loss of its rows: `shardids node"
    " replace`.",
)
def shard_on_no_node(facts: ClusterFacts) -> Iterator[Found]:
    """The node that should hold a shard does not have it, or its schema was dropped; nor has any other."""
    active = _active_on(facts)
    missing = (
        (node, shard)
        for shard, node, local in _settled(facts)
        if (local is None or not local.has_schema) and shard not in active
    )
    for node, shards in grouped(missing).items():
        url = shown_url(parse_url(facts.nodes[node].node.url))
        yield Found(
            what=f'{named_shards(shards)}: the schema is gone from the owner, node "{node}", and its rows are'
            " lost there; not active on any other node that answers",
            to_do=f'Restore the schema on node "{node}" from a backup (docs/how-to/restore-and-upgrade.md),'
            f" then activate the shard there: shardids shard activate {shown_shards(shards)}\n"
            "Or accept the loss of rows without a copy: see the dry run, then repeat it with --yes instead of"
            " --dry-run. A shard without any copy is empty then: shardids migrate up",
            commands=in_shell(
                f"shardids node replace {node} --url {shlex.quote(url)} --accept-loss {shown_shards(shards)}"
                " --dry-run"
            ),
            nodes=(node,),
            shards=shards,
        )


@check("shard-misplaced", Severity.ERROR, remedy="Correct the catalog: `shardids shard place`.")
def shard_misplaced(facts: ClusterFacts) -> Iterator[Found]:
    """A shard is active on another node than the catalog says, or the catalog does not know it."""
    active = _active_on(facts)
    elsewhere = (
        ((node, names), shard)
        for shard, node, local in _settled(facts)
        if (names := active.get(shard, ())) and node not in names
    )
    for (node, names), shards in grouped(elsewhere).items():
        yield Found(
            what=f'{named_shards(shards)}: active on {named_nodes(names)}; the catalog says node "{node}"',
            to_do="Correct the catalog: the command examines all nodes first",
            commands=in_shell(f"shardids shard place {shown_shards(shards)} --node {shlex.quote(names[0])}"),
            nodes=(node, *names),
            shards=shards,
        )
    unknown = ((names, shard) for shard, names in active.items() if shard not in facts.placed)
    for names, shards in grouped(unknown).items():
        known = max(shards) < facts.description.shard_count
        yield Found(
            what=f"{named_shards(shards)}: active on {named_nodes(names)}, and not in the catalog",
            to_do="Enter it in the catalog" if known else "Its number is outside the cluster: fence it",
            commands=in_shell(f"shardids shard create {shown_shards(shards)} --node {names[0]}")
            if known
            else on_node(names[0], call("fence", shards)),
            nodes=names,
            shards=shards,
        )


@check(
    "shard-stopped",
    Severity.ERROR,
    remedy="Activate it, if no other copy was active meanwhile. Where a function took its place:"
    " `shardids key function`.",
)
def shard_stopped(facts: ClusterFacts) -> Iterator[Found]:
    """A shard is fenced, or marked as moved, on the node where the catalog places it."""
    active = _active_on(facts)
    stopped = [
        ((node, f'moved to node "{local.moved_to}"' if local.moved_to else "fenced"), shard)
        for shard, node, local in _settled(facts)
        if local and local.state in ("fenced", "moved") and shard not in active
    ]
    # Seen twice: in the time between, a fence would have been committed.
    stopped += [
        ((node, "fenced by a transaction that was rolled back"), shard)
        for shard, node, local in _settled(facts)
        if local and local.state == "active" and (draws := facts.nodes[node].draws.get(shard))
        if all(read.state == "fenced" for read in draws)
    ]
    replaced = [
        (node, shard, facts.nodes[node].issuers[shard][0])
        for (node, _), shard in stopped
        if facts.nodes[node].issuers.get(shard)
    ]
    for node, shard, function in replaced:
        yield Found(
            what=f'shard {shard}: stopped on the owner, node "{node}", where {function} issues its IDs',
            to_do="When the function is to draw from the shard again, let it",
            commands=in_shell(
                f"shardids key function {shlex.quote(function.removesuffix('()'))} --shard {shard}"
            ),
            nodes=(node,),
            shards=(shard,),
            severity=Severity.INFO,
        )
    stopped = [one for one in stopped if one[1] not in {shard for _, shard, _ in replaced}]
    for (node, state), shards in grouped(stopped).items():
        yield Found(
            what=f'{named_shards(shards)}: {state} on the owner, node "{node}", so no node issues IDs',
            to_do="If no other copy was active meanwhile, activate it",
            commands=in_shell(f"shardids shard activate {shown_shards(shards)}"),
            nodes=(node,),
            shards=shards,
        )


@check("shard-unfinished", Severity.WARNING, remedy="Repeat `shardids shard create`.")
def shard_unfinished(facts: ClusterFacts) -> Iterator[Found]:
    """The creation of a shard was interrupted, or is under way."""
    shards = tuple(sorted(shard for shard, placed in facts.placed.items() if placed.state == "creating"))
    if shards:
        yield Found(
            what=f"{named_shards(shards)}: creation was begun and not finished",
            to_do="Repeat the command",
            commands=in_shell(f"shardids shard create {shown_shards(shards)}"),
            shards=shards,
        )


@check(
    "copy-not-activated", Severity.ERROR, remedy="Activate it, if the original will never issue IDs again."
)
def copy_not_activated(facts: ClusterFacts) -> Iterator[Found]:
    """A shard was copied from another server and not activated: it refuses to draw."""
    for name, node in facts.nodes.items():
        copies = [s.shard for s in node.states.values() if s.state == "active" and not s.is_activated_here]
        if node.server and copies:
            warns = node.server.on_copy == "warn"
            yield Found(
                what=f'{named_shards(copies)}: copied to node "{name}" from another server and not activated;'
                f" it {'draws with a warning' if warns else 'refuses to draw (SI004)'}",
                to_do="If the original will never issue IDs again, activate it",
                commands=in_shell(f"shardids shard activate {shown_shards(copies)}"),
                nodes=(name,),
                shards=tuple(sorted(copies)),
                severity=Severity.WARNING if warns else None,
            )


@check(
    "shard-unregistered", Severity.WARNING, remedy="Activate it, or drop it: `shardids shard purge --node`."
)
def shard_unregistered(facts: ClusterFacts) -> Iterator[Found]:
    """A schema with a generator that its node does not know as a shard; an error where it is placed there."""
    for name, node in facts.nodes.items():
        for local in node.states.values():
            if local.state is None and local.shard not in facts.moving:
                placed = facts.placed.get(local.shard)
                yield Found(
                    what=f'schema {local.schema} of node "{name}" has a generator, but no row in'
                    " shardids.shard: it was copied here without it",
                    to_do="To issue IDs here, activate it; if it is not needed, purge it",
                    commands=in_shell(f"shardids shard activate {local.shard}")
                    if placed and placed.node == name
                    else in_shell(f"shardids shard purge {local.shard} --node {shlex.quote(name)}"),
                    nodes=(name,),
                    shards=(local.shard,),
                    thing=local.schema,
                    severity=Severity.ERROR if placed and placed.node == name else None,
                )


@check("shard-incomplete", Severity.ERROR, remedy="Activate it, if these rows are the newest.")
def shard_incomplete(facts: ClusterFacts) -> Iterator[Found]:
    """A shard's sequences are not those that it was activated with: its schema was dropped and restored."""
    for name, node in facts.nodes.items():
        shards = tuple(
            s.shard
            for s in node.states.values()
            if s.state is not None and s.has_schema and not s.has_sequences
        )
        if shards:
            yield Found(
                what=f'{named_shards(shards)} of node "{name}": the sequences are not those that it was'
                " activated with; they, or the whole schema, were dropped and restored",
                to_do="If these rows are the newest, activate it: shardids shard activate"
                f" {shown_shards(shards)}",
                nodes=(name,),
                shards=shards,
            )


def _is_outside(facts: ClusterFacts, shard: int, node: str) -> bool:
    return facts.region_of.get(shard) != facts.nodes[node].node.region


@check("shard-outside-region", Severity.WARNING, remedy="`shardids rebalance`, which moves it there.")
def shard_outside_region(facts: ClusterFacts) -> Iterator[Found]:
    """A shard lives on a node that is not of its region."""
    outside = (
        ((placed.node, facts.region_of.get(shard)), shard)
        for shard, placed in facts.placed.items()
        if placed.state == "active" and shard not in facts.moving and _is_outside(facts, shard, placed.node)
    )
    for (name, region), shards in grouped(outside).items():
        has_node = any(node.node.region == region for node in facts.nodes.values())
        if has_node:
            to_do, commands = "Bring it home", in_shell("shardids rebalance")
        else:
            to_do, commands = f"No node is {in_region(region)}: add or assign one, then rebalance", ()
        yield Found(
            what=f'{named_shards(shards)}: {in_region(region)}, and lives on node "{name}", which is'
            f" {in_region(facts.nodes[name].node.region)}",
            to_do=to_do,
            commands=commands,
            nodes=(name,),
            shards=shards,
        )


def _old_copies(facts: ClusterFacts, *, outside: bool) -> Iterator[tuple[str, list[int]]]:
    """Yield the nodes that have stopped old copies, outside of their region or not, with the shards."""
    for name, node in facts.nodes.items():
        old = sorted(
            local.shard
            for local in node.states.values()
            if local.state in ("fenced", "moved")
            and local.shard not in facts.moving
            and (placed := facts.placed.get(local.shard)) is not None
            and (placed.node != name and placed.state == "active")
            and _is_outside(facts, local.shard, name) == outside
        )
        if old:
            yield name, old


@check(
    "copy-outside-region", Severity.WARNING, remedy="`shardids shard purge`: its rows are there until then."
)
def copy_outside_region(facts: ClusterFacts) -> Iterator[Found]:
    """A moved shard's old copy, stopped, on a node that is not of its region."""
    for name, old in _old_copies(facts, outside=True):
        yield Found(
            what=f'{named_shards(old)}: node "{name}", which is not of its region, keeps a stopped old copy'
            " with its rows",
            to_do="Purge it",
            commands=in_shell(f"shardids shard purge {shown_shards(old)}"),
            nodes=(name,),
            shards=tuple(old),
        )


@check("old-copy", Severity.INFO, remedy="`shardids shard purge`, once it is not needed.")
def old_copy(facts: ClusterFacts) -> Iterator[Found]:
    """A moved shard's old copy, stopped, that was kept."""
    for name, old in _old_copies(facts, outside=False):
        yield Found(
            what=f'{named_shards(old)}: node "{name}" keeps a stopped old copy',
            to_do="When it is not needed any more, purge it",
            commands=in_shell(f"shardids shard purge {shown_shards(old)}"),
            nodes=(name,),
            shards=tuple(old),
        )


@check(
    "key-homeless",
    Severity.ERROR,
    remedy="Bring its shard back, or move the key: `shardids tenant show KEY`.",
)
def key_homeless(facts: ClusterFacts) -> Iterator[Found]:
    """The directory of keys names a shard that is not active, or not of the key's region."""
    for home in facts.homeless:
        placed = facts.placed.get(home.shard)
        state = "not of its region" if placed is None or placed.state == "active" else placed.state
        yield Found(
            what=f"key {home.key[:60]!r} of kind {home.kind} lives in shard {home.shard}, which is {state}",
            to_do="Bring the shard back, or move the key",
            commands=in_shell(f"shardids tenant show {shlex.quote(home.key)} --kind {home.kind}"),
            shards=(home.shard,),
        )


@check(
    "key-refused",
    Severity.ERROR,
    remedy="Make the shard that has its rows its home, as the finding says.",
)
def key_refused(facts: ClusterFacts) -> Iterator[Found]:
    """The directory leads a key to a shard that refuses it: the catalog has lost the switch of a move."""
    for one in facts.misled:
        yield Found(
            what=f"key {one.key[:60]!r} lives in shard {one.shard} by the directory of keys, and that shard"
            f" refuses it: it has left for shard {one.target} by move {one.move}, and the catalog lacks it",
            to_do=f"Look which shard has its rows, and make shard {one.target} its home if they are there",
            commands=on_catalog(
                "insert into shardids_catalog.key_home (kind, key, shard)"
                f" values ({literal(one.kind)}, {literal(one.key)}, {one.target})"
                " on conflict (kind, key) do update set shard = excluded.shard;",
                f"update shardids_catalog.moved_key set shard = {one.target}"
                f" where kind = {literal(one.kind)} and key = {literal(one.key)};",
            ),
            shards=(one.shard, one.target),
            thing=one.key,
        )


@check(
    "directory-copy",
    Severity.WARNING,
    remedy="Bring the copies up to date: `shardids tenant sync`.",
)
def directory_copy(facts: ClusterFacts) -> Iterator[Found]:
    """A node's copy of the directory of keys differs from the catalog: SQL there misses keys that moved."""
    wanted = facts.homes
    for name, node in facts.nodes.items():
        if wanted is None or node.homes is None or node.homes == wanted:
            continue
        yield Found(
            what=f'node "{name}" has {node.homes.keys} keys of the directory at version {node.homes.version},'
            f" the catalog {wanted.keys} at version {wanted.version}",
            to_do="Bring the copies up to date",
            commands=in_shell("shardids tenant sync"),
            nodes=(name,),
        )
