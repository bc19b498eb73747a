"""What ``check`` and ``revision --autogenerate`` compare, and environments that are not of shardids."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.migrations import App

MODELS = """
import enum
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
import shardids
from shardids.migrate import run_environment

names = {"ix": "ix_%(column_0_label)s", "ck": "ck_%(table_name)s_%(constraint_name)s"}
metadata = sa.MetaData(naming_convention=names)


class Mood(enum.Enum):
    happy = 1
    sad = 2


sa.Table(
    "users",
    metadata,
    shardids.primary_key("id", comment="tells when and where"),
    shardids.sharding_key("name", sa.String(80), nullable=False, index=True),
    sa.Column("age", sa.Integer, server_default="AGE"),
    sa.Column("mood", sa.Enum(Mood, name="mood")),
    sa.Column("rank", postgresql.DOMAIN("rank", sa.Integer, check=sa.text("value > 0"))),
    sa.Column("twice", sa.Integer, sa.Computed("age * 2", persisted=True)),
    sa.Column("given", sa.BigInteger, sa.Identity()),
    sa.Column("counted", sa.BigInteger, sa.Identity(always=True, start=10)),
    sa.Column("other", sa.BigInteger, server_default=shardids.next_id()),
    sa.Column("made", sa.DateTime(timezone=True), server_default=sa.func.now()),
    sa.Column("tags", postgresql.ARRAY(sa.Text), server_default=sa.text("'{}'::text[]")),
    sa.CheckConstraint("age > 0", name="age"),
    sa.Index("lower_name", sa.text("lower(name)")),
    sa.Index("aged", "age", postgresql_where=sa.text("age > 10"), postgresql_include=["name"]),
    comment="it's people",
)
"""
OF_ALEMBIC = """
from alembic import context

context.configure(URL, target_metadata=None)
with context.begin_transaction():
    context.run_migrations()
"""


def write(app: App, age: int, options: str = "") -> None:
    """Writes the models and an environment that compares them, with these options."""
    models = MODELS.replace("AGE", str(age))
    (app.folder / "env.py").write_text(f"{models}\nrun_environment(metadata{options})\n")


def test_computed_columns_and_identities_are_compared(app: App) -> None:
    write(app, 1)
    app.add("zero", "pass")
    app.up()
    assert app("revision", "-m", "users", "--autogenerate").code == 0
    assert {row["way"] for row in app.up().values()} == {"sql"}
    checked = app("check", "--all")
    assert (checked.code, checked.err) == (0, "No difference\n")


@pytest.mark.parametrize(
    ("options", "is_different"),
    [
        ("", True),
        (", compare_server_default=False", False),
        (", compare_server_default=lambda *_: None", True),
        (", compare_server_default=lambda *_: False", False),
    ],
)
def test_other_defaults_are_compared_as_the_application_says(
    app: App, options: str, *, is_different: bool
) -> None:
    write(app, 1)
    app.add("zero", "pass")
    app.up()
    assert app("revision", "-m", "users", "--autogenerate").code == 0
    app.up()
    # Of another length: env.py is compiled again if its size or its second is another.
    write(app, 20, options)
    assert app("check").code == (3 if is_different else 0)
    # The key's default is looked at in any case.
    app.ask(0, "alter table users alter id drop default")
    found = [row["difference"] for row in app("check", "--json").json]
    assert sum(bool(re.search(r"^modify default: .*\bid\b", one)) for one in found) == 1, found


def test_other_schemas_are_not_read(app: App) -> None:
    app.add("zero", "pass")
    app.up()
    # Alembic would read other shards' tables and shardids' own, whose types it warns of.
    env = "import sqlalchemy as sa\nfrom shardids.migrate import run_environment\n"
    (app.folder / "env.py").write_text(f"{env}run_environment(sa.MetaData(), include_schemas=True)\n")
    assert app("check").err == "No difference\n"


def test_options_that_say_where_a_revision_is_recorded_are_refused(app: App) -> None:
    app.add_two()
    write(app, 1, ", version_table='mine', version_table_schema='public', compare_type=False")
    ran = app("up")
    assert (ran.code, "run_environment() decides version_table, version_table_schema itself" in ran.err) == (
        2, True,
    ), ran  # fmt: skip
    assert set(app.revisions().values()) == {None}


@pytest.mark.parametrize("url", ["", "url='postgresql://'", "dialect_name='postgresql'"])
def test_an_environment_that_runs_for_no_shard_is_refused(app: App, url: str) -> None:
    app.add_two()
    (app.folder / "env.py").write_text(OF_ALEMBIC.replace("URL", url) if url else "import os\n")
    for words in (("up",), ("up", "--dry-run"), ("up", "base:head", "--sql")):
        ran = app(*words)
        assert (ran.code, "env.py did not call shardids.migrate.run_environment()" in ran.err) == (2, True), (
            ran
        )
    assert set(app.revisions().values()) == {None}


def test_an_environment_that_ends_in_an_error_first_says_it(app: App) -> None:
    app.add_two()
    # As alembic init writes it, without a URL.
    (app.folder / "env.py").write_text(OF_ALEMBIC.replace("URL", "url=None"))
    ran = app("up")
    assert (ran.code, "run_environment(): Exception: Connection, url, or dialect_name" in ran.err) == (
        2,
        True,
    )


def test_models_that_are_all_in_a_schema_are_none_of_a_shard(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "models_in_a_schema.py").write_text(
        "import sqlalchemy as sa\nimport shardids\nm = sa.MetaData(schema='app')\n"
        "sa.Table('users', m, shardids.primary_key('id'))\n"
    )
    ran = app("init", str(tmp_path / "new"), "--models", "models_in_a_schema:m")
    assert (ran.code, "all have a schema" in ran.err) == (2, True), ran
    assert not (tmp_path / "new").exists()


def test_one_revision_back_from_two_heads_is_refused(app: App) -> None:
    for name in ("a", "b"):
        app.add(name, f"op.create_table('{name}', key_column())", f"op.drop_table('{name}')")
        app.up(name)
    for words in (("down",), ("down", "-1")):
        ran = app(*words)
        assert (ran.code, "shards are at several heads, a, b" in ran.err) == (2, True), ran
    assert set(app.revisions().values()) == {("a", "b")}
