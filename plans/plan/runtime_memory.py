"""What a runtime takes that computes the products of prompts, or an accelerator's blocks: services/offload/npu/.

The figures are measured, and rounded up: services/offload/npu/README.md has them beside what this says.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.protocol.frozen import frozen

MIB = 1 << 20
GRAPH_TOKENS = (64, 128, 512)
"""Tokens of a graph. What is not filled is padded with zeros."""

START_TOKENS = 32
"""What a graph costs besides its tokens: to hand it over and to read its rows takes as long as so many tokens."""

HELD_TOKENS = (1, 2, 4)
"""The same of an accelerator's graphs. More texts go by turns."""

MAX_PRODUCT_NEURONS = 2048  # that are handed to another to compute at once
FLOAT_BYTES = 4


@frozen(kw_only=True)
class RuntimeCost:
    """Bytes of one runtime. Some keep a graph's memory as long as the graph; others give it back after each product, so
    that the largest counts, once."""

    base_bytes: int  # libraries, with numpy
    keeps: bool
    matrix_weight_bytes: float  # of each weight of an attention matrix
    neuron_weight_bytes: float  # of each of gate, up and down together
    value_bytes: int  # of each value of a token: inputs, outputs, and what lies between them


QNN = RuntimeCost(base_bytes=208 * MIB, keeps=True, matrix_weight_bytes=1.5, neuron_weight_bytes=1.5, value_bytes=10)
RUNTIMES = {
    "onnx:cpu": RuntimeCost(
        base_bytes=64 * MIB, keeps=False, matrix_weight_bytes=8, neuron_weight_bytes=10 / 3, value_bytes=6
    ),
    "onnx:qnn-emulated": QNN,
    "onnx:qnn": QNN,
}
"""By backend, whatever the chip. A device's own was never measured: it is taken to be its emulator's."""


def runtime_of(backend: str) -> RuntimeCost | None:
    """The runtime that computes products for this backend, whatever the chip; None: the engine computes them itself."""
    return RUNTIMES.get(":".join(backend.split(":")[:2]))


def graph_tokens(most_tokens: int) -> tuple[int, ...]:
    """The lengths of the graphs for steps of up to so many tokens. Longer ones go by turns."""
    shorter = [tokens for tokens in GRAPH_TOKENS if tokens < most_tokens]
    return (*shorter, *GRAPH_TOKENS[len(shorter) : len(shorter) + 1])


def graphs_for(tokens: int, lengths: Sequence[int]) -> list[int]:
    """The lengths, out of ascending ones, of the graphs that compute so many tokens one after the other: all are full
    but the last. The longest while it is full; then the shortest that holds the rest, or turns of the next shorter one,
    where these cost less."""
    chosen = []
    while tokens > 0:
        chosen.append(_next_graph(tokens, lengths))
        tokens -= chosen[-1]
    return chosen


def _next_graph(tokens: int, lengths: Sequence[int]) -> int:
    number = next((number for number, length in enumerate(lengths) if length >= tokens), len(lengths) - 1)
    whole, shorter = lengths[number], lengths[number - 1]
    if tokens >= whole or number == 0:
        return whole
    turns, rest = divmod(tokens, shorter)
    ends = min(length for length in lengths if length >= rest) + START_TOKENS if rest else 0
    return shorter if turns * (shorter + START_TOKENS) + ends < whole + START_TOKENS else whole


def runtime_bytes(manifest: Manifest, backend: str, *, neurons: int, tokens: int) -> int:
    """What this backend takes in steps of up to so many tokens, besides what the engine takes; nothing, if it is the
    engine itself. neurons: of one graph."""
    if (cost := runtime_of(backend)) is None:
        return 0
    model = manifest.model
    matrices, ffn = (model.qkv_rows * model.width, model.width * model.query_width), 3 * neurons * model.width
    rows = 2 * ffn + sum(matrices)  # as bytes, in buffers that stay; neurons of two products by turns
    matrix_values, ffn_values = model.width + model.qkv_rows, 2 * model.width + 3 * neurons
    handed = max(model.width, model.query_width) + max(model.qkv_rows, model.width)  # from and to the engine
    lengths = graph_tokens(tokens)
    if cost.keeps:
        weights = len(lengths) * (cost.matrix_weight_bytes * sum(matrices) + cost.neuron_weight_bytes * ffn)
        graphs = weights + sum(lengths) * max(matrix_values, ffn_values) * cost.value_bytes
    else:
        products = (
            (cost.matrix_weight_bytes * max(matrices), matrix_values),
            (cost.neuron_weight_bytes * ffn, ffn_values),
        )
        graphs = max(weights + max(lengths) * values * cost.value_bytes for weights, values in products)
    return cost.base_bytes + rows + int(graphs) + tokens * handed * FLOAT_BYTES


def holder_bytes(manifest: Manifest, backend: str, *, neurons: int) -> int:
    """What this backend takes as an accelerator's, besides the weights that it holds; nothing, if it is no runtime.
    neurons: of one graph."""
    if (cost := runtime_of(backend)) is None:
        return 0
    width = manifest.model.width
    graph = cost.neuron_weight_bytes * 3 * neurons * width
    values = (2 * width + 3 * neurons) * cost.value_bytes
    if cost.keeps:
        in_floats = FLOAT_BYTES * neurons * width  # of one matrix, where a product is computed again
        return cost.base_bytes + int(len(HELD_TOKENS) * graph) + sum(HELD_TOKENS) * values + in_floats
    return cost.base_bytes + int(graph) + max(HELD_TOKENS) * values
