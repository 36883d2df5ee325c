"""Products by ONNX Runtime: near the engine's, with bits that the token alone decides; and no success that is none."""

from __future__ import annotations

import importlib.util
import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Quantization
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, graphs_for
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.npu import sessions
from neuronpipe.services.offload.npu.providers import Provider, provider_of
from neuronpipe.services.steps.backend import create_backend
from numpy.typing import NDArray

from tests.conformance.participants import Participants
from tests.conformance.specs import SPECS, write_package

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from neuronpipe.services.offload.npu import graphs
from neuronpipe.services.offload.npu.graph_files import write_graphs
from neuronpipe.services.offload.npu.layer_products import Products, is_clamped
from neuronpipe.services.offload.npu.sessions import Runtime

CPU = Provider("cpu")
TEXT = np.random.default_rng(5).integers(0, 100, 90).tolist()
MODELS = {name: SPECS[name] for name in ("gated layer norm", "turbosparse", "scaled")}
MODELS["gated parallel"] = replace(SPECS["parallel"], gated=True)


def computed(
    package: Any, provider: str, chunk: int, blocks: int = 2, threads: int = 1
) -> tuple[NDArray[np.float32], int]:
    """Logits of the text, in steps of so many tokens, and how many products were computed again."""
    participants = Participants(package, count=2, max_tokens=len(TEXT), external_products=True, product_blocks=blocks)
    neurons = blocks * package.manifest.layout.block_neurons
    session, max_tokens = Runtime(provider_of(provider)).session, len(TEXT)
    products = Products(package.manifest, session, neurons=neurons, max_tokens=max_tokens, threads=threads)
    return participants.run(TEXT, chunk, multiply=products), products.recomputed_tokens


def row_differences(rows: NDArray[np.float32], wanted: NDArray[np.float32]) -> Any:
    """Of each row, in units of its spread."""
    return np.sqrt(np.mean(np.square(rows - wanted), axis=1)) / wanted.std(axis=1)


def difference(rows: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Of any row, at most."""
    return float(row_differences(rows, wanted).max())


@pytest.mark.parametrize("quantization", ["q8", "q4"])
@pytest.mark.parametrize("name", MODELS)
def test_products_by_the_runtime_agree_and_depend_on_the_token_alone(
    tmp_path: Path, name: str, quantization: Quantization
) -> None:
    package = write_package(tmp_path / "package", MODELS[name], quantization)
    whole, _ = computed(package, "cpu", len(TEXT))
    if MODELS[name].experts == 1:
        wanted = Participants(package, count=1, max_tokens=len(TEXT)).run(TEXT, len(TEXT))
        assert 0 < difference(whole, wanted) < 0.04
    assert np.array_equal(computed(package, "cpu", 40)[0], whole)


@pytest.mark.parametrize("quantization", ["q8", "q4"])
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_near_the_engines(tmp_path: Path, name: str, quantization: Quantization) -> None:
    """From the same inputs, which are the engine's throughout: where two experts are nearly as good for a token, a
    router may take the other one, and then logits of it, and of all that attend to it, differ for good reason."""
    package = write_package(tmp_path / "package", MODELS[name], quantization)
    neurons = 2 * package.manifest.layout.block_neurons
    errors: dict[int, list[float]] = {}

    class Both(Products):
        """The engine's are kept."""

        def _finish(self, product: Any, future: Any) -> None:
            size = product.tokens * product.outputs_stride
            out = np.frombuffer(ffi.buffer(product.outputs, 4 * size), np.float32).reshape(product.tokens, -1)
            before = out.copy() if product.kind == lib.NP_PRODUCT_NEURONS else np.zeros_like(out)
            super()._finish(product, future)
            every = np.arange(product.tokens, dtype=np.uint32)
            found, wanted = out - before, self._rows.recompute(product, future.result().rows.place, every)
            out[:] = before + wanted
            errors.setdefault(product.kind, []).append(float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)))

    products = Both(package.manifest, Runtime(CPU).session, neurons=neurons, max_tokens=len(TEXT))
    Participants(package, count=1, max_tokens=len(TEXT), external_products=True).run(TEXT, len(TEXT), multiply=products)
    worst = {kind: max(found) for kind, found in errors.items()}
    print(worst)
    assert set(worst) == {lib.NP_PRODUCT_QKV, lib.NP_PRODUCT_ATTENTION_OUTPUT, lib.NP_PRODUCT_NEURONS}
    assert 0 < min(worst.values()) <= max(worst.values()) < 0.02


