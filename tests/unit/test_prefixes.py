"""Which slot a text gets and what it shares: the rules, for any texts in any order."""

from __future__ import annotations

import contextlib
import itertools
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from neuronpipe.plans.models.attention_sizes import CachedVectors
from neuronpipe.protocol import layouts
from neuronpipe.protocol.memory.segments import Segment
from neuronpipe.services.coordinator.scheduling.prefix_reuse import (
    FORGET_AFTER_S,
    FreeSlots,
    Match,
    Provenance,
    SlotContent,
    TakenSlot,
    common_tokens,
    longest_match,
)
from neuronpipe.services.worker.prefill import KeysValues

texts = st.lists(st.integers(0, 2), max_size=12)  # few tokens, so that texts often begin alike
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


CPU = "cpu:avx2"


def computed(tokens: list[int], numerics: str = CPU) -> SlotContent:
    return SlotContent(tokens, Provenance([(len(tokens), numerics)] if tokens else []))


def begin_alike(first: list[int], second: list[int]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


@given(texts, texts)
def test_the_common_beginning_is_what_comparing_token_by_token_finds(first: list[int], second: list[int]) -> None:
    assert common_tokens(first, second) == begin_alike(first, second)


@given(prompts, st.dictionaries(st.integers(0, 5), texts))
def test_the_longest_match_leaves_the_last_token_to_compute(prompt: list[int], contents: dict[int, list[int]]) -> None:
    most = max((begin_alike(prompt[:-1], content) for content in contents.values()), default=0)
    match = longest_match(prompt, contents)
    if match is None:
        assert most == 0
    else:
        assert match.tokens == most == begin_alike(prompt[:-1], contents[match.slot])


@given(st.integers(1, 4), st.lists(st.tuples(prompts, st.booleans(), st.integers(0, 12)), max_size=30))
def test_a_slot_has_one_text_and_what_it_kept_are_that_texts_own_tokens(
    count: int, story: list[tuple[list[int], bool, int]]
) -> None:
    """Texts come, and the oldest one ends at some length whenever all slots are taken."""
    slots = FreeSlots(count)
    live: list[tuple[int, list[int]]] = []
    held: dict[int, list[int]] = {}
    for prompt, shares, length in story:
        if len(live) == count:
            assert slots.take(prompt, CPU) is None
            slot, tokens = live.pop(0)
            slots.give_back(slot, computed(tokens[:length]), 0.0)
            held[slot] = tokens[:length]
        place = slots.take(prompt, CPU, shares=shares)
        assert place is not None
        assert place.slot not in {slot for slot, _ in live}
        assert place.kept_tokens <= len(prompt) - 1
        assert held.get(place.slot, [])[: place.kept_tokens] == prompt[: place.kept_tokens]
        assert shares or place.kept_tokens == 0
        live.append((place.slot, prompt))
        assert set(slots.shared_in(CPU)) == set(range(count)) - {slot for slot, _ in live}


def test_a_text_goes_on_in_the_slot_that_holds_its_beginning() -> None:
    slots = FreeSlots(3)
    slot, *_ = slots.take([7], CPU)  # type: ignore[misc]
    slots.give_back(slot, computed([1, 2, 3]), 0.0)
    assert slots.take([1, 2, 3, 4], CPU) == TakenSlot(slot, 3)


def test_a_long_text_is_not_given_up_for_the_few_tokens_that_another_shares_with_it() -> None:
    slots = FreeSlots(2)
    long, *_ = slots.take([7], CPU)  # type: ignore[misc]
    slots.give_back(long, computed([1, 2, 3, 4, 5, 6, 7]), 0.0)
    assert slots.take([1, 2, 3, 9], CPU) == TakenSlot(1 - long, 0)
    assert longest_match([1, 2, 3, 9], slots.shared_in(CPU)) == Match(long, 3)


def test_the_slot_used_least_recently_is_taken_first() -> None:
    slots = FreeSlots(3)
    used = [slots.take([number], CPU).slot for number in range(3)]  # type: ignore[union-attr]
    for slot in reversed(used):
        slots.give_back(slot, computed([slot]), 0.0)
    slots.touch(used[2], 1.0)
    slots.touch(99, 1.0)
    assert [slots.take([9], CPU).slot for _ in range(3)] == [used[1], used[0], used[2]]  # type: ignore[union-attr]
    assert slots.take([9], CPU) is None


def test_what_no_request_used_for_long_is_forgotten_and_what_one_shared_is_not() -> None:
    slots = FreeSlots(3)
    for number in range(3):
        slot, *_ = slots.take([number], CPU)  # type: ignore[misc]
        slots.give_back(slot, SlotContent([number, 7], Provenance([(2, CPU)])), 100.0 * number)
    slots.touch(0, FORGET_AFTER_S)
    slots.forget_unused(FORGET_AFTER_S + 100.0)
    assert slots.tokens() == {0: 2, 1: 0, 2: 2}
    assert slots.take([9], CPU) == TakenSlot(1, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.sampled_from("ab")), max_size=12))
