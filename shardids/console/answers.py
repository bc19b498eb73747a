"""Answers as JSON, what was refused among them, and requests as JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shardids.errors import BadArgument, ConnectionFailed, ShardidsError, UnknownShard
from shardids.logs import logger, shown_error

log = logger("console")

_USER: Final = re.compile(r'((?:postgresql|postgres)(?:\+psycopg)?://)[^"/@\\]*@')
_OPTIONS: Final = re.compile(r"\?[\w.~%+-]+=[\w.~%+=&-]*")


def as_json(values: Any) -> str:
    """Returns values as JSON for the page, in which users and options of databases' URLs are left out."""
    # NaN is no JSON: a browser could not read it.
    written = json.dumps(values, separators=(",", ":"), allow_nan=False)
    if "://" not in written:
        return written
    return _OPTIONS.sub("?…", _USER.sub(r"\1…@", written))


def answer(values: Any, status: int = 200) -> Response:
    """Returns values as JSON."""
    return Response(as_json(values), status, media_type="application/json")


def refusal(status: int, error: str, hint: str = "") -> Response:
    """Returns what was refused, and what to do."""
    return answer({"error": error, "hint": hint}, status)


async def json_of(request: Request) -> dict[str, Any]:
    """Returns the object that a request holds.

    Raises:
        BadArgument: it holds none, or does not say that it is JSON, as the forms of other pages can't.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadArgument("the request has to be JSON", hint="Content-Type: application/json")
    body = await request.body()
    try:
        given = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        raise BadArgument("the request is no JSON") from None
    if not isinstance(given, dict):
        raise BadArgument("the request has to be a JSON object")
    return given


async def refused(_request: Request, error: Exception) -> Response:
    """Returns what one of shardids' own errors says."""
    if not isinstance(error, ShardidsError):
        raise error
    status = 409
    if isinstance(error, BadArgument):
        status = 400
    elif isinstance(error, UnknownShard):
        status = 404
    elif isinstance(error, ConnectionFailed):
        status = 503
    return refusal(status, error.message, error.hint)


async def no_such(_request: Request, error: Exception) -> Response:
    """Returns what is wrong with an address or a method."""
    if not isinstance(error, HTTPException):
        raise error
    says = {404: "there is no such page", 405: "that can't be done with this page"}
    return refusal(error.status_code, says.get(error.status_code, error.detail))


async def too_long(_request: Request, _error: Exception) -> Response:
    """Returns that a request is too long."""
    return refusal(413, "the request is longer than 1 MiB", "Send less at a time.")


async def gone(_request: Request, _error: Exception) -> Response:
    """Returns what nobody hears: who asked has gone before the request was whole."""
    return refusal(400, "the request ended early")


async def failed(request: Request, error: Exception) -> Response:
    """Returns that the console itself failed; what failed is in its log alone."""
    log.error("%s failed: %s", request.url.path, shown_error(error))
    return refusal(500, "the console failed to answer this", "Its log says more.")


async def too_many(_request: Request | None, _error: Exception) -> Response:
    """Returns the answer to a token that was not looked at, since as many as may be wait to be judged."""
    refused = refusal(429, "too many tokens from here wait to be judged", "Try again in a second.")
    refused.headers["Retry-After"] = "1"
    return refused
