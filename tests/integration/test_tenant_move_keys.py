"""Moving a key whose root is numbered in each shard: another key may have its number in the target."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import text

import shardids
from shardids import tenants
from shardids.catalog.keys.homes import shard_of_key
from shardids.errors import BadArgument, ClusterConflict, MoveFailed, MoveRefused
from shardids.replication.steps import Event, StepBegun, StepDone
from shardids.watch import doctor
from tests.support.clusters import command_here
from tests.support.moves import TwoNodes
from tests.support.tenants import (
    QUICK,
    abort_open,
    ask,
    home,
    neighbour_in,
    nodes_with_tables,
    other_shard,
)

SHARDS = 4
TABLES = """
    create table {s}.tenants (id bigserial primary key, name text not null unique);
    create table {s}.users (
      id bigint primary key default {s}.next_id(),
      tenant_id bigint not null references {s}.tenants on delete cascade, name text not null);
    create table {s}.projects (
      id bigint primary key default {s}.next_id(), tenant_id bigint not null references {s}.tenants);
    create table {s}.docs (
      id bigint primary key default {s}.next_id(), project_id bigint not null references {s}.projects);
    create table {s}.prefs (
      tenant_id bigint references {s}.tenants, code text, seq bigint generated always as identity,
      primary key (tenant_id, code));
    create table {s}.boards (
      id bigint primary key default {s}.next_id(), tenant_id bigint not null references {s}.tenants,
      seq bigint generated always as identity);
    create table {s}.cards (
      id bigint primary key default {s}.next_id(),
      board_id bigint not null references {s}.boards on delete cascade);
    create table {s}.accounts (id uuid primary key);"""
CHOICES = tenants.Choices(root="tenants.name", loose=("accounts",))


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with nodes_with_tables(SHARDS, TABLES) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _each_alone(nodes: TwoNodes) -> Iterator[None]:
    """A test that fails in a move leaves none to the next."""
    yield
    abort_open(nodes)


def enter(nodes: TwoNodes, shard: int, name: str, number: int) -> None:
    """Enters a tenant with three users, whose number is the next that the shard gives."""
    ask(
        nodes,
        shard,
        f"select setval('{{s}}.tenants_id_seq', {number}, false);"
        f" insert into {{s}}.tenants (name) values ('{name}');"
        f" insert into {{s}}.users (tenant_id, name) select {number}, '{name} ' || n"
        " from generate_series(1, 3) n",
    )


def names(nodes: TwoNodes, shard: int, number: int) -> list[str]:
    """The names of a tenant and of its users in a shard."""
    return [
        str(row[0])
        for row in ask(
            nodes,
            shard,
            f"select name from {{s}}.tenants where id = {number}"
            f" union all select name from {{s}}.users where tenant_id = {number} order by 1",
        )
    ]


def whole(name: str) -> list[str]:
    return [name, *(f"{name} {n}" for n in range(1, 4))]


def stopped(nodes: TwoNodes, name: str, event: Event) -> None:
    """Begins a move that is interrupted at an event."""

    def stop(seen: Event) -> None:
        if seen == event:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        moved(nodes, name, stop)


def moved(nodes: TwoNodes, name: str, on_event: Callable[[Event], None] = lambda _event: None) -> str:
    target = other_shard(nodes, name)
    return tenants.move(nodes.catalog, name, target, CHOICES, options=QUICK, on_event=on_event).outcome


@pytest.mark.parametrize("how", ["abort", "resume", "move"])
def test_another_keys_rows_with_the_same_number_stay_in_the_target(nodes: TwoNodes, how: str) -> None:
    """A tenant may sign up there while the move has brought nothing yet, or after it was interrupted."""
    name, number = f"acme {how}", {"abort": 1001, "resume": 2001, "move": 3001}[how]
    source, target = home(nodes, name), other_shard(nodes, name)
    other = neighbour_in(nodes, target)
    enter(nodes, source, name, number)

    def sign_up(event: Event) -> None:
        if event == StepBegun(step="copy"):
            enter(nodes, target, other, number)

    if how == "move":
        with pytest.raises(MoveFailed, match=r"rows of table tenants can't arrive .* duplicate key"):
            moved(nodes, name, sign_up)
    else:
        stopped(nodes, name, StepDone(step="guard"))
        sign_up(StepBegun(step="copy"))
    if how == "resume":
        with pytest.raises(MoveFailed, match=r"rows of table tenants can't arrive .* duplicate key"):
            tenants.resume(nodes.catalog, name, options=QUICK)
    assert names(nodes, target, number) == whole(other)
    assert tenants.abort(nodes.catalog, name, options=QUICK).outcome == "aborted"
    assert names(nodes, target, number) == whole(other)
    assert names(nodes, source, number) == whole(name)
    # From then on the plan says so, and advises nobody to delete these rows.
    with pytest.raises(
        MoveRefused, match=f"table tenants of .* has another key's row .* {number}"
    ) as refused:
        tenants.plan(nodes.catalog, name, target, CHOICES)
    assert "delete" not in str(refused.value)


def test_a_row_with_the_key_in_the_target_refuses_the_move(nodes: TwoNodes) -> None:
    name = "entered twice"
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, 4001)
    enter(nodes, target, name, 4501)
    with pytest.raises(MoveRefused, match=r"1 rows of the key are in table tenants of schema .* already"):
        tenants.plan(nodes.catalog, name, target, CHOICES)
    ask(nodes, target, "delete from {s}.tenants where id = 4501")
    assert moved(nodes, name) == "moved"
    assert names(nodes, target, 4001) == whole(name)


def test_a_shard_that_refuses_the_number_for_another_key_refuses_the_move(nodes: TwoNodes) -> None:
    """The key that has left it had the same number: the rows of this one could never arrive."""
    name, number = "left first", 4601
    source, target = home(nodes, name), other_shard(nodes, name)
    third, fourth = (shard for shard in range(SHARDS) if shard not in (source, target))
    enter(nodes, source, name, number)
    moved(nodes, name)
    other, apart = neighbour_in(nodes, third), neighbour_in(nodes, third)
    enter(nodes, third, other, number)
    enter(nodes, third, apart, number + 1)
    for attempt in (tenants.plan, tenants.move):
        with pytest.raises(
            MoveRefused, match=rf"refuses rows .* primary key {number}: .* 'left first', which has left it"
        ):
            attempt(nodes.catalog, other, source, CHOICES)
    assert tenants.open_key_moves(nodes.catalog) == []
    assert tenants.plan(nodes.catalog, other, fourth, CHOICES).target == fourth
    assert tenants.plan(nodes.catalog, apart, source, CHOICES).target == source
    assert tenants.plan(nodes.catalog, name, source, CHOICES).target == source


AGAIN = {
    "entered under another number": (
        "delete from {s}.tenants where id = {n}",
        "insert into {s}.tenants (id, name) values ({n} + 1, '{name}')",
    ),
    "numbered anew": ("delete from {s}.users", "update {s}.tenants set id = {n} + 1 where id = {n}"),
    "named otherwise": ("select", "update {s}.tenants set name = 'other' where id = {n}"),
    "both otherwise": ("delete from {s}.users", "update {s}.tenants set id = 1, name = 'o' where id = {n}"),
    "another's name": (
        "delete from {s}.tenants where id = {n}; insert into {s}.tenants (id, name) values ({n} + 1, 'o')",
        "update {s}.tenants set name = '{name}' where id = {n} + 1",
    ),
}


@pytest.mark.parametrize("case", AGAIN)
def test_the_roots_row_keeps_its_key_and_its_primary_key_during_a_move(nodes: TwoNodes, case: str) -> None:
    """Its rows are found by the primary key, and the directory has the key: another row would be stranded."""
    name, number = f"kept {case[:5]}", 5001 + 100 * list(AGAIN).index(case)
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    refused: list[str | None] = []

    def interfere(event: Event) -> None:
        if event in (StepDone(step="copy"), StepDone(step="announce")):
            first, second = (one.replace("{n}", str(number)).replace("{name}", name) for one in AGAIN[case])
            ask(nodes, source, first)
            with pytest.raises(psycopg.Error, match="are being moved") as error:
                ask(nodes, source, second)
            refused.append(error.value.sqlstate)
            # The same row may be entered again.
            ask(
                nodes,
                source,
                f"delete from {{s}}.tenants where id = {number} + 1;"
                f" insert into {{s}}.tenants (id, name) values ({number}, '{name}') on conflict do nothing;"
                f" insert into {{s}}.users (tenant_id, name) values ({number}, 'again')",
            )

    assert moved(nodes, name, interfere) == "moved"
    assert refused == ["SI008"] * 2
    assert {name, "again"} <= set(names(nodes, target, number))
    assert names(nodes, source, number) == []


def test_a_key_entered_again_before_its_rows_are_guarded_stops_the_move(nodes: TwoNodes) -> None:
    name, number = "entered early", 7001
    source = home(nodes, name)
    enter(nodes, source, name, number)

    def interfere(seen: Event) -> None:
        if seen == StepBegun(step="guard"):
            ask(
                nodes,
                source,
                f"delete from {{s}}.tenants where id = {number};"
                f" insert into {{s}}.tenants (id, name) values ({number} + 1, '{name}');",
            )

    with pytest.raises(MoveFailed, match=f"another row of table tenants has key '{name}'"):
        moved(nodes, name, interfere)
    assert home(nodes, name) == source
    assert tenants.abort(nodes.catalog, name, options=QUICK).outcome == "aborted"
    assert names(nodes, source, number + 1) == [name]
    assert moved(nodes, name) == "moved"
    assert names(nodes, other_shard(nodes, name), number + 1) == []


def account_home(nodes: TwoNodes, key: str) -> int:
    with nodes.catalog.engine.connect() as connection:
        return shard_of_key(connection, "uuid", key)


def shards_with(nodes: TwoNodes, key: str) -> list[int]:
    """The shards with an account."""
    query = f"select 1 from {{s}}.accounts where id = '{key}'"
    return [shard for shard in range(SHARDS) if ask(nodes, shard, query)]


@pytest.mark.long
def test_a_key_is_the_same_however_it_is_written(nodes: TwoNodes) -> None:
    written, same = "6F9619FF8B86D011B42D00C04FC964FF", "6f9619ff-8b86-d011-b42d-00c04fc964ff"
    choices = tenants.Choices(
        root="accounts", loose=("tenants", "users", "projects", "docs", "prefs", "boards", "cards")
    )
    source = account_home(nodes, same)
    target = next(shard for shard in range(SHARDS) if shard != source)
    ask(nodes, source, f"insert into {{s}}.accounts values ('{same}')")

    def stop(event: Event) -> None:
        if event == StepDone(step="copy"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tenants.move(nodes.catalog, written, target, choices, options=QUICK, on_event=stop)
    assert doctor.examine(nodes.catalog, ["key-refused"]).findings == ()
    assert [move.key for move in tenants.open_key_moves(nodes.catalog)] == [same]
    with pytest.raises(ClusterConflict, match="was interrupted at step"):
        tenants.move(nodes.catalog, same.upper(), target, choices, options=QUICK)
    assert tenants.resume(nodes.catalog, same.upper(), options=QUICK).key == same
    assert shards_with(nodes, same) == [target]
    assert tenants.move(nodes.catalog, same, source, choices, options=QUICK).outcome == "moved"
    assert shards_with(nodes, same) == [source]
    assert tenants.move(nodes.catalog, same, target, choices, options=QUICK).outcome == "moved"
    assert tenants.move(nodes.catalog, written, options=QUICK, back=True).target == source
    assert shards_with(nodes, same) == [source]
    said = command_here("tenant", "move", written, "--list", "--json", "--catalog", nodes.catalog_url)
    assert {row["key"] for row in json.loads(said.stdout)} == {same}


def test_a_key_moves_back_from_its_own_last_move(nodes: TwoNodes) -> None:
    """A key of another kind, or of a region, may have the same text."""
    name, number = "0f9619ff-8b86-d011-b42d-00c04fc964ff", 8001
    tables = ("tenants", "users", "projects", "docs", "prefs", "boards", "cards")
    account = tenants.Choices(root="accounts", loose=tables)
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    moved(nodes, name)
    first = account_home(nodes, name)
    second = next(shard for shard in range(SHARDS) if shard not in (first, source, target))
    ask(nodes, first, f"insert into {{s}}.accounts values ('{name}')")
    tenants.move(nodes.catalog, name, second, account, options=QUICK)
    with nodes.catalog.engine.begin() as connection:
        connection.execute(
            text("""
                insert into shardids_catalog.key_move
                  (kind, key, source, target, choices, step, epoch, switched_at, ended_at, outcome)
                select 'text@eu', key, target, source, choices || '{"region": "eu"}', step, epoch,
                       switched_at, ended_at, outcome
                from shardids_catalog.key_move where key = :key and kind = 'text'"""),
            {"key": name},
        )
    try:
        for choices in (None, tenants.Choices(root="")):
            with pytest.raises(BadArgument, match="several kinds were moved: text, text@eu, uuid") as refused:
                tenants.plan(nodes.catalog, name, None, choices, back=True)
            assert f"shardids tenant move {name} --list" in str(refused.value.hint)
        assert tenants.plan(nodes.catalog, name, None, CHOICES, back=True).target == source
        assert tenants.plan(nodes.catalog, name, None, account, back=True).target == first
    finally:
        with nodes.catalog.engine.begin() as connection:
            connection.execute(text("delete from shardids_catalog.key_move where kind = 'text@eu'"))


def test_a_key_comes_back_although_the_catalog_has_forgotten_its_move(nodes: TwoNodes) -> None:
    name, number = "forgotten", 9001
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    moved(nodes, name)
    with nodes.catalog.engine.begin() as connection:
        connection.execute(text("delete from shardids_catalog.key_move where key = :key"), {"key": name})
    assert tenants.move(nodes.catalog, name, source, CHOICES, options=QUICK).outcome == "moved"
    assert names(nodes, source, number) == whole(name)
    ask(nodes, source, f"insert into {{s}}.users (tenant_id, name) values ({number}, 'again')")
    with pytest.raises(psycopg.Error, match=f"has moved to shard {source}"):
        ask(nodes, target, f"insert into {{s}}.tenants (name) values ('{name}')")


def users_of(nodes: TwoNodes, shard: int, number: int) -> list[int]:
    query = f"select id from {{s}}.users where tenant_id = {number} order by id"
    return [int(str(row[0])) for row in ask(nodes, shard, query)]


def shards_of(nodes: TwoNodes, ids: list[int]) -> list[int]:
    """The shards that IDs lead to."""
    with shardids.Cluster.connect(nodes.catalog_url, listen=False) as cluster:
        return [cluster.at(id=one).number for one in ids]


def test_an_id_leads_to_its_row_that_has_left_the_key_during_a_move(nodes: TwoNodes) -> None:
    """In a round, in the last one, or deleted and entered again; one that comes back goes along."""
    name, number = "given away", 10_001
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    enter(nodes, source, neighbour_in(nodes, source), number + 50)
    ask(
        nodes,
        source,
        f"insert into {{s}}.users (tenant_id, name) select {number}, n from generate_series(1, 3) n",
    )
    ids = users_of(nodes, source, number)
    before = f"update {{s}}.users set tenant_id = {number + 50} where id = "

    def give(event: Event) -> None:
        if event == StepDone(step="copy"):
            ask(nodes, source, f"{before}{ids[0]}; {before}{ids[3]}")
        if event == StepBegun(step="switch"):
            ask(
                nodes,
                source,
                f"{before}{ids[1]}; update {{s}}.users set tenant_id = {number} where id = {ids[3]}",
            )
            ask(
                nodes,
                source,
                f"delete from {{s}}.users where id = {ids[2]};"
                f" insert into {{s}}.users (id, tenant_id, name) values ({ids[2]}, {number + 50}, 'again')",
            )

    assert moved(nodes, name, give) == "moved"
    assert shards_of(nodes, ids) == [source] * 3 + [target] * 3
    assert users_of(nodes, source, number + 50)[:3] == ids[:3]
    assert users_of(nodes, target, number) == ids[3:]


def test_an_id_found_by_a_path_leads_to_its_row_that_has_left_the_key(nodes: TwoNodes) -> None:
    name, number = "given by a path", 12_001
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    enter(nodes, source, neighbour_in(nodes, source), number + 50)
    add = "insert into {s}.projects (tenant_id) values (%s) returning id"
    own, theirs = (ask(nodes, source, add % one)[0][0] for one in (number, number + 50))
    add = f"insert into {{s}}.docs (project_id) select {own} from generate_series(1, 4) returning id"
    ids = [int(str(row[0])) for row in ask(nodes, source, add)]

    def give(event: Event) -> None:
        if event == StepDone(step="copy"):
            ask(nodes, source, f"update {{s}}.docs set project_id = {theirs} where id = {ids[0]}")
            # Others' rows have notes, too.
            ask(nodes, source, f"insert into {{s}}.docs (project_id) values ({theirs})")
        if event == StepBegun(step="switch"):
            ask(nodes, source, f"update {{s}}.docs set project_id = {theirs} where id = {ids[1]}")
            ask(nodes, source, f"delete from {{s}}.docs where id = {ids[2]}")

    assert moved(nodes, name, give) == "moved"
    assert shards_of(nodes, ids) == [source, source, target, target]


@pytest.mark.long
def test_an_id_leads_to_its_row_that_has_left_the_key_between_two_moves(nodes: TwoNodes) -> None:
    name, number = "given later", 11_001
    source, target = home(nodes, name), other_shard(nodes, name)
    third = next(shard for shard in range(SHARDS) if shard not in (source, target))
    enter(nodes, source, name, number)
    enter(nodes, source, neighbour_in(nodes, source), number + 50)
    other = neighbour_in(nodes, target)
    enter(nodes, target, other, number + 60)
    ids = users_of(nodes, source, number)
    stopped(nodes, name, StepDone(step="announce"))
    tenants.abort(nodes.catalog, name, options=QUICK)
    ask(nodes, source, f"update {{s}}.users set tenant_id = {number + 50} where id = {ids[0]}")
    assert moved(nodes, name) == "moved"
    assert shards_of(nodes, ids) == [source, target, target]
    # It is not where it was born: its new key takes it along.
    ask(nodes, target, f"update {{s}}.users set tenant_id = {number + 60} where id = {ids[1]}")
    assert tenants.move(nodes.catalog, name, third, CHOICES, options=QUICK).outcome == "moved"
    assert shards_of(nodes, ids) == [source, target, third]
    assert tenants.move(nodes.catalog, other, source, CHOICES, options=QUICK).outcome == "moved"
    assert shards_of(nodes, ids) == [source, source, third]


@pytest.mark.parametrize("how", [tenants.abort, tenants.resume])
def test_a_move_that_is_interrupted_at_its_end_ends(
    nodes: TwoNodes, how: Callable[..., tenants.KeyResult]
) -> None:
    """The record of the arrival is gone by then, which does not say that a server was lost."""
    name, number = f"ended {how.__name__}", {"abort": 13_001, "resume": 13_101}[how.__name__]
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    stopped(nodes, name, StepDone(step="clean"))
    assert [move.step for move in tenants.open_key_moves(nodes.catalog)] == ["clean"]
    assert how(nodes.catalog, name, options=QUICK).outcome == "moved"
    assert names(nodes, target, number) == whole(name)
    assert names(nodes, source, number) == []


def test_a_row_that_is_entered_again_has_its_new_identity_value(nodes: TwoNodes) -> None:
    """Only an INSERT sets such a column: that of the row which has arrived can't be changed."""
    name, number = "identities", 14_001
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    ask(nodes, source, f"insert into {{s}}.prefs select {number}, n from generate_series(1, 3) n")

    found = f"select code, seq from {{s}}.prefs where tenant_id = {number} order by 1"
    arrived, last = ask(nodes, source, found), list[tuple[object, ...]]()

    def again(event: Event) -> None:
        code = {StepDone(step="copy"): 1, StepBegun(step="switch"): 2}.get(event)
        if code is not None:
            ask(
                nodes,
                source,
                f"delete from {{s}}.prefs where (tenant_id, code) = ({number}, '{code}');"
                f" insert into {{s}}.prefs values ({number}, '{code}')",
            )
            last[:] = ask(nodes, source, found)

    assert moved(nodes, name, again) == "moved"
    assert ask(nodes, target, found) == last
    assert [row in arrived for row in last] == [False, False, True]


