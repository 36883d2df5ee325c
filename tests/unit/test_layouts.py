"""Layouts: fields neither overlap nor straddle lines, and agree wherever they are computed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.native import lib
from neuronpipe.protocol import layouts
from neuronpipe.protocol.layouts.run import BOARD_FLASH, BOARD_MEMORY, BOARD_WORDS
from neuronpipe.protocol.memory.layout import LINE_BYTES, LINE_WORDS, PAGE_BYTES, Fields, Layout

length = st.integers(1, 100)
some_layout = st.one_of(
    st.builds(layouts.residency, clusters=length, ffns=st.just(1), participants=length, ring_entries=length),
    st.builds(layouts.board, processes=length, sequences=length),
    st.builds(layouts.kv, position_words=length, sequences=length, context_tokens=length),
    st.builds(
        layouts.exchange,
        tokens=length,
        width=length,
        output_width=length,
        query_width=length,
        neurons=length,
        blocks=length,
        rank=st.integers(0, 100),
        claims=length,
        experts_per_token=length,
        groups=length,
        logit_rows=length,
        vocabulary=length,
        workers=length,
        lane_words=length,
    ),
)


@given(some_layout)
def test_fields_start_on_lines_and_do_not_overlap(layout: Layout) -> None:
    end = PAGE_BYTES
    for field in layout.fields:
        assert field.offset_bytes % LINE_BYTES == 0
        assert field.offset_bytes >= end
        end = field.offset_bytes + field.total_bytes
    assert end <= layout.total_bytes
    assert layout.total_bytes % PAGE_BYTES == 0


def test_slots_lie_one_after_the_other() -> None:
    layout = layouts.slots(trigger_slots=3, trigger_slot_bytes=2816, value_slots=5, value_slot_bytes=12288)
    assert layout["trigger_slots"].total_bytes == 3 * 2816
    assert layout["value_slots"].offset_bytes == 4096 + 3 * 2816
    assert layout.total_bytes == 4096 * -(-(4096 + 3 * 2816 + 5 * 12288) // 4096)


def test_a_fingerprint_tells_layouts_apart() -> None:
    made = [
        layouts.residency(clusters=words, ffns=1, participants=participants).fingerprint
        for words in (64, 65)
        for participants in (1, 2)
    ]
    assert len(set(made)) == 4
    assert layouts.board(processes=2, sequences=2).fingerprint == layouts.board(processes=2, sequences=2).fingerprint


def test_every_segment_has_a_kind_of_its_own() -> None:
    examples = layouts.examples()
    assert len({layout.kind for layout in examples}) == len({layout.name for layout in examples}) == len(examples)


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="board: no field epoch"):
        layouts.board(processes=1, sequences=2)["epoch"]


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"board.processes: shape \(-1, 16\) is negative"):
        layouts.board(processes=-1, sequences=2)


def test_the_words_of_the_board_fit_their_lines() -> None:
    assert len(BOARD_WORDS) <= LINE_WORDS
    board = layouts.board(processes=1, sequences=2)
    assert len(BOARD_MEMORY) <= board["memory"].shape[0]
    assert len(BOARD_FLASH) <= board["flash"].shape[0]
    assert len(BOARD_FLASH) == lib.NP_LOADER_BOARD  # the loader stores them all


def test_a_field_is_laid_out_once() -> None:
    fields = Fields("twice", 99, {})
    fields.add("one", "u32", 4, by="a", to="b", ordering="none")
    with pytest.raises(ValueError, match=r"twice.one: laid out twice"):
        fields.add("one", "u32", 4, by="a", to="b", ordering="none")


@given(some_layout)
def test_a_layout_is_read_from_its_text_as_it_was_made(layout: Layout) -> None:
    read = Layout.parse(layout.name, layout.kind, layout.text, layout.total_bytes)
    assert (read.text, read.fingerprint, read.total_bytes) == (layout.text, layout.fingerprint, layout.total_bytes)
    for one, other in zip(read.fields, layout.fields, strict=True):
        assert (one.name, one.type, one.shape, one.offset_bytes, one.total_bytes) == (
            other.name,
            other.type,
            other.shape,
            other.offset_bytes,
            other.total_bytes,
        )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("one u32 16", "is no field"),
        ("one u32 -1 4096", "is no field"),
        ("one u32 16x99999999999999999999 4096", "is no field"),
        ("one u32 16 64", "one does not lie"),
        ("one u32 16 4097", "one does not lie"),
        ("one u32 2048 4096", "one does not lie"),
        ("one u32 16 4160\ntwo u32 16 4096", "two does not lie"),
    ],
)
def test_a_text_that_lays_a_field_out_of_its_place_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout.parse("board", 6, text, 8192)


def test_prefill_has_the_same_stages_as_decode() -> None:
    lengths = {
        "tokens": 4,
        "width": 32,
        "output_width": 32,
        "query_width": 64,
        "neurons": 96,
        "blocks": 3,
        "rank": 8,
        "claims": 5,
    }
    lengths |= {"experts_per_token": 3, "groups": 7}
    own = layouts.prefill_stage(partial_tokens=2, **lengths)
    shared = layouts.exchange(logit_rows=1, vocabulary=1, workers=2, lane_words=96, **lengths)
    decode_only = {"epoch", "logits", "lanes", "finished", "drafted"}
    assert {field.name for field in shared.fields} - {field.name for field in own.fields} == decode_only
    assert own["partials"].shape == (2 * 3, 3, 32)
    assert own["hidden"].shape == (4 * 3, 96)
    assert own["predicted"].shape == (7, 96, 1)
    assert all(own[field.name].shape == shared[field.name].shape for field in own.fields if field.name != "partials")
