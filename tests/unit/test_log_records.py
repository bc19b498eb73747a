"""What may be logged, how the command line writes it, and that nobody hears it unasked."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import psycopg
import pytest
from sqlalchemy.exc import ProgrammingError

from shardids.errors import ClusterConflict, MoveFailed, StatementFailed
from shardids.logs import error_code, log_program, logger, shown_error
from shardids.pg.statement_log import shown_statement

SAY = """
import logging
from shardids.cli.logs import set_up
set_up({verbosity}, as_json={as_json})
for name in ("mover", "client", "sql"):
    log = logging.getLogger(f"shardids.{{name}}")
    log.debug("a step of %s", name, extra={{"shard": 3}})
    log.warning("about %s", name, extra={{"shard": 3}})
"""


def said(verbosity: int, *, as_json: bool = False) -> list[str]:
    program = SAY.format(verbosity=verbosity, as_json=as_json)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout == ""
    return ran.stderr.splitlines()


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("select *\n  from t where id = %(id)s", "select * from t where id = %(id)s"),
        ("select 'secret', 5", "select … , 5"),
        ("select 'it''s secret' as x", "select … as x"),
        ("select E'a\\'secret' as x", "select E …"),
        ("select 'a\\' , 'secret'", "select …"),
        ("select 'secret", "select …"),
        ("-- don't\nselect 'secret' as x", "… select … as x"),
        ("select /* don't */ 'secret'", "select …"),
        ("select /* /* ' */ ' */ 'secret'", "select …"),
        ("select \"it's\" , 'secret' as x", 'select "it\'s" , … as x'),
        ("select \"open 'secret'", "select …"),
        ("do $$ begin perform 'secret'; end $$; commit", "do … ; commit"),
        ("do $a$ secret $$ secret $a$; commit", "do … ; commit"),
        ("do $a$ secret", "do …"),
        ("select " + "x" * 2000 + "'secret'", "select " + "x" * 993),
        ('copy "t" ("a") from stdin (delimiter \',\')', 'copy "t" ("a") from stdin (delimiter … )'),
        (
            "create subscription s connection 'host=h password=secret' publication p",
            "create subscription s connection … publication p",
        ),
    ],
)
def test_statements_are_shown_without_their_literals(statement: str, shown: str) -> None:
    assert shown_statement(statement) == shown


def test_an_error_that_may_quote_values_is_shown_by_its_class_and_code() -> None:
    assert shown_error(ClusterConflict("shard 3 is not there")) == "shard 3 is not there"
    assert shown_error(StatementFailed('node "a": invalid: "secret"', sqlstate="22P02")) == (
        "StatementFailed 22P02"
    )
    second = MoveFailed('step failed (node "a": invalid: "secret")')
    second.__cause__ = StatementFailed('node "a": invalid: "secret"', sqlstate="22P02")
    assert shown_error(second) == "MoveFailed: StatementFailed 22P02"
    driver = psycopg.errors.UniqueViolation("Key (email)=(secret) already exists.")
    assert shown_error(ProgrammingError("select 'secret'", {"x": "secret"}, driver)) == (
        "ProgrammingError 23505"
    )
    assert shown_error(driver) == "UniqueViolation 23505"
    assert shown_error(ValueError("secret")) == "ValueError"


def test_an_error_that_may_come_of_a_row_is_shown_without_its_words() -> None:
    assert error_code(ClusterConflict("record 3: secret")) == "ClusterConflict"
    assert error_code(StatementFailed("secret", sqlstate="22P02")) == "StatementFailed 22P02"


def test_a_program_is_logged_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    command = ["/usr/bin/pg_dump", "--schema=a b"]
    with caplog.at_level(logging.INFO, "shardids.mover"):
        log_program("mover", command, 0.0, 1)
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "shardids.mover"):
        log_program("mover", command, 0.0, None)
        log_program("mover", command, 0.0, -9)
    (record,) = caplog.records
    fields = vars(record)
    assert (record.levelname, record.name) == ("DEBUG", "shardids.mover")
    assert (fields["program"], fields["arguments"], fields["exit_code"]) == ("pg_dump", "'--schema=a b'", -9)
    assert record.getMessage().startswith("pg_dump ended with exit code -9 after ")
    assert fields["seconds"] > 0


def test_an_application_that_sets_up_no_logging_hears_nothing() -> None:
    program = "from shardids.logs import logger; logger('client').warning('never seen')"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert (ran.stdout, ran.stderr) == ("", "")
    assert any(isinstance(one, logging.NullHandler) for one in logging.getLogger("shardids").handlers)
    assert logger("mover") is logging.getLogger("shardids.mover")


def test_importing_shardids_does_not_import_logging() -> None:
    program = "import sys, shardids; sys.exit('logging' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_without_a_wish_only_warnings_that_no_command_prints_itself() -> None:
    (line,) = [line for line in said(0) if "sql" not in line]
    assert line.endswith("WARNING shardids.client: about client")


def test_verbose_shows_steps_and_twice_statements() -> None:
    assert [line.split(" shardids.")[1] for line in said(1)] == [
        "mover: a step of mover",
        "mover: about mover",
        "client: a step of client",
        "client: about client",
        "sql: about sql",
    ]
    assert any(line.endswith("DEBUG shardids.sql: a step of sql") for line in said(2))


def test_json_is_one_object_a_line_with_the_fields() -> None:
    first, *_ = records = [json.loads(line) for line in said(0, as_json=True)]
    assert first.pop("time").endswith("+00:00")
    assert first == {"level": "WARNING", "logger": "shardids.mover", "message": "about mover", "shard": 3}
    assert {record["logger"] for record in records} == {
        "shardids.mover",
        "shardids.client",
        "shardids.sql",
    }