@pytest.mark.parametrize("step", [StepDone(step="copy"), StepBegun(step="switch")])
def test_an_identity_value_of_a_row_that_others_refer_to_loses_none_of_them(
    nodes: TwoNodes, step: StepDone | StepBegun
) -> None:
    """They are entered again with it, and go along; or have no notes, and the move says so."""
    name, number = f"referred at {step.step}", {"copy": 15_001, "switch": 15_101}[step.step]
    source, target = home(nodes, name), other_shard(nodes, name)
    enter(nodes, source, name, number)
    add = f"insert into {{s}}.boards (tenant_id) values ({number}) returning id"
    board = ask(nodes, source, add)[0][0]
    cards = f"insert into {{s}}.cards (board_id) select {board} from generate_series(1, 3)"
    ask(nodes, source, cards)
    own = f"delete from {{s}}.boards where id = {board}"
    whole_again = f"{own}; insert into {{s}}.boards (id, tenant_id) values ({board}, {number}); {cards}"
    attempts = [f"update {{s}}.boards set seq = default where id = {board}", whole_again]

    last: list[tuple[object, ...]] = []

    def change(event: Event) -> None:
        if event == step and attempts:
            ask(nodes, source, attempts.pop(0))
            last[:] = ask(nodes, source, found)

    found = "select b.seq, count(c) from {s}.boards b left join {s}.cards c on c.board_id = b.id"
    found += f" where b.tenant_id = {number} group by 1"
    with pytest.raises(MoveFailed, match="table cards differs"):
        moved(nodes, name, change)
    assert home(nodes, name) == source
    assert tenants.resume(nodes.catalog, name, options=QUICK, on_event=change).outcome == "moved"
    assert ask(nodes, target, found) == last
    assert [count for _, count in last] == [3]
