"""Runs a whole comparison: starts servers, installs schemes, takes one measure after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from shardids.compare.measures.draws import measure_draws, measure_inserts
from shardids.compare.measures.faults import FAULTS, ONE_SERVER, Faults, measure_faults
from shardids.compare.measures.measuring import (
    CLIENTS,
    FAILURES,
    FULL,
    QUICK,
    Measuring,
    faked_clocks,
    in_words,
)
from shardids.compare.measures.storage import measure_spread, measure_storage
from shardids.compare.measures.uniqueness import (
    at_full_speed,
    measure_causality,
    measure_clocks,
    measure_order,
)
from shardids.compare.results import (
    CASES,
    Answers,
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
from shardids.compare.schemes import SCHEMES, Scheme, Servers, scheme_of
from shardids.compare.testbed.clients import client_processes
from shardids.compare.testbed.stage import Stage, check_disk, machine, stage_for, versions
from shardids.errors import UnsupportedServer

_WRAPS: Final = (
    "its low bits of time come first and begin again every 7 minutes: this run is too short to show what that"
    " does to order and index"
)
_ELSEWHERE: Final = (
    "its rows are in MariaDB, whose files have another form than the tables that are compared here"
)


@dataclass(slots=True)
class _Findings:
    """The measures' results, by the scheme's name."""

    told: Mapping[str, Told] = field(default_factory=dict)
    order: Mapping[str, Order] = field(default_factory=dict)
    draws: Mapping[str, Draws] = field(default_factory=dict)
    inserts: Mapping[str, Inserts] = field(default_factory=dict)
    spread: Mapping[str, Inserts] = field(default_factory=dict)
    storage: Mapping[str, Storage] = field(default_factory=dict)
    rush: Mapping[str, Duplicates] = field(default_factory=dict)
    causality: Mapping[str, Sequence[Answers]] = field(default_factory=dict)
    clock: Mapping[str, Duplicates] = field(default_factory=dict)
    faults: Mapping[str, Faults] = field(default_factory=dict)


def compare(
    names: Sequence[str] = (), *, quick: bool = False, command: str = "", say: Callable[[str], None]
) -> Comparison:
    """Measure the schemes of those names, or all schemes; call ``say`` with its present step.

    A named scheme that can't run is an error. Where no names are given, such a scheme is left out, with the
    reason, as is any measure that fails.

    Raises:
        BadArgument: no scheme has that name.
        ServerStartFailed: PostgreSQL can't be started, or there is too little disk space for it.
        ShardidsError: a named scheme can't run; the message names the missing requirement.
    """
    asked = {name: scheme_of(name) for name in dict.fromkeys(names)} or dict(SCHEMES)
    sizes = QUICK if quick else FULL
    folder = check_disk(sizes.disk_mb * len(asked) // len(SCHEMES))
    made_at, begun, ran_on = datetime.now(UTC), time.monotonic(), machine(folder)
    say("starting servers and clients")
    with stage_for(list(asked.values())) as stage, client_processes(CLIENTS) as clients:
        schemes, left_out = _install(asked, stage, named=bool(names))
        run = Measuring(schemes=schemes, servers=stage.servers, clients=clients, sizes=sizes, say=say)
        kinds = stage.kinds()
        found = _measure(run, stage)
    conditions = Conditions(
        made_at=made_at,
        seconds=time.monotonic() - begun,
        command=command,
        quick=quick,
        machine=ran_on,
        versions=versions(),
        servers=kinds,
        sizes=sizes.in_words(),
    )
    results = [_result(name, scheme, run, found) for name, scheme in schemes.items()]
    return Comparison(conditions=conditions, schemes=results, left_out=left_out)


def _install(
    asked: Mapping[str, Scheme], stage: Stage, *, named: bool
) -> tuple[dict[str, Scheme], dict[str, str]]:
    """Install the schemes that can run; return them, and why the others can't."""
    schemes, left_out = {}, {}
    for name, scheme in asked.items():
        try:
            _check_servers(scheme, stage)
            scheme.install(stage.servers)
            with scheme.open(stage.servers) as source:
                source.draw()
        except FAILURES as error:
            if named:
                raise
            left_out[name] = in_words(error)
        else:
            schemes[name] = scheme
    return schemes, left_out


def _check_servers(scheme: Scheme, stage: Stage) -> None:
    needs = scheme.about.needs
    for kind, needed in (
        ("MariaDB", needs.mariadb),
        ("Redis", needs.redis or needs.redis_pair),
        ("The ID service", needs.id_service),
    ):
        if needed and kind in stage.missing:
            raise UnsupportedServer(f"{kind} can't be started: {stage.missing[kind]}")


def _measure(run: Measuring, stage: Stage) -> _Findings:
    found = _Findings()
    for what in ("order", "causality", "storage"):
        if "uuid1" in run.schemes:
            run.leave_out("uuid1", what, _WRAPS)
    for name, scheme in run.schemes.items():
        if scheme.keeps_rows:
            run.leave_out(name, "storage", _ELSEWHERE)
    found.told = run.each("told", lambda name: _told(run.schemes[name], run.servers))
    # Measured first, while all counters are at their start: it shows how they drift apart by themselves.
    found.order = run.each("order", lambda name: measure_order(name, run))
    found.draws = measure_draws(run)
    found.inserts = measure_inserts(run)
    found.spread = measure_spread(run)
    found.storage = measure_storage(run)
    found.rush = run.each("full speed", lambda name: at_full_speed(name, run))
    try:
        with faked_clocks(run) as (faked, clocks):
            found.causality = measure_causality(faked, clocks)
            found.clock = measure_clocks(faked, clocks)
    except FAILURES as error:
        for name in run.schemes:
            for what in ("causality", "clock back"):
                run.leave_out(name, what, error)
    try:
        found.faults = measure_faults(run, stage)
    except FAILURES as error:
        for name in run.schemes:
            run.leave_out(name, "faults", error)
    return found


def _told(scheme: Scheme, servers: Servers) -> Told:
    with scheme.open(servers) as source:
        key = source.draw()
    told = scheme.decode(key)
    if told is None:
        return Told(key=str(key))
    return Told(key=str(key), time=told.time, origin=told.origin, sequence=told.sequence)


def _result(name: str, scheme: Scheme, run: Measuring, found: _Findings) -> SchemeResult:
    if scheme.about.central:
        run.leave_out(name, "added server", ONE_SERVER)
    if not scheme.about.needs.any:
        run.leave_out(name, "outage", "no server is needed")
    left_out = dict(run.left_out.get(name, {}))
    if "faults" in left_out:
        why = left_out.pop("faults")
        left_out = {
            **dict.fromkeys((*FAULTS, "outage"), why),
            **left_out,
        }
    faults = found.faults.get(name, Faults())
    counted = {"full speed": found.rush.get(name), "clock back": found.clock.get(name), **faults.cases}
    return SchemeResult(
        about=scheme.about,
        key_bytes=16 if scheme.column().type == "uuid" else 8,
        draws=found.draws.get(name),
        inserts=found.inserts.get(name),
        spread=found.spread.get(name),
        storage=found.storage.get(name),
        order=found.order.get(name),
        causality=found.causality.get(name, ()),
        duplicates={case: result for case in CASES if (result := counted.get(case)) is not None},
        outage=faults.outage,
        told=found.told.get(name),
        left_out=left_out,
    )
