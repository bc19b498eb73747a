"""pytest as applications run it: in a folder and a process of its own, with the plugin of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.clusters import ROOT, environment

ENTRY_POINT = "[pytest11]\nshardids = shardids.testing.plugin\n"


def run_pytest(
    folder: Path, *arguments: str, has_asyncio: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """``pytest -q …`` in a folder, where it finds the plugin whether or not this package is installed."""
    installed = folder / "site" / "plugin-0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(ENTRY_POINT)
    found = environment(**more)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(installed.parent), found["PYTHONPATH"]])
    # pytest-asyncio warns where its settings are not made.
    asyncio = ["-o", "asyncio_default_fixture_loop_scope=function"] if has_asyncio else ["-p", "no:asyncio"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *asyncio, *arguments],
        cwd=folder,
        env=found,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
