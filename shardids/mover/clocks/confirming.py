"""Compares a node's clock with all others that can be read, and confirms it if they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from sqlalchemy import Connection, Engine, text

from shardids.catalog.nodes import Nodes, administrative_engine
from shardids.catalog.rows import Catalog
from shardids.errors import ClusterConflict, ShardidsError
from shardids.pg.clock import MOST_APART_S, ClockSample, Difference, LocalClock

_CONNECT_TIMEOUT_S: Final = 5
_THIS_MACHINE: Final = ClockSample(offset_s=0.0, error_s=0.0)
_CONFIRM: Final = """
    update shardids.node set clock_confirmed_at = clock_timestamp()
    returning date_part('epoch', clock_confirmed_at)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherClock:
    """A clock that was compared with a node's: how far the node's is ahead of it."""

    name: str
    node_is: Difference

    def __str__(self) -> str:
        side = "ahead of" if self.node_is.ahead_s > 0 else "behind"
        return f"{self.node_is} {side} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A node's clock beside others.

    Attributes:
        node: the node's name.
        sample: its clock, compared with this machine's.
        others: the clocks of other servers and of this machine, which is the last.
        same_server: databases of the node's own server, by name: they share its clock.
        unreachable: the catalog and nodes that did not answer, by name, with the reason.
    """

    node: str
    sample: ClockSample
    others: tuple[OtherClock, ...]
    same_server: tuple[str, ...]
    unreachable: dict[str, str]

    @property
    def is_with_this_machine_only(self) -> bool:
        """Returns whether no other server's clock could be read."""
        return len(self.others) == 1

    def require_agreement(self) -> None:
        """Require that the node's clock agrees with all others.

        Raises:
            ClusterConflict: it does not; the message names those that differ, and by how much.
        """
        if apart := [other for other in self.others if other.node_is.is_too_large]:
            raise ClusterConflict(
                f'the clock of node "{self.node}" is {"; ".join(map(str, apart))}; at most'
                f" {MOST_APART_S:.0f} s is allowed",
                hint="Set the wrong clock right (chronyc tracking, timedatectl), then run it again."
                " Nothing was changed.",
            )


def compare_clocks(catalog: Catalog, name: str) -> Comparison:
    """Compare a node's clock with those of the catalog, the other nodes and this machine.

    Raises:
        ClusterConflict: the node is unknown.
        ConnectionFailed: the node does not answer.
    """
    return _compare(catalog, name, LocalClock())


def confirm_clock(catalog: Catalog, name: str, *, dry_run: bool = False) -> Comparison:
    """Confirm a node's clock, so that all its shards follow it however far it went ahead.

    Raises:
        ClusterConflict: the node is unknown, or its clock does not agree with the others.
        ConnectionFailed: the node does not answer.
    """
    clock = LocalClock()
    comparison = _compare(catalog, name, clock)
    comparison.require_agreement()
    if not dry_run:
        with (
            Nodes(catalog.nodes(), catalog.url, durable=True) as nodes,
            nodes[name].begin() as connection,
        ):
            # What is confirmed is the time that is stored, not the one that was compared before.
            stored = Difference.between(clock.measure(connection, _CONFIRM), comparison.sample)
            if stored.is_too_large:
                raise ClusterConflict(
                    f'the clock of node "{name}" moved by {stored} while it was compared',
                    hint="Set it right, then run it again. Nothing was changed.",
                )
    return comparison


def _compare(catalog: Catalog, name: str, clock: LocalClock) -> Comparison:
    catalog.existing_node(name)
    with Nodes(catalog.nodes(), catalog.url, connect_timeout_s=_CONNECT_TIMEOUT_S) as nodes:
        asked = nodes.each(partial(_read, clock))
    if name in asked.failures:
        raise asked.failures[name]
    found = {f'node "{other}"': asked.results[other] for other in sorted(asked.results) if other != name}
    unreachable = {f'node "{other}"': failure.message for other, failure in asked.failures.items()}
    # A clock of its own only where it is on none of the nodes' servers; each server is compared once.
    engine = administrative_engine(catalog.url, what="the catalog", connect_timeout_s=_CONNECT_TIMEOUT_S)
    try:
        found = {"the catalog": _read(clock, "", engine), **found}
    except ShardidsError as failure:
        unreachable["the catalog"] = failure.message
    finally:
        engine.dispose()
    own, server = asked.results[name]
    others = [
        OtherClock(name=other, node_is=Difference.between(own, sample))
        for other, (sample, its_server) in found.items()
        if its_server != server
    ]
    others.append(OtherClock(name="this machine", node_is=Difference.between(own, _THIS_MACHINE)))
    return Comparison(
        node=name,
        sample=own,
        others=tuple(others),
        same_server=tuple(other for other, (_, its_server) in found.items() if its_server == server),
        unreachable=unreachable,
    )


def _read(clock: LocalClock, _name: str, engine: Engine) -> tuple[ClockSample, Sequence[object]]:
    with engine.connect() as connection:
        return clock.compare(connection), _server(connection)


def _server(connection: Connection) -> Sequence[object]:
    """Identify the server's process: two databases of one server have one clock."""
    with connection.begin():
        return tuple(
            connection.execute(text("select pg_postmaster_start_time(), current_setting('port')")).one()
        )
