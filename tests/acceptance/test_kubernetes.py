"""``deploy/kubernetes`` without a Kubernetes: the schemas of its kinds, and its commands on real servers.

No cluster ran: what is left out is what Kubernetes and the operators do with the manifests.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import psycopg
import psycopg.conninfo
import pytest
import yaml
from markdown_it import MarkdownIt
from sqlalchemy import make_url
from typer.core import TyperGroup
from typer.main import get_command

from shardids import Cluster
from shardids.cli import app
from shardids.errors import ShardLost
from shardids.pg.embedded import EmbeddedServer, temporary_servers
from tests.support.crds import problems
from tests.support.proxy import Proxy
from tests.support.standbys import Standby, standby_of
from tests.support.waiting import wait_for

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PAGE = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text("utf-8")
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for file in KUSTOMIZATION["resources"]
    for manifest in yaml.safe_load_all((FOLDER / file).read_text("utf-8"))
]
NAMED = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in MANIFESTS}
PODS = {
    name: manifest["spec"]["template"]["spec"]
    for (kind, name), manifest in NAMED.items()
    if kind in {"Deployment", "Job"}
}
PASSWORD = "a password of the test"


def containers() -> dict[str, dict[str, Any]]:
    return {
        f"{pod}/{container['name']}": container
        for pod, spec in PODS.items()
        for container in [*spec.get("initContainers", []), *spec["containers"]]
    }


def cluster_script() -> str:
    (script,) = containers()["shardids-up/cluster"]["args"]
    return str(script)


def words_for_shardids() -> list[list[str]]:
    """The arguments that manifests and page give to the command ``shardids``."""
    fences = [token.content for token in MarkdownIt().parse(PAGE) if token.type == "fence"]
    lines = [*cluster_script().splitlines(), *re.findall(r"-- (shardids .*)", "\n".join(fences))]
    return [
        *(shlex.split(line)[1:] for line in lines),
        *(each["args"] for each in containers().values() if "command" not in each),
    ]


def test_all_files_are_applied() -> None:
    assert {*KUSTOMIZATION["resources"], "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    kinds = [kind for kind, _ in NAMED]
    assert kinds.count("Cluster") == 2
    assert {"ConfigMap", "Job", "Deployment", "Service", "ServiceMonitor"} < set(kinds)
    assert len(NAMED) == len(MANIFESTS)


@pytest.mark.parametrize("words", words_for_shardids(), ids=" ".join)
def test_each_command_and_its_options_exist(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDIDS_CATALOG", "postgresql://shardids@node-a-rw/app")
    command: Any = get_command(app)
    while isinstance(command, TyperGroup):
        name, *words = words
        command = command.get_command(click.Context(command), name)
        assert command is not None, name
    command.make_context(name, words)  # an error, if it has no such option


def test_containers_have_no_rights_on_their_machine() -> None:
    for name, pod in PODS.items():
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] == 10001, name
        assert not {"hostNetwork", "hostPID", "serviceAccountName"} & pod.keys(), name
    for name, container in containers().items():
        assert container["image"] == "shardids", name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
    assert [image["name"] for image in KUSTOMIZATION["images"]] == ["shardids"]
    services = [manifest["spec"] for (kind, _), manifest in NAMED.items() if kind == "Service"]
    assert all("type" not in service for service in services)


def test_no_secret_is_written_down_and_the_page_makes_each() -> None:
    written = "".join((FOLDER / file).read_text("utf-8") for file in KUSTOMIZATION["resources"])
    assert "kind: Secret" not in written
    assert not re.search(r"://[^/@\s]*:[^/@\s]*@", written)
    named = set(re.findall(r"(?:secretName|secretKeyRef:\s+name|[sS]ecret:\s+name): (\S+)", written))
    assert named == {"shardids-login", "shardids-monitor-login", "shardids-console"}
    assert named == set(re.findall(r"kubectl create secret generic (\S+)", PAGE))


def test_services_and_monitors_find_their_pods() -> None:
    for (kind, name), manifest in NAMED.items():
        if kind == "Service":
            labels = NAMED["Deployment", name]["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"] == labels
            ports = {port["name"] for port in PODS[name]["containers"][0]["ports"]}
            assert {port["targetPort"] for port in manifest["spec"]["ports"]} == ports
    monitor, service = NAMED["ServiceMonitor", "shardids"]["spec"], NAMED["Service", "shardids-metrics"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [one["port"] for one in monitor["endpoints"]] == [one["name"] for one in service["spec"]["ports"]]
    used = {name for (kind, name) in NAMED if kind == "Cluster"}
    assert set(re.findall(r"@([\w-]+)-rw/", "".join(map(str, MANIFESTS)))) == used


@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="the schemas come by npm, which this machine lacks")
def test_manifests_are_those_that_their_schemas_allow(tmp_path: Path) -> None:
    assert problems(MANIFESTS, tmp_path) == []
    wrong = copy.deepcopy(NAMED["Cluster", "node-a"])
    wrong["spec"]["postgresql"]["synchronous"]["nummer"] = 1
    wrong["spec"]["instances"] = "three"
    also = copy.deepcopy(NAMED["ServiceMonitor", "shardids"])
    del also["spec"]["selector"]
    (tmp_path / "wrong").mkdir()
    found = "\n".join(problems([wrong, also], tmp_path / "wrong"))
    assert all(word in found for word in ("nummer", "not assignable to type 'number'", "selector")), found


def make_database(server: EmbeddedServer, node: str) -> None:
    """The database and roles of a node, by the statements that the operator runs as the manifest says."""
    spec = NAMED["Cluster", f"node-{node}"]["spec"]
    initdb, (monitor,) = spec["bootstrap"]["initdb"], spec["managed"]["roles"]
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for role in (initdb["owner"], monitor["name"]):
            connection.execute(f"create role {role} login password '{PASSWORD}'")
        for group in monitor["inRoles"]:
            connection.execute(f"grant {group} to {monitor['name']}")
        for statement in initdb["postInitSQL"]:
            connection.execute(statement)
        connection.execute(f"create database {initdb['database']} owner {initdb['owner']}")
    with psycopg.connect(server.url(initdb["database"]), autocommit=True) as connection:
        for statement in initdb["postInitApplicationSQL"]:
            connection.execute(statement)


@pytest.mark.long
def test_the_commands_make_a_cluster_and_follow_a_promotion(tmp_path: Path) -> None:
    """With roles as in the manifests, behind addresses that stay, and a standby that lacks the last move."""
    parameters = NAMED["Cluster", "node-a"]["spec"]["postgresql"]["parameters"]
    with temporary_servers(2, settings=parameters) as servers, standby_of(servers[1]) as standby:
        ports = [psycopg.conninfo.conninfo_to_dict(server.url())["port"] for server in servers]
        with Proxy(int(str(ports[0]))) as node_a, Proxy(int(str(ports[1]))) as node_b:
            for server, node in zip(servers, "ab", strict=True):
                make_database(server, node)
            urls = [f"postgresql://shardids@127.0.0.1:{node.port}/app" for node in (node_a, node_b)]
            run = Commands(tmp_path, *urls)
            make_cluster(run, tmp_path)
            follow_promotion(run, tmp_path, servers[1], standby, node_b)


class Commands:
    """Runs commands as a container of the manifests does."""

    def __init__(self, folder: Path, url_a: str, url_b: str) -> None:
        (folder / "shardids").write_text(
            f'#!/bin/sh\nexec {sys.executable} -c "from shardids.cli import app; app()" "$@"\n', "utf-8"
        )
        (folder / "shardids").chmod(0o755)
        self.catalog = url_a
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PG")},
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SHARDIDS_CATALOG": url_a,
            "NODE_A": url_a,
            "NODE_B": url_b,
            "PGPASSWORD": PASSWORD,
            "COLUMNS": "200",
        }

    def __call__(self, *command: str, **more: str) -> str:
        given = {**self.environment, **more}
        ran = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=180)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


def make_cluster(run: Commands, folder: Path) -> None:
    for _ in range(2):
        listed = run("sh", "-euc", cluster_script())
        assert re.findall(r"^([ab]) +(\d+) ", listed, re.MULTILINE) == [("a", "32"), ("b", "32")]
    run("shardids", "doctor")
    monitor = run.catalog.replace("shardids@", "monitor@")
    file = folder / "metrics.prom"
    run("shardids", "metrics", "--once", "--textfile", str(file), SHARDIDS_CATALOG=monitor)
    assert set(re.findall(r"^shardids_node_complete\{.*\} (.*)$", file.read_text(), re.MULTILINE)) == {"1.0"}


def follow_promotion(
    run: Commands, folder: Path, primary: EmbeddedServer, standby: Standby, address: Proxy
) -> None:
    program, log = folder / "follow_promotions.py", folder / "promotions.log"
    text = NAMED["ConfigMap", "shardids-promotions"]["data"]["follow_promotions.py"]
    program.write_text(text.replace("PAUSE_S = 5", "PAUSE_S = 1"), "utf-8")
    with log.open("w") as output:
        following = subprocess.Popen(
            [sys.executable, str(program)], env=run.environment, stdout=output, stderr=output
        )
    try:
        wait_for(lambda: log.read_text().count(", with 32 shards") == 2, "both nodes were compared", 90)
        assert 'node "a" is on timeline 1' in log.read_text()
        with psycopg.connect(standby.url(), autocommit=True) as connection:
            # The move never arrives there.
            connection.execute("alter system set primary_conninfo = ''")
            connection.execute("select pg_reload_conf()")
        wait_for(lambda: senders(primary) == 0, "the standby is cut off", 30)
        run("shardids", "shard", "move", "0", "--to", "b")
        primary.kill()
        with psycopg.connect(standby.url(), autocommit=True) as connection:
            connection.execute("select pg_promote()")
        address.lead_to(standby.port)
        wait_for(lambda: "Shard 0 is lost" in log.read_text(), "the node was compared again", 90)
        assert 'node "b" is on timeline 2' in log.read_text()
        with Cluster.connect(make_url(run.catalog).set(password=PASSWORD)) as cluster:
            assert len(cluster.at(shard=40).reserve(10)) == 10
            with pytest.raises(ShardLost):
                cluster.at(shard=0).reserve(1)
        assert log.read_text().count("is on timeline") == 3
        assert following.poll() is None
    finally:
        following.terminate()
        following.wait(30)


def senders(primary: EmbeddedServer) -> int:
    with psycopg.connect(primary.url()) as connection:
        ((count,),) = connection.execute("select count(*) from pg_stat_replication").fetchall()
    return int(count)
