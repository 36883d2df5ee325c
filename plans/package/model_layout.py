"""The layout of a new package of a model: experts as wholes, a dense feed-forward in slices, or neurons in clusters."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import (
    BLOCK_WEIGHTS,
    GROUP_WEIGHTS,
    Layout,
    NeuronOrder,
    Quantization,
    compute_layout,
    expert_layout,
)

MAX_EXPERT_WEIGHTS = 24 << 20  # eight experts are read at once, and their buffers count in the memory limit
MAX_SLICE_WEIGHTS, MAX_SLICE_NEURONS = 8 << 20, 512  # rows of Down with more weights are hardly faster


def layout_of_model(
    model: ModelSpec,
    quantization: Quantization,
    order: NeuronOrder,
    *,
    differing: Mapping[str, Quantization | None] | None = None,
    by_neuron: bool = False,
) -> Layout:
    """Return the layout of a new package of a model.

    If all neurons fire, Down is stored by output, as the source has it: products with whole rows are faster than sums
    of rows, and a file's encoding of Down can be kept. A mixture's experts are then stored as wholes, and a dense
    feed-forward in slices. Neurons in clusters can be left out or cached one by one.

    differing: quantizations by matrix, where they differ from `quantization`
    by_neuron: store neurons in clusters in any case
    """
    if not by_neuron and order == "source" and (slices := slices_of_model(model)):
        of_matrix = {name: (differing or {}).get(name) or quantization for name in model.ffn_matrices}
        return expert_layout(model.width, model.neurons, of_matrix, slices=slices, package=quantization)
    return compute_layout(
        quantization,
        model.width,
        model.neurons,
        model.ffn_matrices,
        order,
        differing=differing,
        read_whole=model.read_whole,
    )


def slices_of_model(model: ModelSpec) -> int:
    """Return the number of slices of a feed-forward in a new package, unless it is asked for neurons in clusters: 1 if
    experts are stored as wholes, 0 if Down has a row for each neuron in any case."""
    if not (model.gated and model.all_neurons_fire):
        return 0
    neuron_weights = len(model.ffn_matrices) * model.width
    if model.experts > 1:
        fits = model.neurons % GROUP_WEIGHTS == 0 and neuron_weights * model.neurons <= MAX_EXPERT_WEIGHTS
        return int(fits)
    if model.ffn_bias or model.neurons % BLOCK_WEIGHTS:
        return 0
    largest = min(MAX_SLICE_NEURONS, MAX_SLICE_WEIGHTS // neuron_weights) // BLOCK_WEIGHTS * BLOCK_WEIGHTS
    sizes = range(max(largest, BLOCK_WEIGHTS), 0, -BLOCK_WEIGHTS)
    return model.neurons // next(size for size in sizes if model.neurons % size == 0)
