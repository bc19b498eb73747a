"""Fixtures that several modules of integration tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.migrations import App


@pytest.fixture
def app(
    cluster_url: URL, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> App:
    """An application without revisions, and its cluster."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SHARDIDS_CATALOG", dsn(cluster_url))
    monkeypatch.setenv("SHARDIDS_MIGRATIONS", str(tmp_path / "migrations"))
    monkeypatch.chdir(tmp_path)
    return App(tmp_path / "migrations", cluster_url, capsys)
