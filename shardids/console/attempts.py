"""Slows down who guesses the token."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from typing import Final

WAIT_S: Final = 1.0
"""How long an attempt waits before it is judged, if its network has given a wrong token."""
MEMORY_S: Final = 60.0
"""How long a wrong token is remembered."""
MOST_WAITING: Final = 16
"""How many attempts from one network wait at once."""
_MOST_NETWORKS: Final = 1000


class Attempts:
    """The networks that gave wrong tokens of late; used in one event loop.

    An attempt with the right token also waits: otherwise an answer that does not come at once would say that
    the token is wrong. It waits for a bounded time, and only for wrong tokens from its own network: an IPv4
    address, or the first 64 bits of an IPv6 address.
    """

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._failed_s: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()

    async def wait(self, client: str) -> bool:
        """Return when an attempt may be judged; false if too many others wait already."""
        network = _network(client)
        if time.monotonic() - self._failed_s.get(network, -MEMORY_S) >= MEMORY_S:
            return True
        if self._waiting[network] >= MOST_WAITING:
            return False
        self._waiting[network] += 1
        try:
            await asyncio.sleep(self._wait_s)
        finally:
            self._waiting[network] -= 1
            if not self._waiting[network]:
                del self._waiting[network]
        return True

    def failed(self, client: str) -> None:
        """Remember that a client gave a wrong token."""
        network = _network(client)
        self._failed_s.pop(network, None)
        if len(self._failed_s) >= _MOST_NETWORKS:
            del self._failed_s[next(iter(self._failed_s))]
        self._failed_s[network] = time.monotonic()


def _network(client: str) -> str:
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv4Address):
        return client
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
