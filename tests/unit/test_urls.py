"""URLs of databases that are refused before anything is connected."""

from __future__ import annotations

import asyncio

import pytest

from shardids import AsyncCluster, Cluster
from shardids.errors import BadArgument


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg2", "psycopg_async", "pg8000", "psycopg2cffi"])
def test_another_driver_is_refused_with_what_to_write_instead(driver: str) -> None:
    url = f"postgresql+{driver}://ann:secret@host/photos"
    with pytest.raises(BadArgument, match=f"names the driver '{driver}'; shardids connects with") as refused:
        Cluster.connect(url)
    assert "postgresql+psycopg://" in refused.value.hint
    assert "AsyncCluster takes the same URL" in refused.value.hint
    assert "secret" not in str(refused.value) + refused.value.hint
    with pytest.raises(BadArgument, match=f"names the driver '{driver}'; shardids connects with") as again:
        asyncio.run(AsyncCluster.connect(url))
    assert again.value.hint == refused.value.hint


@pytest.mark.parametrize("start", ["mysql", "mysql+asyncmy", "sqlite+aiosqlite", "cockroachdb+asyncpg"])
def test_another_database_is_refused(start: str) -> None:
    with pytest.raises(
        BadArgument, match=f"starts with '{start}'; shardids needs PostgreSQL".replace("+", r"\+")
    ):
        Cluster.connect(f"{start}://host/photos")
