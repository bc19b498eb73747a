"""Fixtures that several modules of integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from shardids.pg.embedded import temporary_servers
from tests.conftest import dsn
from tests.support.adoptions import Shop, new_shop
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


@pytest.fixture(scope="module")
def any_shop() -> Iterator[Shop]:
    """A shop on a server of its own, and two servers to adopt it."""
    with temporary_servers(3) as servers:
        shop = new_shop(servers)
        with closing(shop.catalog):
            yield shop


@pytest.fixture
def shop(any_shop: Shop) -> Shop:
    """The shop, if its servers can be nodes of an adoption."""
    if not any_shop.has_row_filters:
        pytest.skip("PostgreSQL 14 has no row filters; that it is refused is tested")
    return any_shop
