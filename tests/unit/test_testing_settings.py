"""The settings of the pytest plugin: read, or refused by name."""

from __future__ import annotations

import pytest

from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT
from shardids.testing.clusters import ClusterWishes

UNSET = {"layout": "default", "shards": "4", "nodes": "2", "server": "", "catalog": ""}
URL = "postgresql://u:secret@127.0.0.1:1/d"


def test_settings() -> None:
    wishes = ClusterWishes.parse(UNSET | {"server": URL}, workers=8)
    assert (wishes.layout, wishes.shards, wishes.nodes, wishes.catalog) == (DEFAULT, 4, 2, None)
    assert wishes.server is not None
    assert wishes.server.host == "127.0.0.1"
    assert ClusterWishes.parse(UNSET | {"catalog": URL}, workers=1).catalog is not None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"shards": "many"}, "shardids_shards = many is not a number from 1 to 4096"),
        ({"shards": "4097"}, "shardids_shards = 4097 is not a number from 1 to 4096"),
        ({"shards": "65", "layout": "js53"}, "shardids_shards = 65 is not a number from 1 to 64"),
        ({"nodes": "0"}, "shardids_nodes = 0 is not a number from 1 to 26"),
        ({"nodes": "-1"}, "shardids_nodes = -1 is not a number"),
        ({"layout": "js54"}, "'js54' is not a layout"),
        ({"server": "mysql://u:secret@h/d"}, "shardids needs PostgreSQL"),
        ({"server": URL, "catalog": URL}, "either a catalog or a server"),
        ({"catalog": URL}, "2 workers can't share"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(BadArgument, match=words) as refused:
        ClusterWishes.parse(UNSET | wrong, workers=2)
    assert "secret" not in str(refused.value)
