"""``manage.py migrate_shards``: runs the migrations of sharded models in every shard."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from threading import Event
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations

from shardids.catalog.leases import Lease
from shardids.catalog.rows import Catalog
from shardids.django.aliases import configuration, refuse_tests, shard_of_alias
from shardids.django.migrating.history import ShardHistory, shown
from shardids.django.migrating.run import PreparedMigrations, ShardMigrations
from shardids.errors import ShardidsError
from shardids.migrate.plan import Outcome, Position, RunReport, Start, shards_by_start
from shardids.migrate.player import Limits
from shardids.migrate.runner import Observer, RunSettings, one_run
from shardids.pg.notation import named_shards, parse_duration_ms, parse_shards, shown_shards
from shardids.tables import views


class Command(BaseCommand):
    """Brings all shards to the newest migrations, or to one that is named."""

    help = (
        "Runs the migrations of sharded models in every shard: compiled to SQL once, one transaction a shard."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add arguments of Django's ``migrate``, and of ``shardids migrate up``."""
        add = parser.add_argument
        add("app_label", nargs="?", help="Only this application, and its dependencies.")
        add("migration_name", nargs="?", help="Only up to this migration, or the one that begins so.")
        add(
            "--database",
            action="append",
            metavar="ALIAS",
            help="Only this shard: shard_0005. May be repeated.",
        )
        add("--shards", help="Only these: numbers and ranges, 0-31,40.")
        add("--plan", "--dry-run", action="store_true", help="Show what would run, and where.")
        add("--sql", action="store_true", help="With --plan: print the SQL as well.")
        add(
            "--check",
            action="store_true",
            help="Exit with 1 if a shard has migrations to run; change nothing.",
        )
        add("--fake", action="store_true", help="Record migrations as run, without running them.")
        add("--jobs", type=int, default=1, metavar="N", help="Migrate N shards at once on each node.")
        add("--canary", type=int, default=1, metavar="N", help="Migrate N shards first, one at a time.")
        add("--lock-timeout", default="2s", help="Longest wait for a lock before a retry: 2s, 500ms.")
        add("--statement-timeout", default="0", help="Longest time for a statement; 0 means no limit.")
        add("--retries", type=int, default=5, help="Retries after a lock timeout or a lost connection.")
        add("--continue-on-error", action="store_true", help="After a failure, continue with the others.")

    @no_translations
    def handle(self, *_: Any, **options: Any) -> None:
        """Run the command."""
        try:
            refuse_tests()
            with closing(Catalog(configuration()["CATALOG"])) as catalog:
                self._handle(catalog, options)
        except ShardidsError as error:
            raise CommandError(str(error)) from error

    def _handle(self, catalog: Catalog, options: Mapping[str, Any]) -> None:
        history = ShardHistory()
        targets = history.targets(options["app_label"], options["migration_name"])
        with ShardMigrations(catalog, history) as migrations:
            prepared = migrations.prepare(
                _shards(catalog, options),
                targets=targets,
                canaries=options["canary"],
                continue_on_error=options["continue_on_error"],
                is_fake=options["fake"],
            )
            if options["plan"] or options["check"]:
                self._show_plan(prepared, with_sql=options["sql"])
                lost = migrations.placement.lost
                left = [one for one in prepared.left_out if one.shard not in lost]
                if options["check"] and (prepared.plan.pending or left):
                    raise CommandError("there are migrations to run: manage.py migrate_shards")
                return
            with one_run(catalog, "migrate_shards") as leases, _until_interrupted() as stop:
                report = migrations.run(prepared, _settings(options), _ShownProgress(self), stop, leases)
        for line in views.follow(catalog):
            self.stderr.write(line)
        self._show_report(report, prepared, options)

    def _show_plan(self, prepared: PreparedMigrations, *, with_sql: bool) -> None:
        for start, shards in shards_by_start(prepared.plan.pending).items():
            route = prepared.plan.routes[start]
            self.stdout.write(self.style.MIGRATE_HEADING(f"{_named(shards)}, from {shown(start or ())}:"))
            stages: Any = prepared.compiled[route].stages
            for stage in stages:
                self.stdout.write(
                    f"  {stage.revision}" + (stage.reason and f": {stage.reason}, on each shard")
                )
                for operation in stage.elsewhere:
                    self.stdout.write(f"    not in shards: {operation}")
            if with_sql:
                for stage in stages:
                    if stage.reason:
                        self.stdout.write(f"-- {stage.revision}: {stage.reason}")
                    for part in stage.parts:
                        outside = "" if part.in_transaction or stage.reason else "-- outside a transaction\n"
                        self.stdout.write(outside + part.sql)
        for one in prepared.left_out:
            self.stdout.write(f"shard {one.shard}: {one.error}")
        if not prepared.plan.pending:
            self.stdout.write("No migrations to run.")

    def _show_report(
        self, report: RunReport, prepared: PreparedMigrations, options: Mapping[str, Any]
    ) -> None:
        done = report.of("done")
        for (start, end), shards in _by_ends(done).items():
            self.stdout.write(f"{_named(shards)}: {shown(start or ())} -> {shown(end or ())}")
        for one in prepared.left_out:
            self.stderr.write(f"shard {one.shard}: {one.error}")
        failed, left = report.of("failed"), report.of("not started")
        if not report.outcomes:
            self.stdout.write(f"No migrations to run: {len(prepared.plan.settled)} shards have them.")
            return
        self.stdout.write(
            f"{len(done)} done, {len(failed)} failed, {len(left)} not started, in {report.seconds:.1f} s"
        )
        if not report.succeeded:
            again = shown_shards(one.shard for one in (*failed, *left))
            words = [word for word in (options["app_label"], options["migration_name"]) if word]
            command = shlex.join(["manage.py", "migrate_shards", *words, "--shards", again])
            raise CommandError(f"To run the rest: {command}")


