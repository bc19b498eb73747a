"""``shardids doctor --before-deploy``: what it says of each part, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL

from tests.conftest import MakeDatabase, dsn, found_cluster
from tests.support.clusters import command_here, connected, everything

MODELS = """
import sqlalchemy as sa, shardids
good, bad = sa.MetaData(), sa.MetaData()
for metadata, kind in (good, sa.BigInteger), (bad, sa.Integer):
    sa.Table("users", metadata, shardids.primary_key("id"))
    sa.Table("photos", metadata, shardids.primary_key("id"),
             sa.Column("user_id", kind, sa.ForeignKey("users.id")))
none = sa.MetaData()
"""


def validated(*words: str, code: int, **environment: str) -> dict[str, Any]:
    """The parts by name; with the exit code that is expected."""
    ran = command_here("doctor", "--before-deploy", "--json", *words, **environment)
    assert ran.returncode == code, ran
    answer = json.loads(ran.stdout)
    assert answer["usable"] is (code == 0)
    return {part["part"]: part for part in answer["parts"]}


def test_what_can_be_used(cluster_url: URL, tmp_path: Path) -> None:
    (tmp_path / "shop_of_test.py").write_text(MODELS)
    at = {"SHARDIDS_CATALOG": dsn(cluster_url)}
    before = everything(cluster_url)
    parts = validated(code=0, SHARDIDS_LAYOUT="default", **at)
    assert list(parts) == ["catalog", "layout", "nodes"]
    assert parts["catalog"]["what"].endswith("8 shards")
    assert parts["nodes"]["what"] == "a, b: all answer"
    plain = command_here("doctor", "--before-deploy", **at)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert [line.split()[:2] for line in plain.stdout.splitlines()] == [["ok", name] for name in parts]
    assert everything(cluster_url) == before


def test_a_layout_that_differs_is_wrong_and_one_that_is_none_is_usage(cluster_url: URL) -> None:
    at = {"SHARDIDS_CATALOG": dsn(cluster_url)}
    parts = validated("--layout", "js53", code=3, **at)
    assert not parts["layout"]["usable"]
    assert "41-6-6" in parts["layout"]["what"]
    assert command_here("doctor", "--before-deploy", "--layout", "js54", **at).returncode == 2
    assert command_here("doctor", "--before-deploy").returncode == 2
    wrong = command_here("doctor", "--before-deploy", "--catalog", "mysql://u:secret@h/d")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "secret" not in wrong.stderr


def test_catalogs_that_cannot_be_used(make_database: MakeDatabase) -> None:
    parts = validated("--catalog", dsn(make_database()), code=3)
    assert list(parts) == ["catalog"]
    assert "holds no shardids catalog" in parts["catalog"]["what"]
    parts = validated("--catalog", "postgresql://u:secret@127.0.0.1:1/none", code=3)
    assert "can't be reached" in parts["catalog"]["what"]
    assert "secret" not in str(parts)


def test_nodes_that_cannot_be_used(make_database: MakeDatabase) -> None:
    catalog, other = make_database(), make_database()
    found_cluster(catalog, {"a": catalog, "b": other}, 2)
    with connected(other) as connection:
        connection.execute("update shardids.node set cluster = '00000000-0000-4000-8000-00000000000f'")
    parts = validated("--catalog", dsn(catalog), code=3)
    assert 'node "b" is one of cluster 00000000' in parts["nodes"]["what"]
    with connected(other) as connection:
        connection.execute("drop schema shardids cascade")
    parts = validated("--catalog", dsn(catalog), code=3)
    assert 'node "b"' in parts["nodes"]["what"]
    with connected(catalog) as connection:
        connection.execute(
            "update shardids_catalog.node set url = 'postgresql://127.0.0.1:1/none' where name = 'b'"
        )
    parts = validated("--catalog", dsn(catalog), code=3)
    assert 'node "b"' in parts["nodes"]["what"]
    assert "reached" in parts["nodes"]["what"]


def test_migrations_and_models(cluster_url: URL, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop_of_test.py").write_text(MODELS)
    at = {"SHARDIDS_CATALOG": dsn(cluster_url)}
    folder = tmp_path / "migrations"
    parts = validated("--dir", str(folder), "--models", "shop_of_test:bad", code=3, **at)
    assert "env.py is missing" in parts["migrations"]["what"]
    assert "photos.user_id" in parts["models"]["what"]
    made = command_here("migrate", "init", str(folder), "--models", "shop_of_test:good", **at)
    assert made.returncode == 0, made
    parts = validated("--dir", str(folder), "--models", "shop_of_test:good", code=0, **at)
    assert "head" in parts["migrations"]["what"]
    assert parts["models"]["what"] == "shop_of_test:good, 2 tables"
    for models, words in (("shop_of_test:none", "no tables"), ("no_such:m", "can't be loaded")):
        assert words in validated("--models", models, code=3, **at)["models"]["what"]
    (next((folder / "versions").glob("*.py"))).write_text("down_revision = 'none'")
    assert not validated("--dir", str(folder), code=3, **at)["migrations"]["usable"]
