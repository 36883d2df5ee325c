"""Blocks and matrices that an OpenCL device computes have the bits of the engine's kernels: whatever the model, the
weights' type, the instructions whose order of sums the device keeps, the batch, and how much it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.native import ffi, lib
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.offloaded_blocks import MATRICES, matrix_shape

from tests.conformance.participants import Participants
from tests.conformance.specs import SPECS, give_predictor, write_package
from tests.opencl import require_opencl

pytest.importorskip("pyopencl", reason="the extra [gpu] is not installed")

from neuronpipe.services.offload.block_weights import offloaded_biases, offloaded_weights
from neuronpipe.services.offload.gpu.blocks import ORDERS, OffloadedBlocks
from neuronpipe.services.offload.gpu.device import find_device
from neuronpipe.services.offload.gpu.matrices import OffloadedMatrices
from neuronpipe.services.offload.gpu.trial import manifest_of

from tests.conformance.block_numbers import ALL_CODES, Numbers

require_opencl()

pytestmark = pytest.mark.slow  # the device compiles its kernels for each model
Names = tuple[str, ...]
TEXT = np.random.default_rng(5).integers(0, 100, 22).tolist()
INSTRUCTIONS = ffi.string(lib.np_isa_names()).decode().split(",")
WIDE = replace(SPECS["scaled"], width=576, neurons=2500, layer_kinds=SPECS["scaled"].layer_kinds)
MODELS: dict[str, ModelSpec] = {
    name: SPECS[name]
    for name in ("many neurons", "gated layer norm", "ungated relu2", "opt", "parallel", "threshold", "smallthinker")
} | {"wide": WIDE}


@pytest.fixture(autouse=True)
def _instructions() -> Iterator[None]:
    yield
    lib.np_isa_select(ffi.NULL)


def held(package: Package, blocks: int, tokens: int, instructions: str) -> OffloadedBlocks:
    holder = OffloadedBlocks(find_device(), package.manifest, blocks=blocks, tokens=tokens, instructions=instructions)
    for weights, bias in zip(offloaded_weights(package, blocks), offloaded_biases(package), strict=True):
        holder.load(weights, bias)
    return holder


def matrices(
    package: Package, holder: OffloadedBlocks, tokens: int, instructions: str, names: Names
) -> OffloadedMatrices:
    file = np.fromfile(package.fixed_path, np.uint8)
    tensors = {name: file[entry.start : entry.stop] for name, entry in package.fixed.items()}
    of_device = holder.queue, find_device(), package.manifest, tensors
    return OffloadedMatrices(*of_device, names=names, tokens=tokens, instructions=instructions)


def run(
    package: Package, blocks: int, chunk: int, instructions: str, names: Names = (), **config: Any
) -> tuple[np.ndarray, OffloadedBlocks]:
    """Two participants, and one whose blocks, the first ones, and matrices a device computes."""
    holder, last = held(package, blocks, chunk, instructions), package.manifest.layout.blocks
    rows = matrices(package, holder, chunk, instructions, names)
    of_device = {"holder": holder, "rows": rows, "offloaded_matrices": names}
    several = Participants(package, count=3, max_tokens=chunk, **of_device, **config)
    several.partials[:] = np.nan  # what nobody writes nobody reads
    found = several.run(TEXT, chunk, lambda number: [(blocks, last), (blocks, last), (0, blocks)])
    counted = [one.counters()["matrix_rows"] for one in several.all]
    tokens = len(TEXT) - (len(TEXT) - 1) // chunk * chunk
    assert counted[-1] == tokens * sum(_rows(package, name) for name in names), "of the last step"
    assert sum(counted) == tokens * sum(_rows(package, name) for name in MATRICES)
    return found, holder


def _rows(package: Package, name: str) -> int:
    model = package.manifest.model
    return matrix_shape(model, name)[0] * (1 if name == "output" else model.layers)


CASES = [(name, ("q8", "q4")[number % 2], INSTRUCTIONS[0]) for number, name in enumerate(MODELS)]
CASES += [("many neurons", "q4", INSTRUCTIONS[0]), ("wide", "q8", INSTRUCTIONS[0])]
CASES += [("wide", "q4k", INSTRUCTIONS[0]), ("many neurons", "iq4", INSTRUCTIONS[0])]  # with Down in q5k, in q6k
CASES += [("wide", ("q8", "q4")[number % 2], other) for number, other in enumerate(INSTRUCTIONS[1:])]
MORE_CASES = [("wide", ("q4", "q8")[number % 2], other) for number, other in enumerate(INSTRUCTIONS[1:])]
HELD = ("one block", "all blocks")  # of a batch with all matrices; of single tokens with two of them
BOTH = ("many neurons", "wide")  # the others take turns by day: a device compiles its kernels for each


def held_cases() -> Iterator[Any]:
    for number, case in enumerate(CASES + MORE_CASES):
        for turn, what in enumerate(HELD):
            both = case[0] in BOTH and case[2] == INSTRUCTIONS[0]
            by_day = case in CASES and (both or number % 2 == turn)
            yield pytest.param(*case, what, marks=[] if by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "quantization", "instructions", "what"), list(held_cases()))
def test_a_device_gives_the_processors_bits(
    tmp_path: Path, name: str, quantization: Quantization, instructions: str, what: str
) -> None:
    package = write_package(tmp_path / "package", MODELS[name], quantization)
    lib.np_isa_select(instructions.encode())
    wanted = Participants(package, count=1, max_tokens=1).run(TEXT, 1)
    some, chunk, names = (1, 6, MATRICES) if what == HELD[0] else (package.manifest.layout.blocks, 1, MATRICES[:2])
    found, _ = run(package, some, chunk, instructions, names)
    assert np.array_equal(found, wanted), float(np.abs(found - wanted).max())


def coded_rows() -> Iterator[Any]:
    """By day every type in one order of sums and of one width, each order and each width with several types: the device
    compiles its kernels for each, which takes a second."""
    for (order, instructions), (code, quantization) in product(enumerate(INSTRUCTIONS), enumerate(ALL_CODES)):
        for turn, width in enumerate((256, 352)):
            by_day = code % len(INSTRUCTIONS) == order and code // len(INSTRUCTIONS) % 2 == turn
            yield pytest.param(instructions, quantization, width, marks=[] if by_day else pytest.mark.nightly)


@pytest.mark.parametrize(("instructions", "quantization", "width"), list(coded_rows()))
def test_a_device_gives_the_processors_bits_of_rows_with_a_minimum_or_a_codebook(
    instructions: str, quantization: Quantization, width: int
) -> None:
    numbers = Numbers(quantization, width)
    sums, products = numbers.on_the_device(instructions)
    wanted = numbers.on_this_processor(instructions)
    assert np.isfinite(wanted).all()
    assert np.count_nonzero(wanted) > 0.99 * wanted.size
    assert np.array_equal(products, numbers.products(0))
    assert np.array_equal(sums, wanted), float(np.abs(sums - wanted).max())


@pytest.mark.parametrize("name", ["many neurons", "turbosparse"])
def test_who_is_not_predicted_is_not_computed(tmp_path: Path, name: str) -> None:
    package, _ = give_predictor(write_package(tmp_path / "package", SPECS[name], "q8"), TEXT)
    instructions = ffi.string(lib.np_isa_name()).decode()
    exact = Participants(package, count=1, max_tokens=2).run(TEXT, 2)
    wanted = Participants(package, count=1, max_tokens=2, predicts=True).run(TEXT, 2)
    found, holder = run(package, 2, 2, instructions, MATRICES[1:], predicts=True)
    assert np.array_equal(found, wanted)
    assert not np.array_equal(found, exact)
    computed = 2 * package.manifest.layout.block_neurons * package.manifest.model.layers
    pairs = len(TEXT) * package.manifest.model.experts_per_token
    assert 0 < holder.counters()["predicted"] < 0.8 * computed * pairs


def test_a_step_without_held_blocks_may_have_held_matrices(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    instructions, last = ffi.string(lib.np_isa_name()).decode(), package.manifest.layout.blocks
    holder = held(package, 1, 2, instructions)
    rows = matrices(package, holder, 2, instructions, MATRICES)
    several = Participants(package, count=2, max_tokens=2, holder=holder, rows=rows, offloaded_matrices=MATRICES)
    found = several.run(TEXT, 2, lambda number: [(0, last), (0, 0)])
    assert np.array_equal(found, Participants(package, count=1, max_tokens=2).run(TEXT, 2))
    assert several.all[0].counters()["matrix_rows"] == 0
    assert holder.counters()["active"] == 0


def test_matrices_that_nobody_may_hold_are_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    nobody: Any = lambda wanted: None  # noqa: E731
    with pytest.raises(ValueError, match="refused its arguments"):
        Participants(package, count=1, max_tokens=1, offloaded_matrices=("qkv",)).run(TEXT, 1)
    for names, rows, why in (
        (("gate",), nobody, "refused its arguments"),
        (("qkv",), None, "computes no rows"),
    ):
        several = Participants(package, count=1, max_tokens=1, holder=nobody, rows=rows, offloaded_matrices=names)
        with pytest.raises(ValueError, match=why):
            several.run(TEXT, 1, lambda number: [(0, package.manifest.layout.blocks)])


def test_counters_say_what_the_device_computed(tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", SPECS["many neurons"], "q8")
    blocks, layers = package.manifest.layout.blocks, package.manifest.model.layers
    alone = Participants(package, count=1, max_tokens=len(TEXT))
    alone.run(TEXT, len(TEXT))
    counted = alone.counters()
    _, holder = run(package, blocks, len(TEXT), ffi.string(lib.np_isa_name()).decode())
    neurons = package.manifest.layout.clusters * package.manifest.layout.cluster_neurons
    assert holder.counters() == {
        "predicted": neurons * layers * len(TEXT),
        "fired": counted["fired"],
        "active": counted["active"],
    }
    holder.clear_counters()
    assert set(holder.counters().values()) == {0}


@pytest.mark.parametrize("size", [0, 1, 2])
def test_an_engine_takes_the_sums_that_it_wants_and_no_others(tmp_path: Path, size: int) -> None:
    package = write_package(tmp_path / "package", SPECS["many neurons"], "q8")
    blocks = package.manifest.layout.blocks
    sums = np.zeros(size * blocks.bit_count() * package.manifest.model.width, np.float32)
    one = Participants(package, count=1, max_tokens=1, holder=lambda wanted: sums)
    if size == 1:
        one.run(TEXT[:1], 1)
        return
    with pytest.raises(ValueError, match="refused its arguments"):
        one.run(TEXT[:1], 1)


@pytest.mark.parametrize("quantization", ["q8", "q4", "q6k", "q5h", "iq4"])
@pytest.mark.parametrize("instructions", sorted(ORDERS.keys() - set(INSTRUCTIONS)))
def test_the_orders_of_other_processors_compile(quantization: Quantization, instructions: str) -> None:
    """Their bits are test_arm_orders.py's, by night."""
    OffloadedBlocks(find_device(), manifest_of(quantization, 256), blocks=1, tokens=1, instructions=instructions)
