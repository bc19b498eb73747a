"""``shardids migrate``: writes revisions, and runs them on all shards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from shardids.cli.command import OnBusyOption, Run, refuse, takes
from shardids.cli.printing import err, out, print_json, print_rows, print_warnings
from shardids.errors import BadArgument
from shardids.pg.notation import named_shards, parse_duration_ms, parse_shards, shown_shards

if TYPE_CHECKING:
    from shardids.migrate.drops import Dropped
    from shardids.migrate.environment import Direction, Environment, Recorded
    from shardids.migrate.migration import Migration, PreparedRun
    from shardids.migrate.runner import RunSettings
    from shardids.migrate.status import Standing

# Mako, which Alembic loads, would load Pygments to colour its error pages: a tenth of the command's start.
sys.modules.setdefault("mako.ext.pygmentplugin", None)  # type: ignore[arg-type] # None: it can't be imported

DirOption = Annotated[
    Path,
    typer.Option(
        "--dir", envvar="SHARDIDS_MIGRATIONS", metavar="DIR", help="The folder with env.py and versions/."
    ),
]
ShardsOption = Annotated[str | None, typer.Option(help="Only these: numbers and ranges, 0-31,40.")]
NodesOption = Annotated[str | None, typer.Option(help="Only shards on these nodes: a,b.")]
FOLDER = Path("migrations")
_RETRIES = 5
_OF_RUNS = ("jobs", "retries", "continue_on_error", "on_busy")
"""Options of a run that do not apply to its SQL."""
CanaryOption = Annotated[
    int, typer.Option(min=0, help="Migrate N shards first, one at a time; if one fails, begin no others.")
]
JobsOption = Annotated[int, typer.Option(min=1, max=64, help="Migrate N shards at once on each node.")]
LockTimeoutOption = Annotated[str, typer.Option(help="Longest wait for a lock before a retry: 2s, 500ms.")]
StatementTimeoutOption = Annotated[str, typer.Option(help="Longest time for a statement; 0 means no limit.")]
RetriesOption = Annotated[int, typer.Option(min=0, help="Retries after a lock timeout or a lost connection.")]
ContinueOption = Annotated[
    bool,
    typer.Option(
        "--continue-on-error/--stop",
        help="After a failure, continue with the other shards, or begin no more.",
    ),
]
ShowSqlOption = Annotated[
    bool, typer.Option("--show-sql", help="Print the SQL that will run, once for each starting point.")
]
SqlOption = Annotated[
    bool,
    typer.Option("--sql", help="Run nothing: print SQL for psql that takes a node's shards from FROM to TO."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="With --sql: write NODE.sql there for each node."),
]


@contextmanager
def migration_of(run: Run, folder: Path) -> Iterator[Migration]:
    """Open the cluster and the environment, and close them."""
    from shardids.migrate.environment import Environment
    from shardids.migrate.migration import Migration

    environment = Environment.at(folder)
    with Migration(run.catalog, environment) as migration:
        yield migration


def chosen(migration: Migration, shards: str | None, nodes: str | None) -> list[int]:
    """Return the shards that ``--shards`` and ``--nodes`` choose."""
    count = migration.catalog.shard_total() if shards is not None else 0
    numbers = None if shards in (None, "all") else parse_shards(str(shards), count)
    return migration.choose(numbers, None if nodes is None else [name.strip() for name in nodes.split(",")])


app = typer.Typer(help="Change the tables of every shard, with Alembic.", no_args_is_help=True)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet.")],
    models: Annotated[
        str, typer.Option(metavar="PACKAGE.MODULE:BASE", help="The models: a declarative base, or metadata.")
    ],
    message: Annotated[
        str, typer.Option("--message", "-m", help="The message of the first revision.")
    ] = "the models",
) -> None:
    """Create an Alembic environment with a first revision that creates the models' tables."""
    from shardids.migrate import scaffold

    path = scaffold.init(folder, models, message)
    out.print(f"Created {folder} with its first revision, {path.name}")
    err.print(f"Read it, and run it on all shards: shardids migrate up --dir {folder}")


