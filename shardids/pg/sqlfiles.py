"""The places of ``sql/``, ``migrations/`` and ``examples/``: beside the package, or inside it in a wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardids.errors import BadArgument

_PACKAGE = Path(__file__).parent.parent


def data_folder(name: str) -> Path:
    """Return the folder ``sql``, ``migrations`` or ``examples`` that belongs to this installation."""
    in_wheel = _PACKAGE / "_data" / name
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / name


def sql_names() -> list[str]:
    """Name of all SQL files, sorted: ``<folder>/<object>.v<N>.sql``, and ``.down.sql`` for its removal."""
    folder = data_folder("sql")
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*.sql"))


@cache
def read_sql(name: str) -> str:
    """Return the text of an SQL file. ``name`` is ``<folder>/<file>``; ``.sql`` may be left out.

    Raises:
        BadArgument: the file does not exist; the message lists the files.
    """
    names = sql_names()
    file_name = name if name.endswith(".sql") else f"{name}.sql"
    if file_name not in names:
        raise BadArgument(f"SQL file {name!r} does not exist", hint="The files are: " + ", ".join(names))
    return (data_folder("sql") / file_name).read_text(encoding="utf-8")
