"""A moved key's entries outside of the directory: claims of look-ups and old IDs lead to its new shard."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from shardids import Cluster, tenants
from shardids.catalog.old_ids import (
    OldIdRule,
    fill_directory,
    forget_old_ids,
    overwrite_directory,
    write_old_ids,
)
from shardids.client.lookups import Claims
from shardids.errors import ClusterConflict, MoveFailed, MoveRefused, UnknownValue
from shardids.pg.embedded import temporary_servers
from shardids.replication.steps import Event, StepDone
from shardids.tables import lookups
from shardids.tenants import entries
from tests.support.moves import TwoNodes, schema, two_nodes
from tests.support.signups import EMAIL, Photo, User, claims, make_tables, named, rows
from tests.support.tenants import home, lose_switch, other_shard

SHARDS = 6
CHOICES = tenants.Choices(root="users.name")
QUICK = tenants.Options(settle_s=0.3)


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with temporary_servers(2) as servers:
        nodes = two_nodes(servers, SHARDS)
        with Cluster.connect(nodes.catalog_url, listen=False) as cluster:
            make_tables(cluster)
            for shard in cluster.placement.all_shards():
                with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                    connection.execute(f"alter table {schema(shard)}.users add unique (name)")
        lookups.create(nodes.catalog, EMAIL)
        lookups.backfill(nodes.catalog, EMAIL)
        yield nodes
        nodes.catalog.close()


@pytest.fixture
def cluster(nodes: TwoNodes) -> Iterator[Cluster]:
    """The cluster; each test leaves every row once, with a claim for its shard."""
    with Cluster.connect(nodes.catalog_url) as cluster:
        yield cluster
        for move in tenants.open_key_moves(nodes.catalog):
            tenants.abort(nodes.catalog, move.key, options=QUICK)
        there = claims(cluster)
        assert {email: there.get(email) for email in rows(cluster)} == rows(cluster)


def email(name: str) -> str:
    return f"{name.replace(' ', '.')}@example.com"


def sign_up(cluster: Cluster, name: str, photos: int = 3) -> int:
    with cluster.session(key=name) as session:
        user = User(name=name, email=email(name))
        session.add(user)
        session.flush()
        session.add_all([Photo(user_id=user.id) for _ in range(photos)])
        session.commit()
        return user.id


def move(nodes: TwoNodes, name: str, target: int, on_event=lambda _event: None) -> tenants.KeyResult:  # type: ignore[no-untyped-def]  # a test's own
    return tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=on_event)


def test_a_look_up_leads_to_the_new_shard_and_back(nodes: TwoNodes, cluster: Cluster) -> None:
    name = "looked up"
    sign_up(cluster, name)
    source, target = home(nodes, name), other_shard(nodes, name)
    assert cluster.at(lookup=User.email == email(name)).number == source
    move(nodes, name, target)
    assert cluster.at(lookup=User.email == email(name)).number == target
    assert claims(cluster)[email(name)] == target
    for other in range(SHARDS):
        with cluster.session(shard=other) as session:
            session.add(User(name=named(cluster, other), email=email(name)))
            with pytest.raises(IntegrityError):
                session.commit()
    assert tenants.move(nodes.catalog, name, options=QUICK, back=True).target == source
    assert cluster.at(lookup=User.email == email(name)).number == source


def test_a_claim_made_on_the_way_and_one_given_up(nodes: TwoNodes, cluster: Cluster) -> None:
    """The tenant changes its address while its rows are copied, and again once they are there."""
    name = "changing"
    sign_up(cluster, name)
    target = other_shard(nodes, name)

    def write(address: str) -> None:
        with cluster.session(key=name) as session:
            user = session.query(User).filter_by(name=name).one()
            user.email = address
            session.commit()

    seen: list[int] = []

    def interfere(event: Event) -> None:
        if event == StepDone(step="announce"):
            write("second@example.com")
        if event == StepDone(step="switch"):
            cluster.refresh()
            write("third@example.com")
            # The old rows are there still; those who look for the value find them, and get no second one.
            seen.append(cluster.at(lookup=User.email == "third@example.com").number)
            with cluster.session(shard=(target + 1) % SHARDS) as session:
                session.add(User(name=named(cluster, (target + 1) % SHARDS), email="second@example.com"))
                with pytest.raises(IntegrityError):
                    session.commit()

    move(nodes, name, target, interfere)
    assert seen == [target]
    assert cluster.at(lookup=User.email == "third@example.com").number == target
    # What nobody has is free.
    for address in (email(name), "second@example.com"):
        other = (target + 2) % SHARDS
        with cluster.session(shard=other) as session:
            session.add(User(name=named(cluster, other), email=address))
            session.commit()
        assert cluster.at(lookup=User.email == address).number == other
        with cluster.session(shard=other) as session:
            session.query(User).filter_by(email=address).delete()
            session.commit()


@pytest.mark.long
def test_a_move_that_stops_between_claims_is_resumed(
    nodes: TwoNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "stopped between"
    sign_up(cluster, name)
    source, target = home(nodes, name), other_shard(nodes, name)
    redirect = Claims.redirect

    def stop(*given: object) -> None:
        redirect(*given)  # type: ignore[arg-type]  # as it was called
        raise KeyboardInterrupt

    for stops in (stop, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)):
        monkeypatch.setattr(Claims, "redirect", stops)
        target = other_shard(nodes, name)
        source = home(nodes, name)
        with pytest.raises(KeyboardInterrupt):
            move(nodes, name, target)
        monkeypatch.undo()
        # The key lives there already; its old rows are what claims lead to, until they follow.
        assert home(nodes, name) == target
        assert cluster.at(lookup=User.email == email(name)).number in (source, target)
        with pytest.raises(ClusterConflict, match=f"rows of key '{name}' are being moved"):
            lookups.backfill(nodes.catalog, EMAIL)
        assert tenants.resume(nodes.catalog, name, options=QUICK).outcome == "moved"
        assert claims(cluster)[email(name)] == target


def test_a_process_that_has_slept_changes_no_claims(
    nodes: TwoNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have ended its move meanwhile, and moved the key back."""
    name = "slept"
    sign_up(cluster, name)
    source, values = home(nodes, name), entries._values

    def sleep(*given: object) -> list[object]:
        found = values(*given)  # type: ignore[arg-type]  # as it was called
        with nodes.catalog.engine.begin() as connection:
            connection.execute(
                text("update shardids_catalog.key_move set epoch = gen_random_uuid() where ended_at is null")
            )
        return found

    monkeypatch.setattr(entries, "_values", sleep)
    with pytest.raises(MoveFailed, match="taken over, or closed, by another process"):
        move(nodes, name, other_shard(nodes, name))
    assert claims(cluster)[email(name)] == source


