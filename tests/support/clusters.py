"""What the tests of the Python layer share: clusters to try things on, and all that is in a database."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL
from typer.testing import CliRunner

from shardids.catalog.rows import Catalog
from shardids.cli import app
from tests.conftest import dsn
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
COMMAND = "from shardids.cli import app; app()"


@contextmanager
def catalog_at(url: str | URL) -> Iterator[Catalog]:
    """The catalog, closed afterwards."""
    catalog = Catalog(url)
    try:
        yield catalog
    finally:
        catalog.close()


@contextmanager
def connected(url: URL) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection, closed afterwards."""
    with psycopg.connect(dsn(url), autocommit=True, client_encoding="utf8") as connection:
        yield connection


def sessions(admin: psycopg.Connection[Any], url: URL) -> int:
    """How many sessions there are in a database."""
    found = admin.execute(
        "select count(*) from pg_stat_activity where datname = %s", [url.database]
    ).fetchone()
    assert found is not None
    return int(found[0])


def whole_story(error: BaseException) -> str:
    """All that an error could tell: message, repr, arguments, traceback, and the same of its causes."""
    told = [*traceback.format_exception(error)]
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            told += [str(one), repr(one), repr(one.args)]
            waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__]
    return "\n".join(told)


_SCHEMAS = """
    select n.oid, n.nspname from pg_namespace n
    where n.nspname !~ '^(pg_|information_schema$)' and (%(only)s::text is null or n.nspname = %(only)s)"""

# Each row: what kind of object, its name, and all there is to say of it.
_OBJECTS = f"""
    with chosen as ({_SCHEMAS})
    select 'schema', nspname, concat_ws(' | ', pg_get_userbyid(n.nspowner), n.nspacl,
                                        obj_description(n.oid, 'pg_namespace'))
    from chosen join pg_namespace n using (oid, nspname)
    union all
    select 'relation ' || c.relkind::text, c.oid::regclass::text,
           concat_ws(' | ', pg_get_userbyid(c.relowner), c.relacl, obj_description(c.oid, 'pg_class'))
    from pg_class c join chosen on c.relnamespace = chosen.oid
    union all
    select 'column', c.oid::regclass::text || '.' || a.attname,
           concat_ws(' | ', a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attacl,
                     pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum))
    from pg_attribute a join pg_class c on c.oid = a.attrelid and c.relkind = 'r'
    join chosen on c.relnamespace = chosen.oid
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attnum > 0 and not a.attisdropped
    union all
    select 'constraint', conrelid::regclass::text || '.' || conname, pg_get_constraintdef(k.oid)
    from pg_constraint k join chosen on k.connamespace = chosen.oid
    union all
    select 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
    from pg_index join pg_class c on c.oid = indrelid join chosen on c.relnamespace = chosen.oid
    union all
    select 'trigger', tgrelid::regclass::text || '.' || tgname, pg_get_triggerdef(t.oid)
    from pg_trigger t join pg_class c on c.oid = tgrelid join chosen on c.relnamespace = chosen.oid
    where not tgisinternal
    union all
    select 'sequence', seqrelid::regclass::text,
           concat_ws(' | ', seqtypid::regtype, case when relname <> 'id_offset' then seqstart end,
                     seqincrement, seqmin, seqmax, seqcache, seqcycle)
    from pg_sequence join pg_class c on c.oid = seqrelid join chosen on c.relnamespace = chosen.oid
    union all
    select 'function', p.oid::regprocedure::text,
           concat_ws(' | ', pg_get_functiondef(p.oid), pg_get_userbyid(p.proowner),
                     coalesce(p.proacl, acldefault('f', p.proowner)),
                     obj_description(p.oid, 'pg_proc'))
    from pg_proc p join chosen on p.pronamespace = chosen.oid
    order by 1, 2"""


def objects(url: URL, schema: str | None = None) -> list[tuple[str, str, str]]:
    """Every object of the database or of one schema: definition, owner, privileges and comment."""
    with connected(url) as connection:
        return connection.execute(_OBJECTS, {"only": schema}).fetchall()


