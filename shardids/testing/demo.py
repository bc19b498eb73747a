"""``shardids demo``: runs the photo application of ``examples/`` on two real servers and checks its IDs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from types import ModuleType
from typing import Any

from sqlalchemy import text

from shardids.client.cluster import Cluster
from shardids.errors import ShardidsError
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from shardids.pg.sqlfiles import data_folder
from shardids.testing import devcluster

SHARDS = 64
USERS = 1000
PHOTOS_EACH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """The number of rows in one shard after the demo has written."""

    shard: int
    node: str
    users: int
    photos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of checking the IDs of all shards.

    Attributes:
        ids: how many there are.
        distinct: how many of them are distinct.
        born_elsewhere: how many name a shard other than the one they are stored in.
        disordered: how many are not higher than the ID inserted just before them into the same table.
    """

    ids: int
    distinct: int
    born_elsewhere: int
    disordered: int

    @property
    def holds(self) -> bool:
        """Whether all IDs are distinct, in order, and name the shard they are stored in."""
        return self.ids == self.distinct and not self.born_elsewhere and not self.disordered


class Demo:
    """The running demo: two servers, a cluster on them, and the photo application."""

    def __init__(self, servers: list[EmbeddedServer]) -> None:
        self.servers = servers
        self.app: Any = _load_photos()
        self.cluster: Cluster

    def provision(self) -> None:
        """Create the cluster and the application's tables."""
        self.cluster = Cluster.connect(devcluster.create_cluster(self.servers, SHARDS))
        self.app.create_tables(self.cluster)

    def write(self) -> Iterator[int]:
        """Write users and photos; yield the number of rows after each commit."""
        names = [f"user{number}" for number in range(USERS)]
        yield from self.app.sign_up(self.cluster, names, PHOTOS_EACH)

    def server_version(self) -> str:
        """Return the PostgreSQL version that the server of shard 0 reports."""
        with self.cluster.at(shard=0).connection() as connection:
            return str(connection.execute(text("show server_version")).scalar_one())

    def rows(self) -> list[ShardRows]:
        """Count the rows of each shard."""
        found = []
        for shard, node in self.cluster.placement.node_of.items():
            with self.cluster.session(shard=shard) as session:
                users = session.query(self.app.User).count()
                photos = session.query(self.app.Photo).count()
            found.append(ShardRows(shard=shard, node=node, users=users, photos=photos))
        return found

    def sample_ids(self) -> list[int]:
        """Return three IDs to decode: two users on different nodes, and a photo."""
        users: dict[str, int] = {}
        for number in range(USERS):
            user = self.app.find_user(self.cluster, f"user{number}")
            users.setdefault(self.cluster.node_of(self.cluster.shard_of(user.id)).name, user.id)
            if len(users) == len(self.servers):
                break
        first = next(iter(users.values()))
        return [*users.values(), self.app.photos_of(self.cluster, first)[-1].id]

    def time_range(self, photo_id: int) -> tuple[int, datetime, datetime, int]:
        """Return shard, start, end and number of photos for the tenth of a second around a photo's birth."""
        born = self.cluster.decode(photo_id)
        start, end = born.time - timedelta(milliseconds=50), born.time + timedelta(milliseconds=50)
        return born.shard, start, end, self.app.photos_between(self.cluster, born.shard, start, end)

    def prove(self) -> Proof:
        """Read all IDs in the order of insertion and check them."""
        seen: set[int] = set()
        count = elsewhere = disordered = 0
        for shard in self.cluster.placement.node_of:
            with self.cluster.session(shard=shard) as session:
                for model in (self.app.User, self.app.Photo):
                    # In a table that has only seen INSERTs, the order of ctid is the order of the inserts.
                    ids = session.query(model.id).order_by(text("ctid")).all()
                    numbers = [row.id for row in ids]
                    count += len(numbers)
                    seen.update(numbers)
                    elsewhere += sum(self.cluster.shard_of(number) != shard for number in numbers)
                    disordered += sum(one >= other for one, other in pairwise(numbers))
        return Proof(ids=count, distinct=len(seen), born_elsewhere=elsewhere, disordered=disordered)


@contextmanager
def running() -> Iterator[Demo]:
    """Start two servers for the demo; stop and removes them at the end of the block."""
    with temporary_servers(2) as servers:
        demo = Demo(servers)
        try:
            yield demo
        finally:
            if hasattr(demo, "cluster"):
                demo.cluster.close()


def _load_photos() -> ModuleType:
    path = data_folder("examples") / "photos.py"
    spec = importlib.util.spec_from_file_location("shardids_example_photos", path)
    if spec is None or spec.loader is None:
        raise ShardidsError(f"the example {path} is missing from this installation")
    module = importlib.util.module_from_spec(spec)
    # SQLAlchemy looks the models' annotations up in this module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
