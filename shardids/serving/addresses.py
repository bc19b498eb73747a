"""Addresses to listen at, and the names that clients ask for."""

from __future__ import annotations

import errno
import ipaddress
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from shardids.errors import BadArgument, ShardidsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen: ``host`` is a name or an address; port 0 is any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads ``HOST:PORT``, an IPv6 address in brackets.

        Raises:
            BadArgument: it has another form.
        """
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise BadArgument(
                f"{text!r} is no address to listen at", hint="It looks like this: 127.0.0.1:9187"
            )
        return cls(host=host, port=int(port))

    @property
    def is_loopback(self) -> bool:
        """Returns whether no other machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Hold the address for the block inside.

        Raises:
            ShardidsError: the system refuses it; the message names it.
        """
        try:
            yield
        except OSError as error:
            # What Python adds to the text of some has the address a second time.
            is_known = error.errno in errno.errorcode
            reason = os.strerror(error.errno or 0) if is_known else error.strerror or str(error)
            raise ShardidsError(f"can't listen at {self}: {reason}", hint=_hint(error.errno)) from error

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _hint(number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return "Another process listens there: end it, or choose another port with --listen HOST:PORT."
    return "Choose an address of this machine and a port with --listen HOST:PORT."


def serves(host: str, names: Collection[str]) -> bool:
    """Returns whether a request with this ``Host`` is for a server with these names.

    Addresses and ``localhost`` always are. Any other name can be made to lead here by the page that asks (DNS
    rebinding), so the server has to know it.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return name == "localhost" or name in {known.lower() for known in names}
