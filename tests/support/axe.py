"""axe-core, which judges whether a page can be used by everybody; fetched by npm into a cache folder."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page

VERSION: Final = "4.14.1"
_SHA256: Final = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardids-test-axe"
_TOLERATED: Final = ("minor",)


@cache
def source() -> str:
    """The program, as the recorded version has it."""
    folder = _CACHE / VERSION
    file = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-save", "--ignore-scripts", "--prefix", str(folder)]
        subprocess.run([*npm, f"axe-core@{VERSION}"], check=True)
    program = file.read_bytes()
    assert sha256(program).hexdigest() == _SHA256
    return program.decode()


def violations(page: Page) -> list[str]:
    """What is serious or moderate on a page as it is now: the rule, and the elements that break it."""
    page.evaluate(source())
    found: dict[str, Any] = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['impact']}: {one['id']}: {node['target']}: {node['failureSummary']}"
        for one in found["violations"]
        if one["impact"] not in _TOLERATED
        for node in one["nodes"]
    ]
