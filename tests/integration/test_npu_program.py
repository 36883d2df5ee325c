"""The prefill worker without Python: the bits of ours on the same runtime, and one line where it cannot work."""

from __future__ import annotations

import importlib.util
import platform
import shlex
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.protocol.run_directory import RunDirectory

from tests.bench.npu_pipeline import prefill_figures
from tests.conformance.specs import SPECS, write_package
from tests.faults.kills import kill_in_a_step
from tests.flash_embedding import leave_embedding_on_flash
from tests.moved_scales import move_scales
from tests.npu_device import DEVICE
from tests.pipeline import SLOWER, Run, Shell, compiled_engine

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime
from neuronpipe.services.offload.npu.accuracy_measurement import keep, measure
from neuronpipe.services.offload.npu.graph_files import INDEX, write_graphs
from neuronpipe.services.offload.npu.providers import Provider
from neuronpipe.services.offload.npu.sessions import Runtime

RUNTIME = Path(onnxruntime.__file__).parent / "capi"
SOURCES = Path(__file__).parents[2] / "services" / "offload" / "npu" / "program"
LACKING = [tool for tool in ("cmake", "c++") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no {' and no '.join(LACKING)}")

MODELS = {
    "a mixture": replace(SPECS["turbosparse"], context_tokens=256),
    "layers without a router": replace(SPECS["shared gate"], shared_gate=False, context_tokens=256),
    "gated parallel": replace(SPECS["parallel"], gated=True, context_tokens=256),
}


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npu-prefill")
    made = [f"-DNP_ENGINE={archive}" for archive in compiled_engine()]
    subprocess.run(["cmake", "-S", SOURCES, "-B", folder, *made], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    return folder / "npu-prefill"


def words(program: Path, graphs: Path | None, provider: str = "cpu") -> str:
    """`--use` for the program. graphs: None for those in the package's folder."""
    (library,) = RUNTIME.glob("libonnxruntime.so.*")
    command = [program, *(("--graphs", graphs) if graphs else ()), "--library", library, "--provider", provider]
    if provider != "cpu":
        spec = importlib.util.find_spec("onnxruntime_qnn")
        assert spec is not None
        assert spec.origin is not None
        command += ["--plugins", Path(spec.origin).parent]
    return f"prefill=argv:{shlex.join(map(str, command))}"


def planned(shell: Shell, package: Path, *options: str) -> Path:
    """A plan for several threads, and the graphs that fit it, beside it."""
    plan = shell.folder / "plan.json"
    done = shell.call("plan", package, "--workers", "2", "--ffn-resident", "50%", *options, "-o", plan)
    assert done.code == 0, done.errors
    write_graphs_by_command(shell, package, plan)
    return plan


def write_graphs_by_command(shell: Shell, package: Path, plan: Path) -> None:
    done = shell.call("compile", package, "--plan", plan, "-o", shell.folder / "graphs")
    assert done.code == 0, done.errors


def keys_and_values(run: Run) -> Any:
    """All that the run has computed of them: they show the bits of every product but the last layer's."""
    with RunDirectory(run.path).read().open_segment("kv") as segment:
        return np.array(segment.map().view("kv"))


def computed(shell: Shell, package: Path, plan: Path, prompt: Any, *options: str) -> tuple[Any, list[int], str]:
    with shell.up(package, "--plan", plan, *options) as run:
        said = run.ask(prompt, 4)["token_ids"]
        numerics = next(one.numerics for one in run.status().processes if one.role == "prefill")
        return keys_and_values(run), said, numerics


def agree(
    shell: Shell,
    program: Path,
    package: Path,
    prompt: Any,
    provider: str = "cpu",
    *,
    moved: bool = False,
    embedding_on_flash: bool = False,
    kv_type: str = "f16",
) -> None:
    plan = planned(shell, package, "--backend", f"prefill=onnx:{provider}", "--kv-type", kv_type)
    if embedding_on_flash:
        leave_embedding_on_flash(plan, Package.open(package).manifest)
    if moved:
        move_scales(plan, Package.open(package).manifest)
    ours = computed(shell, package, plan, prompt)
    theirs = computed(shell, package, plan, prompt, "--use", words(program, shell.folder / "graphs", provider))
    assert theirs[1:] == ours[1:]
    assert ours[0].any()
    assert np.array_equal(theirs[0], ours[0])


def test_it_computes_the_bits_of_the_worker_in_python(shell: Shell, program: Path) -> None:
    """A step of 512 tokens is padded to the longest graph, one of 40 to the shortest."""
    prompt = np.random.default_rng(4).integers(1, 4000, 470).tolist()
    agree(shell, program, DEMO, prompt)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["a mixture", "layers without a router", pytest.param("gated parallel", marks=pytest.mark.nightly)]
)
def test_every_shape_of_a_model_comes_out_alike(shell: Shell, program: Path, tmp_path: Path, name: str) -> None:
    """A step of 150 tokens is computed by a graph of 128 and one of 64."""
    package = write_package(tmp_path / "package", MODELS[name], "q4")
    agree(shell, program, package.path, np.random.default_rng(4).integers(1, 50, 150).tolist())


@pytest.mark.nightly
def test_it_finds_scales_that_the_plan_moves(shell: Shell, program: Path, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", MODELS["a mixture"], "q4")
    prompt = np.random.default_rng(4).integers(1, 50, 150).tolist()
    agree(shell, program, package.path, prompt, moved=True)


@pytest.mark.nightly
def test_it_rounds_keys_and_values(shell: Shell, program: Path) -> None:
    agree(shell, program, DEMO, list(range(1, 41)), kv_type="q8")


@pytest.mark.nightly
def test_it_reads_an_embedding_that_stays_on_flash(shell: Shell, program: Path, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", MODELS["layers without a router"], "q4")
    agree(shell, program, package.path, list(range(1, 41)), embedding_on_flash=True)


def test_the_emulated_processor_gives_it_the_same_bits(shell: Shell, program: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    agree(shell, program, package.path, list(range(1, 31)), "qnn-emulated")


@pytest.mark.nightly
def test_graphs_of_another_size_have_numerics_of_their_own(shell: Shell, program: Path) -> None:
    plan, prompt = planned(shell, DEMO), list(range(1, 41))
    package = Package.open(DEMO)
    write_graphs(shell.folder / "small", package.manifest, neurons := 2 * package.manifest.layout.block_neurons)
    _, said, name = computed(shell, DEMO, plan, prompt, "--use", words(program, shell.folder / "graphs"))
    _, again, other = computed(shell, DEMO, plan, prompt, "--use", words(program, shell.folder / "small"))
    assert again == said
    assert other == name.replace("onnx-cpu", f"onnx-cpu-{neurons}")


def test_killed_in_the_middle_of_a_prompt_it_says_the_same(shell: Shell, program: Path) -> None:
    prompt = np.random.default_rng(4).integers(1, 4000, 470).tolist()
    plan = planned(shell, DEMO)
    with shell.up(DEMO, "--plan", plan, "--use", words(program, shell.folder / "graphs")) as run:
        said = run.ask(prompt, 8)["token_ids"]
        again: list[list[int]] = []
        asking = threading.Thread(target=lambda: again.append(run.ask(prompt, 8)["token_ids"]))
        asking.start()
        kill_in_a_step(run, "prefill")
        asking.join()
        assert again == [said]
        assert next(one.restarts for one in run.status().processes if one.role == "prefill") == 1


@pytest.mark.nightly
def test_it_passes_the_suite_of_its_role(shell: Shell, program: Path, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8").path
    plan = shell.folder / "plan.json"
    assert shell.call("plan", package, "--workers", "2", "-o", plan).code == 0
    write_graphs_by_command(shell, package, plan)
    use = words(program, shell.folder / "graphs").removeprefix("prefill=")
    report = shell.json("conformance", "prefill", package, "--use", use, "--patience", f"{30 * SLOWER:g}")
    assert [f"{check['name']}: {check['why']}" for check in report["checks"] if check["why"]] == []


@pytest.mark.nightly
@pytest.mark.parametrize("worker", ["ours", "program"])
def test_rows_are_ready_before_the_device_asks(
    shell: Shell, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, worker: str
) -> None:
    """A device that takes 30 ms for a product; a third of the neurons streams from flash meanwhile."""
    monkeypatch.setenv(DEVICE, "1000,30000")
    plan, options = planned(shell, DEMO, "--backend", "prefill=onnx:cpu", "--ffn-resident", "65%"), {}
    use = "prefill=tests.npu_device:Phone"
    if worker == "ours":
        options = {"cwd": Path(__file__).parents[2]}
    else:
        use = words(request.getfixturevalue("program"), shell.folder / "graphs")
        (library,) = RUNTIME.glob("libonnxruntime.so.*")
        device = shell.folder / "libdevice.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", device, SOURCES.parents[3] / "tests" / "npu_runtime.c"], check=True
        )
        use = use.replace(str(library), str(device))
    with shell.up(DEMO, "--plan", plan, "--use", use, **options) as run:
        for first in (1, 2):
            figures = prefill_figures(run, [first, *range(3, 472)])
    model = Package.open(DEMO).manifest.model
    assert figures["rows_ready"] + figures["rows_late"] == 3 * model.layers  # one piece each
    assert figures["graphs_ms"] > 3 * model.layers * 30
    assert figures["rows_wait_ms"] < 0.05 * figures["ms"]


def refused(shell: Shell, plan: Path, *cases: tuple[Path, str, str]) -> None:
    """That a run of the package with this implementation ends with a line that says why."""
    for package, use, why in cases:
        options = ("--plan", plan) if package == DEMO else ()
        assert why in shell.refused("up", package, *options, "--use", use)


@pytest.mark.nightly
def test_what_it_cannot_work_with_ends_the_run_with_one_line(shell: Shell, program: Path, tmp_path: Path) -> None:
    plan, good = planned(shell, DEMO), words(program, shell.folder / "graphs")
    other = write_package(tmp_path / "other", SPECS["scaled"], "q8").path
    (library,) = RUNTIME.glob("libonnxruntime.so.*")
    silu = write_package(tmp_path / "silu", SPECS["qwen3"], "q8").path
    nowhere = good.replace(str(library), "/nowhere/libonnxruntime.so")
    refused(
        shell,
        plan,
        (DEMO, nowhere, "ONNX Runtime does not load: /nowhere/libonnx"),
        (DEMO, good.replace(str(shell.folder / "graphs"), "/nowhere"), "/nowhere/graphs.json: No such file"),
        (other, good, "does not suit this model; make them again with `neuronpipe compile`"),
        (silu, good, "model/activation: this worker computes relu and drelu with a gate"),
    )
    assert shell.refused("compile", silu).endswith("this model has silu")


@pytest.mark.nightly
def test_words_that_it_does_not_know_end_the_run_with_one_line(shell: Shell, program: Path, tmp_path: Path) -> None:
    plan, good = planned(shell, DEMO), words(program, shell.folder / "graphs")
    (library,) = RUNTIME.glob("libonnxruntime.so.*")
    none = good.replace(str(library), "libm.so.6")
    gates = write_package(tmp_path / "gates", SPECS["shared gate"], "q8").path

    def provider(named: str) -> str:
        return good.replace("--provider cpu", f"--provider {named}")

    refused(
        shell,
        plan,
        (DEMO, none, "libm.so.6: is no ONNX Runtime; name its libonnxruntime.so"),
        (gates, good, "model: this worker does not compute this model's routers or attention; use our own prefill"),
        (DEMO, provider("gpu"), "gpu: the providers are cpu, qnn, qnn-emulated"),
        (DEMO, provider("qnn-emulated"), "name the folder of its libraries by --plugins"),
        (DEMO, good.replace("--provider", "--prov"), "--prov: npu-prefill [--graphs FOLDER]"),
        (
            DEMO,
            provider("qnn-emulated --plugins /nowhere"),
            "/nowhere/libonnxruntime_providers_qnn.so does not load",
        ),
        (DEMO, provider("qnn-emulated:x"), "name a chip by its number, as in qnn-emulated:57"),
        (DEMO, provider("cpu:57"), "cpu:57: the providers are cpu, qnn, qnn-emulated"),
    )
    if platform.machine() == "x86_64":
        refused(shell, plan, (DEMO, provider("qnn:57"), "--provider qnn: this machine is no 64-bit Arm"))


@pytest.mark.nightly
def test_files_that_are_damaged_or_of_another_version_end_the_run_with_one_line(shell: Shell, program: Path) -> None:
    plan, use = planned(shell, DEMO), words(program, shell.folder / "graphs")
    graph, index = shell.folder / "graphs" / "feed_forward-64.onnx", shell.folder / "graphs" / INDEX
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    damaged = shell.refused("up", DEMO, "--plan", plan, "--use", use)
    assert "feed_forward-64.onnx: does not match its checksum; make it again with `neuronpipe compile`" in damaged
    index.write_text(index.read_text().replace('"version": 3', '"version": 2'))
    old = shell.refused("up", DEMO, "--plan", plan, "--use", use)
    assert "graphs.json: is of another version; make it again with `neuronpipe compile`" in old


@pytest.mark.nightly
def test_measured_ranges_give_both_workers_the_same_bits(shell: Shell, program: Path, tmp_path: Path) -> None:
    """And graphs that were made before they were measured are refused."""
    made, prompt = write_package(tmp_path / "package", SPECS["scaled"], "q8"), list(range(1, 31))
    package = made.path
    options = ("--backend", "prefill=onnx:cpu")
    before = computed(shell, package, planned(shell, package, *options), prompt)
    texts = Texts([prompt], [prompt[::-1]])
    keep(made, measure(made, texts, Runtime(Provider("cpu")).session, text="numbers", scaling="static"))
    use = words(program, shell.folder / "graphs")
    plan = shell.folder / "static.json"
    assert shell.call("plan", package, "--workers", "2", "--ffn-resident", "50%", *options, "-o", plan).code == 0
    refused = shell.refused("up", package, "--plan", plan, "--use", use)
    assert "graphs.json: has other ranges than the package, which was profiled since" in refused
    write_graphs_by_command(shell, package, plan)
    ours = computed(shell, package, plan, prompt)
    theirs = computed(shell, package, plan, prompt, "--use", use)
    assert np.array_equal(theirs[0], ours[0])
    assert not np.array_equal(before[0], ours[0])


def test_contexts_that_were_prepared_for_a_chip_give_the_same_bits(shell: Shell, program: Path, tmp_path: Path) -> None:
    """In emulation. Those of the package's folder are taken by both workers, and what does not suit by neither."""
    pytest.importorskip("onnxruntime_qnn")
    package, prompt = write_package(tmp_path / "package", SPECS["scaled"], "q8").path, list(range(1, 31))
    plan = planned(shell, package, "--backend", "prefill=onnx:qnn-emulated:57")
    emulated = computed(shell, package, plan, prompt)
    made = shell.json("compile", package, "--soc", "SM8650", "--plan", plan)
    assert made["chip"] == {"soc": 57, "name": "SM8650", "arch": 75}
    assert made["made"]
    assert not shell.json("compile", package, "--soc", "57", "--plan", plan)["made"]
    by_program = ("--use", words(program, None, "qnn-emulated:57"))
    for options in ((), by_program):
        keys, *others = computed(shell, package, plan, prompt, *options)
        assert tuple(others) == emulated[1:]
        assert np.array_equal(keys, emulated[0])
    index = Path(made["folder"]) / INDEX
    good = index.read_text()
    for text, ours, theirs in (
        (good.replace('"version": 3', '"version": 2'), "version: 2 does not fit", "is of another version"),
        (good.replace('"soc": 57', '"soc": 69'), "chip: ", "has contexts for soc 69, not for soc 57"),
        (good.replace('"qnn": "', '"qnn": "1.'), "prepared these contexts, and ", "prepared these contexts, and this"),
    ):
        index.write_text(text)
        for options, why in (((), ours), (by_program, theirs)):
            said = shell.refused("up", package, "--plan", plan, *options)
            assert why in said
            assert "`neuronpipe compile" in said
