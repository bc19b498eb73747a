"""The PgBouncer of the tests: as docs/how-to/pgbouncer.md sets it up, but with two connections a database."""

from __future__ import annotations

from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from sqlalchemy.engine import URL

from tests.support.pgbouncer import PgBouncer, running

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "pgbouncer.md"


def documented_settings() -> dict[str, str]:
    (example,) = [
        token.content
        for token in MarkdownIt().parse(HOW_TO.read_text(encoding="utf-8"))
        if token.type == "fence" and token.info == "ini"
    ]
    parser = ConfigParser()
    parser.read_string(example)
    return dict(parser["pgbouncer"])


@pytest.fixture(scope="session")
def pgbouncer(server_url: URL) -> Iterator[PgBouncer]:
    with running(server_url, {**documented_settings(), "default_pool_size": 2}) as bouncer:
        yield bouncer
