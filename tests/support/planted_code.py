"""Code that an ordinary role can put wherever PostgreSQL runs functions, derived from the server's catalogs.

``kinds`` asks the server which columns of its catalogs refer to a function or hold an expression. Each has an
entry in ``PLANTED`` or in ``REFUSED``; a version of PostgreSQL with another one fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg

Db = psycopg.Connection[Any]
Kind = tuple[str, str]

BASE = """
create schema mal;
grant usage on schema mal to public;
create function mal.act(kind text) returns boolean language plpgsql as $f$
declare
  attempt text;
begin
  raise warning 'planted: % as % of %', kind, current_user, session_user;
  foreach attempt in array array[
    'reset role', 'set session authorization default', 'reset session authorization',
    format('set role %I', session_user), format('set session authorization %I', session_user),
    'select pg_catalog.set_config(''transaction_read_only'', ''off'', false)', 'set search_path = mal',
    'declare held cursor with hold for select mal.act(''a cursor WITH HOLD'')',
    'prepare left_behind as select mal.act(''a prepared statement'')',
    'alter function shardids_reader.read(text[]) security invoker',
    'alter role "{role}" superuser', 'copy (select 1) to program ''touch {proof}'''] loop
    begin
      execute attempt;
    exception when others then
      null;
    end;
  end loop;
  return true;
end $f$;
create function mal.evil(kind text) returns bigint language plpgsql immutable as
  $f$ begin perform mal.act(kind); return 0; end $f$;
create function mal.fires() returns trigger language plpgsql as
  $f$ begin perform mal.act(tg_argv[0]); return new; end $f$;
