"""Fetches from PyPI."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import django
import pytest
import sqlalchemy


@pytest.fixture(scope="session")
def django_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder ``tests`` of the Django that is installed, from its source distribution."""
    folder = tmp_path_factory.mktemp("django")
    version = django.get_version()
    pip(folder, "download", "--no-deps", "--no-binary", "Django", "--dest", ".", f"Django=={version}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (tests,) = folder.glob("*/tests")
    return tests


@pytest.fixture(scope="session")
def sqlalchemy_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the SQLAlchemy that is installed, from its source distribution."""
    folder = tmp_path_factory.mktemp("sqlalchemy")
    version = sqlalchemy.__version__
    pip(folder, "download", "--no-deps", "--no-binary", "SQLAlchemy", "--dest", ".", f"SQLAlchemy=={version}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (tests,) = folder.glob("*/test")
    return tests.parent


@pytest.fixture(scope="session")
def cities_light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with django-cities-light and what it needs, but for Django."""
    folder = tmp_path_factory.mktemp("cities")
    packages = ["django-cities-light==3.11", "django-autoslug", "Unidecode", "pytz", "psutil"]
    pip(folder, "install", "--no-deps", "--target", ".", *packages)
    return folder


def pip(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *words], cwd=folder, check=True, timeout=600)
