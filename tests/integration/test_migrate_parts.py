"""What revisions may hold without losing the fast way, and runs that meet a bad shard or one that moves."""

from __future__ import annotations

import shlex

import pytest

from tests.conftest import dsn
from tests.support.clusters import connected
from tests.support.migrations import App

ALL = range(8)

# Compiled, with the result that Alembic has.

ENUMS = """
    mood = sa.Enum("happy", "it's", name="mood")
    op.create_table("people", key_column(), sa.Column("mood", mood))
    op.create_table("pets", key_column(), sa.Column("mood", sa.Enum("a", "b", name="m", native_enum=False)))
    op.create_table("toys", key_column(), sa.Column("kind", sa.Enum("x", "y", name="kind", native_enum=False,
                                                                    create_constraint=True)))
    op.execute("insert into people (mood) values ('it''s')")
    """
UNTYPED = """
    op.create_table("t", sa.Column("name", sa.Text), sa.Column("n", sa.BigInteger),
                    sa.Column("ok", sa.Boolean), sa.Column("at", sa.DateTime(timezone=True)),
                    sa.Column("day", sa.Date), sa.Column("price", sa.Numeric), sa.Column("u", sa.Uuid))
    columns = [sa.column(name) for name in ("name", "n", "ok", "at", "day", "price", "u")]
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=datetime.UTC)
    op.bulk_insert(sa.table("t", *columns), [
        {"name": "it's 100 % \\\\ :x\\ttab", "n": 1 << 40, "ok": True, "at": at, "day": at.date(),
         "price": decimal.Decimal("1.50"), "u": uuid.UUID(int=7)},
        {"name": None, "n": -1, "ok": None, "at": None, "day": None, "price": None, "u": None},
    ])
    """


@pytest.mark.parametrize(
    ("body", "query"),
    [(ENUMS, "select mood::text from people"), (UNTYPED, "select t::text from t")],
    ids=["enums", "bulk insert over untyped columns"],
)
def test_compiled_revisions_do_what_alembic_does(app: App, body: str, query: str) -> None:
    imports = "import datetime, decimal, uuid\nfrom sqlalchemy.dialects import postgresql\n"
    app.add("one", "pass")
    app.add("two", body, after="one", more=imports)
    app.up("one")
    assert {row["way"] for row in app.up("--shards", "0-3").values()} == {"sql"}
    app.add("two", "op.get_bind()\n" + body.replace("\n    ", "\n"), after="one", more=imports)
    assert {row["way"] for row in app.up().values()} == {"alembic"}
    described = app.descriptions()
    assert all(described[shard] == described[0] for shard in ALL)
    rows = {shard: app.ask(shard, query) for shard in ALL}
    assert rows[0]
    assert all(rows[shard] == rows[0] for shard in ALL)


def test_a_percent_sign_stays_one_after_compiled_revisions(app: App) -> None:
    app.add("one", 'op.execute("create table t (n text)")')
    index = 'op.create_index("t_n", "t", ["n"], postgresql_concurrently=True)'
    app.add("two", f"with op.get_context().autocommit_block():\n    {index}", after="one")
    app.add("three", "op.get_bind()\nop.execute(\"insert into t values ('100 %, %%')\")", after="two")
    assert {row["way"] for row in app.up().values()} == {"sql and alembic"}
    assert [app.ask(shard, "select n from t") for shard in ALL] == [[("100 %, %%",)]] * 8


def test_values_that_have_no_literal_form_go_through_alembic(app: App) -> None:
    app.add(
        "one",
        """
        op.create_table("t", sa.Column("b", sa.LargeBinary))
        op.bulk_insert(sa.table("t", sa.column("b")), [{"b": b"\\x00\\xff"}])
        """,
    )
    rows = app.up()
    assert {row["way"] for row in rows.values()} == {"alembic"}
    assert [bytes(value) for (value,) in app.ask(5, "select b from t")] == [b"\x00\xff"]


@pytest.mark.parametrize("outside", [False, True])
def test_the_merge_of_two_heads_runs_at_the_first_attempt(app: App, *, outside: bool) -> None:
    app.add("z_one", 'op.execute("create table z (n integer)")', 'op.drop_table("z")')
    app.add("y_two", 'op.execute("create table y_two ()")', 'op.drop_table("y_two")', after="z_one")
    app.add("b_two", 'op.execute("create table b_two ()")', 'op.drop_table("b_two")', after="z_one")
    index = 'op.create_index("z_n", "z", ["n"], postgresql_concurrently=True)'
    block = f"with op.get_context().autocommit_block():\n    {index}" if outside else "pass"
    app.add("merged", block, "op.drop_index('z_n')" if outside else "pass", after=("b_two", "y_two"))
    assert app("up", "y_two").code == 0
    ran = app("up")
    assert (ran.code, "attempt" in ran.err) == (0, False), ran
    assert app("down", "base").code == 0
    for first, second in (("y_two", "b_two"), ("b_two", "y_two")):
        app.up(first)
        app.up(second)
        assert {tuple(sorted(heads or ())) for heads in app.revisions().values()} == {("b_two", "y_two")}
        ran = app("up")
        assert (ran.code, "attempt" in ran.err) == (0, False), ran
        ran = app("down", "base")
        assert (ran.code, "attempt" in ran.err) == (0, False), ran


