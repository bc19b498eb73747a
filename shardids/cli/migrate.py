"""``shardids migrate``: writes revisions, and runs them on all shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardids import views
from shardids.catalog.notation import parse_duration_ms
from shardids.catalog.urls import parse_url, shown_url
from shardids.cli import migrate_read
from shardids.cli.common import CatalogOption, DryRunOption, JsonOption
from shardids.cli.migrate_options import (
    FOLDER,
    CanaryOption,
    ContinueOption,
    DirOption,
    JobsOption,
    LockTimeoutOption,
    NodesOption,
    RetriesOption,
    ShardsOption,
    ShowSqlOption,
    StatementTimeoutOption,
    chosen,
    migration_of,
)
from shardids.cli.migrate_show import (
    Interruption,
    Progress,
    print_plan,
    print_report,
    print_sql,
    print_warnings_of_squawk,
)
from shardids.cli.output import err, out, print_warnings
from shardids.errors import BadArgument
from shardids.migrate import scaffold
from shardids.migrate.environment import Environment
from shardids.migrate.migration import Migration
from shardids.migrate.player import Limits
from shardids.migrate.prepared import PreparedRun
from shardids.migrate.runner import RunSettings, one_run
from shardids.migrate.stamp import prepare_stamp

app = typer.Typer(help="Change the tables of every shard, with Alembic.", no_args_is_help=True)

app.command()(migrate_read.status)
app.command()(migrate_read.history)
app.command()(migrate_read.check)
app.command()(migrate_read.sql)
app.command()(migrate_read.lint)


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
    path = scaffold.init(folder, models, message)
    out.print(f"Created {folder} with its first revision, {path.name}", markup=False)
    err.print(f"Read it, and run it on all shards: shardids migrate up --dir {folder}", markup=False)


@app.command()
def revision(
    message: Annotated[str, typer.Option("--message", "-m", help="What the revision does, in a few words.")],
    folder: DirOption = FOLDER,
    autogenerate: Annotated[
        bool, typer.Option("--autogenerate", help="Write the differences between the models and a shard.")
    ] = False,
    for_nodes: Annotated[
        bool,
        typer.Option("--node", help="Write a revision that runs once on each node."),
    ] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge several heads.")] = False,
    shard: Annotated[int | None, typer.Option(help="The shard to compare with (default: the first).")] = None,
    catalog: Annotated[
        str | None,
        typer.Option("--catalog", envvar="SHARDIDS_CATALOG", metavar="URL", help="For --autogenerate."),
    ] = None,
) -> None:
    """Write a new revision."""
    if for_nodes and (autogenerate or merge):
        raise BadArgument("--node goes with neither --autogenerate nor --merge")
    if not autogenerate:
        environment = Environment.at(folder)
        if merge:
            path = scaffold.merge(environment, message)
        else:
            path = scaffold.revision(environment, message, for_nodes=for_nodes)
    elif catalog is None:
        raise BadArgument(
            "--autogenerate compares with a shard", hint="Name the cluster: --catalog or SHARDIDS_CATALOG."
        )
    else:
        with migration_of(catalog, folder) as migration:
            reference = migration.choose()[0] if shard is None else migration.choose([shard])[0]
            path = scaffold.autogenerate(migration, message, reference)
    out.print(f"Created {path}", markup=False)


@app.command(context_settings={"ignore_unknown_options": True})
def up(
    catalog: CatalogOption,
    target: Annotated[
        str, typer.Argument(metavar="[REV]", help="A revision, its first letters, head, or +N.")
    ] = "head",
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    jobs: JobsOption = 1,
    canary: CanaryOption = 1,
    contract: Annotated[
        bool, typer.Option("--contract", help="Also run revisions that are marked as contracts.")
    ] = False,
    dry_run: DryRunOption = False,
    show_sql: ShowSqlOption = False,
    lock_timeout: LockTimeoutOption = "2s",
    statement_timeout: StatementTimeoutOption = "0",
    retries: RetriesOption = 5,
    continue_on_error: ContinueOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring shards to the newest revision, or to REV. A shard that is already there costs nothing."""
    settings = _settings(jobs, retries, continue_on_error, lock_timeout, statement_timeout)
    with migration_of(catalog, folder) as migration:
        numbers = chosen(migration, shards, nodes)
        prepared = migration.prepare(
            target, "up", numbers, canaries=canary, contract=contract, continue_on_error=continue_on_error
        )
        words = ["shardids", "migrate", "up", *([] if target == "head" else [prepared.target])]
        words += _words(catalog, folder, settings, canary) + (["--contract"] if contract else [])
        _carry_out(migration, prepared, settings, words, dry_run=dry_run, show_sql=show_sql, as_json=as_json)
        if prepared.held_back and not as_json:
            err.print(
                f"Stopped before {prepared.held_back}, a contract. Once no application uses what it drops:"
                " shardids migrate up --contract",
                markup=False,
            )


