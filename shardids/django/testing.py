"""A cluster for the tests of a Django project, made for the run and dropped after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any, Final

from django.db import connections
from django.test import TestCase
from django.test.runner import DiscoverRunner
from django.test.utils import override_settings

from shardids.catalog.rows import Catalog
from shardids.django.aliases import ENGINE, alias_for, allow_tests, configuration, forget_cluster
from shardids.django.migrating.history import ShardHistory
from shardids.django.migrating.run import ShardMigrations
from shardids.errors import BadArgument, StatementFailed
from shardids.ids.layout import Layout
from shardids.migrate.runner import Observer, RunSettings, one_run
from shardids.pg.urls import parse_url
from shardids.testing.clusters import ClusterWishes, catalog_for_tests
from shardids.testing.held import held_nodes

__all__ = ["ShardTestRunner", "shards_for_tests"]

_DEFAULTS: Final = {"LAYOUT": "default", "SHARDS": 4, "NODES": 2, "SERVER": None}


@contextmanager
def shards_for_tests() -> Iterator[list[str]]:
    """Make a cluster that has the tables of all sharded models, and uses it instead of the application's.

    ``SHARDIDS["TEST"]`` says how: ``SHARDS`` (4), ``NODES`` (2), ``LAYOUT``, and ``SERVER``, the URL of a
    server whose role may create databases; by default the server of ``CATALOG``. The databases are named
    ``shardids_tests_…``, and are dropped at the end of the block. Yields the shards' aliases.

    Raises:
        BadArgument: ``TEST`` has another key or a size that is no number; a migration can't be turned into
            SQL for shards.
        ConnectionFailed, MissingPrivilege: as they say.
    """
    found = configuration()
    asked = {**_DEFAULTS, **found.get("TEST", {})}
    if unknown := sorted(set(asked) - set(_DEFAULTS)):
        raise BadArgument(
            f'SHARDIDS["TEST"] has no key {", ".join(unknown)}: it takes {", ".join(_DEFAULTS)}'
        )
    wishes = ClusterWishes(
        layout=Layout.parse(asked["LAYOUT"]),
        shards=_size(asked, "SHARDS"),
        nodes=_size(asked, "NODES"),
        catalog=None,
        server=parse_url(asked["SERVER"] or found["CATALOG"]),
    )
    with ExitStack() as stack:
        url = stack.enter_context(catalog_for_tests(wishes))
        forget_cluster()
        stack.enter_context(override_settings(SHARDIDS={**found, "CATALOG": url}))
        allow_tests(url)
        try:
            _migrate(url)
            stack.enter_context(_held_test_cases())
            yield [alias_for(shard) for shard in range(wishes.shards)]
        finally:
            allow_tests(None)
            forget_cluster()


@contextmanager
def _held_test_cases() -> Iterator[None]:
    """Let each ``TestCase`` that uses shards roll back what sessions of the cluster commit as well."""
    # Django has no public way to begin before the transactions of a TestCase, and to end after them.
    entering: Any = TestCase.__dict__["_enter_atomics"]
    leaving: Any = TestCase.__dict__["_rollback_atomics"]

    def enter(cls: Any) -> Any:
        if not _uses_shards(cls):
            return entering.__func__(cls)
        held_nodes.enter()
        try:
            return entering.__func__(cls)
        except BaseException:
            held_nodes.leave()
            raise

    def leave(cls: Any, atomics: Any) -> None:
        if not _uses_shards(cls):
            leaving.__func__(cls, atomics)
            return
        held_nodes.end()
        try:
            leaving.__func__(cls, atomics)
        finally:
            held_nodes.leave()

    with ExitStack() as stack:
        for name, ours, theirs in (
            ("_enter_atomics", enter, entering),
            ("_rollback_atomics", leave, leaving),
        ):
            setattr(TestCase, name, classmethod(ours))
            stack.callback(setattr, TestCase, name, theirs)
        yield


def _uses_shards(cls: Any) -> bool:
    return any(connections.settings[alias]["ENGINE"] == ENGINE for alias in cls._databases_names())


def _size(asked: Mapping[str, Any], key: str) -> int:
    try:
        return int(asked[key])
    except (TypeError, ValueError) as error:
        raise BadArgument(f'SHARDIDS["TEST"]["{key}"] is {asked[key]!r}: it takes a number') from error


def _migrate(url: str) -> None:
    catalog = Catalog(url)
    try:
        with ShardMigrations(catalog, ShardHistory()) as migrations:
            prepared = migrations.prepare()
            with one_run(catalog, "tests") as leases:
                report = migrations.run(prepared, RunSettings(), Observer(), Event(), leases)
    finally:
        catalog.close()
    for outcome in report.of("failed"):
        raise StatementFailed(f"shard {outcome.shard} of the tests' cluster: {outcome.error}")


class ShardTestRunner(DiscoverRunner):
    """Django's test runner, with a cluster for the tests; for the setting ``TEST_RUNNER``.

    Tests name the aliases that they use, as with several databases:
    ``databases = {"default", "shard_0000"}``, or ``"__all__"``.
    """

    def setup_databases(self, **options: Any) -> Any:
        """Make the cluster, and then the databases of ``DATABASES``."""
        if self.parallel > 1:
            raise BadArgument("shards for tests are made once: --parallel is not there yet")
        if self.keepdb:
            raise BadArgument("shards for tests are made again for each run: --keepdb is not there yet")
        self._shards = ExitStack()
        self._shards.enter_context(shards_for_tests())
        try:
            return super().setup_databases(**options)
        except BaseException:
            self._shards.close()
            raise

    def teardown_databases(self, old_config: Any, **options: Any) -> None:
        """Drop both."""
        with self._shards:
            super().teardown_databases(old_config, **options)
