"""The programs of the page on routing in other languages, against the vectors of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from uuid import UUID

import pytest
from markdown_it import MarkdownIt

from shardids.catalog.topology import key_hash, shard_for_key
from tests.unit.test_topology import VECTORS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "routing.md"
TYPES = {int: "integer", str: "text", bytes: "bytes", UUID: "UUID"}
COUNTS = (1, 64, 1000, 4096, 65536)

GO = """package main

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"
	"strings"
)

func main() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		parts := strings.Split(lines.Text(), "\\t")
		shards, _ := strconv.ParseUint(parts[2], 10, 64)
		switch parts[0] {
		case "text":
			fmt.Println(ShardForText(parts[1], shards))
		case "integer":
			key, _ := strconv.ParseInt(parts[1], 10, 64)
			fmt.Println(ShardForInteger(key, shards))
		case "bytes":
			key, _ := hex.DecodeString(parts[1])
			fmt.Println(ShardForBytes(key, shards))
		case "UUID":
			key, _ := hex.DecodeString(strings.ReplaceAll(parts[1], "-", ""))
			fmt.Println(ShardForUUID([16]byte(key), shards))
		}
	}
}
"""

JAVA = """
import java.io.*;
import java.nio.charset.StandardCharsets;
import java.util.*;

public class Main {
    public static void main(String[] arguments) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null;) {
            String[] parts = line.split("\\t");
            int shards = Integer.parseInt(parts[2]);
            System.out.println(switch (parts[0]) {
                case "text" -> Shards.forText(parts[1], shards);
                case "integer" -> Shards.forInteger(Long.parseLong(parts[1]), shards);
                case "bytes" -> Shards.forBytes(HexFormat.of().parseHex(parts[1]), shards);
                default -> Shards.forUuid(UUID.fromString(parts[1]), shards);
            });
        }
    }
}
"""

TYPESCRIPT = """
import { readFileSync } from "node:fs";

for (const line of readFileSync(0, "utf8").trimEnd().split("\\n")) {
  const [type, key, count] = line.split("\\t") as [string, string, string];
  const shards = Number(count);
  if (type === "text") console.log(shardForText(key, shards));
  else if (type === "integer") console.log(shardForInteger(BigInt(key), shards));
  else if (type === "bytes") console.log(shardForBytes(Buffer.from(key, "hex"), shards));
  else console.log(shardForUuid(key, shards));
}
"""


def program(kind: str) -> str:
    tokens = MarkdownIt().parse(PAGE.read_text(encoding="utf-8"))
    (found,) = (token.content for token in tokens if token.type == "fence" and token.info == kind)
    return found


def shown(key: object) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)


def check(command: list[str], folder: Path, **more: str) -> None:
    """Runs a program that reads type, key and number of shards, and prints the shard of each line."""
    asked = [(key, count) for key, _ in VECTORS for count in COUNTS]
    lines = [f"{TYPES[type(key)]}\t{shown(key)}\t{count}\n" for key, count in asked]
    ran = subprocess.run(
        command,
        input="".join(lines),
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert [int(line) for line in ran.stdout.split()] == [shard_for_key(key, count) for key, count in asked]


def test_the_vectors_of_the_page_are_those_of_the_tests() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (?:`(.*?)`)? ?\| `([0-9a-f]{16})` \| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"), re.M
    )
    assert rows == [
        (
            TYPES[type(key)],
            shown(key),
            f"{key_hash(key):016x}",
            str(shard_for_key(key, 64)),
            str(shard_for_key(key, 1000)),
        )
        for key, _ in VECTORS
    ]


@pytest.mark.parametrize("kind", ["go", "java", "typescript"])
def test_each_program_has_about_twenty_lines(kind: str) -> None:
    assert len(program(kind).splitlines()) <= 22


def test_go(tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("Debian's golang-go is not installed")
    (tmp_path / "shards.go").write_text(program("go"), encoding="utf-8")
    (tmp_path / "main.go").write_text(GO, encoding="utf-8")
    check([go, "run", "shards.go", "main.go"], tmp_path, GO111MODULE="off", GOCACHE=str(tmp_path / "cache"))


def test_java(tmp_path: Path) -> None:
    java, javac = shutil.which("java"), shutil.which("javac")
    if java is None or javac is None:
        pytest.skip("there is no Java development kit on this machine")
    (tmp_path / "Shards.java").write_text(program("java"), encoding="utf-8")
    (tmp_path / "Main.java").write_text(JAVA, encoding="utf-8")
    subprocess.run(
        [javac, "-encoding", "UTF-8", "Shards.java", "Main.java"], cwd=tmp_path, check=True, timeout=120
    )
    check([java, "-cp", ".", "Main"], tmp_path)


@pytest.mark.long
def test_typescript(tmp_path: Path) -> None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node.js with npm on this machine")
    quietly = ["--no-audit", "--no-fund", "--prefer-offline", "--ignore-scripts"]
    packages = ["typescript@5.9.3", "@types/node@20.19.0"]
    subprocess.run(
        [npm, "install", *quietly, *packages], cwd=tmp_path, check=True, capture_output=True, timeout=300
    )
    (tmp_path / "shards.mts").write_text(program("typescript") + TYPESCRIPT, encoding="utf-8")
    compiler = [
        node,
        "node_modules/typescript/bin/tsc",
        "--strict",
        "--target",
        "es2022",
        "--module",
        "nodenext",
    ]
    compiled = subprocess.run(
        [*compiler, "shards.mts"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert compiled.returncode == 0, compiled.stdout
    check([node, "shards.mjs"], tmp_path)