@app.command(context_settings={"ignore_unknown_options": True})
def down(
    catalog: CatalogOption,
    target: Annotated[str, typer.Argument(metavar="[REV]", help="A revision, base, or -N.")] = "-1",
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    jobs: JobsOption = 1,
    canary: CanaryOption = 1,
    dry_run: DryRunOption = False,
    show_sql: ShowSqlOption = False,
    lock_timeout: LockTimeoutOption = "2s",
    statement_timeout: StatementTimeoutOption = "0",
    retries: RetriesOption = 5,
    continue_on_error: ContinueOption = False,
    as_json: JsonOption = False,
) -> None:
    """Undo revisions down to REV; by default one, counted from the newest that any shard is at."""
    settings = _settings(jobs, retries, continue_on_error, lock_timeout, statement_timeout)
    with migration_of(catalog, folder) as migration:
        numbers = chosen(migration, shards, nodes)
        prepared = migration.prepare(
            target, "down", numbers, canaries=canary, continue_on_error=continue_on_error
        )
        words = ["shardids", "migrate", "down", prepared.target, *_words(catalog, folder, settings, canary)]
        _carry_out(migration, prepared, settings, words, dry_run=dry_run, show_sql=show_sql, as_json=as_json)


@app.command()
def stamp(
    catalog: CatalogOption,
    revision: Annotated[str, typer.Argument(metavar="REV", help="A revision, head or base.")],
    folder: DirOption = FOLDER,
    shards: ShardsOption = None,
    nodes: NodesOption = None,
    dry_run: DryRunOption = False,
    continue_on_error: ContinueOption = False,
    as_json: JsonOption = False,
) -> None:
    """Record that shards are at REV, without running anything."""
    settings = RunSettings(continue_on_error=continue_on_error)
    with migration_of(catalog, folder) as migration:
        numbers = chosen(migration, shards, nodes)
        prepared = prepare_stamp(migration, revision, numbers, continue_on_error=continue_on_error)
        words = ["shardids", "migrate", "stamp", revision, *_words(catalog, folder, settings, None)]
        _carry_out(migration, prepared, settings, words, dry_run=dry_run, show_sql=False, as_json=as_json)


def _settings(
    jobs: int, retries: int, continue_on_error: bool, lock_timeout: str, statement_timeout: str
) -> RunSettings:
    limits = Limits(
        lock_timeout_ms=parse_duration_ms(lock_timeout),
        statement_timeout_ms=parse_duration_ms(statement_timeout),
    )
    return RunSettings(jobs=jobs, retries=retries, continue_on_error=continue_on_error, limits=limits)


def _words(catalog: str, folder: Path, settings: RunSettings, canary: int | None) -> list[str]:
    """Returns the options that a retry command needs."""
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
    return words + (["--continue-on-error"] if settings.continue_on_error else [])


def _carry_out(
    migration: Migration,
    prepared: PreparedRun,
    settings: RunSettings,
    words: list[str],
    *,
    dry_run: bool,
    show_sql: bool,
    as_json: bool,
) -> None:
    """Carries out the prepared run and reports; exits with 1 unless every shard reached the target."""
    if show_sql:
        print_sql(prepared)
    if prepared.direction == "up" and not as_json:
        print_warnings_of_squawk(prepared)
    if dry_run:
        print_plan(prepared, as_json=as_json)
        return
    with (
        one_run(migration.catalog, " ".join(words[1:4])),
        Interruption() as interruption,
        Progress() as progress,
    ):
        report = migration.run(prepared, settings, progress, interruption.stop)
    if prepared.nodes:
        from shardids import references

        print_warnings(references.follow(migration.catalog))
    # The query node's views name the columns that the tables had.
    print_warnings(views.follow(migration.catalog))
    print_report(report, prepared, words, as_json=as_json)
    if not report.succeeded or report.interrupted:
        raise typer.Exit(1)
