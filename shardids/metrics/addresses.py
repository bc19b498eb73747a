"""Addresses to listen at."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self

from shardids.errors import BadArgument


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

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
