"""What becomes of aliases whose shards move or are lost; run as those of ``scenes``."""

from __future__ import annotations

import logging
import time
from statistics import median
from threading import Event, Thread

import pytest
from django.core.management import call_command
from django.db import Error, OperationalError, connections, transaction
from django.utils import timezone
from sqlalchemy.engine import make_url

from shardids import mover
from shardids.catalog.rows import Catalog
from shardids.django import alias_for, get_cluster, in_shard, run_in_shard
from shardids.django.aliases import configuration
from shardids.errors import NodeDown, ShardLost
from tests.support.django_project.polls.models import Question
from tests.support.waiting import wait_for


def make_tables() -> None:
    call_command("migrate_shards", "polls", verbosity=0)


def ask(text: str = "?") -> Question:
    return Question.objects.create(question_text=text, pub_date=timezone.now())


def move(shard: int, to: str, *, back: bool = False) -> None:
    catalog = Catalog(configuration()["CATALOG"])
    try:
        mover.move(catalog, shard, to, back=back)
    finally:
        catalog.close()


def node_of(alias: str) -> str:
    """The node that the alias is really connected to."""
    with connections[alias].cursor() as cursor:
        cursor.execute("select name from shardids.node")
        return str(cursor.fetchone()[0])


def writers_go_on_while_shards_move() -> None:
    stop, written, errors = Event(), list[int](), list[Exception]()

    def write() -> None:
        try:
            while not stop.is_set():
                written.append(run_in_shard(ask, shard=0).pk)
        except Exception as error:  # noqa: BLE001 -- told to the test
            errors.append(error)
        finally:
            connections.close_all()

    threads = [Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(written) > 10 or errors, "writes")
    move(0, "b")
    there = len(written)
    wait_for(lambda: len(written) > there + 10 or errors, "more writes")
    move(0, "a", back=True)
    there = len(written)
    wait_for(lambda: len(written) > there + 10 or errors, "more writes")
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    with in_shard(shard=0):
        assert sorted(Question.objects.values_list("pk", flat=True)) == sorted(written)
    assert node_of(alias_for(0)) == "a"


def the_next_statement_goes_to_the_new_node() -> None:
    with in_shard(shard=1) as alias:
        one = ask("before")
        assert node_of(alias) == "a"
        move(1, "b")
        wait_for(lambda: get_cluster().node_of(1).name == "b", "the new node is known")
        one.question_text = "after"
        one.save()
        assert node_of(alias) == "b"
        assert Question.objects.get().question_text == "after"
    with in_shard(shard=2) as alias:  # the connection is given back to the pool that it is from
        ask()
        move(2, "b")
    connections.close_all()
    with pytest.raises(RuntimeError, match="durable"), transaction.atomic(using=alias):
        run_in_shard(ask, shard=2)


def who_does_not_listen_learns_it_from_the_error() -> None:
    with in_shard(shard=3) as alias:
        one = ask("before")
        move(3, "b")
        with pytest.raises(Error, match=r"shard 3 .*moved") as error, transaction.atomic(using=alias):
            ask("refused")
        assert get_cluster().node_of(3).name == "a", error
        ask("after")
        assert node_of(alias) == "b"
        assert [q.question_text for q in Question.objects.order_by("pk")] == ["before", "after"]
        one.delete()
    with in_shard(shard=4) as alias:
        move(4, "a")
        assert run_in_shard(lambda: ask().pk, shard=4, patience_s=5)
        assert node_of(alias) == "a"


def set_state(state: str) -> str:
    """Sets the state of shard 5 in the catalog; returns the one before."""
    catalog = Catalog(configuration()["CATALOG"])
    with catalog.engine.begin() as connection:
        before = connection.exec_driver_sql(
            "select state from shardids_catalog.placement where shard = 5"
        ).scalar()
        connection.exec_driver_sql(
            "update shardids_catalog.placement set state = %s where shard = 5", (state,)
        )
    catalog.close()
    return str(before)


def a_lost_shard_is_an_error_that_names_it() -> None:
    alias = alias_for(5)
    with in_shard(shard=5):
        ask()
        before = set_state("lost")
        wait_for(lambda: 5 in get_cluster().placement.lost, "the loss is known")
        with pytest.raises(ShardLost, match="shard 5"):
            Question.objects.count()
        assert connections[alias].connection is None
        connections[alias].close_if_unusable_or_obsolete()
        connections.close_all()
        with pytest.raises(ShardLost, match="shard 5"):
            ask()
    call_command("migrate_shards", "polls", "--check", verbosity=0)
    assert alias_for(5) == alias
    with in_shard(shard=6):
        ask()
    set_state(before)


def a_dead_node_is_refused_at_once() -> None:
    configuration()["POOL"]["timeout"] = 2
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it warns of each attempt
    catalog = Catalog(configuration()["CATALOG"])
    url = get_cluster().placement.nodes["b"].url

    def set_url(to: str) -> None:
        with catalog.engine.begin() as connection:
            connection.exec_driver_sql("update shardids_catalog.node set url = %s where name = 'b'", (to,))
        wait_for(lambda: get_cluster().placement.nodes["b"].url == to, "the address is known")

    def attempt(shard: int) -> Exception | None:
        try:
            with in_shard(shard=shard):
                Question.objects.count()
        except (Error, NodeDown) as error:
            return error
        return None

    # Other scenes have moved some.
    by_node = get_cluster().placement.by_node()
    here, there = by_node["a"][-1], by_node["b"][-1]
    assert attempt(there) is None
    set_url(make_url(url).set(port=1).render_as_string(hide_password=False))
    attempts = [attempt(there) for _ in range(6)]
    assert all(isinstance(one, OperationalError) for one in attempts[:3]), attempts
    taken = []
    for _ in range(11):
        begun = time.perf_counter()
        refused = attempt(there)
        taken.append(time.perf_counter() - begun)
    assert isinstance(refused, NodeDown)
    assert "Connection refused" in refused.message
    assert median(taken) < 0.005
    with pytest.raises(NodeDown):
        run_in_shard(ask, shard=there)
    assert attempt(here) is None
    set_url(url)
    assert attempt(there) is None
    catalog.close()