@app.command()
@takes("catalog?", "json")
def revision(
    run: Run,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="The purpose of the revision, in a few words.")
    ] = None,
    folder: DirOption = FOLDER,
    autogenerate: Annotated[
        bool,
        typer.Option(
            "--autogenerate", help="Write the differences between the models and a shard of --catalog."
        ),
    ] = False,
    for_nodes: Annotated[
        bool, typer.Option("--node", help="Write a revision that runs once on each node.")
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge several heads.")] = False,
    shard: Annotated[
        int | None, typer.Option(help="With --autogenerate: the shard to compare with (default: the first).")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Write nothing: list the revisions, the newest first.")
    ] = False,
) -> None:
    """Write a new revision."""
    from shardids.migrate import scaffold
    from shardids.migrate.environment import Environment

    if listed:
        refuse(
            "to --list",
            message=message,
            autogenerate=autogenerate,
            node=for_nodes,
            merge=merge,
            shard=shard is not None,
        )
        run.print_rows(
            _revisions(Environment.at(folder)),
            empty="No revision yet. To write one: shardids migrate revision -m …",
        )
        return
    refuse("without --list", json=run.as_json)
    if message is None:
        raise BadArgument("the revision has no message", hint='Say its purpose: -m "add a column"')
    if for_nodes or merge:
        refuse(
            "to --node" if for_nodes else "to --merge", autogenerate=autogenerate, merge=for_nodes and merge
        )
    if not autogenerate:
        refuse("without --autogenerate", shard=shard is not None)
        environment = Environment.at(folder)
        if merge:
            path = scaffold.merge(environment, message)
        else:
            path = scaffold.revision(environment, message, for_nodes=for_nodes)
    else:
        with migration_of(run, folder) as migration:
            reference = migration.choose()[0] if shard is None else migration.choose([shard])[0]
            made = scaffold.autogenerate(migration, message, reference, tell=err.print)
        path = made.path
        if made.drops:
            print_warnings(
                [f"{path.name} drops {', '.join(made.drops)}, with all rows: read it before it runs"]
            )
    out.print(f"Created {path}")


def _revisions(environment: Environment) -> list[dict[str, object]]:
    from shardids.migrate.environment import contract_of, is_destructive
    from shardids.migrate.plan import shown_heads

    of_nodes = environment.of_nodes()
    branches = [environment] if of_nodes is None else [of_nodes, environment]
    return [
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
                    ("destructive", is_destructive(script)),
                )
                if true
            ),
        }
        for branch in branches
        for script in branch.script.walk_revisions()
    ]


@app.command(context_settings={"ignore_unknown_options": True})
@takes("catalog", "dry-run", "allow-drop", "json")
def up(
    run: Run,
    target: Annotated[
        str,
        typer.Argument(
            metavar="[REV]",
            help="A revision, its first letters, head, or +N. With --sql: FROM:TO, base:head.",
        ),
    ] = "head",
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    jobs: JobsOption = 1,
    canary: CanaryOption = 1,
    contract: Annotated[
        bool, typer.Option("--contract", help="Also run revisions that are marked as contracts.")
    ] = False,
    show_sql: ShowSqlOption = False,
    as_script: SqlOption = False,
    to: OutOption = None,
    lock_timeout: LockTimeoutOption = "2s",
    statement_timeout: StatementTimeoutOption = "0",
    retries: RetriesOption = _RETRIES,
    continue_on_error: ContinueOption = False,
    on_busy: OnBusyOption = "wait",
) -> None:
    """Bring shards to the newest revision, or to REV. A shard that is already there costs nothing."""
    settings = _settings(jobs, retries, continue_on_error, lock_timeout, statement_timeout, on_busy)
    if as_script:
        others = {"canary": canary != 1, "show_sql": show_sql, "contract": contract}
        _write_scripts(run, "up", target, folder, to, (shards, nodes), settings, others)
        return
    refuse("without --sql", out=to)
    with migration_of(run, folder) as migration:
        numbers = chosen(migration, shards, nodes)
        prepared = migration.prepare(
            target, "up", numbers, canaries=canary, contract=contract, continue_on_error=continue_on_error
        )
        words = ["shardids", "migrate", "up", *([] if target == "head" else [prepared.target])]
        words += _words(run.url, folder, settings, canary) + (["--contract"] if contract else [])
        _carry_out(run, migration, prepared, settings, words, show_sql=show_sql)
        if prepared.held_back and not run.as_json:
            err.print(
                f"Stopped before {prepared.held_back}, a contract. Once no application uses what it drops:"
                " shardids migrate up --contract"
            )


