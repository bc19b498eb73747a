"""The commands of ``shardids migrate`` that change nothing: status, history, check, sql and lint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from shardids.catalog.notation import named_shards, parse_duration_ms, shown_shards
from shardids.cli.common import CatalogOption, JsonOption, print_json
from shardids.cli.migrate_options import (
    FOLDER,
    DirOption,
    LockTimeoutOption,
    NodesOption,
    ShardsOption,
    StatementTimeoutOption,
    chosen,
    migration_of,
)
from shardids.cli.output import err, out, print_rows
from shardids.errors import BadArgument
from shardids.migrate import scaffold
from shardids.migrate.compiled import Compiler
from shardids.migrate.environment import Environment, contract_of
from shardids.migrate.hashes import Recorded
from shardids.migrate.lint import lint as squawk
from shardids.migrate.lint import node_wide
from shardids.migrate.migration import Migration
from shardids.migrate.node_revisions import pending_on_node
from shardids.migrate.plan import Start, shown_heads
from shardids.migrate.player import Limits
from shardids.migrate.script import write_scripts
from shardids.migrate.status import Standing, compare_with_code, edited_for_node, unlike


def status(
    catalog: CatalogOption,
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which shards are at which revision, what is pending, and what was edited since it ran (exit 3)."""
    with migration_of(catalog, folder) as migration:
        state = migration.state(chosen(migration, shards, nodes))
        recorded = migration.recorded(migration.nodes).results
        found = compare_with_code(migration.environment, state, recorded)
        on_nodes = _node_standing(migration, recorded)
    rows = [
        {"node": node, "revision": shown_heads(heads), "shards": count}
        for (node, heads), count in found.counts.items()
    ]
    if as_json:
        print_json(_as_json(rows, found) | {"nodes": on_nodes})
    else:
        print_rows(rows, as_json=False, empty="")
        _print_node_remarks(on_nodes)
        _print_remarks(found)
    if found.state.down or found.state.unread:
        raise typer.Exit(1)
    if found.edited or any(node["edited"] for node in on_nodes):
        raise typer.Exit(3)


def _node_standing(
    migration: Migration, recorded: Mapping[str, Sequence[Recorded]]
) -> list[dict[str, object]]:
    """Returns the revision of each node, and what is pending or edited there, without nodes that are down."""
    environment = migration.node_environment
    if environment is None:
        return []
    return [
        {
            "node": name,
            "revision": shown_heads(heads),
            "pending": pending_on_node(environment, heads),
            "edited": edited_for_node(environment, heads, recorded[name]),
        }
        for name, heads in sorted(migration.node_heads(recorded).results.items())
    ]


def _print_node_remarks(nodes: list[dict[str, object]]) -> None:
    for node in nodes:
        pending = cast("list[str]", node["pending"])
        if pending:
            out.print(f"Pending on node {node['node']}: {', '.join(pending)}", markup=False)
        for revision in cast("list[str]", node["edited"]):
            out.print(f"Edited since it ran on node {node['node']}: {revision}", markup=False)


def _as_json(rows: list[dict[str, object]], found: Standing) -> dict[str, object]:
    return {
        "revisions": rows,
        "stragglers": [
            {"shard": p.shard, "node": p.node, "revision": shown_heads(p.heads)} for p in found.stragglers
        ],
        "unfinished": [{"shard": p.shard, "node": p.node, "mark": p.unfinished} for p in found.unfinished],
        "pending": [{"revision": revision, "message": message} for revision, message in found.pending],
        "edited": [
            {
                "revision": one.revision,
                "message": one.message,
                "shards": shown_shards(one.shards),
                "ran": one.ran,
                "now": one.now,
            }
            for one in found.edited
        ],
        "down": {node: error.message for node, error in found.state.down.items()},
        "missing": {str(shard): error.message for shard, error in found.state.unread.items()},
    }


def _print_remarks(found: Standing) -> None:
    for error in (*found.state.down.values(), *found.state.unread.values()):
        err.print(error.message, markup=False)
    if found.stragglers:
        out.print(f"Behind the others: {shown_shards(p.shard for p in found.stragglers)}")
    for position in found.unfinished:
        out.print(f"Half way: shard {position.shard}, {position.unfinished}", markup=False)
    for one in found.edited:
        where = named_shards(one.shards)
        out.print(f"Edited since it ran in {where}: {one.revision} {one.message}", markup=False)
    for revision, message in found.pending:
        out.print(f"Pending: {revision} {message}", markup=False)
    if not found.pending and not found.state.down:
        out.print("All shards are at the newest revision")


