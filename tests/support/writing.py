"""Threads that write until they are stopped, and keep what was acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import psycopg

W = TypeVar("W")


class Threads(Generic[W]):
    """Threads, each with its own notes of what it wrote; the first failure of one is raised at the end."""

    def __init__(self, notes: Callable[[], W], number: int, every_s: float) -> None:
        self._every_s = every_s
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.written = [notes() for _ in range(number)]
        self._threads = [
            threading.Thread(target=self._guarded, args=(index, one), daemon=True)
            for index, one in enumerate(self.written)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if self._failures:
            raise self._failures[0]

    def _guarded(self, index: int, written: W) -> None:
        try:
            self._run(index, written)
        except BaseException as failure:  # noqa: BLE001 -- raised again by stop
            self._failures.append(failure)

    def _run(self, index: int, written: W) -> None:
        raise NotImplementedError


@dataclass
class Written:
    """What a writer of users and photos knows to be committed."""

    users: dict[int, str] = field(default_factory=dict)
    photos: dict[int, int] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    pauses_s: list[float] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    refusals: set[str | None] = field(default_factory=set)

    def is_in(self, users: Mapping[int, str], photos: Mapping[int, int]) -> bool:
        """Whether all that was acknowledged is in the tables, and nothing that was deleted."""
        return (
            self.users.items() <= users.items()
            and self.photos.items() <= photos.items()
            and not self.deleted & users.keys()
        )


def change_users(
    connection: psycopg.Connection, s: str, index: int, turn: int, own: list[int], **values: object
) -> Callable[[Written], None]:
    """Inserts, updates or deletes users with photos; returns what notes it once it is committed.

    ``values`` are further columns of new users.
    """
    if turn % 5 == 3 and own:
        changed, name = own[turn % len(own)], f"changed {index}/{turn}"
        connection.execute(f"update {s}.users set name = %s where id = %s", [name, changed])
        return lambda written: written.users.update({changed: name})
    if turn % 7 == 5 and len(own) > 3:
        gone = own.pop(turn % len(own))
        connection.execute(f"delete from {s}.users where id = %s", [gone])

        def delete(written: Written) -> None:
            written.deleted.add(gone)
            del written.users[gone]
            for photo in [p for p, user in written.photos.items() if user == gone]:
                del written.photos[photo]

        return delete
    name = f"{index}/{turn}"
    columns = ", ".join(["name", *values])
    (user,) = connection.execute(
        f"insert into {s}.users ({columns}) values ({', '.join(['%s'] * (1 + len(values)))}) returning id",
        [name, *values.values()],
    ).fetchone()
    (photo,) = connection.execute(
        f"insert into {s}.photos (user_id, size) values (%s, 1) returning id", [user]
    ).fetchone()

    def insert(written: Written) -> None:
        own.append(user)
        written.users[user] = name
        written.photos[photo] = user

    return insert
