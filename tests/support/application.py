"""A small application of many writers, which uses ``Shard.run`` alone, and what must hold of its writes."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from sqlalchemy import ForeignKey, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from shardids import Cluster, primary_key
from tests.support.moves import TwoNodes, schema

TABLES = """
    create table {s}.users (
      id bigint primary key default {s}.next_id(), name text not null, edits integer not null default 0);
    create table {s}.photos (
      id bigint primary key default {s}.next_id(),
      user_id bigint not null references {s}.users, title text not null);
    create index on {s}.photos (user_id);"""


class Base(DeclarativeBase):
    pass


class User(Base):
    __tablename__ = "users"

    id: Mapped[int] = primary_key()
    name: Mapped[str]
    edits: Mapped[int] = mapped_column(default=0)


class Photo(Base):
    __tablename__ = "photos"

    id: Mapped[int] = primary_key()
    user_id: Mapped[int] = mapped_column(ForeignKey(User.id))
    title: Mapped[str]


@dataclass(frozen=True)
class Write:
    """One transaction: a user with photos, a photo of a user who is there, or an edit of one.

    ``token`` is the name and the title of all that it inserts, and in nobody else's.
    """

    token: str
    shard: int
    owner: int | None = None
    is_edit: bool = False

    def __call__(self, session: Session) -> tuple[list[int], list[int]]:
        """Does it; the IDs of users and of photos that it made."""
        if self.is_edit:
            session.execute(update(User).where(User.id == self.owner).values(edits=User.edits + 1))
            return [], []
        if self.owner is not None:
            photos = [Photo(user_id=self.owner, title=self.token)]
            session.add_all(photos)
            session.flush()
            return [], [photo.id for photo in photos]
        user = User(name=self.token)
        session.add(user)
        session.flush()
        photos = [Photo(user_id=user.id, title=self.token) for _ in range(2)]
        session.add_all(photos)
        session.flush()
        return [user.id], [photo.id for photo in photos]


@dataclass
class Author:
    """Who thinks of one write after another, and keeps what became of them."""

    number: int
    shards: Sequence[int]
    acknowledged: list[tuple[Write, list[int], list[int]]] = field(default_factory=list)
    calls: int = 0
    turn: int = 0
    _users: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.random = random.Random(self.number)

    def next_write(self) -> Write:
        self.turn += 1
        shard, token = self.random.choice(self.shards), f"{self.number}/{self.turn}"
        users = self._users[shard]
        if users and self.turn % 2:
            owner = self.random.choice(users[-50:])
            return Write(token, shard, owner=owner, is_edit=self.turn % 4 == 1)
        return Write(token, shard)

    def keep(self, write: Write, users: list[int], photos: list[int]) -> None:
        self.acknowledged.append((write, users, photos))
        self._users[write.shard] += users


class Application:
    """Threads that write, each with its author, to the shards of a cluster wherever they are.

    No error may come.
    """

    def __init__(
        self,
        cluster: Cluster,
        shards: Sequence[int],
        *,
        writers: int = 16,
        every_s: float = 0.005,
    ) -> None:
        self.cluster = cluster
        self.authors = [Author(number, shards) for number in range(writers)]
        self._every_s = every_s
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(author,), daemon=True) for author in self.authors
        ]

    def __enter__(self) -> Application:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the writers; raises what one of them met and should not have."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self.raise_failures()

    def raise_failures(self) -> None:
        if self._failures:
            raise self._failures[0]

    @property
    def writes(self) -> int:
        """How many writes were acknowledged."""
        return sum(len(author.acknowledged) for author in self.authors)

    @property
    def repeated(self) -> int:
        """How many times a transaction was run again."""
        return sum(author.calls - author.turn for author in self.authors)

    def _run(self, author: Author) -> None:
        try:
            while not self._stop.wait(self._every_s):
                self._write(author, author.next_write())
        except BaseException as failure:  # noqa: BLE001 -- raised again by stop
            self._failures.append(failure)

    def _write(self, author: Author, write: Write) -> None:
        def counted(session: Session) -> tuple[list[int], list[int]]:
            author.calls += 1
            return write(session)

        author.keep(write, *self.cluster.at(shard=write.shard).run(counted))


def assert_each_write_once(
    nodes: TwoNodes, shards: Sequence[int], authors: Sequence[Author], cluster: Cluster
) -> int:
    """What was acknowledged is there once, in its shard, and nothing else is; the number of rows."""
    seen: list[int] = []
    for shard in shards:
        users, photos = _rows(nodes, shard)
        ids = [row[0] for row in chain(users, photos)]
        assert {cluster.shard_of(one) for one in ids} <= {shard}
        seen += ids
        by_token: dict[str, list[int]] = defaultdict(list)
        for made, token, *_ in sorted(chain(users, photos)):
            by_token[token].append(made)
        edits = {made: count for made, _, count in users}
        assert not {owner for _, _, owner in photos} - edits.keys()
        _check_shard(shard, authors, by_token, edits)
    assert len(seen) == len(set(seen))
    return len(seen)


def _rows(nodes: TwoNodes, shard: int) -> tuple[list[tuple[int, str, int]], list[tuple[int, str, int]]]:
    s = schema(shard)
    with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
        return (
            connection.execute(f"select id, name, edits from {s}.users").fetchall(),
            connection.execute(f"select id, title, user_id from {s}.photos").fetchall(),
        )


def _check_shard(
    shard: int, authors: Sequence[Author], by_token: dict[str, list[int]], edits: dict[int, int]
) -> None:
    edited: Counter[int] = Counter()
    for author in authors:
        for write, users, photos in author.acknowledged:
            if write.shard != shard:
                continue
            if write.is_edit:
                edited[write.owner] += 1
            else:
                assert by_token.pop(write.token, None) == sorted([*users, *photos]), write
    assert not by_token, "what nobody acknowledged is there"
    for user, count in edits.items():
        assert count == edited[user]