"""
"""What every plant calls: it records who it runs as, and tries to become more."""

TABLE = "create table {s}.{t} (id bigint primary key default {s}.next_id(), word text, n bigint default 0);"
ROW = "insert into {s}.{t} (word) values ('a'), ('b');"

PLANTED: Mapping[Kind, str] = {
    ("pg_proc", "prosqlbody"): """
        create function mal.body(n bigint) returns bigint language sql immutable
          begin atomic select n + mal.evil('pg_proc.prosqlbody'); end;
        create index on {s}.{t} (mal.body(n))""",
    ("pg_proc", "proargdefaults"): """
        create function mal.defaulted(n bigint, m bigint default mal.evil('pg_proc.proargdefaults')) returns bigint
          language plpgsql immutable as 'begin return n + m; end';
        create index on {s}.{t} (mal.defaulted(n))""",
    ("pg_cast", "castfunc"): """
        create type mal.colour as enum ('red');
        create function mal.to_json(mal.colour) returns json language plpgsql immutable as
          $f$ begin perform mal.act('pg_cast.castfunc'); return '"red"'; end $f$;
        create function mal.to_jsonb(mal.colour) returns jsonb language plpgsql immutable as
          $f$ begin perform mal.act('pg_cast.castfunc'); return '"red"'; end $f$;
        create function mal.to_text(mal.colour) returns text language plpgsql immutable as
          $f$ begin perform mal.act('pg_cast.castfunc'); return 'red'; end $f$;
        create cast (mal.colour as json) with function mal.to_json(mal.colour) as implicit;
        create cast (mal.colour as jsonb) with function mal.to_jsonb(mal.colour) as implicit;
        create cast (mal.colour as text) with function mal.to_text(mal.colour) as implicit;
        create function mal.from_table({s}.{t}) returns jsonb language plpgsql immutable as
          $f$ begin perform mal.act('pg_cast.castfunc'); return '1'; end $f$;
        create cast ({s}.{t} as jsonb) with function mal.from_table({s}.{t}) as implicit;
        create function mal.text_from_table({s}.{t}) returns text language plpgsql immutable as
          $f$ begin perform mal.act('pg_cast.castfunc'); return '1'; end $f$;
        create cast ({s}.{t} as text) with function mal.text_from_table({s}.{t}) as implicit;
        alter table {s}.{t} add c mal.colour default 'red'""",
    ("pg_operator", "oprcode"): """
        create function mal.sum(bigint, bigint) returns bigint language plpgsql immutable as
          $f$ begin return mal.evil('pg_operator.oprcode'); end $f$;
        create operator mal.@@ (function = mal.sum, leftarg = bigint, rightarg = bigint);
        create index on {s}.{t} ((n + (1::bigint operator(mal.@@) 1::bigint)))""",
    **{
        ("pg_aggregate", column): f"""
        create function mal.step_{column}(state bigint, n bigint) returns bigint language plpgsql immutable as
          $f$ begin return mal.evil('pg_aggregate.{column}'); end $f$;
        create function mal.last_{column}(state bigint) returns bigint language plpgsql immutable as
          $f$ begin return mal.evil('pg_aggregate.{column}'); end $f$;
        create aggregate mal.all_{column}(bigint) (stype = bigint, initcond = 0,
          {definition.format(step=f"mal.step_{column}", last=f"mal.last_{column}")});
        create function mal.through_{column}(n bigint) returns bigint language sql immutable as
          $f$ select mal.all_{column}(n) over (rows between 1 preceding and current row)
              from generate_series(1, 3) n order by n desc limit 1 $f$;
        create index on {{s}}.{{t}} ((n + mal.through_{column}(1)))"""
        for column, definition in {
            "aggfnoid": "sfunc = {step}",
            "aggtransfn": "sfunc = {step}",
            "aggfinalfn": "sfunc = int8pl, finalfunc = {last}",
            "aggcombinefn": "sfunc = {step}, combinefunc = {step}, parallel = safe",
            "aggmtransfn": "sfunc = int8pl, msfunc = {step}, minvfunc = {step}, mstype = bigint, minitcond = 0",
            "aggminvtransfn": "sfunc = int8pl, msfunc = {step}, minvfunc = {step}, mstype = bigint, minitcond = 0",
            "aggmfinalfn": "sfunc = int8pl, msfunc = int8pl, minvfunc = int8mi, mstype = bigint, minitcond = 0,"
            " mfinalfunc = {last}",
        }.items()
    },
    ("pg_range", "rngsubdiff"): """
        create function mal.gap(float8, float8) returns float8 language plpgsql immutable as
          $f$ begin perform mal.act('pg_range.rngsubdiff'); return $1 - $2; end $f$;
        create type mal.span as range (subtype = float8, subtype_diff = mal.gap);
        alter table {s}.{t} add r mal.span default '[1,2)';
        create index on {s}.{t} using gist (r)""",
    ("pg_trigger", "tgfoid"): """
        create trigger at_once before insert or update on {s}.{t} for each row execute function mal.fires('pg_trigger');
        create constraint trigger later after insert or update on {s}.{t} deferrable initially deferred
          for each row execute function mal.fires('pg_trigger, deferred')""",
    ("pg_trigger", "tgqual"): """
        create trigger asked before insert or update on {s}.{t} for each row
          when (mal.evil('pg_trigger.tgqual') = 0) execute function mal.fires('pg_trigger')""",
    ("pg_type", "typdefaultbin"): """
        create domain mal.number as bigint default mal.evil('pg_type.typdefaultbin');
        alter table {s}.{t} add d mal.number""",
    ("pg_attrdef", "adbin"): """
        alter table {s}.{t} add g bigint generated always as (n + mal.evil('pg_attrdef.adbin')) stored,
          alter n set default mal.evil('pg_attrdef.adbin')""",
    ("pg_constraint", "conbin"): """
        create domain mal.checked as bigint check (mal.evil('pg_constraint.conbin') = 0 and value >= 0);
        alter table {s}.{t} add k mal.checked default 0, add check (n + mal.evil('pg_constraint.conbin') >= 0)""",
    ("pg_index", "indexprs"): "create index on {s}.{t} ((n + mal.evil('pg_index.indexprs')))",
    ("pg_index", "indpred"): "create index on {s}.{t} (n) where n >= mal.evil('pg_index.indpred')",
    ("pg_rewrite", "ev_action"): """
        alter table {s}.{t} rename to {t}_rows;
        create view {s}.{t} as select id + mal.evil('pg_rewrite.ev_action') as id, word, n from {s}.{t}_rows""",
    ("pg_rewrite", "ev_qual"): """
        create rule also as on update to {s}.{t} where mal.evil('pg_rewrite.ev_qual') = 0
          do also select mal.act('pg_rewrite')""",
    ("pg_policy", "polqual"): """
        create policy few on {s}.{t} using (mal.act('pg_policy.polqual'));
        alter table {s}.{t} enable row level security, force row level security""",
    ("pg_policy", "polwithcheck"): """
        create policy few on {s}.{t} for insert with check (mal.act('pg_policy.polwithcheck'));
        alter table {s}.{t} enable row level security""",
    ("pg_partitioned_table", "partexprs"): """
        drop table {s}.{t};
        create table {s}.{t} (id bigint not null default {s}.next_id(), word text, n bigint default 0)
          partition by list ((n + mal.evil('pg_partitioned_table.partexprs')));
        create table {s}.{t}_part partition of {s}.{t} for values in (0);
        create index on {s}.{t} (id)""",
    ("pg_class", "relpartbound"): """
        drop table {s}.{t};
        create table {s}.{t} (id bigint primary key default {s}.next_id(), word text, n bigint default 0)
          partition by range (id);
        create table {s}.{t}_part partition of {s}.{t} for values from (mal.evil('pg_class.relpartbound')) to (maxvalue);
        create index on {s}.{t} ((n + mal.evil('pg_class.relpartbound')))""",
    ("pg_statistic_ext", "stxexprs"): """
        create statistics {s}.{t}_told on (n + mal.evil('pg_statistic_ext.stxexprs')), id from {s}.{t}""",
}
"""What an ordinary role does to its table ``{t}`` of shard ``{s}``, by the catalog and column that it fills."""

REFUSED: Mapping[Kind, str] = {
    ("pg_proc", "prosupport"): "create function mal.s(bigint) returns bigint language sql support texteq_support as 'select 1'",
    **dict.fromkeys(
        [("pg_aggregate", "aggserialfn"), ("pg_aggregate", "aggdeserialfn")],
        "create aggregate mal.serial(bigint) (stype = internal, sfunc = mal.step_aggtransfn)",
    ),
    ("pg_am", "amhandler"): "create access method mal type table handler heap_tableam_handler",
    ("pg_amproc", "amproc"): """
        create operator class mal.numbers for type bigint using btree as function 1 btint8cmp(bigint, bigint)""",
    ("pg_conversion", "conproc"): "create function mal.c(integer, integer, cstring, internal, integer, boolean) returns integer"
    " language plpgsql as 'begin return 0; end'",
    ("pg_event_trigger", "evtfoid"): "create event trigger mal on ddl_command_end execute function mal.fires()",
    **dict.fromkeys(
        [("pg_foreign_data_wrapper", "fdwhandler"), ("pg_foreign_data_wrapper", "fdwvalidator"),
         ("pg_foreign_data_wrapper", "fdwconnection")],
        "create foreign data wrapper mal",
    ),
    **dict.fromkeys(
        [("pg_language", "lanplcallfoid"), ("pg_language", "laninline"), ("pg_language", "lanvalidator")],
        "create language mal handler plpgsql_call_handler",
    ),
    **dict.fromkeys(
        [("pg_operator", "oprrest"), ("pg_operator", "oprjoin")],
        "create function mal.rest(internal, oid, internal, integer) returns float8 language plpgsql as 'begin return 0; end'",
    ),
    ("pg_range", "rngcanonical"): "create type mal.shell",
    **dict.fromkeys(
        [("pg_transform", "trffromsql"), ("pg_transform", "trftosql")],
        "create function mal.transform(internal) returns internal language plpgsql as 'begin return 0; end'",
    ),
    **{
        ("pg_ts_parser", column): "create text search parser mal (start = prsd_start, gettoken = prsd_nexttoken,"
        " end = prsd_end, lextypes = prsd_lextype)"
        for column in ("prsstart", "prstoken", "prsend", "prsheadline", "prslextype")
    },
    **{
        ("pg_ts_template", column): "create text search template mal (lexize = dsimple_lexize)"
        for column in ("tmplinit", "tmpllexize")
    },
    **{
        ("pg_type", column): "create type mal.base (input = mal.evil, output = mal.evil)"
        for column in (
            "typinput", "typoutput", "typreceive", "typsend", "typmodin", "typmodout", "typanalyze", "typsubscript",
        )
    },
    ("pg_publication_rel", "prqual"): "create publication mal for table {s}.plain where (n = mal.evil('pg_publication_rel'))",
}  # fmt: skip
"""What only a superuser, or a function in C, can put there: the statement that is refused to mallory."""


def kinds(db: Db) -> set[Kind]:
    """The columns of PostgreSQL's catalogs that refer to functions, or hold expressions, which call them."""
    rows = db.execute("""
        select k.fktable::regclass::text, c.name
        from pg_get_catalog_foreign_keys() k cross join lateral unnest(k.fkcols) c (name)
        where k.pktable = 'pg_proc'::regclass
        union
        select a.attrelid::regclass::text, a.attname
        from pg_attribute a join pg_class r on r.oid = a.attrelid
        where r.relnamespace = 'pg_catalog'::regnamespace and r.relkind = 'r' and a.attnum > 0
          and a.atttypid in ('pg_node_tree'::regtype, 'regproc'::regtype)""")
    return {(table, column) for table, column in rows}


