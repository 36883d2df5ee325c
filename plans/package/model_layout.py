"""The layout of a new package of a model: experts as wholes, or neurons in clusters."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import (
    GROUP_WEIGHTS,
    Layout,
    NeuronOrder,
    Quantization,
    compute_layout,
    expert_layout,
)

MAX_EXPERT_WEIGHTS = 24 << 20  # eight experts are read at once, and their buffers count in the memory limit


def layout_of_model(
    model: ModelSpec,
    quantization: Quantization,
    order: NeuronOrder,
    *,
    differing: Mapping[str, Quantization | None] | None = None,
    by_neuron: bool = False,
) -> Layout:
    """Return the layout of a new package of a model.

    If all neurons fire, a mixture's experts are stored as wholes, with Down by output, as the source has it: products
    with whole rows are faster than sums of rows, and a file's encoding of Down can be kept. Neurons in clusters can be
    left out or cached one by one.

    differing: quantizations by matrix, where they differ from `quantization`
    by_neuron: store neurons in clusters in any case
    """
    if not by_neuron and order == "source" and stores_whole_experts(model):
        of_matrix = {name: (differing or {}).get(name) or quantization for name in model.ffn_matrices}
        return expert_layout(model.width, model.neurons, of_matrix, package=quantization)
    return compute_layout(
        quantization,
        model.width,
        model.neurons,
        model.ffn_matrices,
        order,
        differing=differing,
        read_whole=model.read_whole,
    )


def stores_whole_experts(model: ModelSpec) -> bool:
    """Return True if a new package of a model stores experts as wholes, unless it is asked for neurons in clusters."""
    return (
        model.experts > 1
        and model.gated
        and model.all_neurons_fire
        and model.neurons % GROUP_WEIGHTS == 0
        and len(model.ffn_matrices) * model.width * model.neurons <= MAX_EXPERT_WEIGHTS
    )