# A bad shard.


def fails_in(*shards: int) -> str:
    listed = ", ".join(f"'{shard}'" for shard in shards)
    condition = f"if current_setting('shardids.shard') in ({listed}) then raise 'no such luck'; end if;"
    return f"""
        op.execute("create table t ()")
        op.execute("do $$ begin {condition} end $$")
        """


def test_a_bad_first_shard_does_not_stop_the_others(app: App) -> None:
    app.add("one", fails_in(0, 4))
    ran = app("up", "--continue-on-error", "--json", "--canary", "2")
    assert {row["shard"]: row["status"] for row in ran.json["shards"]} == {
        shard: "failed" if shard in {0, 4} else "done" for shard in ALL
    }
    assert shlex.split(ran.json["retry"])[-2:] == ["--shards", "0,4"]
    # One that is wrong for all stops after a few, with nothing changed.
    app.add("two", fails_in(*ALL), after="one")
    ran = app("up", "--continue-on-error", "--json", "--shards", "1-3,5-7")
    statuses = [row["status"] for row in ran.json["shards"]]
    assert (statuses.count("failed"), statuses.count("not started")) == (3, 3)
    # Without the option, the first one stops.
    ran = app("up", "--json", "--shards", "1-3,5-7")
    assert [row["status"] for row in ran.json["shards"]].count("failed") == 1


def test_the_command_that_a_failed_run_prints_works(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.add("one", "pass")
    app.up()
    app.add("two", fails_in(5), after="one")
    app.add("three", "pass", after="two")
    # The catalog and the folder come from options, the target is relative.
    monkeypatch.delenv("SHARDIDS_CATALOG")
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", "/nonexistent")
    ran = app(
        "up", "+1", "--catalog", dsn(app.url), "--dir", str(app.folder), "--continue-on-error", "--json"
    )
    assert (ran.code, [row["to"] for row in ran.json["shards"]].count("two")) == (1, 7), ran
    app.add("two", "pass", after="one")
    if app.url.password is not None:
        assert str(app.url.password) not in ran.json["retry"]
        monkeypatch.setenv("PGPASSWORD", str(app.url.password))
    words = shlex.split(ran.json["retry"])
    again = app(*words[2:])
    assert again.code == 0, again
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(app.url))
    assert set(app.revisions().values()) == {("two",)}


# A shard that moves.


def test_a_shard_that_is_being_moved_is_left_out_and_named(app: App) -> None:
    app.add_two()
    app.up("one")
    with connected(app.url) as connection:
        connection.execute(
            "insert into shardids_catalog.move (shard, source, target, offline, step)"
            " values (2, 'a', 'b', false, 'copy')"
        )
    planned = app("up", "--dry-run", "--json")
    said = {row["shards"]: row["reason"] for row in planned.json}
    assert said["0-1,3-7"] == ""
    assert said["2"].startswith('shard 2 is kept by an interrupted move [node "a"]: move by a process since ')
    ran = app("up", "--json")
    rows = {row["shard"]: row for row in ran.json["shards"]}
    assert (ran.code, rows[2]["status"]) == (1, "not started")
    assert rows[2]["error"].startswith('shard 2 is kept by an interrupted move [node "a"]')
    assert rows[2]["error"].endswith("Resume or undo it first: shardids shard move 2 --resume, or --abort.")
    assert shlex.split(ran.json["retry"])[-2:] == ["--shards", "2"]
    assert app.revisions() == {shard: ("one",) if shard == 2 else ("two",) for shard in ALL}
    for words in (("down", "one"), ("stamp", "one")):
        assert app(*words, "--shards", "2").code == 1
    with connected(app.url) as connection:
        connection.execute("update shardids_catalog.placement set state = 'lost' where shard = 2")
        lost = app("up", "--json")
        assert (lost.code, lost.json["shards"][-1]["status"]) == (1, "not started")
        assert lost.json["shards"][-1]["error"].startswith("shard 2 was lost: the server that took over")
        connection.execute("update shardids_catalog.placement set state = 'active' where shard = 2")
    with connected(app.url) as connection:
        connection.execute("update shardids_catalog.move set ended_at = now(), outcome = 'aborted'")
    app.up()
    assert set(app.revisions().values()) == {("two",)}
