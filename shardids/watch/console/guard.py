"""Access to the console, and the headers of answers: hosts, origins, the token and its cookie."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardids.logs import logger
from shardids.watch.console.answers import refusal, too_many
from shardids.watch.serving import serves

_COOKIE: Final = "shardids_console"
LEAST_TOKEN: Final = 16
"""A token has as many characters at least."""
MOST_BYTES: Final = 1 << 20
"""How long the body of a request may be."""
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: with that a browser sends "Origin: null" with a form.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_OPEN: Final = ("/healthz", "/login")
_OPEN_FILES: Final = (".css", ".js", ".svg")
"""Of the page, what holds nothing of the cluster: the page to log in needs it."""


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


log = logger("console")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The requirements on a client.

    Attributes:
        names: accepted host names of the console, without ports. Addresses are always accepted: only a name
            can be made to lead here by somebody else.
        token: the token that clients give; ``None`` if all clients that reach the console may use it.
        session: the cookie that a browser gets for the token; a new one each time that the console starts.
        attempts: the clients that gave wrong tokens.
    """

    names: Collection[str] = ()
    token: str | None = field(default=None, repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    attempts: Attempts = field(default_factory=Attempts, repr=False)

    async def knows(self, token: str, client: str) -> bool:
        """Return whether this is the token; a client whose network gave wrong ones waits for the answer.

        Raises:
            TooManyAttempts: others from there wait already, and the token was not looked at.
        """
        if not await self.attempts.wait(client):
            raise TooManyAttempts
        # JSON can hold half a character.
        given = token.encode("utf-8", "surrogatepass")
        if self.token is not None and secrets.compare_digest(given, self.token.encode()):
            return True
        self.attempts.failed(client)
        return False

    async def lets_in(self, headers: Headers, cookie_name: str, client: str) -> bool:
        """Return whether a request has the cookie, or ``Authorization: Bearer`` with the token.

        Raises:
            TooManyAttempts: as :meth:`knows` does.
        """
        if self.token is None or self._has_entered(headers, cookie_name):
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and await self.knows(given.strip(), client)

    def _has_entered(self, headers: Headers, cookie_name: str) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(cookie_name)
        except CookieError:
            return False
        return cookie is not None and secrets.compare_digest(cookie.value.encode(), self.session.encode())

    def serves(self, host: str) -> bool:
        """Return whether the console may be asked for by this ``Host``."""
        return serves(host, self.names)


def cookie_of(scope: Scope) -> str:
    """Return the name of the cookie of a request's console: browsers keep one for all ports of a host."""
    server = scope.get("server")
    return f"{_COOKIE}_{server[1]}" if server else _COOKIE


def client_of(scope: Scope) -> str:
    """Return the address that a request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else ""


class TooManyAttempts(Exception):
    """So many tokens wait to be judged that no other one may."""


class Guard:
    """The first handler of requests: it refuses those for other hosts, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), str(scope["path"])

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    sent.setdefault(name, value)
                sent["Cache-Control"] = "no-cache" if _is_open_file(path) else "no-store"
            await send(message)

        try:
            refused = await self._refusal(scope, headers, path)
        except TooManyAttempts as error:
            refused = await too_many(None, error)
        if refused is None:
            await self._app(scope, _bounded(receive), with_headers)
        else:
            await refused(scope, receive, with_headers)

    async def _refusal(self, scope: Scope, headers: Headers, path: str) -> Response | None:
        access = self._access
        if not access.serves(headers.get("host", "")):
            return refusal(
                403,
                "the console is not served under this name",
                "Open it by its address, or start it with --host NAME.",
            )
        is_of_all = scope["method"] in ("GET", "HEAD") and not path.startswith("/api/")
        if not is_of_all and not _is_of_the_page(headers):
            return refusal(403, "the request comes from another page", "Use the console's own page.")
        is_open = path in _OPEN or _is_open_file(path)
        if is_open or await access.lets_in(headers, cookie_of(scope), client_of(scope)):
            return None
        if path.startswith("/api/"):
            return refusal(
                401, "the console asks for its token", "Open /login, or send Authorization: Bearer."
            )
        return RedirectResponse("/login", 303)


def _is_open_file(path: str) -> bool:
    return path.endswith(_OPEN_FILES) and not path.startswith("/api/")


def _is_of_the_page(headers: Mapping[str, str]) -> bool:
    """Return whether a request comes from this origin, or from no other page."""
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:
        return False


class TooLong(Exception):
    """The body of a request went on beyond its limit."""


def _bounded(receive: Receive) -> Receive:
    read = 0

    async def bounded() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MOST_BYTES:
            raise TooLong
        return message

    return bounded


class Login:
    """The pages to log in and out.

    Args:
        access: knows the token.
        page: the page that asks for it.
    """

    def __init__(self, access: Access, page: Path) -> None:
        self._access = access
        self._page = page

    def routes(self) -> list[Route]:
        """Return the pages."""
        return [
            Route("/login", self._show),
            Route("/login", self._enter, methods=["POST"]),
            Route("/logout", self._leave, methods=["POST"]),
        ]

    def _show(self, _request: Request) -> Response:
        return FileResponse(self._page) if self._access.token is not None else RedirectResponse("/", 303)

    async def _enter(self, request: Request) -> Response:
        if not await self._access.knows(await _token_in(request), client_of(request.scope)):
            log.warning("a wrong token was given")
            return refusal(401, "this is not the token", "The console told it when it was started.")
        entered = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        name = cookie_of(request.scope)
        entered.set_cookie(name, self._access.session, httponly=True, samesite="strict", secure=secure)
        return entered

    async def _leave(self, request: Request) -> Response:
        left = RedirectResponse("/login", 303)
        left.delete_cookie(cookie_of(request.scope), httponly=True, samesite="strict")
        return left


async def _token_in(request: Request) -> str:
    """Return the token that a form or JSON holds; an empty string without one."""
    body = (await request.body()).decode("utf-8", "replace")
    if not request.headers.get("content-type", "").startswith("application/json"):
        return parse_qs(body).get("token", [""])[0]
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return str(given.get("token", "")) if isinstance(given, dict) else ""
