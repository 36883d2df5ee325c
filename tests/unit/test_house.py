"""The code stays easy to find one's way in: no import cycles, no crowded folder, no file too long and few too short."""

from __future__ import annotations

import ast
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from neuronpipe.plans.models.registry import ARCHITECTURES

ROOT = Path(__file__).parents[2]
FOLDERS = ("protocol", "native", "plans", "services", "launch")
MAX_LINES, SHORT_LINES, MAX_SHORT_MODULES = 450, 40, 15
LONG_BY_DESIGN = {"native/neuronpipe.h", "protocol/SPEC.md"}


def sources(*endings: str) -> list[Path]:
    """The project's own files outside tests, as git or a checkout without it has them."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in endings and "__pycache__" not in path.parts
    ]


def module_name(path: Path) -> str:
    name = ".".join(("neuronpipe", *path.relative_to(ROOT).with_suffix("").parts))
    return name.removesuffix(".__init__")


def imported(path: Path, modules: set[str]) -> set[str]:
    """Modules of ours that a file imports when it is loaded itself: not those that a function imports later."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:  # so none that is below `if TYPE_CHECKING:` either
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


def test_no_module_imports_itself_over_others() -> None:
    paths = {module_name(path): path for path in sources(".py")}
    graph = {name: imported(path, set(paths)) - {name} for name, path in paths.items()}
    for name, targets in graph.items():  # a package is loaded before its modules, which it may name
        graph[name] = {target for target in targets if not name.startswith(f"{target}.")}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as cycle:
        pytest.fail(" <- ".join(cycle.args[1]))


def test_no_header_includes_itself_over_others() -> None:
    paths = {path.name: path for path in sources(".h")}
    include = re.compile(r'^#include "(?:.*/)?([\w.]+)"', re.MULTILINE)
    graph = {name: set(include.findall(path.read_text())) & set(paths) for name, path in paths.items()}
    list(TopologicalSorter(graph).static_order())


def test_files_are_read_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(".py", ".c", ".h")}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES and name not in LONG_BY_DESIGN} == {}
    short = [name for name, n in lengths.items() if name.endswith(".py") and "__" not in name and n < SHORT_LINES]
    assert len(short) <= MAX_SHORT_MODULES, short


def test_no_script_of_tests_hides_a_module_of_the_standard_library() -> None:
    """A script's own folder comes first where it imports: beside a concurrent.py there is no concurrent.futures."""
    scripts = (ROOT / "tests").rglob("*.py")
    assert [str(path) for path in scripts if path.stem in sys.stdlib_module_names] == []


def test_no_room_is_crowded() -> None:
    modules = [path for path in (ROOT / "services" / "coordinator").glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= 13
    assert len([path for path in (ROOT / "launch").glob("*.py") if path.name != "__init__.py"]) <= 12


def test_readmes_name_only_files_that_exist() -> None:
    """Tables of files went on naming some that had been merged or renamed."""
    folders = [ROOT / folder for folder in (*FOLDERS, "tests")]
    files = {path.as_posix() for folder in folders for path in folder.rglob("*") if path.is_file()}
    pages = [*ROOT.glob("*.md"), *(Path(file) for file in files if file.endswith(".md"))]
    name = re.compile(r"`(?:\.{1,2}/)*((?:[\w-]+/)*[\w-]+\.(?:py|c|h|js|sh|md))`")
    missing = {
        f"{page.relative_to(ROOT)}: {named}"
        for page in pages
        if page.name != "CHANGELOG.md"  # names what was there then
        for named in name.findall(page.read_text(encoding="utf-8"))
        if "NAME" not in named and not any(file.endswith(f"/{named}") for file in files)
    }
    assert missing == set()


def test_only_a_familys_file_knows_its_architectures() -> None:
    knowing = {
        str(path.relative_to(ROOT))
        for path in sources(".py", ".c", ".h")
        for name in ARCHITECTURES
        if name in path.read_text()
    }
    assert {name for name in knowing if not name.startswith(("plans/models/", "plans/lab/demo_training/"))} == set()