def contents(url: URL) -> dict[str, list[str]]:
    """The rows of every table, and the state of every sequence."""
    rows = {"r": "select to_jsonb(t) from {} t order by 1::text", "S": "select last_value, is_called from {}"}
    with connected(url) as connection:
        names = connection.execute(
            f"""with chosen as ({_SCHEMAS})
                select relkind::text, chosen.nspname, relname from pg_class c
                join chosen on c.relnamespace = chosen.oid where relkind in ('r', 'S') order by 2, 3""",
            {"only": None},
        ).fetchall()
        return {
            f"{schema}.{name}": [
                str(row)
                for row in connection.execute(sql.SQL(rows[kind]).format(sql.Identifier(schema, name)))
            ]
            for kind, schema, name in names
        }


def everything(*urls: URL) -> list[object]:
    """All objects and all contents of databases, to be compared with what they are later."""
    return [(objects(url), contents(url)) for url in urls]


def shards_there(url: URL) -> set[int]:
    """The shards that a node has, all of them whole: active, with generator and version, and they draw."""
    with connected(url) as connection:
        found = connection.execute("select id, schema, state from shardids.shard order by id").fetchall()
        for shard, schema, state in found:
            assert state == "active"
            query = """select shardids.shard_of({}.next_id()), (select count(*) from {}),
                              (select count(*) from pg_class where relnamespace = %s::regnamespace),
                              (select count(*) from pg_proc where pronamespace = %s::regnamespace)"""
            versions = sql.Identifier(schema, "shardids_version")
            drawn = connection.execute(
                sql.SQL(query).format(sql.Identifier(schema), versions), [schema, schema]
            ).fetchone()
            # Two sequences, the version table and its index; next_id, next_ids, late_id_N and set_aside_N.
            assert drawn == (shard, 1, 4, 4), schema
        schemas = {schema for _, schema, _ in found}
        begun = connection.execute("select nspname from pg_namespace where nspname ~ '^shard_[0-9]+$'")
        assert {name for (name,) in begun} == schemas
    return {shard for shard, _, _ in found}


def environment(**more: str) -> dict[str, str]:
    """The environment for a Python process that is to find this package."""
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    kept = {name: value for name, value in os.environ.items() if name != "SHARDIDS_CATALOG"}
    return kept | {"PYTHONPATH": path} | more


def command(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """``shardids …`` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=60,
        env=environment(**more),
    )


def command_here(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """``shardids …`` as :func:`command` runs it, but in this process, which spares the start of another."""
    # The console keeps the width that it finds first: one for all tests of a process.
    given = {"SHARDIDS_CATALOG": None, "COLUMNS": "200"} | more
    ran = CliRunner().invoke(app, [*arguments], input=stdin, env=given, prog_name="shardids")
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return subprocess.CompletedProcess([*arguments], ran.exit_code, ran.stdout, ran.stderr)


class Nursery:
    """A process that has everything imported and forks children that do one thing with a cluster.

    ``more`` is what it does, too, before it forks any.
    """

    _SCRIPT = """
import os, sys
from shardids.client import cluster
from shardids.ids import layout
from shardids.migrate.install import trees
from shardids.migrate.install import provision
from shardids.catalog.rows import Catalog
import psycopg, sqlalchemy.dialects.postgresql.psycopg
trees.shard_sql()
{more}
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            exec(eval(line))
        except BaseException as error:
            sys.stdout.write(f"{type(error).__name__}: {error}".replace(chr(10), " ") + chr(10))
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.write("done" + chr(10))
        sys.stdout.flush()
        os._exit(0)
    sys.stdout.write(f"child {child}" + chr(10))
    sys.stdout.flush()
"""

    def __init__(self, more: str = "") -> None:
        self._said: list[str] = []
        script = self._SCRIPT.replace("{more}", more)
        self._process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def start(self, script: str) -> int:
        """Forks a child that runs a script; its process ID."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{script!r}\n")
        self._process.stdin.flush()
        while not (line := self._read()).startswith("child "):
            self._said.append(line)
        return int(line.split()[1])

    def line(self) -> str:
        """The next line that a child wrote."""
        return self._said.pop(0) if self._said else self._read()

    def run(self, scripts: Sequence[str]) -> list[str]:
        """Runs scripts at the same time; what they ended with: ``done`` or an error."""
        for script in scripts:
            self.start(script)
        return [self.line() for _ in scripts]

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the process has ended"
        return line

    def close(self) -> None:
        """Ends the process, after its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(PATIENCE_S)


def processes_in(folder: Path) -> list[str]:
    """Commands of the processes that name this folder."""
    listed = subprocess.run(["ps", "-axww", "-o", "command="], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if str(folder) in line]
