"""One interface to the masters of a command, PostgreSQL or MariaDB: plan, apply and verify."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from shardids.compare.multimaster import mariadb
from shardids.compare.multimaster.mariadb import Login, MariaDbMaster, offset_settings
from shardids.compare.multimaster.postgresql import (
    Master,
    OffsetFinding,
    OffsetStep,
    carry_out,
    check_masters,
    make_plan,
    read_masters,
    verify,
)
from shardids.errors import BadArgument

_HINT = "For example: --master a=postgresql://user@host:5432/database, or a=mariadb://user@host:3306"


class Fleet(Protocol):
    """Masters in the order of their offsets."""

    @property
    def size(self) -> int:
        """Return the number of masters that stay."""

    def counted(self) -> int:
        """Return the largest number that a master counts by now."""

    def options(self) -> dict[str, str]:
        """Return the text for the option file of each master, by name; empty if none needs one."""

    def verify(self) -> list[OffsetFinding]:
        """Return the faults of their offsets."""

    def plan(self) -> list[OffsetStep]:
        """Return the steps that give each master its offset."""

    def carry_out(self, steps: Sequence[OffsetStep], on_step: Callable[[OffsetStep], None]) -> None:
        """Take the steps, and report each that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgreSqlFleet:
    """PostgreSQL masters, whose sequences count by offsets; ``schemas`` selects schemas, none means all."""

    masters: tuple[Master, ...]
    schemas: tuple[str, ...]
    headroom: int

    @property
    def size(self) -> int:
        """Returns how many masters there are."""
        return sum(not master.leaves for master in self.masters)

    def counted(self) -> int:
        """Return the largest increment of a sequence."""
        states = read_masters(self.masters, self.schemas)
        sequences = [counter.sequence for state in states for counter in state.counters if counter.sequence]
        return max((sequence.increment for sequence in sequences), default=1)

    def options(self) -> dict[str, str]:
        """Return nothing: the offsets are in the sequences, which are files of the database."""
        return {}

    def verify(self) -> list[OffsetFinding]:
        """Call :func:`shardids.compare.multimaster.verify`."""
        return verify(read_masters(self.masters, self.schemas))

    def plan(self) -> list[OffsetStep]:
        """Call :func:`shardids.compare.multimaster.make_plan`."""
        return list(make_plan(read_masters(self.masters, self.schemas), self.headroom).steps)

    def carry_out(self, steps: Sequence[OffsetStep], on_step: Callable[[OffsetStep], None]) -> None:
        """Call :func:`shardids.compare.multimaster.carry_out`."""
        carry_out(self.masters, steps, on_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class MariaDbFleet:
    """MariaDB masters, whose servers number the rows of all tables by offsets."""

    masters: tuple[MariaDbMaster, ...]

    @property
    def size(self) -> int:
        """Returns how many masters there are."""
        return sum(not master.leaves for master in self.masters)

    def counted(self) -> int:
        """Return the largest ``auto_increment_increment``."""
        return max(state.found_increment for state in mariadb.read_ring(self.masters))

    def options(self) -> dict[str, str]:
        """Return ``auto_increment_increment`` and ``auto_increment_offset`` of each master that stays."""
        staying = [master.name for master in self.masters if not master.leaves]
        return {
            name: "\n".join(
                ["[mariadbd]"]
                + [f"{key} = {value}" for key, value in offset_settings(offset, self.size).items()]
            )
            for offset, name in enumerate(staying, 1)
        }

    def verify(self) -> list[OffsetFinding]:
        """Call :func:`shardids.compare.multimaster.mariadb.verify_ring`."""
        return mariadb.verify_ring(mariadb.read_ring(self.masters))

    def plan(self) -> list[OffsetStep]:
        """Call :func:`shardids.compare.multimaster.mariadb.plan_ring`."""
        return mariadb.plan_ring(mariadb.read_ring(self.masters))

    def carry_out(self, steps: Sequence[OffsetStep], on_step: Callable[[OffsetStep], None]) -> None:
        """Call :func:`shardids.compare.multimaster.mariadb.carry_out_ring`."""
        mariadb.carry_out_ring(self.masters, steps, on_step)


def parse_fleet(
    words: Sequence[str], *, leaving: Sequence[str] = (), schemas: Sequence[str], headroom: int
) -> Fleet:
    """Parse masters of the form ``NAME=URL``, all PostgreSQL or all MariaDB; those that leave come last.

    MariaDB's password may also come from ``MYSQL_PWD``.

    Raises:
        BadArgument: a master can't be parsed, two have one name, or the kinds are mixed. No message repeats a
            URL, as that may hold a password.
    """
    every = [*words, *leaving]
    named = [_split(number, word, leaves=number > len(words)) for number, word in enumerate(every, 1)]
    check_masters([master for master, _ in named])
    of_mariadb = [url.get_backend_name() in ("mariadb", "mysql") for _, url in named]
    if all(of_mariadb):
        return MariaDbFleet(
            masters=tuple(
                MariaDbMaster(name=master.name, login=_login(url), leaves=master.leaves)
                for master, url in named
            )
        )
    if any(of_mariadb):
        raise BadArgument("the masters must be all PostgreSQL or all MariaDB")
    return PostgreSqlFleet(
        masters=tuple(master for master, _ in named), schemas=tuple(schemas), headroom=headroom
    )


def _split(number: int, word: str, *, leaves: bool) -> tuple[Master, URL]:
    name, equals, text = word.partition("=")
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        equals = ""
    if not equals:
        raise BadArgument(f"master {number} is not of the form NAME=URL", hint=_HINT)
    return Master(name=name, url=text, leaves=leaves), url


def _login(url: URL) -> Login:
    return Login(
        host=url.host or "127.0.0.1",
        port=url.port or 3306,
        user=url.username or "root",
        password=str(url.password or os.environ.get("MYSQL_PWD", "")),
    )
