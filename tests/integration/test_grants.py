"""Every function of shardids, and who may execute it: a new one has to be entered here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL

from tests.conftest import MakeRole, dsn, found_cluster
from tests.support.generator import connect

Db = psycopg.Connection[Any]

PUBLIC = """
shardids.advance_past(integer,bigint)
shardids.await_references(name[],pg_lsn,double precision)
shardids.catch_up(bigint,regclass,regclass,integer)
shardids.clamped_ms(timestamp with time zone)
shardids.current_id(bigint,regclass,regclass,integer)
shardids.drawn_id(bigint,bigint,bigint,integer)
shardids.enter_shard(integer)
shardids.epoch_ms()
shardids.home_of(text,text)
shardids.id_of(bigint,integer)
shardids.is_ahead(bigint,bigint,interval)
shardids.is_current(bigint,bigint)
shardids.is_marked(bigint,bigint)
shardids.is_nearly_current(bigint,bigint)
shardids.is_past(bigint,bigint,bigint)
shardids.is_unchanged(bigint,regclass)
shardids.lagging_id(regclass,regclass,integer)
shardids.max_id(timestamp with time zone)
shardids.max_past_ms()
shardids.min_id(timestamp with time zone)
shardids.ms_of(timestamp with time zone)
shardids.offset_base()
shardids.offset_ms(bigint)
shardids.refuse(text,integer,bigint)
shardids.refused_count(integer)
shardids.reserve(integer,integer)
shardids.schema_of(integer)
shardids.schema_prefix()
shardids.sequence_bits()
shardids.sequence_of(bigint)
shardids.server()
shardids.server_timeline()
shardids.shard_bits()
shardids.shard_for_hash(bytea,integer)
shardids.shard_for_key(bigint,integer)
shardids.shard_for_key(bytea,integer)
shardids.shard_for_key(text,integer)
shardids.shard_for_key(uuid,integer)
shardids.shard_of(bigint)
shardids.tick_before(bigint,integer)
shardids.tick_of(bigint)
shardids.time_bits()
shardids.time_of(bigint)
shardids.timeline()
shardids_catalog.changed()
shardids_catalog.homes_changed()
shardids_catalog.keep_gone_home()
shardids_catalog.key_digest(text,text)
shardids_catalog.lock_homes()
shardids_catalog.percent_decoded(text)
shardids_catalog.plain_digest(text,text)
shardids_catalog.refuse_beside_citus()
shardids_catalog.refuse_while_references_change()
shardids_catalog.shard_for_key(text,text)
shardids_catalog.stamp_home()
shardids_catalog.unsettled_changed()
"""
"""What anybody with USAGE on the schema may execute: it computes, raises errors, or acts as its caller."""

BY_ADMINISTRATORS = {
    "shardids.enter_shard(integer)",
    "shardids.is_marked(bigint,bigint)",
    "shardids.server_timeline()",
    "shardids.timeline()",
}
"""Those of them that no draw needs; enter_shard says which membership its caller lacks."""

BY_GRANT = """
shard_0005.late_id_5(regclass)
shard_0005.next_id()
shard_0005.next_ids(integer)
shard_0005.next_number(text,text,timestamp with time zone)
shard_0005.set_aside_5(regclass,integer,bigint)
shardids.decide(bytea,bytea[])
"""
"""What ``shardids grant`` lets a role execute."""

OWNER = """
shard_0005.next_lane_number(text,text,date,integer)
shardids."analyze"(integer)
shardids.activate(integer,bigint)
shardids.add_barrier(integer,regclass,boolean)
shardids.add_barriers(integer)
shardids.add_route(regclass,name,integer,text)
shardids.advance(integer,regclass,bigint,bigint)
shardids.barrier_holders(integer,boolean)
shardids.begin_ms(bigint,bigint,bigint,bigint,boolean)
shardids.bind(integer,regclass,regclass)
shardids.bound_to(regclass,integer)
shardids.catch_up_on_citus(bigint,regclass,regclass,integer)
shardids.check_sequences(integer,regclass,regclass)
shardids.clock_offset(regclass)
shardids.close_back(regclass,text,text)
shardids.close_table(regclass)
shardids.counter_changes(integer,text)
shardids.counters(integer,text,text,boolean)
shardids.create_counters(integer)
shardids.create_generator(integer)
shardids.create_subscription(name,text,text)
shardids.database()
shardids.define_counter(integer,text,text,text,text,integer,integer,integer)
shardids.define_next_id(integer,name,name)
shardids.dependents_of(integer)
shardids.drop_barriers(integer)
shardids.drop_copy(integer)
shardids.drop_route(regclass,name,text)
shardids.drop_staging(text)
shardids.drop_unknown(integer)
shardids.enter_lease(integer,uuid)
shardids.enter_moved(integer)
shardids.enter_revision(integer,name,text[],uuid)
shardids.fence(integer,text)
shardids.follow(name,text)
shardids.follow_writer(name,text,name)
shardids.forget_decisions(uuid[])
shardids.forget_key(bigint)
shardids.gate_of(bigint)
shardids.grant_usage(integer[],name)
shardids.granted_functions(integer)
shardids.guard_key(bigint,integer,regclass,integer,text,text,text,boolean,name[],boolean,name[],text,text)
shardids.guard_key_reference(bigint,integer,regclass,text,text,text,name[],boolean,boolean)
shardids.guard_part(regclass,boolean)
shardids.guard_reference()
shardids.guard_reference_table(regclass,text,boolean)
shardids.guarded()
shardids.incarnation()
shardids.is_believed(bigint)
shardids.is_bound(regclass,regclass,integer)
shardids.is_followed(regclass,regclass,integer,bigint,bigint)
shardids.is_free(integer,bigint)
shardids.is_late(bigint,bigint)
shardids.is_near(bigint,bigint)
shardids.is_of_another_timeline(bigint,bigint)
shardids.keep_reference_key()
shardids.keep_whole()
shardids.late_id(regclass,integer)
shardids.lock_tables(integer)
shardids.log_offset(regclass,bigint,bigint)
shardids.make_gate(bigint)
shardids.make_index(regclass,name)
shardids.make_late_trigger(text,text,regclass,text,text)
shardids.make_note(text,text)
shardids.note_columns(integer)
shardids.note_step(bigint,bigint)
shardids.noted_steps()
shardids.number_rows(regclass,name,name,text,text,text,text,integer,integer,integer)
shardids.objects_of(integer)
shardids.open_table(regclass)
shardids.pass_barrier()
shardids.pass_barrier(integer,regclass)
shardids.pass_key()
shardids.pass_key(bigint,integer,text)
shardids.past_skipped(integer,bigint,bigint)
shardids.period_of(text,timestamp without time zone)
shardids.plan_reset(integer,bigint)
shardids.publish(integer,name)
shardids.raised(bigint,bigint,regclass)
shardids.reached_ms(regclass,regclass,bigint)
shardids.record_hashes(regclass,text[],jsonb)
shardids.reference_columns(name[])
shardids.refuse_lease(integer,uuid)
shardids.refuse_number(name,text,text,text)
shardids.refuse_unclaimed()
shardids.refuse_with()
shardids.refuse_writes()
shardids.release(integer)
shardids.require_claimable(text,jsonb,integer,integer[])
shardids.require_columns(integer,jsonb)
shardids.require_lease(integer,uuid)
shardids.require_zone(name,text)
shardids.reset_clock(integer,bigint)
shardids.return_leases(integer[],uuid)
shardids.revision_path(integer)
shardids.revisions_in(name,name)
shardids.revoke_usage(integer[],name)
shardids.routed(name,text)
shardids.safe_tick(integer,regclass,regclass)
shardids.schema_version(integer)
shardids.sequences_of(integer)
shardids.set_aside(regclass,integer,integer,bigint)
shardids.set_copy_aside(integer)
shardids.set_counter_zone(integer,text,text)
shardids.set_indexes_aside(regclass)
shardids.set_number(integer,text,text,bigint,text,boolean,date,boolean)
shardids.settle(uuid)
shardids.skips_from(integer)
shardids.stage(name,name,regclass,text,text)
shardids.stage_shard(regclass,integer,regclass)
shardids.staged(text)
shardids.stop(integer,regclass,regclass)
shardids.strangers_in_shared_schema()
shardids.strangers_objects(name[],name)
shardids.subscribe(integer,name,text,integer)
shardids.tables_of(integer)
shardids.take_leases(integer[],uuid,text,text,uuid[])
shardids.take_rows(integer)
shardids.takes_reference_writes(name)
shardids.transaction_of(bytea)
shardids.try_subscribing(text)
shardids.unguard_key(bigint,regclass,boolean)
shardids.unguard_part(regclass)
shardids.unresolved(regclass)
shardids.unstage_shard(regclass,regclass)
shardids.unsubscribe(name)
shardids.wait_for_installer(interval)
shardids.wait_for_lock(integer,integer,interval,boolean)
shardids.wait_ms(bigint,bigint,bigint,boolean)
shardids.without_barrier(integer,boolean)
shardids_catalog.grant_usage(name)
shardids_catalog.wait_for_grants(interval)
"""
"""What the owner of the engine may execute, and nobody else."""

DEFINERS = """
shard_0005.late_id_5(regclass)
shard_0005.next_number(text,text,timestamp with time zone)
shard_0005.set_aside_5(regclass,integer,bigint)
shardids.activate(integer,bigint)
shardids.catch_up(bigint,regclass,regclass,integer)
shardids.decide(bytea,bytea[])
shardids.fence(integer,text)
shardids.incarnation()
shardids.keep_whole()
shardids.offset_base()
shardids.pass_barrier()
shardids.pass_key()
shardids.refuse(text,integer,bigint)
shardids.server()
"""
"""What runs as the owner of the engine, whoever calls it."""

_FUNCTIONS = """
    select p.oid::regprocedure::text as name, p.prosecdef as is_definer,
           array(select distinct case acl.grantee when 0 then 'public' else acl.grantee::regrole::text end
                 from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) acl
                 where acl.grantee <> p.proowner order by 1) as grantees
    from pg_proc p where p.pronamespace::regnamespace::text in ('shardids', 'shardids_catalog', 'shard_0005')
