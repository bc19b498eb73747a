"""The cluster of the settings, and a database alias for each of its shards, made when it is first used."""

from __future__ import annotations

import atexit
import re
import sys
from threading import Lock
from typing import Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections

from shardids.client.cluster import Cluster
from shardids.errors import BadArgument
from shardids.pg.connections import in_child

ENGINE: Final = "shardids.django.backend"
_KNOWN: Final = {"CATALOG", "LISTEN", "POOL", "OPTIONS", "TEST", "TRACER"}


class _Held:
    """The one cluster of the process."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None
        self.catalog_for_tests: str | None = None
        self.new_lock()
        in_child(self, _Held.new_lock)

    def new_lock(self) -> None:
        self.lock = Lock()


_held = _Held()


def configuration() -> dict[str, Any]:
    """Return the setting ``SHARDIDS``.

    Raises:
        ImproperlyConfigured: it is missing, lacks ``CATALOG``, or has a key that is not known.
    """
    found = getattr(settings, "SHARDIDS", None)
    if not isinstance(found, dict) or not found.get("CATALOG"):
        raise ImproperlyConfigured(
            'the setting SHARDIDS names no cluster: SHARDIDS = {"CATALOG": "postgresql://user@host/database"}'
        )
    unknown = sorted(set(found) - _KNOWN)
    if unknown:
        raise ImproperlyConfigured(
            f"SHARDIDS has no key {', '.join(unknown)}: it takes {', '.join(sorted(_KNOWN))}"
        )
    return found


def get_cluster() -> Cluster:
    """Return the cluster that ``SHARDIDS["CATALOG"]`` describes; it is connected to once a process.

    Raises:
        BadArgument: a test run, and the cluster is not one for tests.
        ImproperlyConfigured: the settings name none.
        ConnectionFailed, ClusterConflict: see :meth:`shardids.Cluster.connect`.
    """
    refuse_tests()
    if _held.cluster is None:
        with _held.lock:
            if _held.cluster is None:
                found = configuration()
                _held.cluster = Cluster.connect(
                    found["CATALOG"], listen=found.get("LISTEN", True), tracer=found.get("TRACER")
                )
                atexit.register(_held.cluster.close)
    return _held.cluster


def allow_tests(catalog: str | None) -> None:
    """Let tests use the cluster that a catalog describes; ``None`` ends that."""
    _held.catalog_for_tests = catalog


def refuse_tests() -> None:
    """Refuse the application's cluster to a test run, which empties tables. Raises BadArgument."""
    utils: Any = sys.modules.get("django.test.utils")
    if utils is not None and hasattr(utils._TestState, "saved_data"):
        require_for_tests()


def require_for_tests() -> None:
    """Refuse a cluster that :func:`allow_tests` did not name. Raises BadArgument."""
    allowed = _held.catalog_for_tests
    if allowed is None or configuration()["CATALOG"] != allowed:
        raise BadArgument(
            'the cluster of SHARDIDS["CATALOG"] is the application\'s, and not for tests',
            hint='TEST_RUNNER = "shardids.django.testing.ShardTestRunner", or shards_for_tests()',
        )


def forget_cluster() -> None:
    """Close the cluster, this thread's connections to it and its pools; the next use reads the settings."""
    from shardids.django.backend import pools  # noqa: PLC0415 -- which imports this module

    for wrapper in connections.all(initialized_only=True):
        if wrapper.settings_dict["ENGINE"] == ENGINE:
            wrapper.close()
            del connections[wrapper.alias]
    with _held.lock:
        kept = {one: found for one, found in connections.settings.items() if found["ENGINE"] != ENGINE}
        connections.settings = kept
        cluster, _held.cluster = _held.cluster, None
    pools.close_all()
    if cluster is not None:
        atexit.unregister(cluster.close)
        cluster.close()


def alias_for(shard: int) -> str:
    """Return the database alias of a shard, which is the name of its schema: ``shard_0005``.

    It goes wherever Django takes one: ``Question.objects.using(alias)``, ``save(using=alias)``,
    ``transaction.atomic(using=alias)``. The alias is made when it is first asked for; nothing is connected.

    Raises:
        BadArgument: the number is not in the cluster.
        ImproperlyConfigured: ``DATABASES`` has another database of that name.
    """
    cluster = get_cluster()
    number = cluster._checked(shard)
    alias = cluster.schema_of(number)
    if alias not in connections.settings:
        with _held.lock:
            # Never changed in place: Django iterates over it in other threads.
            connections.settings = {**connections.settings, alias: _settings_of(number, alias)}
    if connections.settings[alias]["ENGINE"] != ENGINE:
        raise ImproperlyConfigured(f"DATABASES has a database {alias!r}, which is the name of shard {number}")
    return alias


def _settings_of(shard: int, alias: str) -> dict[str, Any]:
    found = configuration()
    made = {
        "ENGINE": ENGINE,
        "NAME": alias,
        "OPTIONS": dict(found.get("OPTIONS", {})),
        # A cursor on the server would keep the connection from the thread's other shards.
        "DISABLE_SERVER_SIDE_CURSORS": True,
        "SHARD": shard,
        "TEST": {"DEPENDENCIES": []},
    }
    filled: dict[str, dict[str, Any]] = connections.configure_settings({DEFAULT_DB_ALIAS: {}, alias: made})
    return filled[alias]


def shard_of_alias(alias: str | None) -> int | None:
    """Return the shard that an alias stands for, or ``None`` if it is of another database.

    An object that comes from another process has the alias of a shard that this one has not used yet.
    """
    if alias is None:
        return None
    known = connections.settings.get(alias)
    if known is not None:
        return known["SHARD"] if known["ENGINE"] == ENGINE else None
    digits = re.search(r"[0-9]+$", alias)
    if digits is None:
        return None
    try:
        return int(digits[0]) if alias_for(int(digits[0])) == alias else None
    except BadArgument:
        return None
