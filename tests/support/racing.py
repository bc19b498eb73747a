"""A client that races others for e-mail addresses, by all the ways in which applications write rows."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, configure_mappers

from shardids import Cluster
from shardids.errors import ShardidsError
from tests.support.signups import User, named

configure_mappers()

MANY = 1000
"""How many rows a flush or a statement writes, unless it is one."""
BLOCKS = 24
"""How many blocks of as many values are raced for at a time."""
TRIES_A_VALUE = 1
"""How often each value is tried, about, by who does not know that it is taken."""

Rows = dict[str, int]
"""Addresses, and the shards where they are written."""


class Race:
    """What clients have tried so far, and what was acknowledged to them, in files that outlive them."""

    def __init__(self, folder: Path) -> None:
        self._tried, self._said = folder / "tried", folder / "said"
        self._files = {
            path: os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND) for path in (self._tried, self._said)
        }

    @property
    def tried(self) -> int:
        """How many inserts of a row were tried."""
        return self._tried.stat().st_size

    def has_tried(self, count: int) -> None:
        """Counts inserts that were done, or refused for a clash."""
        os.write(self._files[self._tried], b"." * count)

    def was_told(self, rows: Rows) -> None:
        """Keeps rows that were acknowledged."""
        told = " ".join(f"{email} {shard}" for email, shard in rows.items())
        # Who is killed may have written a part, which has no end.
        os.write(self._files[self._said], f"\n{told} .\n".encode())

    def acknowledged(self) -> Counter[tuple[str, int]]:
        """The addresses and shards of acknowledged rows, which nobody has deleted; each comes once."""
        told: Counter[tuple[str, int]] = Counter()
        for line in self._said.read_text().splitlines():
            if line.endswith(" ."):
                words = line.split()[:-1]
                told.update(zip(words[::2], map(int, words[1::2]), strict=True))
        return told

    def values(self, count: int) -> list[str]:
        """Addresses that others try, too: one, often the same, or a whole block.

        Of blocks that overlap in part, two transactions would each have claimed what the other needs.
        """
        first = self.tried // TRIES_A_VALUE // MANY * MANY
        if count == 1:
            drawn = [first + random.randrange(random.choice((10, BLOCKS * MANY)))]
        else:
            first += random.randrange(BLOCKS) * MANY
            drawn = list(range(first, first + MANY))
        return [f"{value}@example.com" for value in drawn]


Way = Callable[[Cluster, Mapping[int, str], Rows], bool]
"""Writes rows, with the name of each one's shard; returns whether they are there to stay."""


def race(url: str, folder: Path) -> None:
    """Inserts addresses that others insert at the same time, until it is killed, or its parent is.

    One row or many: by objects of some shards, or by a statement for one. Some of it is rolled back, some is
    deleted again.
    """
    so_far, parent = Race(folder), os.getppid()
    while os.getppid() == parent:
        try:
            with Cluster.connect(url, listen=False) as cluster:
                names = {shard: named(cluster, shard) for shard in range(cluster.shard_count)}
                while os.getppid() == parent:
                    _try(
                        cluster,
                        so_far,
                        names,
                        random.choice((_flush, _insert)),
                        random.choice((1, 1, 1, MANY)),
                    )
        except (ShardidsError, DBAPIError):
            # The catalog's server has crashed, and is there again soon.
            continue


def _try(cluster: Cluster, so_far: Race, names: Mapping[int, str], way: Way, count: int) -> None:
    """Tries to insert rows; of many, again without those that others have, as loaders do."""
    emails = so_far.values(count)
    for _ in range(3 if count > 1 else 1):
        try:
            if count > 1:
                emails = _free(cluster, emails)
            shards = random.sample(list(names), 3 if way is _flush else 1)
            rows = {email: random.choice(shards) for email in emails}
            if rows and way(cluster, names, rows):
                so_far.was_told(rows)
        except IntegrityError:
            so_far.has_tried(len(emails))
        except (ShardidsError, DBAPIError):
            # Busy, or a server is down: nobody knows that it was tried.
            time.sleep(0.05)
            return
        else:
            so_far.has_tried(len(emails))
            return


def _free(cluster: Cluster, emails: list[str]) -> list[str]:
    """Those of the addresses that no row has, by look-up."""
    with cluster.sharded_session() as session:
        there = set(session.scalars(select(User.email).where(User.email.in_(emails))))
    return [email for email in emails if email not in there]


def _flush(cluster: Cluster, names: Mapping[int, str], rows: Rows) -> bool:
    shards = set(rows.values())
    with cluster.session(shard=shards.pop()) if len(shards) == 1 else cluster.sharded_session() as session:
        session.add_all(User(name=names[shard], email=email) for email, shard in rows.items())
        session.flush()
        return _stays(session, rows)


def _insert(cluster: Cluster, names: Mapping[int, str], rows: Rows) -> bool:
    (shard,) = set(rows.values())
    with cluster.session(shard=shard) as session:
        session.execute(insert(User), [{"name": names[shard], "email": email} for email in rows])
        return _stays(session, rows)


def _stays(session: Session, rows: Rows) -> bool:
    """Commits; or rolls back; or deletes again what was committed."""
    chance = random.random()
    if chance < 0.1:
        return False
    session.commit()
    if chance > 0.9:
        session.execute(delete(User).where(User.email.in_(list(rows))))
        session.commit()
    return chance <= 0.9
