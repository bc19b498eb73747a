from collections import Counter
from pathlib import Path

import pytest
import tomlkit

from tests.plain_english import HABITS, ROOT, exceeded, lowered, places, read_by_users, texts

SAMPLES = {
    "what": (
        "What the page is shown, and what has\nhappened",
        "Convert a reading to JSON; what happened next",
    ),
    "tell": ("The page is told of it. It tells which one.", "The page receives it. It shows the shard."),
    "whoever": ("Whoever writes; who may read.", "The role that writes; a role who cannot"),
    "but-for": ("None but\nfor one: it alone has a page of its own", "None except one has its own page"),
    "a-node": ("Two connections a node, one a shard", "Two connections per node, one per shard"),
    "too": ("This one, too, nor that; it, nor she", "This one also; neither that. One is too long"),
    "is-no": ("'x' is no time; it has not all rows", "'x' is not a duration; it has not changed"),
    "by-which": ("The name by which it is found, of whose", "Its name, which identifies it"),
}
PYPROJECT = """# kept
[tool.plain-english]
what = 7 # kept
too = 1
"""


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.name)
def test_a_habit_is_counted_and_its_plain_form_is_not(habit):
    habitual, plain = SAMPLES[habit.name]

    assert Counter(name for name, _, _ in places(habitual))[habit.name] >= 2
    assert not [words for name, _, words in places(plain) if name == habit.name]


def test_a_place_has_its_line_also_where_it_continues_over_the_end_of_a_line():
    assert list(places("One.\nTwo, but\nfor three.", 10)) == [("but-for", 11, "but for")]


def test_strings_are_read_without_sql_and_pages_without_code(tmp_path):
    module, page = tmp_path / "module.py", tmp_path / "page.md"
    module.write_text('x = 1\ny = f"{x}, too, or"\nz = "select a, too from alone"\n# alone\n')
    page.write_text("One\n```\nalone\n```\n\n    alone\n\nalone\n")

    assert [(line, text) for line, text in texts(module)] == [(2, ", too, or")]
    assert [place for first, text in texts(page) for place in places(text, first)] == [
        ("but-for", 8, "alone")
    ]


def test_users_read_pages_and_code_except_decisions():
    files = {str(path.relative_to(ROOT)) for path in read_by_users(ROOT)}

    assert {"README.md", "shardids/errors.py", "docs/explanation/security.md"} <= files
    assert not [name for name in files if Path(name).parts[:2] == ("docs", "decisions")]


def test_a_count_above_its_budget_fails_by_name_and_one_below_does_not():
    (message,) = exceeded({"what": 3, "too": 1}, {"what": 2, "too": 5})

    assert message.startswith("what: 3 places, the budget is 2.")
    assert "--show what" in message


def test_a_habit_without_a_budget_has_none_to_spend():
    assert [message.split(":")[0] for message in exceeded({"tell": 1}, {})] == ["tell"]


def test_budgets_fall_to_the_counts_and_never_rise():
    assert lowered(PYPROJECT, {"what": 3, "too": 9}) == PYPROJECT.replace("7", "3")


def test_every_habit_has_its_budget_in_pyproject():
    document = tomlkit.parse((ROOT / "pyproject.toml").read_text()).unwrap()

    assert list(document["tool"]["plain-english"]) == [habit.name for habit in HABITS]
