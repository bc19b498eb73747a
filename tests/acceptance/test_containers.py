"""``compose.yaml``, ``Dockerfile`` and their page, without a daemon: what they name exists, and works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from markdown_it import MarkdownIt
from typer.core import TyperGroup
from typer.main import get_command

from shardids.cli import app
from tests.conftest import MakeDatabase, dsn

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "containers.md").read_text("utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = ("node-a", "node-b")


def script(service: str) -> list[str]:
    """The lines that a service's shell runs; Compose writes $ as $$."""
    assert SERVICES[service]["entrypoint"] == ["sh", "-euc"]
    (lines,) = SERVICES[service]["command"]
    return [line.replace("$$", "$") for line in lines.splitlines()]


def commands_of_the_page() -> list[str]:
    fences = [token.content for token in MarkdownIt().parse(PAGE) if token.type == "fence"]
    return re.findall(r"^\$ (.*)$", "".join(fences), re.MULTILINE)


def words_for_shardids() -> list[list[str]]:
    """What the page and Compose's services give to the command ``shardids``."""
    called = [line.removeprefix("shardids ") for line in script("cluster")]
    called += re.findall(r"docker (?:compose )?run .*? shardids (.*)", "\n".join(commands_of_the_page()))
    called += re.findall(r"docker run .*? shardids (.*)", DOCKERFILE)
    return [
        *(shlex.split(words) for words in called),
        SERVICES["metrics"]["command"],
        SERVICES["console"]["command"],
    ]


@pytest.mark.parametrize("words", words_for_shardids(), ids=" ".join)
def test_each_command_and_its_options_exist(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDIDS_CATALOG", "postgresql://postgres@node-a/app")
    command: Any = get_command(app)
    while isinstance(command, TyperGroup):
        name, *words = words
        command = command.get_command(click.Context(command), name)
        assert command is not None, name
    command.make_context(name, words)  # an error, if it has no such option


def test_services_name_what_there_is() -> None:
    assert set(SERVICES) == {"login", *NODES, "cluster", "shardids", "metrics", "console"}
    for name, service in SERVICES.items():
        for needed in service.get("depends_on", {}):
            assert needed in SERVICES, name
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in COMPOSE["volumes"], name
    for words in commands_of_the_page():
        if named := re.search(r"docker compose (?:run --rm|exec|logs) (\S+)", words):
            assert named[1] in SERVICES, words


def test_nothing_is_published_and_no_secret_is_written_down() -> None:
    for name, service in SERVICES.items():
        assert not {"ports", "privileged", "network_mode", "pid"} & set(service), name
        for variable, value in service["environment"].items():
            assert "PASS" not in variable or str(value).startswith("/run/shardids/"), name
            assert not re.search(r"://[^/@]*:", str(value)), name
    for name in set(SERVICES) - set(NODES):
        assert SERVICES[name]["cap_drop"] == ["ALL"]


def test_images_have_fixed_versions_and_an_unprivileged_user() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases), bases
    assert {SERVICES[node]["image"] for node in NODES} == {SERVICES["node-a"]["image"]}
    assert re.fullmatch(r"postgres:\d+\.\d+", SERVICES["node-a"]["image"])
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (\S+)", last, re.MULTILINE) == ["shardids"]
    assert last.index("USER ") < last.index("ENTRYPOINT ")


def test_the_image_has_what_the_wheel_is_built_from() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    needed = {
        *hatch["wheel"]["packages"],
        *hatch["wheel"]["force-include"],
        "pyproject.toml",
        "README.md",
        "LICENSE",
    }
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
    }
    let_through = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE))
    assert copied == let_through == needed


def test_the_login_is_made_up_once(tmp_path: Path) -> None:
    lines = "\n".join(script("login")).replace("/run/shardids", str(tmp_path))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    files = [tmp_path / name for name in ("password", "pgpass", "token")]
    kept = []
    for _ in range(2):
        subprocess.run(["sh", "-euc", lines], check=True, env={"PATH": path}, timeout=60)
        kept.append([file.read_text("utf-8") for file in files])
    assert kept[0] == kept[1]
    password, pgpass, token = kept[0]
    assert len(token.strip()) >= 32
    assert token.strip() != password
    assert len(password) >= 32
    assert pgpass == f"*:*:*:postgres:{password}\n"
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.long
def test_the_cluster_is_made_and_may_be_made_again(make_database: MakeDatabase, tmp_path: Path) -> None:
    urls = dict(zip(NODES, (dsn(make_database()), dsn(make_database())), strict=True))
    (tmp_path / "shardids").write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from shardids.cli import app; app()" "$@"\n', "utf-8"
    )
    (tmp_path / "shardids").chmod(0o755)
    lines = "\n".join(script("cluster"))
    for node, url in urls.items():
        lines = lines.replace(f"postgresql://postgres@{node}/app", shlex.quote(url))
    given = {"SHARDIDS_CATALOG": urls["node-a"], "PATH": f"{tmp_path}:{os.environ['PATH']}", "COLUMNS": "200"}
    for _ in range(2):
        ran = subprocess.run(
            ["sh", "-euc", lines],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        assert re.findall(r"^([ab]) +(\d+) ", ran.stdout, re.MULTILINE) == [("a", "32"), ("b", "32")]
