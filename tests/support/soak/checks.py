"""What must hold when nothing is under way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.support.client_programs import Dumper
from tests.support.moves import schema
from tests.support.soak.field import Field
from tests.support.soak.records import Expected, Key, Table
from tests.support.soak.scene import Scene
from tests.support.standbys import with_password

VALUES: dict[Table, str] = {"entries": "value", "parts": "entry_id", "loads": "value"}
SHOWN = 12
"""How many faults a message lists at most."""


def assert_rows(field: Field, expected: Expected, records: Iterable[Path]) -> int:
    """Every acknowledged row is at its shard's owner, once, with its last value; nothing else is there."""
    expected.read(records)
    actual = rows(field)
    faults = expected.faults(actual)
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:SHOWN])
    assert len({id_ for _, _, id_ in actual}) == len(actual), "an ID is in two rows"
    expected.settle(actual)
    return len(actual)


def rows(field: Field) -> dict[Key, int]:
    """What each shard has at its owner."""
    found: dict[Key, int] = {}
    for shard in field.shards:
        s = schema(shard)
        with field.connected(field.owner(shard)) as connection:
            for table, value in VALUES.items():
                for id_, there in connection.execute(f"select id, {value} from {s}.{table}"):
                    found[shard, table, id_] = there
            orphans = f"select count(*) from {s}.parts where entry_id not in (select id from {s}.entries)"
            assert connection.execute(orphans).fetchone() == (0,), f"shard {shard}: parts without their entry"
    return found


def assert_one_owner(field: Field) -> None:
    """Each shard is active where it is placed and nowhere else; nothing of any move is left."""
    for shard in field.shards:
        home = field.owner(shard)
        for node in field.servers:
            with field.connected(node) as connection:
                states = connection.execute(
                    "select state from shardids.shard where id = %s", [shard]
                ).fetchall()
            right = states == [("active",)] if node == home else states in ([], [("moved",)], [("fenced",)])
            assert right, f"shard {shard}, placed on {home}, is {states} on {node}"
    assert field.leftovers() == []


def assert_same_schema(field: Field) -> None:
    """pg_dump writes the same text for each shard."""
    texts = {}
    for shard in field.shards:
        node = field.owner(shard)
        with field.connected(node) as connection:
            dumper = Dumper(connection.info.server_version)
        dumped = dumper.dump(with_password(field.servers[node].url()), "--schema-only", f"-n{schema(shard)}")
        texts[shard] = settled(dumped, shard)
    first = texts[0]
    for shard, text in texts.items():
        ours, theirs = set(text.splitlines()), set(first.splitlines())
        assert text == first, (
            f"shard {shard} is not like shard 0: more: {sorted(ours - theirs)}, less: {sorted(theirs - ours)}"
        )


def settled(dumped: str, shard: int) -> str:
    """A dump without what differs from shard to shard: names, and the number in the generator's functions."""
    dumped = re.sub(r"^\\(un)?restrict .*$", "", dumped, flags=re.MULTILINE)
    dumped = re.sub(r"^    START WITH .*$", "", dumped, flags=re.MULTILINE)  # id_offset's names a shard
    number = re.compile(rf"(, |of shard |late_id_|set_aside_){shard}(?=[(),'])")
    return "\n".join(
        number.sub(r"\1n", line) if _OF_THE_GENERATOR.search(line) else line
        for line in dumped.replace(schema(shard), "shard_n").splitlines()
    )


_OF_THE_GENERATOR = re.compile(r"\b(next_ids?|late_id(_[0-9]+)?|set_aside(_[0-9]+)?|id_of)\b")


def assert_well(scene: Scene) -> None:
    """The doctor finds nothing wrong, once the statements of the DBA are recorded."""
    accepted = scene.launcher.run("shard", "accept-schema", "--yes", deadline_s=60)
    assert accepted.code == 0, f"{accepted}\n{accepted.out}{accepted.err}"
    ran = scene.launcher.run("doctor", deadline_s=60)
    assert ran.code == 0, f"{ran}\n{ran.out}{ran.err}"
