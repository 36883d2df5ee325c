"""Memory of an external runtime that computes the products of prompts, or an accelerator's blocks
(services/offload/npu/). A runtime computes graphs, each for a fixed number of tokens.

The figures are measured and rounded up. `python -m tests.bench.npu_memory` measures them again.
"""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.protocol.frozen import frozen

MIB = 1 << 20
GRAPH_TOKENS = (64, 128, 512)
"""Numbers of tokens for which there are graphs in prefill. Unused rows are padded with zeros."""

START_TOKENS = 32
"""Fixed cost of a graph, in tokens: submitting it and reading its weights takes as long as computing these tokens."""

OFFLOAD_GRAPH_TOKENS = (1, 2, 4)
"""The same for an accelerator's decode steps. Steps with more sequences run several graphs in turn."""

MAX_PRODUCT_NEURONS = 2048  # maximum of neurons in one external matrix product
FLOAT_BYTES = 4


@frozen(kw_only=True)
class RuntimeCost:
    """The memory that one runtime takes."""

    base_bytes: int  # libraries, including numpy
    keeps: bool  # each graph has memory for its weights; False: it is freed after a product, so only the largest counts
    matrix_weight_bytes: float  # for each weight of an attention matrix
    neuron_weight_bytes: float  # for each weight of Gate, Up and Down
    value_bytes: int  # for each value of a token: inputs, outputs and intermediate values


QNN = RuntimeCost(base_bytes=208 * MIB, keeps=True, matrix_weight_bytes=1.5, neuron_weight_bytes=1.5, value_bytes=10)
RUNTIMES = {
    "onnx:cpu": RuntimeCost(
        base_bytes=64 * MIB, keeps=False, matrix_weight_bytes=8, neuron_weight_bytes=10 / 3, value_bytes=6
    ),
    "onnx:qnn-emulated": QNN,
    "onnx:qnn": QNN,
}
"""Costs by backend, for all chips. QNN was never measured on a device: it has the figures of its emulator."""


def runtime_of(backend: str) -> RuntimeCost | None:
    """Return the cost of the runtime that computes products for this backend; None if the engine computes them."""
    return RUNTIMES.get(":".join(backend.split(":")[:2]))


def graph_tokens(max_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the graphs for prefill steps of up to `max_tokens` tokens, ascending.

    Steps longer than the longest graph run several graphs in turn.
    """
    shorter = [tokens for tokens in GRAPH_TOKENS if tokens < max_tokens]
    return (*shorter, *GRAPH_TOKENS[len(shorter) : len(shorter) + 1])


def graphs_for(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the graphs that compute `tokens` tokens one after the other.

    The longest graph is used as long as it is full. The remaining tokens take the shortest graph that fits them, or
    several shorter ones if these cost less.

    lengths: available lengths, ascending
    """
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
    full_graphs, last_tokens = divmod(tokens, shorter)
    last_cost = min(length for length in lengths if length >= last_tokens) + START_TOKENS if last_tokens else 0
    return shorter if full_graphs * (shorter + START_TOKENS) + last_cost < whole + START_TOKENS else whole


def runtime_bytes(manifest: Manifest, backend: str, *, neurons: int, tokens: int) -> int:
    """Return the bytes that a runtime adds to the prefill process; 0 if the engine computes products itself.

    neurons: neurons of one product
    tokens: maximum of tokens in a step
    """
    if (cost := runtime_of(backend)) is None:
        return 0
    model = manifest.model
    matrices, ffn = (model.qkv_rows * model.width, model.width * model.query_width), 3 * neurons * model.width
    # One byte for a weight, in permanent buffers. Products of neurons alternate between two buffers.
    rows = 2 * ffn + sum(matrices)
    matrix_values, ffn_values = model.width + model.qkv_rows, 2 * model.width + 3 * neurons
    exchanged_values = max(model.width, model.query_width) + max(model.qkv_rows, model.width)  # from and to the engine
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
    return cost.base_bytes + rows + int(graphs) + tokens * exchanged_values * FLOAT_BYTES


def offload_runtime_bytes(manifest: Manifest, backend: str, *, neurons: int) -> int:
    """Return the bytes that a runtime adds to the accelerator process besides offloaded weights; 0 without a runtime.

    neurons: neurons of one product
    """
    if (cost := runtime_of(backend)) is None:
        return 0
    width = manifest.model.width
    graph = cost.neuron_weight_bytes * 3 * neurons * width
    values = (2 * width + 3 * neurons) * cost.value_bytes
    if cost.keeps:
        in_floats = FLOAT_BYTES * neurons * width  # one matrix as floats, if a product is computed again
        return cost.base_bytes + int(len(OFFLOAD_GRAPH_TOKENS) * graph) + sum(OFFLOAD_GRAPH_TOKENS) * values + in_floats
    return cost.base_bytes + int(graph) + max(OFFLOAD_GRAPH_TOKENS) * values