@app.command(context_settings={"ignore_unknown_options": True})
@takes("catalog", "dry-run", "allow-drop", "json")
def down(
    run: Run,
    target: Annotated[
        str, typer.Argument(metavar="[REV]", help="A revision, base, or -N. With --sql: FROM:TO, head:base.")
    ] = "-1",
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    jobs: JobsOption = 1,
    canary: CanaryOption = 1,
    show_sql: ShowSqlOption = False,
    as_script: SqlOption = False,
    to: OutOption = None,
    lock_timeout: LockTimeoutOption = "2s",
    statement_timeout: StatementTimeoutOption = "0",
    retries: RetriesOption = _RETRIES,
    continue_on_error: ContinueOption = False,
    on_busy: OnBusyOption = "wait",
) -> None:
    """Undo revisions down to REV; by default one, counted from the newest that any shard is at."""
    settings = _settings(jobs, retries, continue_on_error, lock_timeout, statement_timeout, on_busy)
    if as_script:
        others = {"canary": canary != 1, "show_sql": show_sql}
        _write_scripts(run, "down", target, folder, to, (shards, nodes), settings, others)
        return
    refuse("without --sql", out=to)
    with migration_of(run, folder) as migration:
        numbers = chosen(migration, shards, nodes)
        prepared = migration.prepare(
            target, "down", numbers, canaries=canary, continue_on_error=continue_on_error
        )
        words = ["shardids", "migrate", "down", prepared.target, *_words(run.url, folder, settings, canary)]
        _carry_out(run, migration, prepared, settings, words, show_sql=show_sql)


@app.command()
@takes("catalog", "dry-run", "json")
def stamp(
    run: Run,
    revision: Annotated[str, typer.Argument(metavar="REV", help="A revision, head or base.")],
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    continue_on_error: ContinueOption = False,
    on_busy: OnBusyOption = "wait",
) -> None:
    """Record that shards are at REV, without running anything."""
    from shardids.catalog.leases import OnBusy
    from shardids.migrate.migration import prepare_stamp
    from shardids.migrate.runner import RunSettings

    settings = RunSettings(continue_on_error=continue_on_error, on_busy=OnBusy(on_busy))
    with migration_of(run, folder) as migration:
        numbers = chosen(migration, shards, nodes)
        prepared = prepare_stamp(migration, revision, numbers, continue_on_error=continue_on_error)
        words = ["shardids", "migrate", "stamp", revision, *_words(run.url, folder, settings, None)]
        _carry_out(run, migration, prepared, settings, words, show_sql=False)


def _settings(
    jobs: int, retries: int, continue_on_error: bool, lock_timeout: str, statement_timeout: str, on_busy: str
) -> RunSettings:
    from shardids.catalog.leases import OnBusy
    from shardids.migrate.player import Limits
    from shardids.migrate.runner import RunSettings

    return RunSettings(
        jobs=jobs,
        retries=retries,
        continue_on_error=continue_on_error,
        limits=Limits(
            lock_timeout_ms=parse_duration_ms(lock_timeout),
            statement_timeout_ms=parse_duration_ms(statement_timeout),
        ),
        on_busy=OnBusy(on_busy),
    )


def _words(catalog: str, folder: Path, settings: RunSettings, canary: int | None) -> list[str]:
    """Return the options that a retry command needs."""
    from shardids.migrate.runner import RunSettings
    from shardids.pg.urls import parse_url, shown_url

    default = RunSettings()
    words = []
    if catalog != os.environ.get("SHARDIDS_CATALOG"):
        # The URL without its password: no command prints one.
        words += ["--catalog", shown_url(parse_url(catalog))]
    if str(folder) != os.environ.get("SHARDIDS_MIGRATIONS", str(FOLDER)):
        words += ["--dir", str(folder)]
    for option, value, usual in (
        ("--jobs", settings.jobs, default.jobs),
        ("--retries", settings.retries, default.retries),
        ("--canary", canary, 1 if canary is not None else None),
    ):
        words += [] if value == usual else [option, str(value)]
    for option, milliseconds, usual_ms in (
        ("--lock-timeout", settings.limits.lock_timeout_ms, default.limits.lock_timeout_ms),
        ("--statement-timeout", settings.limits.statement_timeout_ms, 0),
    ):
        words += [] if milliseconds == usual_ms else [option, f"{milliseconds}ms"]
    words += [] if settings.on_busy == default.on_busy else ["--on-busy", settings.on_busy.value]
    return words + (["--continue-on-error"] if settings.continue_on_error else [])


