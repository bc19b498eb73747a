"""Exchanges the token for a cookie."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from shardids.console.answers import refusal
from shardids.console.guard import Access, client_of, cookie_of
from shardids.logs import logger

log = logger("console")


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
        """Returns the pages."""
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
    """The token that a form or JSON holds; empty if there is none."""
    body = (await request.body()).decode("utf-8", "replace")
    if not request.headers.get("content-type", "").startswith("application/json"):
        return parse_qs(body).get("token", [""])[0]
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return str(given.get("token", "")) if isinstance(given, dict) else ""
