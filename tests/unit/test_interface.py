"""What shardids exports, documents and loads: lists that must agree."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_overloads

import pytest

import shardids
from shardids import AsyncCluster, AsyncShard, Cluster, Shard, errors
from shardids.pg.sqlfiles import read_sql, sql_names

REFERENCE = Path(__file__).parent.parent.parent / "docs" / "reference"
DIRECTIVE = re.compile(r"^\.\. auto(class|function|data|module):: (\S+)$", re.MULTILINE)
COMMANDS = {"alembic", "mako", "typer", "click", "rich", "shardids.cli"}
DATABASE = {"sqlalchemy", "psycopg", "tenacity", "asyncio"}


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import shardids", COMMANDS | DATABASE),
        ("import shardids.ids", COMMANDS | DATABASE | {"numpy"}),
        (
            "from shardids import Layout; Layout.preset('default').decode(382529960780272642)",
            COMMANDS | DATABASE,
        ),
        ("import shardids.client", COMMANDS | DATABASE),
        (
            "from shardids import Cluster, primary_key, ShardId, PageQuery",
            COMMANDS | {"pydantic", "numpy", "shardids.client.copying"},
        ),
        ("from shardids import AsyncCluster", COMMANDS | {"pydantic", "numpy"}),
    ],
)
def test_imports_load_only_what_they_need(code: str, unwanted: set[str]) -> None:
    show = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {show}"], check=True, capture_output=True, text=True, timeout=60
    )
    assert not unwanted & set(json.loads(done.stdout))


@pytest.mark.parametrize("package", ["shardids", "shardids.client", "shardids.catalog", "shardids.django"])
def test_names_imported_on_first_use_are_all_there(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def documented() -> list[tuple[str, str]]:
    return DIRECTIVE.findall((REFERENCE / "api.md").read_text())


def test_the_reference_documents_only_what_is_exported() -> None:
    for kind, name in documented():
        if kind == "module":
            import_module(name)
            continue
        package, _, short = name.rpartition(".")
        assert short in import_module(package).__all__, name
        assert hasattr(import_module(package), short)


@pytest.mark.parametrize(
    "package",
    ["shardids", "shardids.ids", "shardids.models", "shardids.client", "shardids.catalog", "shardids.django"],
)
def test_the_reference_documents_all_that_is_exported(package: str) -> None:
    names = {name for kind, name in documented() if kind != "module"}
    shared = {name.removeprefix("shardids.") for name in names if name.count(".") == 1}
    missing = {
        name
        for name in import_module(package).__all__
        if f"{package}.{name}" not in names and name not in shared and name != "ShardidsError"
    }
    assert not missing


def test_every_exported_name_is_on_a_page() -> None:
    names = {name for kind, name in documented() if kind != "module"}
    whole = {name for kind, name in documented() if kind == "module"}
    short = {name.rpartition(".")[2] for name in names}
    missing = {}
    for file in Path(shardids.__file__).parent.rglob("__init__.py"):
        package = ".".join(file.parent.relative_to(Path(shardids.__file__).parent.parent).parts)
        exported = set(getattr(import_module(package), "__all__", ()))
        if package not in whole and (rest := exported - short - {"ShardidsError"}):
            missing[package] = sorted(rest)
    assert not missing


def test_error_codes_agree_in_python_sql_and_the_reference() -> None:
    rows = re.findall(r"^\| `(SI\d{3})` \| `(\w+)` \|", (REFERENCE / "sql.md").read_text(), re.MULTILINE)
    assert {state: cls.__name__ for state, cls in errors.BY_SQLSTATE.items()} == dict(rows)
    in_sql = {state for name in sql_names() for state in re.findall(r"'(SI\d{3})'", read_sql(name))}
    # SI099 is how the engine's functions leave an inner block: it never reaches a caller.
    assert in_sql - {"SI099"} == errors.BY_SQLSTATE.keys()


def test_an_inherited_code_stays_that_of_the_class_which_names_it() -> None:
    assert errors.BY_SQLSTATE["SI007"] is errors.BadArgument
    assert isinstance(errors.from_database("SI003", "moved"), errors.ShardMoved)
    assert errors.from_database("23505", "duplicate key") is None


@pytest.mark.parametrize(("plain", "awaited"), [(Cluster, AsyncCluster), (Shard, AsyncShard)])
def test_both_clusters_and_their_shards_have_the_same_interface(plain: type, awaited: type) -> None:
    def public(cls: type) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, member in inspect.getmembers(cls, inspect.isfunction):
            ways = [one.__annotations__.get("where") for one in get_overloads(member)]
            parameters = inspect.signature(member).parameters.values()
            # The four ways to name a shard are overloads.
            found[name] = ways if any(ways) else [(p.name, p.kind, p.default) for p in parameters]
        return {name: how for name, how in found.items() if not name.startswith("_")}

    assert public(plain) == public(awaited)


def test_all_exported_names_are_listed() -> None:
    assert set(shardids.__all__) <= set(dir(shardids))
