"""Strict reading of the manifest's section on experts that are read in place."""

from __future__ import annotations

from neuronpipe.native import ROW_TYPES, lib
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Layout, Quantization
from neuronpipe.plans.package.source_experts import (
    GGUF_TYPES,
    SourceExperts,
    expert_bytes,
    parse_source_experts,
    read_bytes,
)
from neuronpipe.plans.strict_json import Record


def parse_experts(
    record: Record, model: ModelSpec, layout: Layout, quantization: Quantization, shared_bytes: int | None
) -> SourceExperts:
    """Return the section `source_experts`. Raises UserError if rows leave their file, or their encoding does not fit
    the layout. shared_bytes: length of shared.bin; None: the package has none
    """
    experts = parse_source_experts(record, len(model.runs), shared_bytes)
    lengths = [file.bytes for file in experts.files] + ([] if shared_bytes is None else [shared_bytes])
    if not layout.down_by_output or model.experts == 1:
        record.fail("matrices", "experts in place need a mixture, and a layout with down_by_output")
    part_bytes = {"trigger": [0] * len(model.runs), "value": [0] * len(model.runs)}
    for place in layout.matrices:
        of_slots = place.quantization or quantization
        for run, rows in enumerate(experts.matrices[place.name]):
            where = f"matrices.{place.name}.{run}"
            size_bytes = expert_bytes(rows.encoding, layout, place.name, model.width)
            if not size_bytes or not lib.np_gguf_fits(GGUF_TYPES[rows.encoding], ROW_TYPES[of_slots]):
                record.fail(f"{where}.encoding", f"{rows.encoding} does not go with {of_slots} and this shape")
            if 0 < rows.stride < size_bytes:
                record.fail(f"{where}.stride", f"is less than the {size_bytes} bytes of an expert's rows")
            if rows.end(model.runs[run][2], size_bytes) > lengths[rows.file]:
                record.fail(f"{where}.offset", "the experts leave the file")
            part_bytes[place.part][run] += read_bytes(size_bytes)
    planned_bytes = {"trigger": layout.trigger_part_bytes, "value": layout.value_part_bytes}
    for part, by_run in part_bytes.items():
        if max(by_run) > planned_bytes[part]:
            record.fail("matrices", f"reads of {max(by_run)} bytes exceed the layout's {part} part")
    return experts


def require_whole_experts(layout: Layout, model: ModelSpec, quantization: Quantization, record: Record) -> None:
    """Raise UserError unless an expert is one cluster, or a dense feed-forward is slices without biases, and each
    cluster is a block, as Down by output requires, and its rows of Down are whole groups. quantization: the package's
    """
    are_blocks = layout.clusters == layout.blocks and layout.cluster_neurons == layout.block_neurons
    are_full = layout.clusters * layout.cluster_neurons == model.neurons
    is_known = layout.clusters == 1 if model.experts > 1 else not model.ffn_bias
    if not (model.all_neurons_fire and model.gated and is_known and are_blocks and are_full):
        record.fail(
            "down_by_output",
            "needs a model whose neurons all fire, each cluster as a block, each expert of a mixture as one cluster",
        )
    if quantization != "f16" and layout.cluster_neurons % GROUP_WEIGHTS:
        record.fail("cluster_neurons", f"with down_by_output a multiple of {GROUP_WEIGHTS}, unless the package is f16")
    if layout.slices > MAX.experts:
        record.fail("clusters", f"{layout.slices} slices of a feed-forward; at most {MAX.experts}")
    if any(place.scales_part != place.part for place in layout.matrices):
        record.fail("matrices.down.scales_part", "with down_by_output scales lie in their matrix's part")
    if layout.neuron_order != "source":
        record.fail("down_by_output", "needs neurons in the order of the source")
