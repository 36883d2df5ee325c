"""How many texts there is room for when nobody says: none whose KV cache makes one text slow (a 7B at 3 GiB came to
0.4 tokens/s with room for three texts, and 1.0 with room for one)."""

from __future__ import annotations

import dataclasses

import pytest
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.planner.default_sizes import MAX_LOSS, MAX_SEQUENCES, plan_for_sequences
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import LimitTooSmall, PlanOptions
from neuronpipe.plans.planner.planner import make_plan

from tests.unit.test_planner import device, manifest

SIZES = range(1, MAX_SEQUENCES + 1)


@pytest.fixture(scope="module")
def package() -> Manifest:
    """32 MiB of neurons, and 16 MiB of KV cache a text."""
    plain = manifest(neurons=4096, order="frequency")
    return dataclasses.replace(plain, model=dataclasses.replace(plain.model, context_tokens=8192))


def speeds(package: Manifest, facts: DeviceFacts, memory_bytes: int) -> dict[int, float]:
    """Of one text, by how many there is room for; without those that memory does not hold."""
    found = {}
    for sequences in SIZES:
        try:
            made = make_plan(package, facts, PlanOptions(memory_bytes=memory_bytes, sequences=sequences))
        except LimitTooSmall:
            break
        assert made.expected.tokens_per_s is not None
        found[sequences] = made.expected.tokens_per_s
    return found


def limits(package: Manifest, facts: DeviceFacts) -> range:
    """From the least for one text to where everything is resident beside the KV of four."""
    least = make_plan(package, facts, PlanOptions()).memory.least_bytes
    return range(least, least + (128 << 20), 4 << 20)


def test_as_many_texts_as_leave_one_text_nine_tenths_of_its_speed(package: Manifest) -> None:
    facts, chosen = device(), set()
    for limit in limits(package, facts):
        expected = speeds(package, facts, limit)
        made = plan_for_sequences(package, facts, PlanOptions(memory_bytes=limit))
        count = made.compute.sequences
        chosen.add(count)
        assert count == max(n for n, speed in expected.items() if speed >= (1 - MAX_LOSS) * expected[1])
    assert chosen >= {1, MAX_SEQUENCES}


def test_the_plan_says_why_so_many(package: Manifest) -> None:
    facts = device()
    for limit in limits(package, facts):
        expected = speeds(package, facts, limit)
        made = plan_for_sequences(package, facts, PlanOptions(memory_bytes=limit))
        count, reason = made.compute.sequences, made.reasons[0]
        assert reason.startswith(f"room for {count} text")
        if count + 1 in expected:
            speed = f"{show_number(expected[count + 1])} tokens/s instead of {show_number(expected[1])} tokens/s"
            assert f"one text would get {speed}; --sequences" in reason
        elif count < MAX_SEQUENCES:
            assert "memory does not hold the KV cache of another" in reason


def test_the_rest_of_the_plan_is_the_one_for_that_number(package: Manifest) -> None:
    facts = device()
    for limit in limits(package, facts):
        made = plan_for_sequences(package, facts, PlanOptions(memory_bytes=limit))
        same = make_plan(package, facts, PlanOptions(memory_bytes=limit, sequences=made.compute.sequences))
        assert dataclasses.replace(made, reasons=made.reasons[1:]) == same


def test_where_nothing_was_measured_bytes_from_flash_stand_in_for_speed(package: Manifest) -> None:
    facts = dataclasses.replace(device(), flash=None, memory_speed=None)
    chosen = [plan_for_sequences(package, facts, PlanOptions(memory_bytes=limit)) for limit in limits(package, facts)]
    assert {made.compute.sequences for made in chosen} >= {1, MAX_SEQUENCES}
    for made in chosen:
        alone = make_plan(
            package, facts, PlanOptions(memory_bytes=made.memory.limit_bytes)
        ).expected.flash_bytes_per_token
        assert (1 - MAX_LOSS) * made.expected.flash_bytes_per_token <= alone


def test_too_little_for_one_text_is_refused_as_for_one_text(package: Manifest) -> None:
    facts = device()
    least = make_plan(package, facts, PlanOptions()).memory.least_bytes
    with pytest.raises(LimitTooSmall, match=f"the least for this package is {-(-least // (1 << 20))}MiB: "):
        plan_for_sequences(package, facts, PlanOptions(memory_bytes=least - 1))