def test_an_undone_move_leaves_claims_as_they_were(nodes: TwoNodes, cluster: Cluster) -> None:
    name = "undone"
    sign_up(cluster, name)
    before = claims(cluster)

    def stop(event: Event) -> None:
        if event == StepDone(step="announce"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        move(nodes, name, other_shard(nodes, name), stop)
    tenants.abort(nodes.catalog, name, options=QUICK)
    assert claims(cluster) == before


def test_a_look_up_that_is_not_ready_is_refused_by_name(nodes: TwoNodes, cluster: Cluster) -> None:
    name = "not ready"
    sign_up(cluster, name)
    for shard in range(SHARDS):
        with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
            connection.execute(
                f"alter table {schema(shard)}.photos add code text not null unique default 'x'"
                f" || {schema(shard)}.next_id()::text"
            )
            connection.execute(f"alter table {schema(shard)}.photos alter code drop default")
    lookups.create(nodes.catalog, "photos.code")
    try:
        with pytest.raises(MoveRefused, match=r"look-up photos\.code is not ready") as refused:
            move(nodes, name, other_shard(nodes, name))
        assert refused.value.hint == "Claim them first: shardids lookup backfill photos.code"
    finally:
        lookups.drop(nodes.catalog, "photos.code")
        for shard in range(SHARDS):
            with nodes.connected(nodes.catalog.node_of(shard).name) as connection:
                connection.execute(f"alter table {schema(shard)}.photos drop code")


def test_old_ids_lead_to_the_new_shard_and_back(
    nodes: TwoNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_AT_ONCE", 7)
    name = "adopted"
    user = sign_up(cluster, name)
    source, target = home(nodes, name), other_shard(nodes, name)
    old = [*range(100, 120), 70_000, 1_000_000]
    with nodes.connected(nodes.catalog.node_of(source).name) as connection:
        for id_ in old:
            connection.execute(
                f"insert into {schema(source)}.photos (id, user_id) values (%s, %s)", [id_, user]
            )
    with nodes.catalog.engine.begin() as connection:
        write_old_ids(connection, rules=[OldIdRule(table="photos", column="id", rule="directory")])
        fill_directory(connection, "photos", [*((id_, source) for id_ in old), (121, source)])
    try:
        cluster.refresh()
        assert {cluster.shard_of(id_, of=Photo) for id_ in old} == {source}
        move(nodes, name, target)
        cluster.refresh()
        assert {cluster.shard_of(id_, of=Photo) for id_ in old} == {target}
        assert cluster.shard_of(121, of=Photo) == source
        assert cluster.at(id=old[0], of=Photo).run(lambda session: session.get(Photo, old[0])) is not None
        # The old rows, which the entries are found by otherwise, are gone.
        lose_switch(nodes, name)
        with nodes.catalog.engine.begin() as connection:
            overwrite_directory(connection, "photos", dict.fromkeys(old, source))
        tenants.resume(nodes.catalog, name, options=QUICK)
        cluster.refresh()
        assert {cluster.shard_of(id_, of=Photo) for id_ in old} == {target}
        tenants.move(nodes.catalog, name, options=QUICK, back=True)
        cluster.refresh()
        assert {cluster.shard_of(id_, of=Photo) for id_ in old} == {source}
    finally:
        with nodes.catalog.engine.begin() as connection:
            forget_old_ids(connection)


def test_a_writer_that_found_the_old_shard_by_a_look_up_is_sent_on(nodes: TwoNodes, cluster: Cluster) -> None:
    name = "sent on"
    sign_up(cluster, name)
    target = other_shard(nodes, name)
    before = cluster.at(lookup=User.email == email(name))
    move(nodes, name, target)

    def age(session) -> None:  # type: ignore[no-untyped-def]  # a test's own
        session.query(User).filter_by(name=name).update({"age": 5})

    with (
        nodes.connected(nodes.catalog.node_of(before.number).name) as connection,
        pytest.raises(psycopg.Error, match="has moved to shard"),
    ):
        connection.execute(
            f"/* shardids claims */ insert into {schema(before.number)}.users (name, email)"
            f" values ('{name}', 'x')"
        )
    cluster.at(lookup=User.email == email(name)).run(age)
    with cluster.session(key=name) as session:
        assert session.query(User).filter_by(name=name).one().age == 5
    with pytest.raises(UnknownValue):
        cluster.at(lookup=User.email == "nobody@example.com")
