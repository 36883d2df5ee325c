"""Where neurons lie: the layouts that the documentation promises, and rules every layout keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.plans.package.layout import (
    PAGE_BYTES,
    Layout,
    Quantization,
    compute_layout,
    quant_bytes,
    scale_bytes,
)

WIDTHS = st.integers(1, 512).map(lambda groups: groups * 32)
GATED = ("gate", "up", "down")
QUANTIZATIONS: st.SearchStrategy[Quantization] = st.sampled_from(("q4", "q8", "f16"))


def test_a_7b_neuron_at_q4_is_two_pages_and_its_gate_is_one() -> None:
    layout = compute_layout("q4", 4096, 11008, GATED, "source")
    assert layout.cluster_neurons == 1
    assert (layout.trigger_part_bytes, layout.value_part_bytes) == (4096, 4096)
    assert {matrix.scales_part for matrix in layout.matrices} == {"trigger"}
    assert [matrix.scales for matrix in layout.matrices] == [2048, 2304, 2560]
    assert [matrix.quants for matrix in layout.matrices] == [0, 0, 2048]
    assert (layout.block_neurons, layout.blocks) == (344, 32)


def test_without_a_gate_the_up_rows_decide_and_the_down_rows_follow() -> None:
    layout = compute_layout("q4", 4096, 16384, ("up", "down"), "source")
    assert layout.cluster_neurons == 2
    assert [(matrix.name, matrix.part) for matrix in layout.matrices] == [("up", "trigger"), ("down", "value")]
    assert (layout.trigger_part_bytes, layout.value_part_bytes) == (8192, 4096)


def test_small_neurons_share_pages() -> None:
    layout = compute_layout("q8", 320, 1024, GATED, "source")
    assert layout.cluster_neurons == 12
    assert layout.clusters == 86
    assert (layout.trigger_part_bytes, layout.value_part_bytes) == (4096, 8192)
    assert (layout.block_neurons, layout.blocks) == (72, 15)


def test_f16_has_no_scales() -> None:
    layout = compute_layout("f16", 320, 1000, GATED, "source")
    assert all(size == 0 for _, name, _, size in layout.pieces("f16", 320) if name.endswith("scales"))


@given(QUANTIZATIONS, WIDTHS, st.integers(1, 40_000))
def test_pieces_neither_overlap_nor_leave_their_part(quantization: Quantization, width: int, neurons: int) -> None:
    layout = compute_layout(quantization, width, neurons, GATED, "source")
    ends = {"trigger": 0, "value": 0}
    for part, _, offset, size_bytes in sorted(layout.pieces(quantization, width), key=lambda piece: piece[2]):
        assert offset >= ends[part]
        ends[part] = offset + size_bytes
    assert ends["trigger"] <= layout.trigger_part_bytes
    assert ends["value"] <= layout.value_part_bytes
    assert layout.trigger_part_bytes % PAGE_BYTES == layout.value_part_bytes % PAGE_BYTES == 0


def test_a_slot_of_a_7b_gate_at_q4_leaves_the_padding_of_its_page_behind() -> None:
    layout = compute_layout("q4", 4096, 14336, GATED, "source")
    assert layout.slot_bytes("trigger", "q4", 4096) == 2816  # 2048 quants and three rows of 256 scale bytes
    assert layout.slot_bytes("value", "q4", 4096) == 4096


@given(QUANTIZATIONS, WIDTHS, st.integers(1, 40_000))
def test_slots_hold_every_piece_in_whole_cache_lines(quantization: Quantization, width: int, neurons: int) -> None:
    layout = compute_layout(quantization, width, neurons, GATED, "source")
    slots = {
        "trigger": layout.slot_bytes("trigger", quantization, width),
        "value": layout.slot_bytes("value", quantization, width),
    }
    assert all(offset + size <= slots[part] for part, _, offset, size in layout.pieces(quantization, width))
    assert slots["trigger"] % 64 == slots["value"] % 64 == 0
    assert slots["trigger"] <= layout.trigger_part_bytes
    assert slots["value"] <= layout.value_part_bytes


def test_a_7b_gate_at_q4_takes_its_own_rows_alone_where_scales_are_moved() -> None:
    layout = compute_layout("q4", 4096, 14336, GATED, "source")
    slots = layout.slots("q4", 4096, moved=True)
    assert (slots.trigger_bytes, slots.value_bytes) == (2304, 4608)
    assert (slots.moved_from, slots.moved_bytes) == (2304, 512)
    assert [(m.part, m.quants, m.scales_part, m.scales) for m in slots.matrices] == [
        ("trigger", 0, "trigger", 2048),
        ("value", 0, "value", 4096),
        ("value", 2048, "value", 4352),
    ]
    assert layout.slots("q4", 4096).matrices == layout.matrices
    assert [layout.value_read_bytes(moved=moved) for moved in (False, True)] == [4096, 8192]


@given(QUANTIZATIONS, WIDTHS, st.integers(1, 40_000), st.sampled_from((GATED, GATED[1:])), st.booleans())
def test_slots_hold_every_row_once_wherever_scales_are(
    quantization: Quantization, width: int, neurons: int, matrices: tuple[str, ...], moved: bool
) -> None:
    layout = compute_layout(quantization, width, neurons, matrices, "source")
    plain, slots = layout.slots(quantization, width), layout.slots(quantization, width, moved=moved)
    rows = layout.cluster_neurons
    pieces = [(m.part, m.quants, rows * quant_bytes(quantization, width)) for m in slots.matrices]
    pieces += [(m.scales_part, m.scales, rows * scale_bytes(quantization, width)) for m in slots.matrices]
    for part, most in (("trigger", slots.trigger_bytes), ("value", slots.value_bytes)):
        ends = 0
        for offset, size in sorted((offset, size) for of, offset, size in pieces if of == part and size):
            assert offset >= ends
            ends = offset + size
        assert ends <= most
        assert most % 64 == 0
    assert slots.both_bytes <= plain.both_bytes
    assert (slots.trigger_bytes < plain.trigger_bytes) == (slots.moved_bytes > 0)
    assert slots.moved_from + slots.moved_bytes <= layout.trigger_part_bytes
    assert slots.value_bytes - slots.moved_bytes <= layout.value_part_bytes


@given(QUANTIZATIONS, WIDTHS, st.integers(1, 40_000))
def test_blocks_hold_whole_clusters_and_cover_the_layer(quantization: Quantization, width: int, neurons: int) -> None:
    layout = compute_layout(quantization, width, neurons, GATED, "source")
    assert layout.block_neurons % layout.cluster_neurons == 0
    assert layout.clusters * layout.cluster_neurons >= neurons > (layout.clusters - 1) * layout.cluster_neurons
    assert (layout.blocks - 1) * layout.block_clusters < layout.clusters <= layout.blocks * layout.block_clusters
    assert layout.blocks <= 32


@given(QUANTIZATIONS, st.integers(8, 512).map(lambda groups: groups * 32))
def test_padding_is_at_most_a_quarter_where_some_cluster_achieves_it(quantization: Quantization, width: int) -> None:
    layout = compute_layout(quantization, width, 1000, GATED, "source")
    used = layout.cluster_neurons * 3 * (quant_bytes(quantization, width) + scale_bytes(quantization, width))
    assert 1 - used / layout.cluster_stride_bytes <= 0.25


@pytest.mark.parametrize(("layer", "neuron", "word"), [(0, 0, 0), (0, 11, 0), (0, 12, 1), (1, 0, 86), (7, 1023, 687)])
def test_addresses_count_clusters_layer_after_layer(layer: int, neuron: int, word: int) -> None:
    layout: Layout = compute_layout("q8", 320, 1024, GATED, "source")
    assert layout.cluster_index(layer, neuron) == word
    assert layout.offset_bytes(word) == word * 12288
    assert layout.offset_bytes(word, "value") == word * 12288 + 4096


@pytest.mark.parametrize(("width", "neurons"), [(2048, 768), (2560, 768), (4096, 14336)])
def test_clusters_that_are_read_whole_waste_little(width: int, neurons: int) -> None:
    small, whole = (compute_layout("q4", width, neurons, GATED, "source", read_whole=read) for read in (False, True))
    row_bytes = quant_bytes("q4", width) + scale_bytes("q4", width)
    waste = 1 - 3 * neurons * row_bytes / (whole.clusters * whole.cluster_stride_bytes)
    assert waste <= 0.03
    assert whole.cluster_neurons > small.cluster_neurons
    assert whole.block_neurons % whole.cluster_neurons == 0
