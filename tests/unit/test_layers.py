"""The order of the folders: nothing imports upwards, and each foreign library is imported in one place."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("protocol", "native", "plans", "services", "launch")
ROLES = ("coordinator", "gateway", "loader", "cache", "worker")
DOORS = {
    "zmq": ("protocol/channel.py", "protocol/guarded.py"),
    "msgpack": ("protocol/codec.py",),
    "cffi": ("native/bind.py",),
}


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The modules a file imports, wherever in it; relative ones made absolute."""
    return tuple(_imports(path, ast.parse(path.read_bytes())))


def _imports(path: Path, tree: ast.AST) -> Iterator[str]:
    package = ("neuronpipe", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else ())))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def imports_when_loaded(path: Path) -> tuple[str, ...]:
    """The modules that a file imports when it is loaded: not in functions, and not for the type checker alone."""
    tree = ast.parse(path.read_bytes())
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [inner for inner in node.body if not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)]
    return tuple(_imports(path, tree))


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_imports_upwards(layer: str) -> None:
    above = tuple(f"neuronpipe.{name}" for name in LAYERS[LAYERS.index(layer) + 1 :])
    upwards = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(layer)
        for name in imports(path)
        if name.startswith(above) or name.split(".")[0] in LAYERS
    ]
    assert upwards == []


@pytest.mark.parametrize("role", ROLES)
def test_no_role_imports_a_sibling_role(role: str) -> None:
    siblings = tuple(f"neuronpipe.services.{other}" for other in ROLES if other != role)
    assert files(f"services/{role}")
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(f"services/{role}")
        for name in imports(path)
        if name.startswith(siblings)
    ] == []


LAB_VERBS = {"models", "plan", "simulate", "synth", "inspect"}


def test_only_launch_imports_the_lab_and_lazily() -> None:
    """A run must work without plans/lab. Only five verbs are about it; elsewhere in launch a function imports it."""
    outside_lab = [path for path in files(*LAYERS) if "lab" not in path.relative_to(ROOT).parts]
    users = {str(path.relative_to(ROOT)) for path in outside_lab if imports_lab(imports(path))}
    assert [name for name in users if not name.startswith("launch/")] == []
    eager = [name for name in users if imports_lab(imports_when_loaded(ROOT / name))]
    assert [name for name in eager if not name.startswith("launch/verbs/") or Path(name).stem not in LAB_VERBS] == []


def imports_lab(names: Iterable[str]) -> bool:
    return any(f"{name}.".startswith("neuronpipe.plans.lab.") for name in names)


def test_no_two_rooms_import_each_other() -> None:
    """Rooms are the folders directly below those of the top level; an import inside a function counts as well."""
    edges: dict[tuple[str, str], set[str]] = {}
    for path in files(*LAYERS):
        source = room((*path.relative_to(ROOT).parts,))
        for name in imports(path):
            target = room(tuple(name.split(".")[1:])) if name.startswith("neuronpipe.") else None
            if source and target and source != target:
                edges.setdefault((source, target), set()).add(f"{path.relative_to(ROOT)}: {name}")
    assert len(edges) > 50
    assert {pair: examples for pair, examples in edges.items() if pair[::-1] in edges} == {}


def room(parts: tuple[str, ...]) -> str | None:
    """Return `plans/cost` for a path or module below it, and None for what lies in no room."""
    is_room = len(parts) > 1 and parts[0] in LAYERS and (ROOT / parts[0] / parts[1]).is_dir()
    return "/".join(parts[:2]) if is_room else None


READ_PARSED_WORDS = ("launch/arguments/", "launch/verbs/")


def test_only_arguments_and_verbs_see_a_namespace() -> None:
    """A verb turns its parsed arguments into typed options once."""
    users = {str(path.relative_to(ROOT)) for path in files(*LAYERS) if "Namespace" in path.read_text()}
    assert len(users) > 20
    assert sorted(name for name in users if not name.startswith(READ_PARSED_WORDS)) == []


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_one_door(library: str) -> None:
    users = {path for path in files(*LAYERS) for name in imports(path) if name.split(".")[0] == library}
    assert {str(path.relative_to(ROOT)) for path in users} == set(DOORS[library])


def test_only_native_touches_its_extension() -> None:
    users = {
        path.relative_to(ROOT).parts[0]
        for path in files(*LAYERS)
        for name in imports(path)
        if "_kernels" in name.split(".")
    }
    assert users <= {"native"}


def test_every_folder_was_looked_at() -> None:
    assert all(files(layer) for layer in LAYERS)


MODULES = {
    "pyzmq": {"zmq"},
    "prometheus-client": {"prometheus_client"},
    "pydantic": {"pydantic", "pydantic_core"},
    "protobuf": {"google"},
}


def declared(requirements: list[str]) -> set[str]:
    names = re.findall(r"^[\w-]+", "\n".join(requirements), re.MULTILINE)
    return {module for name in names for module in MODULES.get(name, {name})}


def imported(paths: list[Path]) -> set[str]:
    return (
        {name.split(".")[0] for path in paths for name in imports(path)}
        - set(sys.stdlib_module_names)
        - {
            "neuronpipe",
            "__future__",
        }
    )


def test_what_a_run_imports_is_what_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    training = sorted((ROOT / "plans/lab/demo_training").glob("*.py"))
    replicas = sorted((ROOT / "services/examples").glob("ray_*.py"))  # run where the user has installed Ray
    runtime = [path for path in files(*LAYERS) if path not in [*training, *replicas]]
    extras = project["optional-dependencies"]
    devices = declared(extras["npu"]) | declared(extras["gpu"])  # some are only imported by name
    assert imported(runtime) - devices == declared(project["dependencies"]) | declared(extras["sentencepiece"])
    assert declared(extras["gpu"]) <= imported(runtime)
    assert imported(training) - imported(runtime) == declared(extras["train"])
    assert imported(replicas) - imported(runtime) == {"ray", "aiohttp"}  # Serve brings the latter
