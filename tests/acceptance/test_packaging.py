"""The sdist builds a wheel, and the wheel works in an environment that has nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "shardids" / "watch" / "console" / "static" / "vendor"


def run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of a clean environment into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("packaging")
    # build makes the wheel from the sdist that it made before.
    run(sys.executable, "-m", "build", "--installer", "uv", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    run(sys.executable, "-m", "uv", "venv", "--python", sys.executable, folder / "env", cwd=folder)
    binaries = folder / "env" / "bin"
    run(sys.executable, "-m", "uv", "pip", "install", "--python", binaries / "python", wheel, cwd=folder)
    return binaries


def test_id_decode_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert '"shard": 37' in run(
        installed / "shardids", "id", "decode", "--json", "382529960780272642", cwd=tmp_path
    )


def test_sql_and_migrations_are_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "shardids", "sql", "engine/engine.v1", cwd=tmp_path) == (
        ROOT / "sql" / "engine/engine.v1.sql"
    ).read_text("utf-8")
    names = run(installed / "shardids", "sql", cwd=tmp_path).split()
    assert names == sorted(
        file.relative_to(ROOT / "sql").as_posix() for file in (ROOT / "sql").rglob("*.sql")
    )
    sql = run(
        installed / "python",
        "-c",
        "from shardids.migrate.install.trees import shard_sql; print(shard_sql())",
        cwd=tmp_path,
    )
    assert "shardids.create_generator(" in sql


def test_licences_and_documents_are_in_the_sdist_and_the_wheel_names_the_licences(installed: Path) -> None:
    licences = {"LICENSE", *(file.relative_to(ROOT).as_posix() for file in VENDOR.glob("*/LICENSE"))}
    assert len(licences) == 1 + sum(folder.is_dir() for folder in VENDOR.iterdir()) > 1
    dist = installed.parents[1] / "dist"
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(sdist) as archive:
        top, _, _ = archive.getnames()[0].partition("/")
        documents = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
        assert {f"{top}/{name}" for name in licences | documents} <= set(archive.getnames())
        described = archive.extractfile(f"{top}/PKG-INFO")
        assert described is not None
        assert set(licences_named(described.read())) == licences
    with zipfile.ZipFile(wheel) as archive:
        info = f"{top}.dist-info"
        assert set(licences_named(archive.read(f"{info}/METADATA"))) == licences
        for name in licences:
            assert archive.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()


def licences_named(metadata: bytes) -> list[str]:
    return message_from_bytes(metadata).get_all("License-File", [])


def test_pytest_finds_the_plugin_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    listing = (
        "from importlib.metadata import entry_points;"
        "print(*(found.value for found in entry_points(group='pytest11')))"
    )
    assert run(installed / "python", "-c", listing, cwd=tmp_path) == "shardids.testing.plugin\n"


def test_the_template_of_the_comparison_report_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    here = ROOT / "shardids" / "compare" / "report" / "template"
    listing = (
        "from importlib.resources import files;"
        "print(*(file.name for file in (files('shardids.compare.report') / 'template').iterdir()))"
    )
    assert set(run(installed / "python", "-c", listing, cwd=tmp_path).split()) == {
        file.name for file in here.iterdir()
    }


def test_an_environment_for_migrations_can_be_made_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "import sqlalchemy as sa\nm = sa.MetaData()\nsa.Table('t', m, sa.Column('id', sa.BigInteger))\n"
    )
    run(installed / "shardids", "migrate", "init", "new", "--models", "shop:m", "-m", "first", cwd=tmp_path)
    assert "first" in run(
        installed / "shardids", "migrate", "revision", "--list", "--dir", "new", cwd=tmp_path
    )


def test_the_demo_says_what_it_needs_when_there_is_no_server(installed: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [installed / "shardids", "demo"],
        cwd=tmp_path,
        env={"PATH": "/nonexistent", "SHARDIDS_PG_BIN": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "postgres" in ran.stderr
    assert "Traceback" not in ran.stderr
