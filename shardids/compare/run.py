"""A whole comparison: servers, schemes, one measure after the other."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TypeVar

import shardids
from shardids.baselines import SCHEMES, Scheme, Servers, scheme_of
from shardids.compare.clients import Clients, client_processes
from shardids.compare.draws import measure_draws
from shardids.compare.duplicates import CLOCK_CLIENTS, at_full_speed, while_the_clock_steps_back
from shardids.compare.faketime import faked_clock, faketime_library
from shardids.compare.faults import ONE_SERVER, Faults, measure_faults
from shardids.compare.inserts import measure_inserts
from shardids.compare.order import measure_order
from shardids.compare.results import (
    CASES,
    Comparison,
    Conditions,
    Draws,
    Duplicates,
    Inserts,
    Order,
    SchemeResult,
    Storage,
    Told,
)
from shardids.compare.sizes import CLIENTS, FULL, QUICK, Sizes
from shardids.compare.stage import Stage, check_disk, stage_for
from shardids.compare.storage import measure_storage
from shardids.errors import MissingLibrary, ShardidsError, UnsupportedServer

Say = Callable[[str], None]
Found = TypeVar("Found")

_LIBRARIES: Final = ("psycopg", "PyMySQL", "redis", "uuid-utils", "python-ulid")
_NO_FAKETIME: Final = "libfaketime is not installed (Debian: apt-get install libfaketime)"


@dataclass(slots=True)
class _Findings:
    """What the measures found, by the scheme's name; ``left_out`` by that and the measure's."""

    draws: Mapping[str, Draws] = field(default_factory=dict)
    inserts: Mapping[str, Inserts] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    order: Mapping[str, Order] = field(default_factory=dict)
    rush: Mapping[str, Duplicates] = field(default_factory=dict)
    clock: Mapping[str, Duplicates] = field(default_factory=dict)
    faults: Mapping[str, Faults] = field(default_factory=dict)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)


def compare(names: Sequence[str] = (), *, quick: bool = False, command: str = "", say: Say) -> Comparison:
    """Measures the schemes of those names, or all; ``say`` is told what is under way.

    A scheme that was named and can't run is an error; of all, it is left out, with the reason.

    Raises:
        BadArgument: a name is no scheme's.
        ServerStartFailed: a server can't be started, or there is too little disk for it.
        MissingLibrary, UnsupportedServer: what a named scheme needs is not there.
    """
    asked = {name: scheme_of(name) for name in dict.fromkeys(names)} or dict(SCHEMES)
    sizes = QUICK if quick else FULL
    check_disk(sizes.disk_mb)
    made_at, begun = datetime.now(UTC), time.monotonic()
    say("starting servers and clients")
    with stage_for(list(asked.values())) as stage, client_processes(CLIENTS) as clients:
        schemes, left_out = _install(asked, stage, named=bool(names))
        told = {name: _told(scheme, stage.servers) for name, scheme in schemes.items()}
        found = _measure(schemes, stage, clients, sizes, say)
        kinds = stage.kinds()
    conditions = Conditions(
        made_at=made_at,
        seconds=time.monotonic() - begun,
        command=command,
        quick=quick,
        machine=_machine(),
        versions=_versions(),
        servers=kinds,
        sizes=sizes.in_words(),
    )
    results = [_result(name, scheme, told[name], found) for name, scheme in schemes.items()]
    return Comparison(conditions=conditions, schemes=results, left_out=left_out)


def _install(
    asked: Mapping[str, Scheme], stage: Stage, *, named: bool
) -> tuple[dict[str, Scheme], dict[str, str]]:
    """The schemes that can run, installed; and why the others can't."""
    schemes, left_out = {}, {}
    for name, scheme in asked.items():
        try:
            _check_servers(scheme, stage)
            scheme.install(stage.servers)
            with scheme.open(stage.servers) as source:
                source.draw()
        except (MissingLibrary, UnsupportedServer) as error:
            if named:
                raise
            left_out[name] = f"{error.message}. {error.hint}".strip()
        else:
            schemes[name] = scheme
    return schemes, left_out


def _check_servers(scheme: Scheme, stage: Stage) -> None:
    needs = scheme.about.needs
    for kind, needed in (("MariaDB", needs.mariadb), ("Redis", needs.redis)):
        if needed and kind in stage.missing:
            raise UnsupportedServer(f"{kind} can't be started: {stage.missing[kind]}")


def _measure(
    schemes: Mapping[str, Scheme], stage: Stage, clients: Clients, sizes: Sizes, say: Say
) -> _Findings:
    servers = stage.servers
    found = _Findings()

    def each(what: str, measure: Callable[[str], Found]) -> dict[str, Found]:
        results = {}
        for name, scheme in schemes.items():
            say(f"{what}: {scheme.about.title}")
            try:
                results[name] = measure(name)
            except ShardidsError as error:
                found.left_out.setdefault(name, {})[what] = error.message
        return results

    found.draws = measure_draws(schemes, servers, sizes, say)
    found.inserts = measure_inserts(schemes, servers, clients, sizes, say)
    found.storage = each("storage", lambda name: measure_storage(schemes[name], servers, sizes))
    found.order = each("order", lambda name: measure_order(name, servers, clients, sizes))
    found.rush = each("full speed", lambda name: at_full_speed(name, servers, clients, sizes))
    if (library := faketime_library()) is None:
        found.left_out.update({name: {"clock back": _NO_FAKETIME} for name in schemes})
    else:
        with faked_clock(library) as clock, _under(clock.env, schemes) as (faked, faked_clients):
            found.clock = each(
                "clock back",
                lambda name: while_the_clock_steps_back(name, faked, faked_clients, clock, sizes),
            )
    found.faults = measure_faults(schemes, stage, say)
    return found


@contextlib.contextmanager
def _under(env: Mapping[str, str], schemes: Mapping[str, Scheme]) -> Iterator[tuple[Servers, Clients]]:
    """Servers and clients with this environment."""
    with (
        stage_for(list(schemes.values()), env=env) as stage,
        client_processes(CLOCK_CLIENTS, env) as clients,
    ):
        for scheme in schemes.values():
            scheme.install(stage.servers)
        yield stage.servers, clients


def _told(scheme: Scheme, servers: Servers) -> Told:
    with scheme.open(servers) as source:
        key = source.draw()
    told = scheme.decode(key)
    if told is None:
        return Told(key=str(key))
    return Told(key=str(key), time=told.time, origin=told.origin, sequence=told.sequence)


def _result(name: str, scheme: Scheme, told: Told, found: _Findings) -> SchemeResult:
    faults = found.faults[name]
    counted = {"full speed": found.rush.get(name), "clock back": found.clock.get(name), **faults.cases}
    left_out = dict(found.left_out.get(name, {}))
    if "added server" not in counted:
        left_out["added server"] = ONE_SERVER
    if faults.outage is None:
        left_out["outage"] = "no server is needed"
    return SchemeResult(
        about=scheme.about,
        key_bytes=16 if scheme.column().type == "uuid" else 8,
        draws=found.draws.get(name),
        inserts=found.inserts.get(name),
        storage=found.storage.get(name),
        order=found.order.get(name),
        duplicates={case: result for case in CASES if (result := counted.get(case)) is not None},
        outage=faults.outage,
        told=told,
        left_out=left_out,
    )


def _machine() -> str:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{os.cpu_count()} cores, {memory_gb:.0f} GB of memory, {platform.machine()}, {platform.system()}"


def _versions() -> dict[str, str]:
    versions = {"shardids": shardids.__version__, "Python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