def test_graphs_that_follow_each_other_give_the_same_bits(tmp_path: Path) -> None:
    """One more token than a graph holds takes a short one more, not the next longer one."""
    assert graphs_for(129, GRAPH_TOKENS) == [128, 64]
    assert [graphs_for(count, GRAPH_TOKENS) for count in (65, 384, 385)] == [[128], [128, 128, 128], [512]]
    assert graphs_for(512 + 129, GRAPH_TOKENS) == [512, 128, 64]
    assert graphs_for(130, (64, 128)) == [128, 64]
    package = write_package(tmp_path / "package", replace(SPECS["scaled"], context_tokens=256), "q8")
    text = np.random.default_rng(5).integers(0, 100, 129).tolist()
    runs = []

    class Counted:
        def __init__(self, session: Any) -> None:
            self._session = session

        def run(self, inputs: Any) -> Any:
            runs.append(len(inputs["x"]))
            return self._session.run(inputs)

    for chunk in (129, 40):
        participants = Participants(package, count=2, max_tokens=129, external_products=True, product_blocks=2)
        opened, neurons = Runtime(CPU), 2 * package.manifest.layout.block_neurons
        products = Products(
            package.manifest,
            lambda graph, opened=opened: Counted(opened.session(graph)),  # type: ignore[misc, arg-type]
            neurons=neurons,
            max_tokens=129,
            threads=2,
        )
        rows = participants.run(text, chunk, multiply=products)
        if chunk == len(text):
            whole = rows
            assert set(runs) == {128, 64}
    assert np.array_equal(rows, whole)


def test_a_products_pieces_make_the_product(tmp_path: Path) -> None:
    """Sums of them are rounded otherwise, and nothing else; each is again what the token alone decides."""
    package = write_package(tmp_path / "package", SPECS["many neurons"], "q8")
    whole, _ = computed(package, "cpu", len(TEXT), blocks=2)
    pieces, _ = computed(package, "cpu", len(TEXT), blocks=1)
    assert 0 < difference(pieces, whole) < 0.02
    assert np.array_equal(computed(package, "cpu", 40, blocks=1)[0], pieces)
    assert np.array_equal(computed(package, "cpu", 40, blocks=1, threads=3)[0], pieces)


@pytest.mark.parametrize("parallel", [False, True])
def test_rows_are_made_products_ahead_of_the_graphs(tmp_path: Path, parallel: bool) -> None:
    """A graph here ends only when rows of later products are made: as many as there are buffers for, or products left.
    They are of the turns that follow, and of the next layer."""
    model = replace(SPECS["many neurons"], parallel=parallel)
    package = write_package(tmp_path / "package", model, "q8")
    pieces = package.manifest.layout.blocks
    order = ["qkv", *["piece"] * pieces, "output"] if parallel else ["qkv", "output", *["piece"] * pieces]
    order, computed = order * model.layers, []
    ahead: list[int] = []

    class Device:
        def __init__(self, session: Any) -> None:
            self._session = session

        def run(self, inputs: Any) -> Any:
            number = len(computed)
            computed.append("piece" if "gate" in inputs else "qkv" if len(inputs["w"]) > model.width else "output")
            free = {"qkv": 1, "output": 1, "piece": 2}
            free[computed[-1]] -= 1  # it is read
            wanted = 0
            for kind in order[number + 1 :]:
                if not free[kind]:
                    break
                free[kind] -= 1
                wanted += 1
            rows = products._rows
            with rows._changed:
                assert rows._changed.wait_for(lambda: len(rows._prepared) >= wanted, 30)
            ahead.append(wanted)
            return self._session.run(inputs)

    runtime = Runtime(CPU)
    products = Products(
        package.manifest,
        lambda graph: Device(runtime.session(graph)),  # type: ignore[arg-type, return-value]
        neurons=package.manifest.layout.block_neurons,
        max_tokens=len(TEXT),
    )
    one = Participants(package, count=1, max_tokens=len(TEXT), external_products=True, product_blocks=1)
    one.run(TEXT[:1], 1, multiply=products)
    assert pieces > 2
    assert computed == order
    assert max(ahead) == 3
    assert min(ahead[:-1]) >= 1
    counters = products.counters()
    assert counters["rows_late"] <= 1  # the very first
    assert counters["rows_ready"] + counters["rows_late"] == len(order)


