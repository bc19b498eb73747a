"""Django's own tests of models, queries, transactions, admin and migrations, with a shard for a database.

Left out are ``raw_query`` (its own SQL throughout), ``schema`` and the rest of ``migrations``, which alter
tables by a schema editor, as ``migrate`` does and ``migrate_shards`` does not, and ``model_fields``, whose
tables need collations of ICU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import URL

from tests.conftest import dsn
from tests.support.clusters import environment

LEAST_PASSED = {
    "admin_changelist": 5,
    "admin_docs": 5,
    "admin_filters": 1,
    "admin_inlines": 1,
    "admin_ordering": 9,
    "admin_registration": 19,
    "admin_utils": 30,
    "admin_views": 4,
    "admin_widgets": 63,
    "aggregation": 140,
    "aggregation_regress": 69,
    "annotations": 90,
    "basic": 76,
    "bulk_create": 39,
    "composite_pk": 26,
    "constraints": 96,
    "custom_lookups": 33,
    "custom_managers": 30,
    "datatypes": 6,
    "dates": 6,
    "datetimes": 7,
    "db_functions": 338,
    "defer": 36,
    "defer_regress": 17,
    "delete": 55,
    "delete_regress": 20,
    "empty": 1,
    "expressions": 200,
    "expressions_case": 88,
    "expressions_window": 72,
    "field_defaults": 12,
    "field_subclassing": 2,
    "filtered_relation": 5,
    "fixtures": 23,
    "fixtures_regress": 60,
    "force_insert_update": 12,
    "foreign_object": 40,
    "from_db_value": 6,
    "generic_inline_admin": 7,
    "generic_relations": 8,
    "generic_relations_regress": 1,
    "get_earliest_or_latest": 9,
    "get_object_or_404": 4,
    "get_or_create": 42,
    "indexes": 20,
    "inline_formsets": 13,
    "known_related_objects": 20,
    "lookup": 98,
    "m2m_and_m2o": 3,
    "m2m_intermediary": 1,
    "m2m_multiple": 1,
    "m2m_recursive": 12,
    "m2m_regress": 9,
    "m2m_signals": 14,
    "m2m_through": 55,
    "m2m_through_regress": 19,
    "m2o_recursive": 2,
    "managers_regress": 13,
    "many_to_many": 38,
    "many_to_one": 29,
    "many_to_one_null": 14,
    "max_lengths": 3,
    "migrations.test_autodetector": 160,
    "migrations.test_graph": 20,
    "migrations.test_optimizer": 50,
    "migrations.test_questioner": 10,
    "migrations.test_state": 80,
    "migrations.test_writer": 55,
    "model_forms": 181,
    "model_formsets": 74,
    "model_formsets_regress": 19,
    "model_inheritance": 54,
    "model_inheritance_regress": 23,
    "model_options": 21,
    "model_regress": 18,
    "model_utils": 1,
    "modeladmin": 171,
    "multiple_database": 51,
    "mutually_referential": 1,
    "nested_foreign_keys": 7,
    "null_fk": 2,
    "null_fk_ordering": 1,
    "null_queries": 3,
    "one_to_one": 38,
    "or_lookups": 11,
    "order_with_respect_to": 10,
    "ordering": 34,
    "pagination": 23,
    "prefetch_related": 93,
    "properties": 2,
    "proxy_model_inheritance": 2,
    "proxy_models": 26,
    "queries": 458,
    "queryset_pickle": 39,
    "reverse_lookup": 3,
    "save_delete_hooks": 1,
    "select_for_update": 29,
    "select_related": 20,
    "select_related_onetoone": 2,
    "select_related_regress": 9,
    "serializers": 184,
    "signals": 20,
    "str": 2,
    "string_lookup": 4,
    "timezones": 55,
    "transaction_hooks": 20,
    "transactions": 82,
    "unmanaged_models": 3,
    "update": 25,
    "update_only_fields": 20,
    "validation": 63,
    "xor_lookups": 7,
}
_RAW_SQL = "its own SQL names the table without the schema"
_KEYS = "it gives keys itself, or writes rows of one database into another"
_WRITTEN = "it compares SQL that names the table without the schema"
_OTHER_FIELD = "it expects another field for the key"
_MIGRATE = "it runs migrate, which is not for shards"
_JOINED = "a statement names a table of another model that is in no shard"
_UNINSTALLED = "it runs without installed applications, which say what tables are in shards"
EXPLAINED = {
    "aggregation_regress.tests.AggregationTests.test_annotate_with_extra": _RAW_SQL,
    "constraints.tests.UniqueConstraintTests.test_initially_deferred_database_constraint": _RAW_SQL,
    "constraints.tests.UniqueConstraintTests.test_initially_immediate_database_constraint": _RAW_SQL,
    "custom_methods.tests.MethodsTests.test_custom_methods": _RAW_SQL,
    "db_functions.comparison.test_cast.CastTests."
    "test_expression_wrapped_with_parentheses_on_postgresql": _WRITTEN,
    "delete_regress.tests.DeleteLockingTest.test_concurrent_delete": _RAW_SQL,
    "field_defaults.tests.DefaultTests.test_both_default": _RAW_SQL,
    "fixtures.tests.CircularReferenceTests.test_circular_reference": _JOINED,
    "fixtures.tests.CircularReferenceTests.test_circular_reference_natural_key": _JOINED,
    "fixtures.tests.FixtureLoadingTests.test_dumpdata_objects_with_prefetch_related": _JOINED,
    "fixtures.tests.ForwardReferenceTests.test_forward_reference_fk": _JOINED,
    "fixtures.tests.ForwardReferenceTests.test_forward_reference_fk_natural_key": _JOINED,
    "fixtures.tests.ForwardReferenceTests.test_forward_reference_m2m": _JOINED,
    "fixtures.tests.ForwardReferenceTests.test_forward_reference_m2m_natural_key": _JOINED,
    "foreign_object.tests.MultiColumnFKTests": "its model keeps an ID in 32 bits",
    "indexes.tests.SchemaIndexesPostgreSQLTests.test_ops_class": "another test leaves an index of that name",
    "m2m_through_regress.tests.M2MThroughSerializationTestCase.test_serialization": _JOINED,
    "model_inheritance.test_abstract_inheritance.AbstractInheritanceTests."
    "test_abstract_model_with_regular_python_mixin_mro": _OTHER_FIELD,
    "multiple_database.tests.FixtureTestCase": _KEYS,
    "multiple_database.tests.QueryTestCase.test_raw": _RAW_SQL,
    "multiple_database.tests.QueryTestCase.test_refresh": _KEYS,
    "multiple_database.tests.RouterTestCase.test_deferred_models": _KEYS,
    "multiple_database.tests.RouterTestCase.test_foreign_key_cross_database_protection": _KEYS,
    "multiple_database.tests.RouterTestCase.test_foreign_key_managers": _KEYS,
    "multiple_database.tests.RouterTestCase.test_m2m_cross_database_protection": _KEYS,
    "multiple_database.tests.RouterTestCase.test_m2m_managers": _KEYS,
    "multiple_database.tests.SignalTests.test_database_arg_m2m": _KEYS,
    "prefetch_related.tests.RawQuerySetTests.test_basic": _RAW_SQL,
    "prefetch_related.tests.RawQuerySetTests.test_clear": _RAW_SQL,
    "prefetch_related.tests.RawQuerySetTests.test_prefetch_before_raw": _RAW_SQL,
    "proxy_model_inheritance.tests.ProxyModelInheritanceTests.test_table_exists": _MIGRATE,
    "queries.test_db_returning.ReturningValuesTests.test_bulk_insert": "it brings keys of another shard",
    "queries.tests.Queries5Tests.test_ordering": "its extra(tables=…) names a table that is in no shard",
    "select_for_update.tests.SelectForUpdateTests.test_block": _RAW_SQL,
    "select_for_update.tests.SelectForUpdateTests.test_nowait_raises_error_on_block": _RAW_SQL,
    "select_for_update.tests.SelectForUpdateTests.test_raw_lock_not_available": _RAW_SQL,
    "select_for_update.tests.SelectForUpdateTests.test_skip_locked_skips_locked_rows": _RAW_SQL,
    "serializers.test_natural.NaturalKeySerializerTests.test_json_natural_key_serializer": _KEYS,
    "serializers.test_natural.NaturalKeySerializerTests.test_jsonl_natural_key_serializer": _KEYS,
    "serializers.test_natural.NaturalKeySerializerTests.test_python_natural_key_serializer": _KEYS,
    "serializers.test_natural.NaturalKeySerializerTests.test_xml_natural_key_serializer": _KEYS,
    "serializers.test_natural.NaturalKeySerializerTests.test_yaml_natural_key_serializer": _KEYS,
    "timezones.tests.LegacyDatabaseTests.test_cursor_execute_accepts_naive_datetime": _RAW_SQL,
    "timezones.tests.LegacyDatabaseTests.test_cursor_execute_returns_naive_datetime": _RAW_SQL,
    "timezones.tests.LegacyDatabaseTests.test_raw_sql": _RAW_SQL,
    "timezones.tests.NewDatabaseTests.test_cursor_execute_accepts_aware_datetime": _RAW_SQL,
    "timezones.tests.NewDatabaseTests.test_cursor_execute_returns_aware_datetime": _RAW_SQL,
    "timezones.tests.NewDatabaseTests.test_raw_sql": _RAW_SQL,
    "transactions.tests.NonAutocommitTests.test_orm_query_after_error_and_rollback": _UNINSTALLED,
    "transactions.tests.NonAutocommitTests.test_orm_query_without_autocommit": _UNINSTALLED,
}
"""Tests that fail on shards and not elsewhere, and why."""
TIMED = {"serializers.test_deserialization.TestDeserializer.test_crafted_xml_performance"}
"""Tests that measure time, which a busy machine fails."""


@pytest.mark.parametrize("label", sorted(LEAST_PASSED))
def test_django_s_own_tests(cluster_url: URL, django_tests: Path, label: str) -> None:
    words = [sys.executable, "runtests.py", "--settings", "tests.outside.django_settings", "--parallel", "1"]
    found = environment(SHARDIDS_CATALOG=dsn(cluster_url))
    found["PYTHONPATH"] = os.pathsep.join([found["PYTHONPATH"], str(django_tests)])
    done = subprocess.run(
        [*words, "--verbosity", "2", label],
        cwd=django_tests,
        env=found,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    skipped = re.findall(r"skipped ['\"](.*)['\"]", done.stderr)
    failed = set(re.findall(r"^(?:ERROR|FAIL): \S+ \((\S+?)\)", done.stderr, re.MULTILINE))
    assert re.search(r"^Ran \d+ tests?", done.stderr, re.MULTILINE), done.stderr
    assert failed - TIMED == {name for name in EXPLAINED if name.startswith(f"{label}.")}, done.stderr
    assert bool(failed) == (done.returncode != 0), done.stderr
    reasons = {reason: skipped.count(reason) for reason in skipped}
    passed = len(re.findall(r"\.\.\. ok$", done.stderr, re.MULTILINE))
    print(f"\n{label}: passed {passed}, skipped {len(skipped)}: {reasons}")  # noqa: T201 -- the report
    assert passed >= LEAST_PASSED[label]
