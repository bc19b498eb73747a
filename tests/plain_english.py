"""Habits of English that readers have to read twice, counted in the texts that users see.

``python -m tests.plain_english`` fails when a habit occurs more often than ``[tool.plain-english]`` of
pyproject.toml allows. ``--lower`` writes counts below their budget there: budgets only fall. ``--show HABIT``
lists its places.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Habit:
    """A way of speaking to avoid. A space of its pattern matches any white space."""

    name: str
    advice: str
    pattern: str

    @property
    def regex(self) -> re.Pattern[str]:
        """Return the pattern; phrases continue over the ends of lines."""
        return re.compile(self.pattern.replace(" ", r"\s+"))


_VERB_AFTER_WHAT = (
    "is|are|was|were|has|have|had|does|do|did|can|may|will|would|"
    "belongs?|comes?|goes|leaves?|makes?|needs?|reads?|takes?|tells?"
)
_SUBJECT_AFTER_WHAT = "it|they|the|an?|others?|nobody|somebody"
_UNIT = (
    "node|shard|second|server|table|reading|statement|row|line|package|cluster|millisecond|month|column|"
    "connection|session"
)
_COUNTED = "once|one|rows?|entry|line|connections?|statement|way|trip|query|branch|times?"

HABITS = (
    Habit(
        "what",
        "name the noun instead of 'what ...'",
        rf"\b[Ww]hat (?:{_VERB_AFTER_WHAT}|{_SUBJECT_AFTER_WHAT})\b",
    ),
    Habit(
        "tell",
        "things report, show or determine; nothing 'is told' or 'tells'",
        r"\b(?:is|are|was|were|be|been|being) told\b|"
        r"\btells? (?:an?|the|its|their|rows?|which|no|each|what|how)\b",
    ),
    Habit(
        "whoever",
        "name the role: client, caller, operator",
        r"\b[Ww]hoever\b|(?:\A|\n\s*\n|[.:;,\"] ?)[Ww]ho (?:\w+s|\w+ed|may)\b",
    ),
    Habit(
        "but-for",
        "'except', 'only', 'its own'",
        r"\bbut for\b|\bnothing but\b|\balone\b|\bits like\b|\bof (?:its|their|his|an?) own\b",
    ),
    Habit("a-node", "'per node' instead of 'a node'", rf"\b(?:{_COUNTED}) an? (?:{_UNIT})\b"),
    Habit("too", "'also' before the verb; a new sentence instead of ', nor'", r", too\b|, nor\b"),
    Habit(
        "is-no",
        "'is not a duration', 'does not have'",
        r"\b(?:has|have) not (?:all|the|any|an?)\b|\bis (?:none|no [a-z]+)\b",
    ),
    Habit(
        "by-which",
        "two clauses, or an actor, instead of 'by which'",
        r"\b(?:by|in|of|for|with|to|on|from|under|over|above|below|through) (?:which|whose)\b",
    ),
)
_SQL = re.compile(r"\b(?:select|insert into|create|update|delete from)\b")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each passage: strings of Python without SQL, prose of Markdown."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and not _SQL.search(node.value):
                yield node.lineno, node.value
        return
    in_code = False
    lines = []
    for line in source.split("\n"):
        is_fence = line.lstrip().startswith("```")
        in_code = in_code != is_fence
        lines.append("" if is_fence or in_code or line.startswith("    ") else line)
    yield 1, "\n".join(lines)


def read_by_users(root: Path) -> Iterator[Path]:
    """Yield the files that users read; decisions keep their words, pages of commands repeat the code's."""
    yield root / "README.md"
    yield from sorted(root.glob("shardids/**/*.py"))
    for path in sorted(root.glob("docs/**/*.md")):
        inner = path.relative_to(root / "docs").parts
        if inner[0] not in ("decisions", "_build") and inner[:2] != ("reference", "cli"):
            yield path


def places(text: str, first_line: int = 1) -> Iterator[tuple[str, int, str]]:
    """Yield the habit, the line and the words of each occurrence in a text."""
    for habit in HABITS:
        for match in habit.regex.finditer(text):
            words = " ".join(match.group().split())
            yield habit.name, first_line + text.count("\n", 0, match.start()), words


def exceeded(counts: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """Return a message for each habit that occurs more often than its budget."""
    return [
        f"{habit.name}: {counts.get(habit.name, 0)} places, the budget is {budgets.get(habit.name, 0)}. "
        f"Write plainly ({habit.advice}); `python -m tests.plain_english --show {habit.name}` lists them."
        for habit in HABITS
        if counts.get(habit.name, 0) > budgets.get(habit.name, 0)
    ]


def lowered(pyproject: str, counts: Mapping[str, int]) -> str:
    """Return pyproject.toml with each budget lowered to its count; a budget never rises."""
    document = tomlkit.parse(pyproject)
    budgets: Any = document["tool"]["plain-english"]  # type: ignore[index] # tomlkit's items have no narrower type
    for name, budget in dict(budgets).items():
        budgets[name] = min(int(budget), counts.get(name, 0))
    return tomlkit.dumps(document)


def main() -> int:
    """Compare the counts with their budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower budgets to the present counts")
    parser.add_argument("--show", choices=[habit.name for habit in HABITS], help="list the places of a habit")
    options = parser.parse_args()
    found = [
        (name, f"{path.relative_to(ROOT)}:{line}: {words}")
        for path in read_by_users(ROOT)
        for first, text in texts(path)
        for name, line, words in places(text, first)
    ]
    if options.show:
        print(*(place for name, place in found if name == options.show), sep="\n")
        return 0
    counts = Counter(name for name, _ in found)
    pyproject = ROOT / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    budgets = {
        str(name): int(budget)
        for name, budget in tomlkit.parse(text).unwrap()["tool"]["plain-english"].items()
    }
    if errors := exceeded(counts, budgets):
        print(*errors, sep="\n", file=sys.stderr)
        return 1
    if options.lower:
        pyproject.write_text(lowered(text, counts), encoding="utf-8")
    elif slack := [f"{name} to {counts[name]}" for name, budget in budgets.items() if counts[name] < budget]:
        print(f"Budgets can be lowered ({', '.join(slack)}): python -m tests.plain_english --lower")
    return 0


if __name__ == "__main__":
    sys.exit(main())