"""


def test_every_function_is_executed_by_those_who_need_it_and_nobody_else(
    blank_database: Callable[[], URL], make_role: MakeRole
) -> None:
    url, role = blank_database(), make_role("app")
    found_cluster(url, {"a": url}, 8)
    with connect(dsn(url)) as owner:
        owner.execute("select shardids.define_counter(5, 'order', 'day')")
        before = {name: grantees for name, _, grantees in owner.execute(_FUNCTIONS).fetchall()}
        owner.execute("select shardids.grant_usage(array[5], %s)", [role.username])
        found = owner.execute(_FUNCTIONS).fetchall()
        quoted = sql.Identifier(str(role.username)).as_string()
    assert sorted(name for name, there in before.items() if there == ["public"]) == PUBLIC.split("\n")[1:-1]
    assert sorted(name for name, there in before.items() if there == []) == sorted(
        [*BY_GRANT.split("\n")[1:-1], *OWNER.split("\n")[1:-1]]
    )
    granted = {name for name, _, there in found if quoted in there}
    drawing = {name for name in PUBLIC.split("\n") if name.startswith("shardids.")} - BY_ADMINISTRATORS
    assert granted == drawing | set(BY_GRANT.split("\n")[1:-1])
    assert sorted(name for name, is_definer, _ in found if is_definer) == DEFINERS.split("\n")[1:-1]


def test_functions_that_act_as_the_owner_have_a_safe_search_path(node: str) -> None:
    with connect(node) as db:
        unsafe = db.execute("""
            select p.oid::regprocedure::text from pg_proc p
            join pg_namespace n on n.oid = p.pronamespace
            where n.nspname in ('shardids', 'shard_0005') and p.prosecdef
              and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)""").fetchall()
    # All that catch_up() names is qualified, and it has no operator: a setting would slow each late draw.
    assert unsafe == [("shardids.catch_up(bigint,regclass,regclass,integer)",)]
