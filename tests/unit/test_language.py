"""Names say what they hold: few locals, parameters, functions and modules have a name that only its line explains."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "native", "plans", "services", "launch")
MAX_VAGUE_PER_1000 = 1.0

VAGUE = frozenset(
    {
        "said",
        "told",
        "made",
        "asked",
        "kept",
        "found",
        "taken",
        "shown",
        "given",
        "one",
        "ones",
        "other",
        "others",
        "here",
        "there",
        "these",
        "those",
        "most",
        "least",
        "own",
        "ours",
        "theirs",
        "both",
        "wanted",
        "needed",
        "enough",
        "got",
        "came",
        "some",
        "seen",
        "known",
        "gone",
        "held",
        "holder",
        "lent",
        "meant",
        "named",
        "rest",
        "thing",
        "things",
        "stuff",
        "tmp",
        "foo",
        "twin",
        "twins",
        "crew",
        "arena",
        "ways",
        "doors",
        "problems",
        "bodies",
        "forms",
        "bases",
        "newcomer",
        "rehearsal",
    }
)
"""Names that the glossary replaces by the name of the thing."""


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


class Definition(NamedTuple):
    """A function or class of a module, or the module itself, which has no name."""

    name: str
    line: int
    docstring: str


class Source(NamedTuple):
    """The names that a module gives to values, with their lines: in assignments, loops, `with`, comprehensions and
    parameters; and its definitions."""

    assigned: list[tuple[str, int]]
    definitions: list[Definition]


@cache
def parsed(path: Path) -> Source:
    """Each file is read once for all tests: to read them all takes seconds."""
    source = Source([], [])
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            source.assigned.append((node.id, node.lineno))
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            source.assigned.append((node.arg, node.lineno))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
            source.definitions.append(Definition(name, line, ast.get_docstring(node) or ""))
    return source


def is_vague(name: str) -> bool:
    return name.strip("_").lower() in VAGUE


def vague_names(path: Path) -> tuple[list[str], int]:
    """The vague names of a file, as `file:line: name`, and how many names it gives."""
    names = parsed(path).assigned
    where = path.relative_to(ROOT)
    return [f"{where}:{line}: {name}" for name, line in names if is_vague(name)], len(names)


def test_names_say_what_they_hold() -> None:
    vague, count = [], 0
    for path in sources():
        names, total = vague_names(path)
        vague += names
        count += total
    assert count > 10_000
    assert 1000 * len(vague) / count < MAX_VAGUE_PER_1000, "\n".join(vague)


def test_functions_classes_and_modules_say_what_they_are() -> None:
    vague = [str(path.relative_to(ROOT)) for path in sources() if path.stem in VAGUE]
    for path in sources():
        for one in parsed(path).definitions:
            if is_vague(one.name):
                vague.append(f"{path.relative_to(ROOT)}:{one.line}: {one.name}")
    assert vague == []


@pytest.mark.parametrize("name", ["found", "_told", "Others"])
def test_a_vague_name_is_recognized(name: str) -> None:
    assert is_vague(name)


NO_SENTENCE = frozenset(
    {
        "What",
        "Of",
        "Whether",
        "How",
        "Which",
        "Who",
        "Whose",
        "Those",
        "These",
        "Its",
        "That",
        "As",
        "So",
        "With",
        "By",
        "Where",
        "When",
        "Why",
    }
)
"""First words of docstrings that need the name above them to be understood."""


def docstring_faults(path: Path) -> list[str]:
    """The docstrings of a file that are fragments, as `file:line: beginning`."""
    faults = []
    for one in parsed(path).definitions:
        words = one.docstring.split()
        if words and (words[0] in NO_SENTENCE or len(words) <= 4):
            faults.append(f"{path.relative_to(ROOT)}:{one.line}: {' '.join(words[:8])}")
    return faults


def test_docstrings_are_sentences_that_stand_alone() -> None:
    assert [fault for path in sources() for fault in docstring_faults(path)] == []


FRAGMENT = re.compile(r"^\s*\w+(, \w+)*: (of|by|as) (?!in `|in the request)")
"""A line that describes a field or a parameter and needs its name to be understood: `neurons: of a cluster`."""


def test_descriptions_of_fields_are_noun_phrases() -> None:
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources()
        for one in parsed(path).definitions
        if one.name  # those of modules are prose
        for line in one.docstring.splitlines()
        if FRAGMENT.match(line)
    ]
    assert lines == []
