"""The tests' proxy passes on how a connection ends; a client that waits for ever would be its fault."""

from __future__ import annotations

import socket
import struct

import pytest

from tests.support.proxy import Proxy

PATIENCE_S = 20.0
RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER's value by which close() resets the connection, as the end of a killed process may."""


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_waits_hears_that_the_server_is_gone(is_reset: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()[1]) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)
        with client, listener.accept()[0] as server:
            client.sendall(b"a query")
            assert server.recv(100) == b"a query"
            if is_reset:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            server.close()

            assert _is_at_its_end(client)


def test_a_server_that_is_reset_while_nothing_passes_is_missed_when_all_passes_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(listener.getsockname()[1]) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE_S)
        with client, listener.accept()[0] as server:
            proxy.swallow()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            server.close()
            proxy.forward()
            client.sendall(b"a query")

            assert _is_at_its_end(client)


def _is_at_its_end(client: socket.socket) -> bool:
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True
