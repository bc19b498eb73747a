"""Sessions that commit on several nodes or on none, and what becomes of those that died."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import collate, event, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import IllegalStateChangeError, IntegrityError
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from shardids import AsyncCluster, Cluster
from shardids.cli import app
from shardids.errors import (
    BadArgument,
    CommitUncertain,
    MissingPrivilege,
    TransactionEnded,
    UnsupportedServer,
)
from shardids.migrate.install import provision
from shardids.pg.embedded import temporary_server
from shardids.pg.gids import Gid
from shardids.pg.urls import parse_url
from shardids.tables.transactions import listed, resolve
from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.clusters import ROOT, catalog_at, connected
from tests.support.transfers import (
    OPENING,
    Account,
    Entry,
    balances,
    open_bank,
    prepared_on,
    require_whole,
    roll_back_prepared,
    transfer,
)


class Bank:
    """A cluster of two nodes, with one account of each in ``a`` and ``b``."""

    def __init__(self, urls: dict[str, URL], cluster: Cluster, names: dict[str, list[str]]) -> None:
        self.urls = urls
        self.cluster = cluster
        self.names = names
        self.a, self.b = names["a"][0], names["b"][0]

    @property
    def catalog_url(self) -> URL:
        return self.urls["a"]

    def session(self, **options: Any) -> Session:
        return self.cluster.sharded_session(twophase=True, **options)

    def prepared(self) -> list[str]:
        return prepared_on(self.urls.values())

    def decisions(self, node: str) -> list[bool]:
        with connected(self.urls[node]) as connection:
            return [c for (c,) in connection.execute("select committed from shardids.decision")]


@pytest.fixture
def bank(blank_database: Callable[[], URL]) -> Iterator[Bank]:
    urls = {"a": blank_database(), "b": blank_database()}
    found_cluster(urls["a"], urls, 4)
    with Cluster.connect(urls["a"]) as cluster:
        yield Bank(urls, cluster, open_bank(cluster))
    # A test that fails leaves what it prepared; the tables could not be dropped.
    roll_back_prepared(urls.values())


def statements_of(session: Session, act: Callable[[], None]) -> list[str]:
    """What a session sends that is about transactions, in order."""
    sent: list[str] = []

    def note(connection: Any, _cursor: object, sql: str, *_: object) -> None:
        if "PREPARE" in sql or "decide" in sql or "assigned" in sql:
            sent.append(f"{connection.engine.url.database[-4:]} {sql.split(maxsplit=1)[0]}")

    engines = [session.shards.engine(node) for node in session.shards.placement.nodes.values()]  # type: ignore[attr-defined]  # RoutedSession's own
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        act()
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)
    return sent


def test_the_first_program_of_the_page_runs_on_two_nodes(bank: Bank) -> None:
    page = (ROOT / "docs" / "how-to" / "commit-on-two-nodes.md").read_text(encoding="utf-8")
    program = page.split("```python\n")[1].split("```")[0]
    both = sorted([bank.a, bank.b])
    program = program.replace('["ann", "eve"]', repr(both)).replace("User", "Account")
    exec(program, {"cluster": bank.cluster, "Account": Account, "select": select, "collate": collate})
    found = balances(bank.cluster)
    assert (found[both[0]], found[both[1]]) == (OPENING - 10, OPENING + 10)


def test_a_transaction_is_committed_on_both_nodes(bank: Bank) -> None:
    for number in range(3):
        with bank.session() as session, session.begin():
            transfer(session, bank.a, bank.b, f"t{number}")
    assert require_whole(bank.cluster) == 3
    assert bank.prepared() == []
    assert balances(bank.cluster)[bank.b] == OPENING + 3
    # Each decision is deleted by the next.
    assert bank.decisions("a") + bank.decisions("b") == [True]


def test_one_node_is_committed_to_without_preparing(bank: Bank) -> None:
    with bank.session() as session:
        sent = statements_of(session, lambda: move(session, bank.a, bank.names["a"][1]))
        session.get_one(Account, account_id(bank, bank.b))
        assert sent == []
    assert bank.decisions("a") + bank.decisions("b") == []
    assert require_whole(bank.cluster) == 1


def test_a_node_that_was_only_read_is_not_prepared(bank: Bank) -> None:
    there = account_id(bank, bank.b)
    with bank.session() as session:
        session.get_one(Account, there)

        def act() -> None:
            move(session, bank.a, bank.names["a"][1])

        sent = statements_of(session, act)
        assert len(sent) == 2  # It asks both whether they wrote.
    assert require_whole(bank.cluster) == 1


def move(session: Session, source: str, target: str, token: str = "t") -> None:
    transfer(session, source, target, token)
    session.commit()


def account_id(bank: Bank, name: str) -> int:
    with bank.cluster.session(key=name) as session:
        return session.scalars(select(Account.id).where(Account.name == name)).one()


def test_under_serializable_what_was_only_read_is_prepared_too(bank: Bank) -> None:
    there = account_id(bank, bank.b)
    with (
        Cluster.connect(bank.catalog_url, isolation_level="SERIALIZABLE") as cluster,
        cluster.sharded_session(twophase=True) as session,
    ):
        session.get_one(Account, there)
        sent = statements_of(session, lambda: move(session, bank.a, bank.names["a"][1]))
        assert [line.split()[1] for line in sent] == ["select", "select", "PREPARE", "select"]
    assert require_whole(bank.cluster) == 1
    assert bank.prepared() == []


def test_names_of_prepared_transactions_say_whose_they_are(bank: Bank) -> None:
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        (name,) = bank.prepared()
        gid = Gid.parse(name)
        assert gid is not None
        assert str(gid) == name
        with catalog_at(bank.catalog_url) as catalog:
            assert gid.cluster == catalog.describe().cluster
        assert (gid.number, gid.count) == (2, 2)
        assert gid.decider in {"a", "b"}
        session.commit()
    assert bank.prepared() == []
    assert require_whole(bank.cluster) == 1


@pytest.mark.parametrize("how", ["rollback", "close"])
def test_what_is_prepared_is_rolled_back_with_the_session(bank: Bank, how: str) -> None:
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        assert len(bank.prepared()) == 1
        getattr(session, how)()
        assert bank.prepared() == []
        transfer(session, bank.a, bank.b, "u")
        session.commit()
    assert require_whole(bank.cluster) == 1


def test_a_failure_in_prepare_rolls_all_nodes_back(bank: Bank) -> None:
    first, second = sorted((bank.a, bank.b))
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.commit()
        account = session.scalars(select(Account).where(Account.name == first)).one()
        account.balance += 1
        session.flush()
        # A deferred constraint is checked when the second node prepares.
        owner = account_id(bank, second)
        session.add(Entry(account_id=owner, transfer="t", amount=1))
        # SQLAlchemy before 2.0.51 fails to roll back, and says that instead.
        with pytest.raises((IntegrityError, IllegalStateChangeError)):
            session.commit()
        assert bank.prepared() == []
        session.rollback()
        move(session, bank.a, bank.b, "u")
    assert require_whole(bank.cluster) == 2


def test_a_failure_in_the_deciders_commit_rolls_all_nodes_back(bank: Bank) -> None:
    first, second = sorted((bank.a, bank.b))
    move(bank.session(), bank.a, bank.b)
    with bank.session() as session:
        session.add(Entry(account_id=account_id(bank, first), transfer="t", amount=1))
        session.flush()
        account = session.scalars(select(Account).where(Account.name == second)).one()
        account.balance += 1
        with pytest.raises(IntegrityError):
            session.commit()
        assert bank.prepared() == []
        session.rollback()
        move(session, bank.a, bank.b, "u")
    assert require_whole(bank.cluster) == 2


def test_savepoints_and_events_are_as_without_two_phases(bank: Bank) -> None:
    seen: list[str] = []
    with bank.session() as session:
        for name in ("before_commit", "after_commit", "after_rollback"):
            event.listen(session, name, lambda _session, name=name: seen.append(name))
        with session.begin():
            transfer(session, bank.a, bank.b, "t")
            nested = session.begin_nested()
            transfer(session, bank.a, bank.b, "not")
            nested.rollback()
            with session.begin_nested():
                transfer(session, bank.b, bank.a, "u")
    assert seen[-2:] == ["before_commit", "after_commit"]
    assert require_whole(bank.cluster) == 2


def test_a_decision_is_on_disk_whatever_the_role_has_set(bank: Bank) -> None:
    options = "-c synchronous_commit=off"
    with (
        Cluster.connect(bank.catalog_url, connect_args={"options": options}) as cluster,
        cluster.sharded_session(twophase=True) as session,
    ):
        transfer(session, bank.a, bank.b, "t")
        levels: list[str] = []

        def note(connection: Any) -> None:
            levels.append(connection.exec_driver_sql("show synchronous_commit").scalar())

        for node in cluster.placement.nodes.values():
            event.listen(cluster.engine(node), "commit", note)
        session.commit()
    assert levels[0] == "on"  # the decider's


def test_the_connection_lost_in_the_deciders_commit_leaves_the_rest_prepared(bank: Bank) -> None:
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")

        def lose(connection: Any) -> None:
            pid = connection.connection.dbapi_connection.info.backend_pid
            with connected(bank.catalog_url) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", [pid])

        for node in bank.cluster.placement.nodes.values():
            event.listen(bank.cluster.engine(node), "commit", lose)
        with pytest.raises(CommitUncertain):
            session.commit()
        session.rollback()
        for node in bank.cluster.placement.nodes.values():
            event.remove(bank.cluster.engine(node), "commit", lose)
    assert len(bank.prepared()) == 1
    with catalog_at(bank.catalog_url) as catalog:
        done = resolve(catalog, older_than_s=0)
    assert [outcome.result for outcome in done.outcomes] == ["rolled back"]
    assert bank.prepared() == []
    assert require_whole(bank.cluster) == 0


def test_a_node_that_is_lost_after_the_decision_is_committed_to_later(
    bank: Bank, caplog: pytest.LogCaptureFixture
) -> None:
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        (name,) = bank.prepared()
        gid = Gid.parse(name)
        assert gid is not None
        prepared_on_node = "b" if gid.decider == "a" else "a"
        with connected(bank.urls[prepared_on_node]) as other:
            other.execute(
                """select pg_terminate_backend(pid, 5000) from pg_stat_activity
                   where datname = current_database() and pid <> pg_backend_pid()"""
            )
        with caplog.at_level(logging.WARNING):
            session.commit()
    assert "stays prepared" in caplog.text
    # What the server or the driver says may quote values.
    (warning,) = (record for record in caplog.records if "stays prepared" in record.getMessage())
    assert re.search(r"rolled back: |committed: ", warning.getMessage())
    assert "terminating" not in warning.getMessage()
    assert bank.prepared() == [name]
    with catalog_at(bank.catalog_url) as catalog:
        done = resolve(catalog)
    assert [outcome.result for outcome in done.outcomes] == ["committed"]
    assert bank.prepared() == []
    assert require_whole(bank.cluster) == 1


def test_async_sessions_commit_on_both_nodes_or_on_none(bank: Bank) -> None:
    async def run() -> None:
        async with await AsyncCluster.connect(bank.catalog_url) as cluster:
            async with cluster.sharded_session(twophase=True) as session:
                await session.run_sync(lambda s: transfer(s, bank.a, bank.b, "t"))
                await session.commit()
            async with cluster.sharded_session(twophase=True) as session:
                await session.run_sync(lambda s: transfer(s, bank.a, bank.b, "u"))
                await session.run_sync(lambda s: s.prepare())
                assert len(bank.prepared()) == 1
                await session.rollback()
                assert bank.prepared() == []

    asyncio.run(run())
    assert require_whole(bank.cluster) == 1


def test_autocommit_is_refused(bank: Bank) -> None:
    with (
        Cluster.connect(bank.catalog_url, isolation_level="AUTOCOMMIT") as cluster,
        pytest.raises(BadArgument, match="AUTOCOMMIT"),
    ):
        cluster.sharded_session(twophase=True)


def test_roles_that_were_granted_nothing_may_not_decide(bank: Bank, make_role: MakeRole) -> None:
    role = make_role("app")
    name = sql.Identifier(str(role.username))
    for url in bank.urls.values():
        with connected(url) as owner:
            owner.execute(sql.SQL("grant usage on schema shardids to {}").format(name))
    with connected(bank.catalog_url) as owner:
        owner.execute(sql.SQL("select shardids_catalog.grant_usage({})").format(role.username))
    with Cluster.connect(bank.catalog_url.set(username=role.username, password=role.password)) as cluster:
        with pytest.raises(MissingPrivilege, match="shardids grant"):
            cluster.sharded_session(twophase=True)
        with catalog_at(bank.catalog_url) as catalog:
            provision.grant(catalog, str(role.username))
        cluster.sharded_session(twophase=True).close()
    drop_grants(bank, role)


def drop_grants(bank: Bank, role: URL) -> None:
    for url in bank.urls.values():
        with connected(url) as owner:
            owner.execute(sql.SQL("drop owned by {}").format(sql.Identifier(str(role.username))))


def test_a_node_that_allows_no_prepared_transactions_is_refused(blank_database: Callable[[], URL]) -> None:
    url = blank_database()
    with temporary_server(settings={"max_prepared_transactions": "0"}) as server:
        found_cluster(url, {"a": url, "b": parse_url(server.url())}, 4)
        with (
            Cluster.connect(url) as cluster,
            pytest.raises(UnsupportedServer, match=r'node "b".*max_prepared_transactions is 0'),
        ):
            cluster.sharded_session(twophase=True)


# Ending what clients have left


def end_sessions(bank: Bank) -> None:
    """What becomes of a client's sessions when it dies."""
    for url in bank.urls.values():
        with connected(url) as owner:
            owner.execute(
                """select pg_terminate_backend(pid, 5000) from pg_stat_activity
                   where datname = current_database() and pid <> pg_backend_pid()"""
            )


