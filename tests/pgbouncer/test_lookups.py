"""Look-ups through PgBouncer in transaction mode: no setting of one client stays for another."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy.exc import IntegrityError

from shardids import Cluster
from tests.conftest import BlankDatabases, dsn
from tests.support.pgbouncer import PgBouncer
from tests.support.signups import User, claims, named, open_signups, rows

SHARDS = 4


def test_sessions_claim_and_other_statements_are_refused(
    databases: BlankDatabases, pgbouncer: PgBouncer
) -> None:
    direct = databases.take()
    url = pgbouncer.url(direct.database)
    open_signups(url, {"a": url}, SHARDS)
    write = "insert into shard_0001.users (name, email) values ('x', 'sql@example.com')"
    with (
        Cluster.connect(url, listen=False) as cluster,
        psycopg.connect(dsn(url), prepare_threshold=None) as other,
    ):
        for number in range(20):
            shard = number % SHARDS
            with cluster.session(shard=shard) as session:
                session.add(User(name=named(cluster, shard), email=f"u{number}@example.com"))
                session.commit()
            if number % 5 == 0:
                other.execute("set local shardids.unclaimed_writes = 'allowed'")
                other.execute(write)
                other.rollback()
            # On the server connections that the session, and who was allowed, have used.
            with pytest.raises(psycopg.Error, match="without a claim"):
                other.execute(write)
            other.rollback()
        with cluster.session(shard=2) as session:
            session.add(User(name=named(cluster, 2), email="u1@example.com"))
            with pytest.raises(IntegrityError, match="violates look-up"):
                session.commit()
        assert claims(cluster) == rows(cluster)
        assert len(rows(cluster)) == 20
    databases.give_back(direct)
