"""``python -m tests.releases VERSION [--release]``: writes the dump of a version, or freezes it."""

from __future__ import annotations

import sys

from tests.releases import release, write_dump


def main(version: str, *options: str) -> None:
    """Writes the dump, and with ``--release`` freezes the version."""
    write_dump(version)
    if "--release" in options:
        release(version)


if __name__ == "__main__":
    main(*sys.argv[1:])