def results(bank: Bank, **options: Any) -> list[str]:
    with catalog_at(bank.catalog_url) as catalog:
        return [outcome.result for outcome in resolve(catalog, **options).outcomes]


def test_what_was_not_decided_is_rolled_back_once_it_is_old_enough(bank: Bank) -> None:
    session = bank.session()
    transfer(session, bank.a, bank.b, "t")
    session.prepare()
    assert results(bank, older_than_s=60) == ["left"]
    assert results(bank, older_than_s=0, dry_run=True) == ["rolled back"]
    assert len(bank.prepared()) == 1
    end_sessions(bank)
    assert results(bank, older_than_s=0) == ["rolled back"]
    assert results(bank) == []
    with suppress(CommitUncertain):
        session.close()
    assert bank.decisions("a") + bank.decisions("b") == []
    assert require_whole(bank.cluster) == 0


def test_a_client_that_wakes_up_late_cannot_commit_any_more(bank: Bank) -> None:
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        with catalog_at(bank.catalog_url) as catalog:
            (outcome,) = resolve(catalog, older_than_s=0).outcomes
        assert outcome.result == "rolled back"
        # The rows that the client wrote on the node that decides are locked as long as it lives.
        pid = session.begun[0].connection.driver_connection.info.backend_pid  # type: ignore[attr-defined]  # psycopg's
        assert outcome.reason.endswith(f"select pg_terminate_backend({pid})")
        assert f"process {pid} on node" in outcome.reason
        # While the client's transaction lives, the refusal is kept.
        assert results(bank) == []
        assert bank.decisions("a") + bank.decisions("b") == [False]
        with pytest.raises(TransactionEnded, match="resolve"):
            session.commit()
        session.rollback()
        move(session, bank.a, bank.b, "u")
    assert results(bank) == []
    assert False not in bank.decisions("a") + bank.decisions("b")
    assert require_whole(bank.cluster) == 1


