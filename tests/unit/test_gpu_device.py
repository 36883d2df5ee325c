"""Which OpenCL device is taken, and why one is refused: by doubles of pyopencl, since no machine has them all."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.gpu import device

CONFIG = SimpleNamespace(ROUND_TO_NEAREST=1, INF_NAN=2, DENORM=4, CORRECTLY_ROUNDED_DIVIDE_SQRT=8)
CPU, GPU = 1, 2


class Failed(Exception):
    pass


def handle(name: str, kind: int = GPU, floats: int = 15, doubles: int = 0, **others: Any) -> SimpleNamespace:
    facts = {"available": True, "compiler_available": True, "endian_little": True, "host_unified_memory": False}
    return SimpleNamespace(
        name=f" {name} ",
        type=kind,
        single_fp_config=floats,
        double_fp_config=doubles,
        global_mem_size=8 << 30,
        max_mem_alloc_size=2 << 30,
        platform=SimpleNamespace(name="Some Platform"),
        **(facts | others),
    )


def use(monkeypatch: pytest.MonkeyPatch, *handles: SimpleNamespace, platforms: bool = True) -> None:
    def get_platforms() -> list[Any]:
        if not platforms:
            raise Failed
        return [SimpleNamespace(get_devices=lambda: list(handles))]

    double = SimpleNamespace(
        Error=Failed,
        get_platforms=get_platforms,
        device_fp_config=CONFIG,
        device_type=SimpleNamespace(CPU=CPU, GPU=GPU),
    )
    monkeypatch.setattr(device, "opencl", lambda: double)


def test_a_gpu_comes_before_a_processor_and_a_name_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, handle("Slow CPU", CPU), handle("Fast GPU"), handle("Faster GPU"))
    assert device.find_device().name == "Fast GPU"
    assert device.find_device("faster").name == "Faster GPU"
    assert device.find_device("cpu").name == "Slow CPU"
    assert device.find_device("some platform").name == "Fast GPU"


@pytest.mark.parametrize(
    ("handles", "wanted", "why"),
    [
        ([], "", "the OpenCL platforms here have no device"),
        ([handle("Fast GPU")], "other", "no device is called that; there are Fast GPU"),
        ([handle("Fast GPU", floats=11)], "", "flushes denormal floats to zero"),
        ([handle("Fast GPU", floats=13)], "", "has no infinite floats"),
        ([handle("Fast GPU", floats=14)], "", "does not round floats to the nearest"),
        ([handle("Fast GPU", floats=7)], "", "cannot divide as exactly as a processor"),
        ([handle("Fast GPU", compiler_available=False)], "", "has no compiler"),
    ],
)
def test_a_device_that_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, handles: list[SimpleNamespace], wanted: str, why: str
) -> None:
    use(monkeypatch, *handles)
    with pytest.raises(UserError, match=why):
        device.find_device(wanted)


def test_without_a_platform_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, platforms=False)
    with pytest.raises(UserError, match="no OpenCL platform; install your GPU's OpenCL driver"):
        device.find_device()


def test_a_device_may_divide_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, handle("Fast GPU", floats=7, doubles=1))
    assert not device.find_device().divides_exactly


def test_without_the_extra_the_refusal_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    device.opencl.cache_clear()
    with pytest.raises(UserError, match=r"python\S* -m pip install pyopencl"):
        device.find_device()
    device.opencl.cache_clear()


def test_another_process_describes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ['{"name": "Fast GPU", "memory_bytes": 9, "max_buffer_bytes": 5, "shares_memory": false}']

    def run(*words: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=said[0], stderr="at last\nit crashed\n", returncode=-11)

    monkeypatch.setattr(subprocess, "run", run)
    assert device.describe("") == Accelerator(name="Fast GPU", memory_bytes=9, max_buffer_bytes=5, shares_memory=False)
    said[0] = '{"error": "backend opencl: nothing"}'
    with pytest.raises(UserError, match="backend opencl: nothing"):
        device.describe("")
    for no_facts in ("", "5", "[]", "a driver's line"):
        said[0] = no_facts
        with pytest.raises(UserError, match="the driver failed: 'it crashed'"):
            device.describe("")
    said[0] = 'a driver prints\n{"name": "Fast GPU", "memory_bytes": "9"}'
    with pytest.raises(UserError, match=r"backend opencl: the driver: field 'memory_bytes'"):
        device.describe("")


def test_nothing_of_it_is_imported_by_who_does_not_ask_for_it() -> None:
    code = (
        "import sys; import neuronpipe.launch.cli, neuronpipe.launch.supervisor.start as s; s.preload();"
        "print([name for name in sys.modules if 'opencl' in name or 'worker.gpu' in name])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
