"""Metrics: what the page says of them, addresses to listen at, and rates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

import shardids.watch.metrics
from shardids.catalog.shards import Shard
from shardids.errors import BadArgument
from shardids.ids.layout import DEFAULT
from shardids.watch.facts.reading import NodeRates, advanced_ms, drawn
from shardids.watch.metrics.samples import METRICS
from shardids.watch.serving import Address

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md").read_text("utf-8")


def test_the_page_lists_every_metric_with_its_labels() -> None:
    rows = re.findall(r"^\| `(shardids_\w+)` \| (.*) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (metric.name, ", ".join(f"`{label}`" for label in metric.labels), metric.says)
        for metric in METRICS.values()
    ]


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("127.0.0.1:9187", "127.0.0.1", 9187, True),
        ("127.8.8.8:1", "127.8.8.8", 1, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:9187", "::1", 9187, True),
        ("[::]:9187", "::", 9187, False),
        ("0.0.0.0:9187", "0.0.0.0", 9187, False),
        ("metrics.internal:9187", "metrics.internal", 9187, False),
    ],
)
def test_addresses(text: str, host: str, port: int, is_loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback, str(address)) == (host, port, is_loopback, text)


@pytest.mark.parametrize("text", ["", ":9187", "9187", "127.0.0.1", "127.0.0.1:", "a:65536", "a:-1", "a:¹"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadArgument, match="not an address to listen on"):
        Address.parse(text)


def shard(drawn: int, lead_ms: int = 0, *, counter: int = 7, number: int = 1) -> Shard:
    offset_ms = 1000 + lead_ms - (drawn >> DEFAULT.sequence_bits)
    return Shard(
        shard=number, state="active", counter=counter, drawn=drawn, offset_ms=offset_ms, clock_ms=1000
    )


@pytest.mark.parametrize(
    ("before", "after", "ticks", "ahead_ms"),
    [
        (shard(10), shard(15), 5, 0),
        (shard(10), shard(10, 5000), 0, 5000),  # a block, after=, or a new incarnation
        (shard(10, -60_000), shard(10, 5000), 0, 5000),  # it followed the clock first
        (shard(10, 17), shard(15, 1017), 5, 1000),
        (shard(10, 1017), shard(15, 17), 5, 0),  # the clock follows it
        (shard(10, 17), shard(15, 16), 5, 0),  # it follows the clock
        (shard(10), shard(10 + (100 << 10), 90), 100 << 10, 0),  # draws alone took it ahead
        (shard(10), shard(10 + (100 << 10), 290), 100 << 10, 190),
        (shard(10, 17), shard(15, 1017, counter=8), 0, 0),  # sequences of another shard of that number
        (shard(10, 17), shard(3, 1017), 0, 0),
        (shard(10, 17), shard(15, 1017)._replace(state="fenced"), 5, 0),
    ],
)
def test_what_is_between_two_looks(before: Shard, after: Shard, ticks: int, ahead_ms: int) -> None:
    assert (drawn(before, after), advanced_ms(before, after, DEFAULT)) == (ticks, ahead_ms)


def test_the_rates_of_a_node() -> None:
    rates = NodeRates()
    rates.look([shard(10), shard(0, number=2)], 100.0, DEFAULT)
    assert (rates.drawn, rates.per_second) == (0, None)
    rates.look([shard(14), shard(0, number=2), shard(50, number=3)], 102.0, DEFAULT)
    assert (rates.drawn, rates.per_second) == (4, {1: 2.0})
    rates.look([shard(99)], 102.4, DEFAULT)  # too soon
    assert (rates.drawn, rates.per_second) == (4, {1: 2.0})
    rates.look([shard(14), shard(60, number=3)], 104.0, DEFAULT)
    assert (rates.drawn, rates.per_second) == (14, {3: 5.0})
    rates.look([], 106.0, DEFAULT)
    assert (rates.drawn, rates.per_second) == (14, {})
    rates.look([shard(68, number=3)], 108.0, DEFAULT)  # it was not seen in between
    assert (rates.drawn, rates.per_second) == (22, {3: 2.0})
    assert rates.advanced_ms == 0
    for at, lead_ms in ((110.0, 2000), (112.0, 1500), (114.0, 1600)):
        rates.look([shard(68, lead_ms, number=3), shard(14)], at, DEFAULT)
    assert (rates.drawn, rates.per_second, rates.advanced_ms) == (22, {}, 2100)


def test_the_alerts_and_the_dashboard_ask_for_metrics_that_exist_and_the_dashboard_for_all() -> None:
    folder = Path(shardids.watch.metrics.__file__).parent
    rules = [
        rule
        for group in yaml.safe_load((folder / "alerts.yaml").read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ]
    dashboard = json.loads((folder / "dashboard.json").read_text("utf-8"))
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(rules) > 10
    assert len(targets) > 20
    asked = [rule["expr"] for rule in rules] + [target["expr"] for target in targets]
    asked += [
        variable["query"]["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]
    asked += [note["expr"] for note in dashboard["annotations"]["list"]]
    for expression in asked:
        names = re.findall(r"\bshardids_\w+", expression)
        assert names, expression
        assert {*names} <= {*METRICS}, expression
    shown = [one["expr"] for one in (*targets, *dashboard["annotations"]["list"])]
    assert {*re.findall(r"\bshardids_\w+", " ".join(shown))} == {*METRICS}
    for target in targets:
        name = re.findall(r"\bshardids_\w+", target["expr"])[0]
        labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {*labels} <= {*METRICS[name].labels}, target
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_page_lists_every_alert() -> None:
    rules = yaml.safe_load((Path(shardids.watch.metrics.__file__).parent / "alerts.yaml").read_text("utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(Shardids\w+)` \|", PAGE, re.MULTILINE) == alerts