class _ShownProgress(Observer):
    """Says what fails and is tried again, and with ``--verbosity 2`` each shard that is done."""

    def __init__(self, command: BaseCommand) -> None:
        self._command = command

    def retried(self, position: Position, attempt: int, error: str) -> None:
        self._command.stderr.write(f"shard {position.shard}: attempt {attempt}: {error}")

    def waiting(self, lease: Lease) -> None:
        self._command.stderr.write(f"shard {lease.shard}: waits for a {lease}")

    def ended(self, outcome: Outcome) -> None:
        if outcome.status == "failed":
            self._command.stderr.write(f"shard {outcome.shard} failed: {outcome.error}")


def _shards(catalog: Catalog, options: Mapping[str, Any]) -> list[int] | None:
    """Return the shards that are chosen, ``None`` for all."""
    chosen = set[int]()
    for alias in options["database"] or ():
        shard = shard_of_alias(alias)
        if shard is None:
            raise CommandError(f"{alias} is not a shard: manage.py migrate is for other databases")
        chosen.add(shard)
    if options["shards"]:
        chosen |= set(parse_shards(options["shards"], catalog.shard_total()))
    return sorted(chosen) or None


def _settings(options: Mapping[str, Any]) -> RunSettings:
    return RunSettings(
        jobs=options["jobs"],
        retries=options["retries"],
        continue_on_error=options["continue_on_error"],
        limits=Limits(
            lock_timeout_ms=parse_duration_ms(options["lock_timeout"]),
            statement_timeout_ms=parse_duration_ms(options["statement_timeout"]),
        ),
    )


def _named(shards: Sequence[int]) -> str:
    return named_shards(shards).capitalize()


def _by_ends(outcomes: Sequence[Outcome]) -> dict[tuple[Start, Start], list[int]]:
    found: dict[tuple[Start, Start], list[int]] = {}
    for one in outcomes:
        found.setdefault((one.start, one.end), []).append(one.shard)
    return found


@contextmanager
def _until_interrupted() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C sets: running shards end. The second ends the command."""
    stop = Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, before)
