"""Which functions, views, triggers and policies come along, and what their statements name in the shards."""

from __future__ import annotations

import pytest

from shardids.adopt.plan.belongings import Belonging, in_shards, sort_belongings
from shardids.adopt.plan.document import Kind

KINDS = {
    "public.users": Kind.ROOT,
    '"The Shop"."Orders"': Kind.DIRECT,
    "public.countries": Kind.REFERENCE,
    "public.strays": Kind.LOOSE,
}
TABLES = ("public.users", '"The Shop"."Orders"', "public.countries", "public.strays", "public.numbers")


def one(kind: str, name: str, relation: str | None = None, *, oid: int = 1, **more: object) -> Belonging:
    fields = {
        "definition": "d",
        "body": None,
        "problem": None,
        "options": None,
        "comment": None,
        "roles": (),
        "names": (),
        "calls": (),
        "has_grants": False,
        "grants": (),
    }
    return Belonging(kind=kind, oid=oid, relation=relation, name=name, **{**fields, **more})  # type: ignore[arg-type] -- fields of any type


OTHERS = [one("relation", name, name) for name in TABLES]


def reasons(*belongings: Belonging) -> dict[str, str]:
    return {each.shown: why for each, why in sort_belongings([*OTHERS, *belongings], KINDS).left}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("select 1", None),
        ('select count(*) from users, "Orders"', None),
        ("select count(*) from STRAYS", "it names public.strays, which stays at the source"),
        ("select nextval('numbers')", "it names public.numbers, which stays at the source"),
        ("select name from countries", "it names public.countries, which is a reference table"),
        ("select id from Public . Users", "it names public.users with its schema"),
        ('select 1 from "The Shop"."Orders"', 'it names "The Shop"."Orders" with its schema'),
        ("begin execute 'x'; end", "it may make statements of texts: EXECUTE"),
        ("select other()", "it names public.other(), which is not carried"),
    ],
)
def test_every_word_of_a_body_counts_as_a_name(body: str, reason: str | None):
    other = one("function", "public.other()", problem="a problem", oid=2)
    assert reasons(one("function", "public.f()", body=body), other).get("public.f()") == reason


def test_what_names_something_that_is_left_is_left():
    found = reasons(
        one("function", "public.f()", body="select 1 from strays"),
        one("trigger", "t", "public.users", names=("public.users",), calls=(1,)),
        one("view", "public.v", "public.v", names=("public.users", "public.strays"), oid=2),
        one("view", "public.w", "public.w", names=("public.v",), oid=3),
        one("trigger", "u", "public.strays", oid=4),
        one("view", "public.x", "public.x", names=("public.strays",), oid=5),
    )
    assert found == {
        "public.f()": "it names public.strays, which stays at the source",
        "public.users, t": "it calls public.f(), which is not carried",
        "public.v": "it names public.strays, which stays at the source",
        "public.w": "it names public.v, which is not carried",
    }


def test_the_policies_of_a_table_come_along_together():
    found = reasons(
        one("policy", "a", "public.users"),
        one("policy", "b", "public.users", names=("public.strays",), oid=2),
        one("policy", "c", '"The Shop"."Orders"', oid=3),
        one("policy", "d", "public.countries", names=("public.users",), oid=4),
    )
    assert found == {
        "public.users, a": "policy b of its table is not carried",
        "public.users, b": "it names public.strays, which stays at the source",
        "public.countries, d": "it belongs to a reference table and names rows that are split",
    }


def test_views_come_after_those_that_they_name():
    views = [
        one("view", "public.a", "public.a", names=("public.b", "public.c")),
        one("view", "public.b", "public.b", names=("public.users",), oid=2),
        one("view", "public.c", "public.c", names=("public.countries",), oid=3),
    ]
    sorting = sort_belongings([*OTHERS, *views], KINDS)
    assert [view.name for view in sorting.in_shards] == ["public.b", "public.a"]
    assert [view.name for view in sorting.on_nodes] == ["public.c"]


def test_names_are_replaced_but_not_in_texts_or_longer_names():
    names = {"public.users": "users", '"The Shop"."Orders"': '"Orders"'}
    text = (
        """SELECT 'public.users', E'it''s \\\\', "x public.users", a.public.users FROM public.users u, """
        """public.users_old, "The Shop"."Orders", old_public.users, public.users"""
    )
    assert in_shards(text, names) == (
        """SELECT 'public.users', E'it''s \\\\', "x public.users", a.public.users FROM users u, """
        """public.users_old, "Orders", old_public.users, users"""
    )