@pytest.mark.parametrize("name", ["scaled", "many neurons"])
def test_tokens_whose_values_were_clamped_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """From rows that are opened again, while others were read ahead."""
    package = write_package(tmp_path / "package", SPECS[name], "q8")
    wanted = Participants(package, count=1, max_tokens=len(TEXT)).run(TEXT, len(TEXT))
    monkeypatch.setattr(graphs, "SPREAD", 2.0)
    found, recomputed = computed(package, "cpu", len(TEXT), blocks=1)
    assert recomputed > len(TEXT)
    assert difference(found, wanted) < 0.04


@pytest.mark.parametrize("provider", ["cpu", "qnn-emulated"])
@pytest.mark.parametrize("name", ["turbosparse", "smallthinker"])
def test_a_mixtures_logits_agree_but_for_tokens_whose_router_was_undecided(
    tmp_path: Path, name: str, provider: str
) -> None:
    """Measured: a median of 0.020 to 0.025 of the spread, 83 to 99 % of the tokens as near as a dense model's; the
    others, where two experts are nearly as good, 0.31 at most. One graph serves all experts."""
    if provider != "cpu":
        pytest.importorskip("onnxruntime_qnn")
    package = write_package(tmp_path / "package", SPECS[name], "q8")
    wanted = Participants(package, count=1, max_tokens=len(TEXT)).run(TEXT, len(TEXT))
    found = row_differences(computed(package, provider, len(TEXT))[0], wanted)
    assert 0 < np.median(found) < 0.03
    assert np.mean(found < 0.04) > 0.75
    assert found.max() < 0.5


def test_the_emulated_processor_agrees(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    wanted, _ = computed(package, "cpu", len(TEXT))
    assert difference(computed(package, "qnn-emulated", len(TEXT))[0], wanted) < 0.01


@pytest.mark.parametrize(
    ("missing", "text", "why"),
    [
        ("", "onnx:gpu", "backend onnx:gpu: the providers are cpu, qnn, qnn-emulated"),
        (
            "",
            "onnx",
            "backend onnx: names no provider, as onnx:cpu does: the providers are",
        ),
        ("", "onnx:cpu:57", "backend onnx:cpu:57: the providers are"),
        ("", "onnx:qnn:SM1", r"chip 'SM1': it is not known here; the chips are 30 SM8350, .*57 SM8650"),
        ("", "onnx:qnn", "backend onnx:qnn: this machine has no chip of Qualcomm's; onnx:qnn-emulated emulates one"),
        ("onnxruntime_qnn", "onnx:qnn-emulated", r"onnxruntime_qnn cannot be found; install it with: "),
    ],
)
def test_a_runtime_that_is_missing_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, missing: str, text: str, why: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("math") if name != missing else None)
    with pytest.raises(UserError, match=why):
        create_backend(text)


def test_the_line_that_installs_a_runtime_can_be_pasted_where_the_path_has_blanks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/home/new user/bin/python")
    assert shlex.split(Provider("cpu").install.partition(": ")[2])[:3] == ["/home/new user/bin/python", "-m", "pip"]