def test_what_its_client_is_deciding_just_now_is_left(bank: Bank) -> None:
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        (name,) = bank.prepared()
        gid = Gid.parse(name)
        assert gid is not None
        with connected(bank.urls[gid.decider]) as client:
            client.execute("begin")
            client.execute(
                "insert into shardids.decision (transaction, committed) values (%s, true)", [gid.transaction]
            )
            with catalog_at(bank.catalog_url) as catalog:
                (outcome,) = resolve(catalog, older_than_s=0).outcomes
            assert outcome.result == "left"
            assert f'is deciding on node "{gid.decider}"' in outcome.reason
            assert str(client.info.backend_pid) in outcome.reason
            client.execute("rollback")
        session.commit()
    assert require_whole(bank.cluster) == 1


def test_what_others_prepared_is_shown_and_left_alone(bank: Bank) -> None:
    other = Gid(cluster=UUID(int=7), transaction=UUID(int=8), number=2, count=2, decider="a")
    names = ["theirs", str(other)]
    for name in names:
        with connected(bank.urls["b"]) as client:
            client.execute("begin")
            client.execute("create table public.made ()" if name == "theirs" else "select 1")
            client.execute(sql.SQL("prepare transaction {}").format(name))
    with catalog_at(bank.catalog_url) as catalog:
        assert {str(one.decision) for one in listed(catalog).doubts} == {"foreign"}
    assert results(bank, older_than_s=0) == ["left", "left"]
    assert sorted(bank.prepared()) == sorted(names)


