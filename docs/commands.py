"""Pages of the commands in ``docs/reference/cli``, written from the commands themselves.

``conf.py`` calls :func:`write` before Sphinx reads the pages: one page for each group of ``shardids --help``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer.main

from shardids.cli import COMMANDS, app

_FOLDER = Path(__file__).parent / "reference" / "cli"
_COMMON = {"--catalog", "--dry-run", "-y", "--json"}
"""Options that the page of all commands explains, for all of them."""
_KINDS = {int: "N", float: "N", str: "TEXT", Path: "PATH", list[str]: "TEXT"}
_HEAD = """\
# Commands

`shardids COMMAND --help` says the same in a terminal. Results go to stdout, progress and messages to stderr.
Exit codes: 0 fine, 1 failed, 2 usage, 3 something differs from what it should be.

Commands for a cluster take `--catalog URL`, or the variable `SHARDIDS_CATALOG`. The catalog stores
no passwords: they come from its URL where the user is the same, from `PGPASSWORD` or from
`~/.pgpass`. `--dry-run` does everything up to the first change, with the same refusals and exit
code. `--json` prints JSON. Commands that destroy something ask first, unless `--yes` is given. An
option that does not apply is refused by name. Options of `shardids` itself stand before the
command: `--verbose` (`-v`, `-vv`), `--log-format json`, `--version`, `--install-completion`.
"""


def write(folder: Path = _FOLDER) -> list[Path]:
    """Write the pages that have changed; return all of them."""
    root = typer.main.get_command(app)
    panels: dict[str, list[str]] = {}
    for name, entry in COMMANDS.items():
        panels.setdefault(entry.panel, []).append(name)
    index = [_HEAD]
    pages = {}
    for panel, names in panels.items():
        page = panel.split()[0].lower()
        leaves = [leaf for name in names for leaf in _leaves(_child(root, name), (name,))]
        index += [f"## {panel}\n", "| command | |", "|---|---|"]
        index += [f"| [`{' '.join(path)}`]({page}.md#{_anchor(path)}) | {_line(it)} |" for path, it in leaves]
        index.append("")
        pages[page] = f"# {panel}\n\n" + "\n".join(_section(path, it) for path, it in leaves)
    index += ["```{toctree}", ":hidden:", "", *pages, "```", ""]
    pages["index"] = "\n".join(index)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md" for name in pages]
    for path, text in zip(paths, pages.values(), strict=True):
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    return paths


def _child(group: Any, name: str) -> Any:
    return group.get_command(None, name)


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
    for name in getattr(command, "commands", ()):
        yield from _leaves(_child(command, name), (*path, name))


def _anchor(path: tuple[str, ...]) -> str:
    return "-".join(path)


def _line(command: Any) -> str:
    return _cell(command.help.split("\n\n")[0])


def _cell(text: str) -> str:
    """Return a text on one line; options in it are code, whose dashes stay two."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)", r"`\1`", line)


def _section(path: tuple[str, ...], command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and "--help" not in one.opts]
    words = [_metavar(one) for one in arguments]
    common = [_usage(one) for one in options if _COMMON & {*one.opts}]
    options = [one for one in options if not _COMMON & {*one.opts}]
    words += ["[OPTIONS]"] * bool(options) + common
    text = f"({_anchor(path)})=\n## {' '.join(path)}\n\n"
    text += f"```console\n$ shardids {' '.join([*path, *words])}\n```\n\n"
    text += "\n\n".join(_cell(part) for part in command.help.split("\n\n")) + "\n"
    kinds = {
        name: it.annotation
        for name, it in inspect.signature(command.callback, eval_str=True).parameters.items()
    }
    rows = [(_metavar(one), one) for one in arguments if one.help]
    rows += [(_names(one, kinds[one.name]), one) for one in options]
    if rows:
        text += "\n| | |\n|---|---|\n"
        text += "".join(f"| `{_code(name)}` | {_meaning(one)} |\n" for name, one in rows)
    return text


def _usage(option: Any) -> str:
    text = option.opts[0] if option.is_flag else f"{option.opts[0]} {option.metavar}"
    return text if option.required else f"[{text}]"


def _code(text: str) -> str:
    return text.replace("|", "\\|")


def _metavar(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _names(option: Any, annotation: Any) -> str:
    """Return the spelling of an option, from its parameter's annotation: ``--shards N``, ``--by key|id``."""
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag or getattr(option, "count", False):
        return names
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    kind = next((one for one in get_args(kind) if NoneType in get_args(kind) and one is not NoneType), kind)
    choices = "|".join(map(str, get_args(kind) if get_origin(kind) is Literal else ()))
    return f"{names} {option.metavar or choices or _KINDS[kind]}"


def _meaning(parameter: Any) -> str:
    parts = [_cell(parameter.help or "")]
    if parameter.required and parameter.param_type_name == "option":
        parts.append("Required.")
    shown = parameter.show_default
    value = shown if isinstance(shown, str) else parameter.default
    if shown and isinstance(value, str | int | float | Path) and not isinstance(value, bool):
        parts.append(f"Default: `{_code(str(value))}`.")
    if parameter.envvar:
        parts.append(f"Variable: `{parameter.envvar}`.")
    return " ".join(part if part.endswith((".", "?", "`")) else part + "." for part in parts if part)


if __name__ == "__main__":
    write()