def _carry_out(
    run: Run,
    migration: Migration,
    prepared: PreparedRun,
    settings: RunSettings,
    words: list[str],
    *,
    show_sql: bool,
) -> None:
    """Carry out the prepared run and report; exits with 1 unless every shard reached the target."""
    from shardids.cli.migrate.shown import (
        Interruption,
        Progress,
        print_plan,
        print_report,
        print_sql,
        print_warnings_of_squawk,
    )
    from shardids.migrate.plan import RunReport
    from shardids.migrate.runner import one_run
    from shardids.tables import views

    if show_sql:
        print_sql(prepared)
    if prepared.direction == "up" and not run.as_json:
        print_warnings_of_squawk(prepared)
    allowed = _allowed_drops(run, migration, prepared)
    if run.dry:
        print_plan(run, prepared)
        return
    if prepared.is_empty:
        report = RunReport(outcomes=(), seconds=0.0)
    else:
        with (
            one_run(migration.catalog, " ".join(words[1:4])) as leases,
            Interruption() as interruption,
            Progress() as progress,
        ):
            report = migration.run(prepared, settings, progress, interruption.stop, leases, allowed=allowed)
    if prepared.nodes:
        from shardids.tables import references

        print_warnings(references.follow(migration.catalog))
    # The query node's views name the columns that the tables had, also after a run that was killed.
    print_warnings(views.follow(migration.catalog))
    print_report(report, prepared, words, as_json=run.as_json)
    if not report.succeeded or report.interrupted:
        raise typer.Exit(1)


def _allowed_drops(run: Run, migration: Migration, prepared: PreparedRun) -> set[Dropped] | None:
    """Ask before rows are dropped; return the drops that are allowed, ``None`` for all."""
    from shardids.migrate.drops import refusal

    losses = [] if run.yes and not run.dry else migration.losses(prepared)
    if run.dry:
        print_warnings(f"the revisions drop {loss}" for loss in losses)
    elif losses:
        words = f"Drop {', '.join(map(str, losses))}?"
        said = "nothing was changed: the revisions drop"
        run.ask(words, refusal=refusal(said, losses, prepared.direction))
    return None if run.yes else {loss.what for loss in losses}


@app.command()
@takes("catalog", "json")
def status(
    run: Run, folder: DirOption = FOLDER, shards: ShardsOption = None, nodes: NodesOption = None
) -> None:
    """Show the revisions of shards, pending ones, and those edited since they ran (exit 3)."""
    from shardids.catalog.leases import visible_leases
    from shardids.migrate.plan import shown_heads
    from shardids.migrate.status import compare_with_code

    with migration_of(run, folder) as migration:
        state = migration.state(chosen(migration, shards, nodes))
        recorded = migration.recorded(migration.nodes).results
        found = compare_with_code(migration.environment, state, recorded)
        on_nodes = _node_standing(migration, recorded)
        leases = visible_leases(migration.catalog, migration.nodes)
    rows = [
        {"node": node, "revision": shown_heads(heads), "shards": count}
        for (node, heads), count in found.counts.items()
    ]
    if run.as_json:
        print_json(_as_json(rows, found) | {"nodes": on_nodes, "leases": [lease.row() for lease in leases]})
    else:
        print_rows(rows)
        _print_node_remarks(on_nodes)
        _print_remarks(found)
        for lease in leases:
            out.print(f"Shard {lease.shard} on node {lease.node}: {lease} ({lease.standing})")
    if found.state.down or found.state.unread:
        raise typer.Exit(1)
    if found.edited or any(node["edited"] for node in on_nodes):
        raise typer.Exit(3)


