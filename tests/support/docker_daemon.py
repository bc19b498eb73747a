"""A stand-in for the Docker daemon: every container that it starts is a server that runs already."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

CONTAINER = "c0ffee"


class _Daemon(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def __init__(self, socket: Path, port: int) -> None:
        super().__init__(str(socket), _Handler)
        self.port = port
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Daemon

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = re.sub(r"^/v[0-9.]+", "", self.path.partition("?")[0])
        self.server.asked.append(f"{self.command} {path}")
        body = b"OK" if path == "/_ping" else json.dumps(self._body(path)).encode()
        self.send_response(201 if path == "/containers/create" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self, path: str) -> Any:
        published = [{"HostIp": "127.0.0.1", "HostPort": str(self.server.port)}]
        answers: dict[str, Any] = {
            "/version": {"ApiVersion": "1.44", "MinAPIVersion": "1.24"},
            # testcontainers 4.9 looks for its container, and for the way to it, in this list.
            "/containers/json": [
                {
                    "Id": CONTAINER,
                    "HostConfig": {"NetworkMode": "bridge"},
                    "NetworkSettings": {"Networks": {"bridge": {"Gateway": "127.0.0.1"}}},
                }
            ],
            "/containers/create": {"Id": CONTAINER, "Warnings": []},
            f"/containers/{CONTAINER}/json": {
                "Id": CONTAINER,
                "Name": "/postgres",
                "Config": {"Image": "postgres", "Labels": {}},
                "Image": "sha256:1",
                "State": {"Status": "running", "Running": True, "ExitCode": 0},
                "NetworkSettings": {"Ports": {"5432/tcp": published}, "Networks": {}},
            },
            f"/containers/{CONTAINER}/exec": {"Id": "e1"},
            "/exec/e1/json": {"ExitCode": 0, "Running": False},
        }
        return answers.get(path, {})

    def address_string(self) -> str:
        return "a Unix socket"

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def docker_daemon(socket: Path, port: int) -> Iterator[list[str]]:
    """Answers on a socket as a daemon that publishes ``port``; yields what it is asked."""
    with _Daemon(socket, port) as daemon:
        thread = threading.Thread(target=daemon.serve_forever, daemon=True)
        thread.start()
        yield daemon.asked
        daemon.shutdown()
        thread.join()
