"""Documentation is of three kinds, for users, design and measurements, and each stays what it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_ROOT_WORDS, MAX_README_WORDS, MAX_WORDS = 900, 800, 40_650
MAX_LINE = 120
NORMATIVE = ("protocol/SPEC.md", "plans/package/FORMAT.md")
GENERATED = (
    "launch/guide/options.md",
    "launch/guide/api.md",
    "plans/package/MODEL.md",
    "tests/bench/results/README.md",
    "tests/bench/results/community/README.md",
    "tests/bench/results/simulated-paper.md",
    "tests/bench/results/llama-server-tests.md",
)
GENERATED_PART = re.compile(r"<!-- generated: \w+ -->.*?<!-- end -->", re.DOTALL)  # of protocol/SPEC.md
FOLDERS = (".", "protocol", "native", "plans", "services", "launch", "tests")


def pages() -> dict[str, str]:
    """Every Markdown page of the project, by its path."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS[1:] for path in (ROOT / folder).rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(found)}


def words(text: str) -> int:
    """The number of words; table borders and bullets are none."""
    return len(re.findall(r"\S*[A-Za-z0-9]\S*", text))


def is_measurement(name: str) -> bool:
    return name.startswith("tests/bench/results/")


def test_pages_keep_to_their_length() -> None:
    too_long = {}
    for name, text in pages().items():
        limit = MAX_ROOT_WORDS if name == "README.md" else MAX_README_WORDS
        if name.endswith("README.md") and words(text) > limit and not is_measurement(name):
            too_long[name] = words(text)
    assert too_long == {}


def test_all_pages_together_can_be_read() -> None:
    written = {name: GENERATED_PART.sub("", text) for name, text in pages().items() if name not in GENERATED}
    counts = {name: words(text) for name, text in written.items()}
    assert sum(counts.values()) <= MAX_WORDS, sorted(counts.items(), key=lambda item: -item[1])[:20]


def test_lines_fit_an_editor() -> None:
    """Tables and code cannot be wrapped; a link alone may be longer."""
    long = [
        f"{name}:{number}"
        for name, text in pages().items()
        if name not in (*NORMATIVE, *GENERATED) and not is_measurement(name)
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MAX_LINE and not line.startswith(("|", "    ")) and " " in line.strip()
    ]
    assert long == []


def test_dates_stand_only_in_decisions_and_measurements() -> None:
    dated = [
        f"{name}: {date}"
        for name, text in pages().items()
        for date in re.findall(r"(?<![\w/-])20\d\d-[01]\d-[0-3]\d(?![\w-])", text)
        if not name.endswith("DECISIONS.md") and not is_measurement(name)
    ]
    assert dated == []


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings have, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    every = pages()
    broken = []
    for name, text in every.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, anchor = target.partition("#")
            path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
            if not path.exists():
                broken.append(f"{name}: {target}")
            elif anchor and path.suffix == ".md":
                key = path.relative_to(ROOT).as_posix()
                if anchor not in anchors(every.get(key, "")):
                    broken.append(f"{name}: {target}")
    assert broken == []