def owner_columns(db: Db) -> set[str]:
    """The columns of PostgreSQL's catalogs that name the owner of an object."""
    rows = db.execute("""
        select k.fkcols[1] from pg_get_catalog_foreign_keys() k
        where k.pktable = 'pg_authid'::regclass and k.fkcols[1] ~ 'owner$'""")
    return {column for (column,) in rows}


def table_of(kind: Kind) -> str:
    """The table that has a plant."""
    return "_".join(kind)


def plant(db: Db, role: str, proof: Path, schema: str) -> None:
    """Plants all of them, as the session's role."""
    db.execute(BASE.replace("{role}", role).replace("{proof}", str(proof)).encode())
    for kind, how in PLANTED.items():
        statements = f"{TABLE} {how}; {'' if kind == ('pg_rewrite', 'ev_action') else ROW}"
        db.execute(statements.replace("{s}", schema).replace("{t}", table_of(kind)).encode())


class Recorded:
    """What planted functions wrote to the server's log: what they were, and who they ran as."""

    def __init__(self, directory: Path) -> None:
        self._logs = [p for p in directory.rglob("*log*") if p.is_file() and "pg_wal" not in p.parts]
        assert self._logs
        self._read = dict.fromkeys(self._logs, 0)
        self.new()

    def new(self) -> set[tuple[str, str, str]]:
        """Kind, ``current_user`` and ``session_user`` of each that ran since the last call."""
        found: set[tuple[str, str, str]] = set()
        for path in self._logs:
            text = path.read_bytes()[self._read[path] :]
            self._read[path] += len(text)
            found |= set(re.findall(r"planted: (.*) as (\S+) of (\S+)", text.decode(errors="replace")))
        return found
