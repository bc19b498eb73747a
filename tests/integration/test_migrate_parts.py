"""What revisions may hold without losing the fast way, and runs that meet a bad shard or one that moves."""

from __future__ import annotations

import pytest

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
    op.add_column("people", sa.Column("size", postgresql.ENUM("s", "m", name="size", create_type=False).with_variant(
        sa.Text(), "postgresql")))
    """
ENUMS_DOWN = """
    op.drop_table("toys")
    op.drop_table("pets")
    op.drop_table("people")
    sa.Enum(name="mood").drop(op.get_bind(), checkfirst=False)
    """
UNTYPED = """
    op.create_table("t", sa.Column("name", sa.Text), sa.Column("n", sa.BigInteger), sa.Column("ok", sa.Boolean),
                    sa.Column("at", sa.DateTime(timezone=True)), sa.Column("day", sa.Date),
                    sa.Column("price", sa.Numeric), sa.Column("u", sa.Uuid))
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
