"""The programs of the page on other clients, as they stand there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url

from shardids import Cluster
from tests.conftest import dsn

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "other-clients.md"
PACKAGES = ("pg@8.23.1", "drizzle-orm@0.45.4")
GO_PATH = Path("/usr/share/gocode")
JARS = [
    Path("/usr/share/java", f"{name}.jar")
    for name in ("postgresql", "jackson-databind", "jackson-core", "jackson-annotations")
]
"""Debian's libpostgresql-jdbc-java and libjackson2-databind-java."""


def fences(kind: str) -> list[str]:
    tokens = MarkdownIt().parse(PAGE.read_text(encoding="utf-8"))
    return [token.content for token in tokens if token.type == "fence" and token.info == kind]


@pytest.fixture
def users(cluster_url: URL) -> Iterator[Cluster]:
    """A cluster whose shards have the page's table."""
    (table, *_) = fences("sql")
    with Cluster.connect(cluster_url) as cluster:
        for shard in range(cluster.shard_count):
            with cluster.at(shard=shard).engine.begin() as connection:
                connection.execute(text(table.replace("shard_0005", cluster.schema_of(shard))))
        yield cluster


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the page's files of SQL are."""
    for statement in fences("postgresql"):
        for name in re.findall(r"^-- (\S+\.sql)\n", statement):
            (tmp_path / name).write_text(statement, encoding="utf-8")
    return tmp_path


def run(command: list[str], folder: Path, cluster_url: URL, node_url: str, **more: str) -> str:
    # The catalog has no passwords, and other drivers than libpq's know no passfile= in a URL.
    login = {
        "PGPASSWORD": cluster_url.password or "",
        "PGPASSFILE": str(cluster_url.query.get("passfile", "")),
    }
    given = {name: value for name, value in login.items() if value}
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **given, "SHARDIDS_CATALOG": dsn(cluster_url), "NODE_URL": node_url, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("number", [0, 1], ids=["psycopg", "asyncpg"])
def test_python(users: Cluster, cluster_url: URL, folder: Path, number: int) -> None:
    (folder / "program.py").write_text(fences("python")[number], encoding="utf-8")
    printed = run([sys.executable, "-W", "error", "program.py"], folder, cluster_url, "")
    shard, id_ = map(int, re.findall(r"\d+", printed))
    assert shard == users.shard_for("ann") == users.shard_of(id_)
    with users.at(shard=shard).connection() as connection:
        name = connection.scalar(text(f"select name from {users.schema_of(shard)}.users where id = {id_}"))
    assert name == "ann"


@pytest.mark.long
def test_node_and_drizzle(users: Cluster, cluster_url: URL, folder: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node.js with npm on this machine")
    quietly = ["--no-audit", "--no-fund", "--prefer-offline", "--ignore-scripts"]
    subprocess.run(
        [npm, "install", *quietly, *PACKAGES], cwd=folder, check=True, capture_output=True, timeout=300
    )
    url, printed = users.node_of(5).url, []
    for number, program in enumerate(fences("javascript")):
        script = folder / f"program_{number}.js"
        script.write_text(program, encoding="utf-8")
        printed.append(run([node, script.name], folder, cluster_url, url))
    made, numbers = printed[0].split("\n", 1)
    assert re.fullmatch(rf"string {users.shard_for('ann')} \d+", made)
    assert [numbers, printed[1]] == fences("text")


@pytest.fixture
def login(users: Cluster) -> Iterator[str]:
    """A role whose password is its name, stored as servers do by default: JDBC and lib/pq refuse less."""
    role = f"shardids_login_{os.getpid()}"
    with users.at(shard=5).engine.begin() as connection:
        connection.execute(
            text("select set_config(name, '4096', true) from pg_settings where name = 'scram_iterations'")
        )
        connection.execute(text(f"create role {role} superuser login password '{role}'"))
    yield role
    with users.at(shard=5).engine.begin() as connection:
        connection.execute(text(f"drop role {role}"))


PGX, PQ = "github.com/jackc/pgx/v4", "github.com/lib/pq"


@pytest.mark.parametrize(
    ("file", "changes"),
    [("pgx.go", {}), ("sql.go", {}), ("sql.go", {PQ: f"{PGX}/stdlib", '"postgres"': '"pgx"'})],
    ids=["pgx", "sql-pq", "sql-pgx"],
)
def test_go(users: Cluster, folder: Path, login: str, file: str, changes: dict[str, str]) -> None:
    (program,) = (found for found in fences("go") if found.startswith(f"// {file}\n"))
    for old, new in changes.items():
        assert old in program
        program = program.replace(old, new)
    go, wanted = shutil.which("go"), PQ if PQ in program else PGX
    if go is None or not (GO_PATH / "src" / wanted).exists():
        pytest.skip(f"Debian's golang-go and its package of {wanted} are not installed")
    (folder / file).write_text(program, encoding="utf-8")
    more = {"GOPATH": str(GO_PATH), "GO111MODULE": "off", "GOCACHE": str(folder / "cache")}
    at = make_url(users.node_of(5).url)
    url = URL.create("postgresql", login, login, at.host, at.port, at.database)
    check_sent(users, run([go, "run", file], folder, url, dsn(url), PGSSLMODE="disable", **more))


def test_java(users: Cluster, cluster_url: URL, folder: Path, login: str) -> None:
    java = shutil.which("java")
    if java is None or not all(jar.exists() for jar in JARS):
        pytest.skip("Debian's libpostgresql-jdbc-java and libjackson2-databind-java are not installed")
    (program,) = fences("java")
    (folder / "Users.java").write_text(program, encoding="utf-8")
    at = make_url(users.node_of(5).url)
    url = f"jdbc:postgresql://{at.host}:{at.port or 5432}/{at.database}?user={login}&password={login}"
    command = [java, "-cp", ":".join(map(str, JARS)), "Users.java"]
    check_sent(users, run(command, folder, cluster_url, "", NODE_JDBC_URL=url))


def check_sent(users: Cluster, printed: str) -> None:
    """The program has inserted ann, and printed her as JSON with the ID as a string."""
    sent = json.loads(printed)
    with users.at(shard=5).connection() as connection:
        assert connection.scalar(text("select id::text from shard_0005.users")) == sent["id"]
    assert sent == {"id": sent["id"], "name": "ann"}


def test_the_shard_of_an_id(users: Cluster, cluster_url: URL, folder: Path) -> None:
    statement = (folder / "shard_of_id.sql").read_text(encoding="utf-8")
    with users.at(shard=6).engine.connect() as connection:
        id_ = connection.scalar(text("select shard_0006.next_id()"))
    with users.engine(users.node_of(0)).connect() as catalog:
        found = catalog.exec_driver_sql(statement.replace("$1", "%s"), (id_,)).one()
    assert tuple(found) == (6, "shard_0006", users.node_of(6).url)
