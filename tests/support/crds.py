"""Manifests of Kubernetes against the schemas of their kinds, made from the CRDs and fetched by npm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = {
    "kubernetes-models": "5.1.0",
    "@kubernetes-models/cloudnative-pg": "2.0.0",
    "@kubernetes-models/prometheus-operator": "6.0.0",
    "typescript": "5.9.3",
}
_OF_GROUP: Final = {
    "postgresql.cnpg.io": "@kubernetes-models/cloudnative-pg",
    "monitoring.coreos.com": "@kubernetes-models/prometheus-operator",
}
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardids-test-crds"
_OPTIONS: Final = ("--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022")


def problems(manifests: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Unknown fields, wrong types, missing fields and values that the schemas refuse, a line each."""
    (folder / "node_modules").symlink_to(_packages())
    lines = []
    for number, manifest in enumerate(manifests):
        group, kind = manifest["apiVersion"].partition("/")[0], manifest["kind"]
        module = f"{_OF_GROUP.get(group, 'kubernetes-models')}/{manifest['apiVersion']}/{kind}"
        # The compiler knows which fields there are, the class which values.
        lines += [
            f"import {{ {kind} as Kind{number}, type I{kind} as Fields{number} }} from {json.dumps(module)};",
            f"const one{number}: Fields{number} = {json.dumps(manifest)};",
            f"new Kind{number}(one{number}).validate();",
        ]
    (folder / "manifests.mts").write_text("\n".join(lines), "utf-8")
    compiler = folder / "node_modules" / "typescript" / "bin" / "tsc"
    compiled = _run("node", str(compiler), *_OPTIONS, "manifests.mts", folder=folder)
    return compiled or _run("node", "manifests.mjs", folder=folder)


def _run(*command: str, folder: Path) -> list[str]:
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    return (ran.stdout + ran.stderr).splitlines() if ran.returncode else []


def _packages() -> Path:
    folder = _CACHE / "-".join(PACKAGES.values())
    if not (folder / "node_modules" / "typescript" / "bin" / "tsc").exists():
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-save", "--ignore-scripts", "--prefix", str(folder)]
        subprocess.run([*npm, *(f"{name}@{version}" for name, version in PACKAGES.items())], check=True)
    return folder / "node_modules"
