"""Drafted tokens: what is drafted, and when steps have drafts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.services.coordinator.scheduling.drafts import (
    ASSUMED_TRIALS,
    MIN_GAIN,
    RETRY_STEPS,
    Drafter,
    LayerAcceptance,
    StepTimes,
)


def begun() -> StepTimes:
    """Times of a run whose first step was slow."""
    times = StepTimes()
    times.measured(0, 5000.0)
    return times


def drafter_of(tokens: list[int]) -> Drafter:
    """A drafter of a text whose last token has just been added."""
    drafter = Drafter(tokens[:-1])
    drafter.append(tokens[-1])
    return drafter


def test_a_draft_is_what_followed_the_last_three_tokens_before() -> None:
    assert drafter_of([1, 2, 3, 4, 5, 9, 1, 2, 3]).draft(2) == (4, 5)
    assert drafter_of([1, 2, 3, 4, 7, 1, 2, 3, 5, 7, 1, 2, 3]).draft(1) == (5,), "the latest occurrence counts"


def test_a_text_that_is_new_has_no_draft() -> None:
    assert drafter_of([1, 2, 3, 4, 5, 6]).draft(3) == ()
    assert drafter_of([1]).draft(3) == ()


def test_a_draft_may_reach_into_the_newest_tokens() -> None:
    assert drafter_of([7] * 5).draft(3) == (7,)


def test_tokens_are_compared_whole() -> None:
    """The bytes of the last three tokens occur one byte into the first ones too."""
    text = [256, 65792, 256, 1280, 1, 257, 1]
    assert drafter_of(text).draft(1) == ()


@given(st.lists(st.integers(0, 2), min_size=4, max_size=60))
def test_every_draft_follows_an_earlier_occurrence_of_the_newest_tokens(tokens: list[int]) -> None:
    drafter = Drafter(tokens[:1])
    for count in range(1, len(tokens)):
        drafter.append(tokens[count])
        text = tokens[: count + 1]
        followers = {text[at + 3] for at in range(len(text) - 3) if text[at : at + 3] == text[-3:]}
        draft = drafter.draft(1)
        assert (set(draft) <= followers) if followers else draft == ()
        assert bool(draft) == bool(followers)


def test_acceptance_rises_while_a_text_repeats_itself_and_falls_after() -> None:
    drafter = Drafter([1, 2, 3, 4, 5, 6])
    for token in (1, 2, 3, 4, 5, 6, 1, 2, 3):
        drafter.append(token)
    repeating = drafter.acceptance
    assert repeating > 0.5
    for token in range(20, 40):
        drafter.append(token)
    assert drafter.acceptance < 0.1 * repeating


def test_nothing_is_drafted_before_a_step_was_measured_or_where_nothing_is_accepted() -> None:
    times = begun()
    assert times.best_draft_tokens(1.0, 3) == 0
    times.measured(0, 10.0)
    assert times.best_draft_tokens(0.0, 3) == 0
    assert times.best_draft_tokens(1.0, 3) == 3
    assert times.best_draft_tokens(1.0, 2) == 2


def test_steps_that_cost_as_much_as_their_tokens_have_no_drafts_until_they_are_tried_again() -> None:
    times = begun()
    for tokens in (1, 2, 3, 4):
        times.measured(tokens - 1, 10.0 * tokens)
    assert times.best_draft_tokens(1.0, 3) == 0
    for _ in range(RETRY_STEPS):
        times.measured(0, 10.0)
    assert times.best_draft_tokens(1.0, 3) == 3


def test_a_gain_below_the_margin_is_left() -> None:
    times = begun()
    times.measured(0, 10.0)
    for tokens in (2, 3, 4):
        times.measured(tokens - 1, 10.0 * tokens / (MIN_GAIN - 0.01))
    assert times.best_draft_tokens(1.0, 3) == 0


def test_one_late_step_does_not_decide() -> None:
    times = begun()
    times.measured(0, 10.0)
    for _ in range(5):
        times.measured(3, 16.0)
    times.measured(3, 5000.0)
    assert times.best_draft_tokens(0.9, 3) > 0


def drafting_by_layer(share: float, ms: float) -> StepTimes:
    """Times of a run whose steps of one token take 10 ms, and those with a token from the draft layer `ms`."""
    times = begun()
    times.measured(0, 10.0)
    for number in range(200):
        times.measured(1, ms, by_layer=True)
        times.acceptance.measured(int(number * share % 1 + share >= 1), 1)
    return times


def test_the_draft_layer_is_asked_while_its_tokens_are_accepted_often_enough() -> None:
    for share, ms, drafted in ((0.8, 15.0, 1), (0.4, 15.0, 0), (0.8, 18.0, 0)):
        times = drafting_by_layer(share, ms)
        assert abs(times.acceptance.share - share) < 0.1
        assert times.best_draft_tokens(times.acceptance.share, 1, by_layer=True) == drafted


def test_a_draft_layer_that_is_always_wrong_costs_a_few_steps_until_it_is_tried_again() -> None:
    times, asked = begun(), 0
    for _ in range(10 * RETRY_STEPS):
        drafted = times.best_draft_tokens(times.acceptance.share, 1, by_layer=True)
        asked += drafted
        times.measured(drafted, 15.0 if drafted else 10.0, by_layer=bool(drafted))
        if drafted:
            times.acceptance.measured(0, drafted)
    assert 10 <= asked <= 40, "0.5 of a step each: at most 2 % of the time"


def test_a_step_drafts_one_token_until_acceptance_was_measured() -> None:
    acceptance = LayerAcceptance()
    for _ in range(ASSUMED_TRIALS):
        assert acceptance.is_assumed
        acceptance.measured(1, 1)
    assert not acceptance.is_assumed
    acceptance.assume()
    assert acceptance.is_assumed
