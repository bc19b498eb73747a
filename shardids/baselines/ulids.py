"""ULIDs: milliseconds and 80 random bits, stored as a UUID."""

from __future__ import annotations

from shardids.baselines.scheme import About, Column, Decoded, Key, Scheme, Servers, Source, library, uuid_of
from shardids.baselines.uuids import Drawn


class Ulid(Scheme):
    """Drawn by python-ulid, which counts up within a millisecond."""

    about = About(
        name="ulid",
        title="ULID",
        safe_under="everything that leaves its 80 random bits random; clocks may jump",
        unsafe_under="a random generator that repeats itself: its state copied in a snapshot of a machine",
        stops="nothing: every process makes its own",
        tells="time (ms)",
        settings="python-ulid, monotonic within a ms and process; stored as uuid, 16 bytes, not as text, 26",
        described_at="https://github.com/ulid/spec",
    )

    def _open(self, servers: Servers, node: int) -> Source:
        ulid = library("ulid").ULID
        return Drawn(lambda: ulid().to_uuid())

    def column(self, node: int = 0) -> Column:
        return Column(type="uuid")

    def decode(self, key: Key) -> Decoded:
        return Decoded(time=library("ulid").ULID.from_uuid(uuid_of(key)).datetime)
