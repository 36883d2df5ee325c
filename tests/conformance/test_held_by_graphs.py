"""Blocks that a runtime's graphs compute densely: near the engine's, in bits that the token alone decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.demo.corpus import documents
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
from numpy.typing import NDArray

from tests.conformance.participants import Participants
from tests.conformance.specs import SPECS, give_predictor, write_package

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from neuronpipe.services.offload.block_weights import offloaded_weights
from neuronpipe.services.offload.npu import graphs
from neuronpipe.services.offload.npu.offloaded_blocks import OffloadedProducts
from neuronpipe.services.offload.npu.providers import provider_of
from neuronpipe.services.offload.npu.sessions import Runtime

TEXT = np.random.default_rng(5).integers(0, 100, 22).tolist()


def held(package: Package, blocks: int, provider: str = "cpu") -> OffloadedProducts:
    chosen = provider_of(provider)
    holder = OffloadedProducts(
        package.manifest, Runtime(chosen).session, blocks=blocks, lengths=chosen.offload_graph_tokens
    )
    for weights in offloaded_weights(package, blocks):
        holder.load(weights)
    return holder


def run(
    package: Package, holder: OffloadedProducts, chunk: int, *, predicts: bool = False, text: list[int] = TEXT
) -> NDArray[np.float32]:
    """Two participants, and one whose blocks graphs compute: the first ones."""
    some, last = holder.blocks, package.manifest.layout.blocks
    several = Participants(package, count=3, max_tokens=6, holder=holder, predicts=predicts)
    return several.run(text, chunk, lambda number: [(some, last), (some, last), (0, some)])


def differences(rows: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each row, in units of its spread."""
    found: NDArray[np.float32] = np.sqrt(np.mean(np.square(rows - wanted), axis=1)) / wanted.std(axis=1)
    return found


@pytest.mark.parametrize(
    ("name", "quantization"),
    [*((name, q) for name in ("many neurons", "scaled", "turbosparse") for q in ("q8", "q4")), ("many neurons", "q3")],
)
def test_held_products_are_near_the_engines_and_depend_on_the_token_alone(
    tmp_path: Path, name: str, quantization: Quantization
) -> None:
    """With up to four tokens one graph, with more by turns. A mixture's router may turn to another expert."""
    package = write_package(tmp_path / "package", SPECS[name], quantization)
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    holder = held(package, 1)
    alone = run(package, holder, 1)
    found = differences(alone, wanted)
    assert 0 < found.max() < (0.04 if SPECS[name].experts == 1 else 0.5)
    assert np.median(found) < 0.03
    for chunk in (2, 3, 4, 6):
        assert np.array_equal(run(package, holder, chunk), alone), chunk
    assert holder.counters()["recomputed_tokens"] == 0


def test_clamped_tokens_are_computed_again_in_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write_package(tmp_path / "package", SPECS["many neurons"], "q8")
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    monkeypatch.setattr(graphs, "SPREAD", 2.0)
    holder = held(package, package.manifest.layout.blocks)
    found = run(package, holder, 4)
    assert holder.counters()["recomputed_tokens"] > len(TEXT)
    assert differences(found, wanted).max() < 0.04
    assert np.array_equal(run(package, holder, 1), found)


def test_in_predicted_mode_held_blocks_are_computed_whole(tmp_path: Path) -> None:
    package, _ = give_predictor(write_package(tmp_path / "package", SPECS["many neurons"], "q8"), TEXT)
    every = held(package, package.manifest.layout.blocks)
    assert np.array_equal(run(package, every, 2, predicts=True), run(package, every, 2))
    first = held(package, 1)
    assert not np.array_equal(run(package, first, 2, predicts=True), run(package, first, 2))


def test_other_counts_of_blocks_than_are_held_are_refused(tmp_path: Path) -> None:
    holder = held(write_package(tmp_path / "package", SPECS["many neurons"], "q8"), 2)
    with pytest.raises(ValueError, match="1 blocks are requested, and 2 are offloaded"):
        holder(SimpleNamespace(blocks=1))


def test_the_demo_loses_nothing_on_text_it_has_not_seen() -> None:
    """tests/bench/offload_quality.py measures with more tokens, which is when the change is below 0.001 nats."""
    package = Package.open(DEMO)
    tokens = FileTokenizer(package.tokenizer()).encode(next(documents(held_out=True)))[:256]
    exact = Participants(package, count=1, max_tokens=1).run(tokens, 1)
    found = run(package, held(package, package.manifest.layout.blocks), 4, text=tokens)
    assert abs(loss(found, tokens) - loss(exact, tokens)) < 0.003
    assert np.mean(found.argmax(axis=1) == exact.argmax(axis=1)) > 0.97


def loss(logits: NDArray[np.float32], tokens: list[int]) -> float:
    """Nats a token."""
    rows = logits[:-1].astype(np.float64)
    spread = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
    return float(np.mean(spread - rows[np.arange(len(rows)), tokens[1:]]))


def test_the_emulated_processor_agrees(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    package = write_package(tmp_path / "package", SPECS["many neurons"], "q8")
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    alone = run(package, held(package, 2, "qnn-emulated"), 1)
    assert 0 < differences(alone, wanted).max() < 0.04
    assert np.array_equal(run(package, held(package, 2, "qnn-emulated"), 3), alone)
