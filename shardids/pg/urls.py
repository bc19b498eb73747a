"""PostgreSQL URLs: read, shown without passwords, and with the login of another."""

from __future__ import annotations

import psycopg
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from shardids.errors import BadArgument


def parse_url(url: str | URL) -> URL:
    """Parse a PostgreSQL URL for psycopg. ``postgres://`` and ``postgresql://`` are both accepted.

    Raises:
        BadArgument: it is malformed, or names another database or driver. The message never has its password.
    """
    form = "It looks like this: postgresql://user@host:5432/database"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise BadArgument("the database URL is malformed", hint=form) from None
    dialect, _, driver = parsed.drivername.partition("+")
    if dialect not in ("postgres", "postgresql"):
        raise BadArgument(
            f"the database URL starts with {parsed.drivername!r}; shardids needs PostgreSQL", hint=form
        )
    if driver not in ("", "psycopg"):
        raise BadArgument(
            f"the database URL names the driver {driver!r}; shardids connects with psycopg",
            hint="Write postgresql:// or postgresql+psycopg://. AsyncCluster takes the same URL as Cluster.",
        )
    if "@" in (parsed.host or ""):
        raise BadArgument(
            "the database URL has more than one @", hint="In a user name or password, @ is written %40."
        )
    return parsed.set(drivername="postgresql+psycopg")


def shown_url(url: URL) -> str:
    """Return the URL as a user types it, without driver or passwords, fit to be printed and stored."""
    secrets = [name for name in url.query if "password" in name.lower()]
    bare = url.difference_update_query(secrets)
    address, mark, query = (
        URL.create("postgresql", bare.username, None, bare.host, bare.port, bare.database, bare.query)
        .render_as_string()
        .partition("?")
    )
    # RFC 3986 allows a slash there; in the address it would end the host.
    return address + mark + query.replace("%2F", "/")


def role_of(url: URL) -> str:
    """Return the role that a connection logs in as: the URL's, else libpq's default."""
    default = next(d.val for d in psycopg.pq.Conninfo.get_defaults() if d.keyword == b"user")
    return url.username or (default or b"?").decode()


def with_password_of(url: URL, other: URL) -> URL:
    """Return ``url`` with the password of ``other`` if it has none itself and the user is the same.

    The catalog stores no passwords. If all servers share one account, the password of the catalog's URL is
    used; otherwise ``~/.pgpass`` or ``PGPASSWORD`` supplies it.
    """
    if url.password is None and other.password is not None and url.username == other.username:
        return url.set(password=str(other.password))
    return url


def with_login_of(url: URL, other: URL) -> URL:
    """Return ``url`` with the user and password of ``other`` if that names a user.

    An application logs in to the nodes as it does to the catalog, not as the DBA who added them.
    """
    if other.username is None or other.username == url.username:
        return with_password_of(url, other)
    return url.set(username=other.username, password=other.password and str(other.password))