def test_a_runtime_that_does_not_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libQnnHtp.so: cannot open\nshared object")

    monkeypatch.setattr(sessions.importlib, "import_module", broken)
    with pytest.raises(UserError, match=r"does not load: libQnnHtp\.so: cannot open shared object; install"):
        Runtime(CPU)


def test_a_graph_that_another_provider_computes_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the processor's library did not load: the runtime goes on with its CPU and says nothing."""
    runtime = Runtime(CPU)
    monkeypatch.setattr(runtime, "_provider", Provider("qnn-emulated"))
    made = SimpleNamespace(get_provider_graph_assignment_info=lambda: [SimpleNamespace(ep_name="CPUExecutionProvider")])
    with pytest.raises(UserError, match="went to CPUExecutionProvider and not to QNNExecutionProvider alone"):
        runtime._check_placement(made)
    with pytest.raises(UserError, match="a graph is refused"):
        runtime.session(graphs.Graph("none", b"no model"))


@pytest.mark.parametrize(
    ("name", "quantization", "phase", "why"),
    [
        ("qwen3", "q8", "prefill", "this model has silu"),
        ("opt", "q8", "prefill", "this model has relu without a gate"),
        ("threshold", "q8", "prefill", "without a threshold"),
        ("scaled", "f16", "prefill", "needs a package in q8 or q4"),
        ("scaled", "q8", "decode", "write prefill=onnx:... or accelerator=onnx:..."),
    ],
)
def test_what_it_cannot_compute_is_refused_before_the_run(
    tmp_path: Path, name: str, quantization: Quantization, phase: Any, why: str
) -> None:
    package = write_package(tmp_path / "package", SPECS[name], quantization)
    assert why in (create_backend("onnx:cpu").supports(package.manifest, phase) or "")


def test_numerics_name_both_arithmetics() -> None:
    assert create_backend("onnx:cpu").numerics.startswith("onnx-cpu+cpu:")


@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_a_token_for_which_no_gate_fires_is_not_computed_again(activation: Any) -> None:
    """A gate's range begins at 0, where it is meant to end: such a token's greatest gate is 0 and clamps nothing."""
    shape = graphs.FeedForward(96, 64, activation)
    session = Runtime(CPU).session(graphs.feed_forward_graph(64, shape))
    rng = np.random.default_rng(3)
    x = rng.integers(graphs.MIDDLE, graphs.MIDDLE + 4000, (64, 96)).astype(np.uint16)  # nothing negative
    rows = {name: rng.integers(-127, 128, (64, 96)).astype(np.int8) for name in ("gate", "up", "down")}
    factor = np.full((1, 64), graphs.MAX_INTEGER, np.uint16)
    fires = session.run({"x": x, "factor": factor, **rows})
    silent = session.run({"x": x, "factor": factor, **(rows | {"gate": -np.abs(rows["gate"])})})
    assert not is_clamped(shape, fires).any()
    assert (silent["gate_peak"] == 0).all()
    assert (silent["y"] == graphs.MIDDLE).all()
    assert not is_clamped(shape, silent).any()
    for name, scale in shape.peaks.items():
        assert is_clamped(shape, silent | {name: np.full_like(silent[name], graphs.MAX_INTEGER)}).all()
        signed = is_clamped(shape, silent | {name: np.zeros_like(silent[name])}).any()
        assert signed == (scale.zero == graphs.MIDDLE)


def test_the_graphs_as_files_say_which_peaks_have_an_end_at_0(tmp_path: Path) -> None:
    for name, signed in (("scaled", {"up", "hidden"}), ("turbosparse", set())):  # relu; drelu
        package = write_package(tmp_path / name, SPECS[name], "q8")
        write_graphs(tmp_path / name / "graphs", package.manifest, package.manifest.layout.block_neurons)
        peaks = json.loads((tmp_path / name / "graphs" / "graphs.json").read_text())["feed_forward"]["peaks"]
        assert {peak["name"].split("_")[0] for peak in peaks if peak["signed"]} == signed