def test_a_decider_that_cannot_be_asked_leaves_its_transactions(bank: Bank) -> None:
    gone = Gid(
        cluster=bank.cluster.decisions.cluster, transaction=UUID(int=8), number=2, count=2, decider="gone"
    )
    with connected(bank.urls["b"]) as client:
        client.execute("begin")
        client.execute(sql.SQL("prepare transaction {}").format(str(gone)))
    with catalog_at(bank.catalog_url) as catalog:
        (outcome,) = resolve(catalog, older_than_s=0).outcomes
    assert outcome.result == "left"
    assert outcome.error is not None
    assert "not in the catalog" in outcome.error.hint


def test_others_can_neither_forge_a_decision_nor_delete_one(bank: Bank, make_role: MakeRole) -> None:
    role = make_role("other")
    with catalog_at(bank.catalog_url) as catalog:
        provision.grant(catalog, str(role.username))
    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        (name,) = bank.prepared()
        gid = Gid.parse(name)
        assert gid is not None
        url = bank.urls[gid.decider].set(username=role.username, password=role.password)
        with connected(url) as hostile:
            # Everybody can read the name; it does not say the secret.
            assert hostile.execute("select gid from pg_prepared_xacts where gid = %s", [name]).fetchone()
            hostile.execute(
                "select shardids.decide(%s, %s)", [gid.transaction.bytes, [gid.transaction.bytes]]
            )
            for statement in (
                "insert into shardids.decision (transaction, committed) values (%s, true)",
                "delete from shardids.decision where transaction = %s",
                "select shardids.settle(%s)",
                "select shardids.forget_decisions(array[%s]::uuid[])",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    hostile.execute(statement, [gid.transaction])
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                hostile.execute("begin; lock table shardids.decision in share mode")
        session.commit()
    drop_grants(bank, role)
    assert require_whole(bank.cluster) == 1


def test_the_command_line_lists_and_ends_what_is_in_doubt(bank: Bank) -> None:
    def shardids(*arguments: str) -> tuple[int, Any]:
        done = CliRunner().invoke(app, [*arguments, "--json", "--catalog", dsn(bank.catalog_url)])
        return done.exit_code, json.loads(done.stdout)

    with bank.session() as session:
        transfer(session, bank.a, bank.b, "t")
        session.prepare()
        status, (row,) = shardids("transactions")
        assert (status, row["decision"], row["part"]) == (0, "none yet", "2/2")
        status, (row,) = shardids("transactions", "--resolve", "--older-than", "0s", "--dry-run")
        assert (status, row["would be"]) == (0, "rolled back")
        status, (row,) = shardids("transactions", "--resolve", "--older-than", "1h")
        assert (status, row["was"]) == (0, "left")
        status, (row,) = shardids("transactions", "--resolve", "--older-than", "0s")
        assert (status, row["was"]) == (0, "rolled back")
        assert shardids("transactions") == (0, [])
        status, made = shardids("restore-point", "noon", "--dry-run")
        assert (status, made["name"]) == (0, "noon")
    assert require_whole(bank.cluster) == 0
