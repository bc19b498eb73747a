"""Finds timeouts that would end the copying of a table by logical replication."""

from __future__ import annotations

from sqlalchemy import Connection, text

_ENDS_COPIES = text("""
    select format('%s = %s%s', s.name, s.reset_val, s.unit) as setting,
           format('alter role %I in database %I set %s = 0', session_user, current_database(), s.name)
             as remedy
    from pg_settings s where s.name = any (:names) and s.reset_val <> '0' order by s.name""")


def ending_copies(connection: Connection, where: str, *, taking: bool = False) -> list[tuple[str, str]]:
    """Returns reasons against copying rows from a server, or ``taking`` them there, each with its remedy.

    ``where`` names the server. A table is copied in one statement and one transaction, in sessions that get
    the timeouts of the role, the database and the server, and can't set them themselves.
    """
    # Workers run no statements of clients: statement_timeout does not end them.
    names = ["transaction_timeout"] if taking else ["statement_timeout", "transaction_timeout"]
    return [
        (f"{where} ends what lasts longer than {row.setting}, also the copying of a table", row.remedy)
        for row in connection.execute(_ENDS_COPIES, {"names": names})
    ]