def history(folder: DirOption = FOLDER, as_json: JsonOption = False) -> None:
    """List the revisions, the newest first."""
    environment = Environment.at(folder)
    of_nodes = environment.of_nodes()
    branches = [environment] if of_nodes is None else [of_nodes, environment]
    rows = [
        {
            "revision": script.revision,
            "after": shown_heads(tuple(sorted(script._versioned_down_revisions))),
            "message": script.doc,
            "": " ".join(
                word
                for word, true in (
                    ("node", branch is of_nodes),
                    ("head", script.revision in branch.heads),
                    ("contract", contract_of(script) is not None),
                )
                if true
            ),
        }
        for branch in branches
        for script in branch.script.walk_revisions()
    ]
    print_rows(rows, as_json=as_json, empty="No revision yet. To write one: shardids migrate revision -m …")


def check(
    catalog: CatalogOption,
    folder: DirOption = FOLDER,
    shard: Annotated[int | None, typer.Option(help="The shard to compare with (default: the first).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also compare every shard with that one.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the models with a shard, and with --all that shard with every other. Exit 3 if they differ."""
    with migration_of(catalog, folder) as migration:
        reference = migration.choose(None if shard is None else [shard])[0]
        environment = migration.environment
        compiled = Compiler(environment, "up").compile(environment.route(None, environment.head(), "up"))
        shared = node_wide(environment, [compiled])
        lines = [str(one) for one in shared] + scaffold.drift(migration, reference)
        others = unlike(migration.nodes, migration.placement, reference, migration.choose()) if every else []
    rows: list[dict[str, object]] = [
        {"shard": reference, "node": migration.placement.node_of[reference], "difference": line}
        for line in lines
    ]
    rows += [
        {"shard": other.shard, "node": other.node, "difference": line}
        for other in others
        for line in other.lines
    ]
    print_rows(rows, as_json=as_json, empty="No difference")
    if rows:
        raise typer.Exit(3)


def sql(
    catalog: CatalogOption,
    between: Annotated[str, typer.Argument(metavar="FROM:TO", help="Two revisions, for example base:head.")],
    folder: DirOption = FOLDER,
    to: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write one file a node there, NODE.sql.")
    ] = None,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    lock_timeout: LockTimeoutOption = "2s",
    statement_timeout: StatementTimeoutOption = "0",
) -> None:
    """Write SQL for psql, one file per node, that takes the shards at FROM to TO and records it."""
    limits = Limits(
        lock_timeout_ms=parse_duration_ms(lock_timeout),
        statement_timeout_ms=parse_duration_ms(statement_timeout),
    )
    with migration_of(catalog, folder) as migration:
        start, target = _between(migration.environment, between)
        scripts = write_scripts(migration, start, target, chosen(migration, shards, nodes), limits)
    if to is None and len(scripts.of_node) > 1:
        raise BadArgument(
            f"the shards are on {len(scripts.of_node)} nodes, each of which needs its own file",
            hint="Name a folder for them (--out DIR), or one node (--nodes).",
        )
    for node, text in scripts.of_node.items():
        if to is None:
            typer.echo(text)
        else:
            to.mkdir(parents=True, exist_ok=True)
            (to / f"{node}.sql").write_text(text, encoding="utf-8")
            out.print(f"Wrote {to / f'{node}.sql'}", markup=False)
    if scripts.elsewhere:
        err.print(
            f"Not at {start}, so left out: {shown_shards(p.shard for p in scripts.elsewhere)}", markup=False
        )


def lint(
    between: Annotated[
        str | None, typer.Argument(metavar="[FROM:TO]", help="Two revisions (default: the newest revision).")
    ] = None,
    folder: DirOption = FOLDER,
    as_json: JsonOption = False,
) -> None:
    """Check the SQL of revisions for what is not safe under load. Exit 3 if something is found."""
    environment = Environment.at(folder)
    start, target = _between(environment, between)
    heads: Start = None if start == "base" else (start,)
    compiled = Compiler(environment, "up").compile(environment.route(heads, target, "up"))
    if compiled.reason:
        raise BadArgument(f"there is no SQL to check: {compiled.reason}", hint="Name a range without it.")
    findings = squawk(compiled)
    print_rows([finding.row() for finding in findings], as_json=as_json, empty="Nothing found")
    if findings:
        raise typer.Exit(3)


def _between(environment: Environment, between: str | None) -> tuple[str, str]:
    if between is None:
        newest = environment.revision(environment.head())
        return next(iter(sorted(newest._versioned_down_revisions)), "base"), newest.revision
    start, colon, target = between.partition(":")
    if not (start and colon and target):
        raise BadArgument(
            f"{between!r} is not a range of revisions", hint="For example: base:head, or 8bb6aa:head"
        )
    return environment.target(start, "up"), environment.target(target, "up")
