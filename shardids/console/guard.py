"""Who may ask, and what answers carry: hosts, origins, the token, headers."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardids.console.answers import refusal, too_many
from shardids.console.attempts import Attempts
from shardids.serving.addresses import serves

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What is asked of who asks.

    Attributes:
        names: names of hosts under which the console may be asked for, without ports. Addresses always may:
            only a name can be made to lead here by somebody else.
        token: what has to be known; ``None`` if whoever reaches the console may use it.
        session: what a browser is given for the token; another one each time that the console starts.
        attempts: who gave wrong tokens.
    """

    names: Collection[str] = ()
    token: str | None = field(default=None, repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    attempts: Attempts = field(default_factory=Attempts, repr=False)

    async def knows(self, token: str, client: str) -> bool:
        """Returns whether this is the token; a client whose network gave wrong ones waits for the answer.

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
        """Returns whether a request has the cookie, or ``Authorization: Bearer`` with the token.

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
        """Returns whether the console may be asked for by this ``Host``."""
        return serves(host, self.names)


def cookie_of(scope: Scope) -> str:
    """The name of the cookie of a request's console: browsers keep one for all ports of a host."""
    server = scope.get("server")
    return f"{_COOKIE}_{server[1]}" if server else _COOKIE


def client_of(scope: Scope) -> str:
    """Returns the address that a request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else ""


class TooManyAttempts(Exception):
    """So many tokens wait to be judged that no other one may."""


class Guard:
    """Refuses what is not for this console before anything else sees it, and adds headers to all answers."""

    def __init__(self, app: ASGIApp, *, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
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
    """Whether a request comes from this origin, or from no other page."""
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
