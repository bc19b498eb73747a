"""A group of commands that imports a command's module only when that command is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command or a group of commands is defined (``module:name``), and its line in the help."""

    where: str
    help: str

    def load(self, name: str) -> Any:
        """Imports the command, and returns it as Typer would have added it to the group."""
        module, _, attribute = self.where.partition(":")
        found = getattr(import_module(f"{__package__}.{module}"), attribute)
        holder = typer.Typer()
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            holder.command(name)(found)
        return get_group(holder).commands[name]


class _Unloaded(TyperCommand):
    """A stand-in for a command in the group's help."""


class LazyGroup(TyperGroup):
    """A group whose commands are those of ``entries``.

    It prints its help from ``entries`` alone. Whatever else asks for a command imports the command's module.
    """

    entries: ClassVar[Mapping[str, Entry]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._is_listing = False
        for name, entry in self.entries.items():
            self.commands[name] = _Unloaded(name, help=entry.help)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command by name."""
        command = super().get_command(ctx, cmd_name)
        if isinstance(command, _Unloaded) and not self._is_listing:
            command = self.commands[cmd_name] = self.entries[cmd_name].load(cmd_name)
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Prints the help of the group."""
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False
