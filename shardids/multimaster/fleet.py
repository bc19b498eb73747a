"""One interface to the masters of a command, PostgreSQL or MariaDB: plan, apply and verify."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from shardids.errors import BadArgument
from shardids.multimaster import mariadb
from shardids.multimaster.counters import Master, check_masters, read_masters
from shardids.multimaster.mariadb import MariaDbMaster
from shardids.multimaster.mariadb_session import Login
from shardids.multimaster.plan import OffsetStep, carry_out, make_plan
from shardids.multimaster.verify import OffsetFinding, verify

_HINT = "For example: --master a=postgresql://user@host:5432/database, or a=mariadb://user@host:3306"


class Fleet(Protocol):
    """Masters in the order of their offsets."""

    @property
    def size(self) -> int:
        """Returns how many masters there are."""

    def verify(self) -> list[OffsetFinding]:
        """Returns what is wrong with their offsets."""

    def plan(self) -> list[OffsetStep]:
        """Returns the steps that give each master its offset."""

    def carry_out(self, steps: Sequence[OffsetStep], on_step: Callable[[OffsetStep], None]) -> None:
        """Takes the steps, and reports each that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgreSqlFleet:
    """PostgreSQL masters, whose sequences count by offsets; ``schemas`` selects schemas, none means all."""

    masters: tuple[Master, ...]
    schemas: tuple[str, ...]
    headroom: int

    @property
    def size(self) -> int:
        """Returns how many masters there are."""
        return len(self.masters)

    def verify(self) -> list[OffsetFinding]:
        """Calls :func:`shardids.multimaster.verify`."""
        return verify(read_masters(self.masters, self.schemas))

    def plan(self) -> list[OffsetStep]:
        """Calls :func:`shardids.multimaster.make_plan`."""
        return list(make_plan(read_masters(self.masters, self.schemas), self.headroom).steps)

    def carry_out(self, steps: Sequence[OffsetStep], on_step: Callable[[OffsetStep], None]) -> None:
        """Calls :func:`shardids.multimaster.carry_out`."""
        carry_out(self.masters, steps, on_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbFleet:
    """MariaDB masters, whose servers number the rows of all tables by offsets."""

    masters: tuple[MariaDbMaster, ...]

    @property
    def size(self) -> int:
        """Returns how many masters there are."""
        return len(self.masters)

    def verify(self) -> list[OffsetFinding]:
        """Calls :func:`shardids.multimaster.mariadb.verify_ring`."""
        return mariadb.verify_ring(mariadb.read_ring(self.masters))

    def plan(self) -> list[OffsetStep]:
        """Calls :func:`shardids.multimaster.mariadb.plan_ring`; returns no steps if the offsets are right."""
        wrong = {"no-offset", "wrong-increment", "wrong-offset", "limited"}
        if any(finding.problem in wrong for finding in self.verify()):
            return mariadb.plan_ring(self.masters)
        return []

    def carry_out(self, steps: Sequence[OffsetStep], on_step: Callable[[OffsetStep], None]) -> None:
        """Calls :func:`shardids.multimaster.mariadb.carry_out_ring`."""
        mariadb.carry_out_ring(self.masters, steps, on_step)


def parse_fleet(words: Sequence[str], *, schemas: Sequence[str], headroom: int) -> Fleet:
    """Parses masters of the form ``NAME=URL``, all PostgreSQL or all MariaDB.

    MariaDB's password may also come from ``MYSQL_PWD``.

    Raises:
        BadArgument: a master can't be parsed, the kinds are mixed, or there are fewer than two masters. No
            message repeats a URL, as that may hold a password.
    """
    named = [_split(number, word) for number, word in enumerate(words, 1)]
    check_masters([master for master, _ in named])
    of_mariadb = [url.get_backend_name() in ("mariadb", "mysql") for _, url in named]
    if all(of_mariadb):
        return MariaDbFleet(
            masters=tuple(MariaDbMaster(name=master.name, login=_login(url)) for master, url in named)
        )
    if any(of_mariadb):
        raise BadArgument("the masters must be all PostgreSQL or all MariaDB")
    return PostgreSqlFleet(
        masters=tuple(master for master, _ in named), schemas=tuple(schemas), headroom=headroom
    )


def _split(number: int, word: str) -> tuple[Master, URL]:
    name, equals, text = word.partition("=")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        equals = ""
    if not equals:
        raise BadArgument(f"master {number} is not of the form NAME=URL", hint=_HINT)
    return Master(name=name, url=text), url


def _login(url: URL) -> Login:
    return Login(
        host=url.host or "127.0.0.1",
        port=url.port or 3306,
        user=url.username or "root",
        password=str(url.password or os.environ.get("MYSQL_PWD", "")),
    )