def test_who_computed_a_position_is_who_computed_it_last(steps: list[tuple[int, int, str]]) -> None:
    """Each step goes back by so many positions and computes so many in one numerics."""
    provenance, model = Provenance(), ""
    for back, count, numerics in steps:
        first = max(0, len(model) - back)
        provenance.computed(first, first + count, numerics)
        model = model[:first] + numerics * count
    for numerics in "ab":
        assert provenance.tokens_of(numerics) == len(model) - len(model.lstrip(numerics))
    ends = [end for end, _ in provenance.runs]
    assert ends == sorted(set(ends))
    assert all(one[1] != other[1] for one, other in itertools.pairwise(provenance.runs))


def test_only_what_was_computed_in_the_same_numerics_from_the_start_on_is_kept_or_shared() -> None:
    slots = FreeSlots(1)
    slot, *_ = slots.take([7], CPU)  # type: ignore[misc]
    content = SlotContent([1, 2, 3, 4, 5], Provenance([(2, CPU), (5, "onnx")]))
    slots.give_back(slot, content, 0.0)
    assert slots.shared_in(CPU) == {slot: [1, 2]}
    assert slots.shared_in("onnx") == {slot: []}
    assert slots.take([1, 2, 3, 4, 9], CPU) == TakenSlot(slot, 2)
    slots.give_back(slot, content, 0.0)
    assert slots.take([1, 2, 3, 4, 9], "onnx") == TakenSlot(slot, 0)


@pytest.fixture
def keys_values_of() -> Iterator[Callable[..., tuple[KeysValues, memoryview]]]:
    """Makes a KV segment with a different number in every place, as a prefill worker has it, and the numbers."""
    with contextlib.ExitStack() as stack:

        def make(layers: int, vector_width: int, **shape: int) -> tuple[KeysValues, memoryview]:
            vectors = [CachedVectors(4, vector_width)] * layers
            elements = layers * 4 * vector_width
            segment = stack.enter_context(Segment.create(layouts.kv(position_words=elements, **shape)))
            view = stack.enter_context(segment.map(writable=True)).view("kv")
            view[:] = array("H", [1 + place % 65535 for place in range(len(view))])
            return KeysValues(view, segment, vectors, **shape), view

        yield make


def test_copying_takes_the_first_positions_of_every_head_and_leaves_all_else(keys_values_of: Any) -> None:
    layers, sequences, vectors, context_tokens, vector_width = 2, 3, 4, 5, 2
    keys_values, view = keys_values_of(
        layers=layers, sequences=sequences, context_tokens=context_tokens, vector_width=vector_width
    )
    values = view.tolist()
    for _ in range(2):  # a step that is sent again copies again
        keys_values.copy(2, 0, 3)
        for at, value in enumerate(view.tolist()):
            line, position = divmod(at // vector_width, context_tokens)
            sequence = line // vectors % sequences
            copied = sequence == 0 and position < 3
            assert value == values[at] + (2 * vectors * context_tokens * vector_width if copied else 0)
    for source, target, tokens in ((-1, 0, 1), (0, 3, 1), (0, 1, 6)):
        with pytest.raises(ValueError, match="there is no such place"):
            keys_values.copy(source, target, tokens)


def test_forgetting_gives_whole_pages_of_one_slot_back_and_leaves_all_else(keys_values_of: Any) -> None:
    layers, sequences, vectors, context_tokens, vector_width = 2, 3, 4, 96, 64
    page_tokens = 4096 // (2 * vector_width)
    keys_values, view = keys_values_of(
        layers=layers, sequences=sequences, context_tokens=context_tokens, vector_width=vector_width
    )
    before = view.tolist()
    keys_values.forget_behind(1, page_tokens + 1)
    for at, value in enumerate(view.tolist()):
        line, position = divmod(at // vector_width, context_tokens)
        forgotten = line // vectors % sequences == 1 and position >= 2 * page_tokens
        assert value == (0 if forgotten else before[at])
    for slot, tokens in ((-1, 0), (3, 0), (0, 97), (0, -1)):
        with pytest.raises(ValueError, match="there is no such place"):
            keys_values.forget_behind(slot, tokens)
