"""Passwords and tokens. A token names its user by ID, and the ID names the shard."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import UTC, datetime, timedelta

import jwt

from shardids.errors import BadArgument
from shardids.ids import from_decimal

_LIFETIME = timedelta(days=8)
_COST = {"n": 2**14, "r": 8, "p": 1}


def hashed(password: str) -> str:
    """The hash of a password, with its salt."""
    salt = secrets.token_bytes(16)
    return f"{salt.hex()}:{hashlib.scrypt(password.encode(), salt=salt, **_COST).hex()}"


def is_right(password: str, stored: str | None) -> bool:
    """Whether it is the password of a stored hash; takes as long where there is none."""
    salt, _, hash_ = (stored or "00:00").partition(":")
    tried = hashlib.scrypt(password.encode(), salt=bytes.fromhex(salt), **_COST)
    return hmac.compare_digest(tried, bytes.fromhex(hash_))


def token_for(user_id: int, secret: str) -> str:
    """A signed token of a user."""
    return jwt.encode({"sub": str(user_id), "exp": datetime.now(UTC) + _LIFETIME}, secret, "HS256")


def user_of(token: str, secret: str) -> int | None:
    """The user's ID in a token; ``None`` if the token is forged or has expired."""
    try:
        claims = jwt.decode(token, secret, ["HS256"], options={"require": ["sub", "exp"]})
        return from_decimal(claims["sub"])
    except (jwt.InvalidTokenError, BadArgument):
        return None
