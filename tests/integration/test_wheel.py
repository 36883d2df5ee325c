"""What a wheel holds: all of neuronpipe, the command, and nothing else; and it works without the checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

from tests.http_client import served
from tests.pipeline import PATIENCE_S, SLOWER, Shell, compiled_engine

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("protocol", "native", "plans", "services", "launch")
NOT_SHIPPED = {"native/bind.py"}
pytestmark = pytest.mark.pipeline  # all of it: compiling the kernels is not quick


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps"]
    pip += [f"-Ccmake.define.NP_ENGINE={archive}" for archive in compiled_engine()]
    built = subprocess.run([*pip, "-w", str(folder), str(ROOT)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_nothing_lies_outside_the_package(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert "neuronpipe" in tops
    assert {name.split("/")[1] for name in names if name.startswith("neuronpipe/")} == {*FOLDERS, "__main__.py"}


def test_every_module_is_there(names: set[str]) -> None:
    sources = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert {f"neuronpipe/{name}" for name in sources - NOT_SHIPPED} <= names


def test_the_kernels_the_demo_model_the_page_and_the_types_are_there(names: set[str]) -> None:
    folders = (ROOT / "plans/demo/package", ROOT / "services/gateway/page")
    data = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert len(data) > 10
    wanted = {"native/_kernels.abi3.so", *(f"{folder}/py.typed" for folder in FOLDERS), *data}
    assert {f"neuronpipe/{name}" for name in wanted} <= names


def test_the_c_client_library_is_there_and_compiles(installed: Path, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    native, program = installed / "neuronpipe" / "native", tmp_path / "service"
    (tmp_path / "service.c").write_text(
        '#include "client/lifecycle.h"\n#include "client/run_context.h"\n#include "client/sha256.h"\n'
        "int main(void) { char sum[65]; sha256_text(\"\", 0, sum); return sum[0] != 'e'; }\n"
    )
    files = [tmp_path / "service.c", *sorted((native / "client").glob("*.c"))]
    command = [compiler, "-std=c11", "-D_GNU_SOURCE", f"-I{native}", "-o", program, *files, "-lm"]
    subprocess.run(command, check=True)
    subprocess.run([program], check=True)


def test_what_only_the_checkout_needs_stays_there(names: set[str]) -> None:
    for name in names:
        if name.startswith("neuronpipe/native/client/"):
            continue
        assert not name.endswith(
            (
                ".c",
                ".h",
                ".cmake",
                ".sh",
                "CMakeLists.txt",
                "README.md",
                "DECISIONS.md",
                "FORMAT.md",
                "phone.md",
                "bind.py",
                ".pth",
            )
        ), name
        assert name not in {"neuronpipe/launch/neuronpipe", "neuronpipe/launch/test"}


@pytest.fixture
def installed(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the wheel's files lie; commands started from now on find these before the checkout's."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_the_command_works_without_the_checkout(wheel: Path, installed: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "neuronpipe=neuronpipe.launch.cli:main" in archive.read(entry_points).decode().replace(" ", "")
    script = """if True:
        import neuronpipe.native
        from neuronpipe.launch import cli
        print(neuronpipe.native.__file__, cli.__file__)
        cli.main(["--version"])
    """
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{installed}/neuronpipe/native/__init__.py {installed}/neuronpipe/launch/cli.py")
    assert "neuronpipe 0.1.0" in ran.stdout
    module = [sys.executable, "-m", "neuronpipe", "--version"]
    assert subprocess.run(module, cwd=installed, capture_output=True, text=True).stdout == "neuronpipe 0.1.0\n"


def test_the_page_and_the_demo_model_are_served_without_the_checkout(shell: Shell, installed: Path) -> None:
    page = installed / "neuronpipe/services/gateway/page"
    (page / "index.html").write_text((page / "index.html").read_text() + "<!-- as installed -->")
    with served(shell) as server:
        assert "<!-- as installed -->" in server.call("GET", "/").body.decode()
        for file in page.iterdir():
            if file.name != "index.html":
                assert server.call("GET", f"/page/{file.name}").body == file.read_bytes()
        reply = server.post("/v1/completions", prompt="import os", max_tokens=4)
        assert reply.json()["usage"]["completion_tokens"] == 4


@pytest.fixture(scope="module")
def from_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has neuronpipe from an sdist, and its dependencies from this one."""
    folder = tmp_path_factory.mktemp("sdist")
    script = f"import scikit_build_core.build as backend; backend.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    engine = [f"-Ccmake.define.NP_ENGINE={archive}" for archive in compiled_engine()]
    install = [*pip, "install", "--no-build-isolation", "--no-deps", "--ignore-installed", *engine, sdist]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return programs


def test_what_is_installed_from_an_sdist_answers(from_sdist: Path, tmp_path: Path) -> None:
    python = [from_sdist / "python", "-c", "import neuronpipe.native as native; print(native.__file__)"]
    where = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(from_sdist.parent)), "not the checkout"
    run = [from_sdist / "neuronpipe", "run", "-p", "import os", "-n", "4", "--json"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 4


@pytest.mark.alone
@pytest.mark.parametrize("words", [["--help"], ["ps"], ["list"]], ids=" ".join)
def test_what_computes_nothing_starts_quickly(tmp_path: Path, words: list[str]) -> None:
    command, took_s = Path(sys.executable).with_name("neuronpipe"), []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([command, *words], cwd=tmp_path, capture_output=True, check=True)
        took_s.append(time.perf_counter() - began)
    assert min(took_s) < 0.3 * SLOWER


def test_an_example_works_without_the_checkout(shell: Shell, installed: Path) -> None:
    use = "decode=neuronpipe.services.examples.firing:FiringLog"
    assert shell.json("run", "-p", "import os", "-n", "4", "--workers", "1", "--use", use)["tokens"] == 4
