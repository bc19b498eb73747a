"""Prometheus itself reads the exporter of a cluster, and raises an alert by the printed rules."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy.engine import URL

from shardids.pg.embedded.data import free_port
from tests.conftest import found_cluster
from tests.support.clusters import command, connected
from tests.support.series import served
from tests.support.waiting import wait_for


@contextmanager
def prometheus(folder: Path, exporter: str) -> Iterator[Callable[[str], Any]]:
    """A server that reads the exporter each second, and waits a second where rules wait for minutes."""
    printed = command("metrics", "--print", "alerts")
    assert printed.returncode == 0, printed.stderr
    (folder / "rules.yaml").write_text(re.sub(r"\bfor: \d+m", "for: 1s", printed.stdout), "utf-8")
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{"job_name": "shardids", "static_configs": [{"targets": [exporter]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:

        def ask(path: str) -> Any:
            assert process.poll() is None, (folder / "log").read_text("utf-8")
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=5) as answer:
                    return json.load(answer)["data"]
            except OSError:
                return {}

        yield ask
    finally:
        process.kill()
        process.wait()


def test_a_fenced_shard_raises_its_alert_and_no_other(
    blank_database: Callable[[], URL], tmp_path: Path
) -> None:
    urls = blank_database(), blank_database()
    found_cluster(urls[0], {"a": urls[0], "b": urls[1]}, 8)
    with (
        served(urls[0]) as (_, address, _),
        prometheus(tmp_path, re.sub(r"^http://|/metrics$", "", address)) as ask,
    ):

        def known(metric: str) -> list[str]:
            return [one["value"][1] for one in ask(f"query?query={metric}").get("result", ())]

        def health() -> set[str]:
            return {rule["health"] for group in ask("rules").get("groups", ()) for rule in group["rules"]}

        def alerts() -> dict[str, list[tuple[str, str]]]:
            found: dict[str, list[tuple[str, str]]] = {}
            for one in ask("alerts").get("alerts", ()):
                labels = one["labels"]
                found.setdefault(one["state"], []).append((labels["alertname"], labels.get("node", "")))
            return found

        wait_for(lambda: known("shardids_node_up") == ["1", "1"], "Prometheus to have read the exporter")
        wait_for(lambda: health() == {"ok"}, "all rules to be evaluated")
        assert alerts() == {}
        with connected(urls[1]) as connection:
            connection.execute("select shardids.fence(5)")
            wait_for(lambda: alerts() == {"firing": [("ShardidsShardFenced", "b")]}, "the alert")
            connection.execute("select shardids.activate(5)")
        wait_for(lambda: alerts() == {}, "the alert to end")