def _node_standing(
    migration: Migration, recorded: Mapping[str, Sequence[Recorded]]
) -> list[dict[str, object]]:
    """Return the revision of each node, with pending or edited ones, without nodes that are down."""
    from shardids.migrate.node_revisions import pending_on_node
    from shardids.migrate.plan import shown_heads
    from shardids.migrate.status import edited_for_node

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
            out.print(f"Pending on node {node['node']}: {', '.join(pending)}")
        for revision in cast("list[str]", node["edited"]):
            out.print(f"Edited since it ran on node {node['node']}: {revision}")


def _as_json(rows: list[dict[str, object]], found: Standing) -> dict[str, object]:
    from shardids.migrate.plan import shown_heads

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
        err.print(error.message)
    if found.stragglers:
        out.print(f"Behind the others: {shown_shards(p.shard for p in found.stragglers)}")
    for position in found.unfinished:
        out.print(f"Half way: shard {position.shard}, {position.unfinished}")
    for one in found.edited:
        where = named_shards(one.shards)
        out.print(f"Edited since it ran in {where}: {one.revision} {one.message}")
    for revision, message in found.pending:
        out.print(f"Pending: {revision} {message}")
    if not found.pending and not found.state.down:
        out.print("All shards are at the newest revision")


@app.command()
@takes("catalog?", "json")
def check(
    run: Run,
    between: Annotated[
        str | None,
        typer.Argument(
            metavar="[FROM:TO]", help="With --lint: two revisions (default: the newest revision)."
        ),
    ] = None,
    lint: Annotated[
        bool,
        typer.Option(
            "--lint",
            help="Instead, check the SQL of revisions for statements unsafe under load; asks no server.",
        ),
    ] = False,
    folder: DirOption = FOLDER,
    shard: Annotated[int | None, typer.Option(help="The shard to compare with (default: the first).")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also compare every shard with that one.")] = False,
) -> None:
    """Compare the models with a shard, and with --all that shard with every other. Exit 3 if they differ."""
    from shardids.migrate import scaffold
    from shardids.migrate.compiled import Compiler
    from shardids.migrate.lint import node_wide
    from shardids.migrate.status import unlike

    if lint:
        refuse("to --lint", shard=shard is not None, all=every)
        _lint(run, folder, between)
        return
    if between is not None:
        raise BadArgument("FROM:TO goes with --lint", hint=f"shardids migrate check --lint {between}")
    with migration_of(run, folder) as migration:
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
    run.print_rows(rows, empty="No difference")
    if rows:
        raise typer.Exit(3)


def _write_scripts(
    run: Run,
    direction: Direction,
    between: str,
    folder: Path,
    to: Path | None,
    only: tuple[str | None, str | None],
    settings: RunSettings,
    others: Mapping[str, bool],
) -> None:
    """Print or write the SQL of a range; ``others`` are more options that do not apply to that."""
    from shardids.migrate.runner import RunSettings
    from shardids.migrate.script import write_scripts

    applies = RunSettings(limits=settings.limits)
    unfit = {name: getattr(settings, name) != getattr(applies, name) for name in _OF_RUNS}
    refuse("to --sql", **unfit, **others, dry_run=run.dry, allow_drop=run.yes, json=run.as_json)
    with migration_of(run, folder) as migration:
        start, target = _between(migration.environment, between)
        numbers = chosen(migration, *only)
        scripts = write_scripts(migration, direction, start, target, numbers, limits=settings.limits)
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
            out.print(f"Wrote {to / f'{node}.sql'}")
    if scripts.elsewhere:
        err.print(f"Not at {start}, so left out: {shown_shards(p.shard for p in scripts.elsewhere)}")


def _lint(run: Run, folder: Path, between: str | None) -> None:
    from shardids.migrate.compiled import Compiler
    from shardids.migrate.environment import Environment
    from shardids.migrate.lint import lint as squawk
    from shardids.migrate.plan import Start

    environment = Environment.at(folder)
    start, target = _between(environment, between)
    heads: Start = None if start == "base" else (start,)
    compiled = Compiler(environment, "up").compile(environment.route(heads, target, "up"))
    if compiled.reason:
        raise BadArgument(f"there is no SQL to check: {compiled.reason}", hint="Name a range without it.")
    findings = squawk(compiled)
    run.print_rows([finding.row() for finding in findings], empty="Nothing found")
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
