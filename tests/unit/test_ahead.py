"""What follows a step is known before its tokens are: what the scheduler foresees is what it decides, or nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from neuronpipe.protocol.messages.request import Bias, Cancel, Generate
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.coordinator.scheduling.events import (
    Action,
    Ahead,
    EpochChanged,
    Leaving,
    SampleTokens,
    SendStep,
    Tell,
    ThrottleChanged,
    TokensSampled,
)
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler

from tests.unit.test_coordinator_core import END, finish, make_scheduler, receive, sent

LETTER = ord("x")


def foreseen(step: SendStep, ahead: Ahead, tokens: tuple[int, ...]) -> SendStep:
    message = step.message
    assert isinstance(message, Step)
    fields: dict[str, Any] = {name: getattr(message, name) for name in message.__slots__}
    fields |= {"step": ahead.number, "positions": ahead.positions, "tokens": tokens}
    return SendStep(step.processes, Step(**fields))


def sends(actions: list[Action]) -> list[SendStep]:
    return [action for action in actions if isinstance(action, SendStep)]


def decoding(scheduler: Scheduler, **ask: Any) -> SendStep:
    """The first decode step of a text."""
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", **{"max_tokens": 9, **ask}), 0.0))
    finish(scheduler, prefill)
    (step,) = sends(scheduler.handle(TokensSampled((LETTER,)), 0.1))
    return step


def test_the_next_step_and_how_its_tokens_are_sampled_are_foreseen() -> None:
    scheduler = make_scheduler()
    step = decoding(scheduler, repetition_penalty=1.5, logit_bias=(Bias(token=3, bias=1.0),))
    ahead = scheduler.ahead(0.1)
    assert ahead is not None
    assert ahead.ends == (END,)
    (sample,) = [action for action in finish(scheduler, step.message) if isinstance(action, SampleTokens)]
    assert sample.rows == ahead.rows
    assert sample.rows[0].text == (*b"abx",)
    (following,) = sends(scheduler.handle(TokensSampled((LETTER,)), 0.2))
    assert following == foreseen(step, ahead, (LETTER,))


@pytest.mark.parametrize(
    "ask",
    [
        {"stop": ("q",)},
        {"logprobs": 1},
        {"max_tokens": 2},
    ],
)
def test_nothing_is_foreseen_of_a_text_that_must_be_looked_at(ask: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    decoding(scheduler, **ask)
    assert scheduler.ahead(0.1) is None


@pytest.mark.parametrize(
    "event",
    [
        EpochChanged(1, (("decode", 1),)),
        EpochChanged(1, ()),
        Leaving(frozenset({("cache", 0)})),
        ThrottleChanged(0.5, 100.0),
    ],
)
def test_what_disturbs_the_step_leaves_nothing_foreseen(event: Any) -> None:
    scheduler = make_scheduler()
    decoding(scheduler)
    assert scheduler.ahead(0.1) is not None
    scheduler.handle(event, 0.2)
    assert scheduler.ahead(0.3) is None


def test_other_requests_leave_nothing_foreseen_where_they_come_next() -> None:
    scheduler = make_scheduler()
    decoding(scheduler)
    receive(scheduler, Generate(request="s", prompt="cd"), 0.2)
    assert scheduler.ahead(0.2) is None
    scheduler = make_scheduler(sequences=1)
    step = decoding(scheduler)
    receive(scheduler, Generate(request="s", prompt="cd"), 0.2)  # it waits until this text has ended
    ahead = scheduler.ahead(0.2)
    assert ahead is not None
    finish(scheduler, step.message)
    assert sends(scheduler.handle(TokensSampled((LETTER,)), 0.3)) == [foreseen(step, ahead, (LETTER,))]
    receive(scheduler, Cancel(request="r"), 0.4)
    assert scheduler.ahead(0.4) is None


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_what_was_foreseen_last_is_what_is_decided(seed: int) -> None:
    """Requests, cancellations, throttling and losses at random moments between steps that everybody answers."""
    rng = random.Random(seed)
    scheduler, now, requests, confirmed, epoch = make_scheduler(context_tokens=64), 0.0, 0, 0, 0
    under_way: list[SendStep] = []

    def take(actions: list[Action]) -> None:
        under_way.extend(sends(actions))
        assert all(not isinstance(action, Tell) for action in actions[: len(sends(actions))])

    def disturb() -> None:
        nonlocal requests, epoch
        kind = rng.randrange(8)
        if kind == 0 or not scheduler.requests.active:
            requests += 1
            stop = ("q",) if rng.random() < 0.2 else ()
            ask = Generate(request=str(requests), prompt="abcdef"[: rng.randint(1, 6)], max_tokens=20, stop=stop)
            take(receive(scheduler, ask, now))
        elif kind == 1:
            take(receive(scheduler, Cancel(request=str(rng.randint(1, requests))), now))
        elif kind == 2:
            take(scheduler.handle(ThrottleChanged(rng.choice([0.0, 0.3]), now + 1.0), now))

    for _ in range(200):
        now += 1.0
        disturb()
        if not under_way:
            continue
        step = under_way.pop()
        ahead = scheduler.ahead(now)
        left = finish(scheduler, step.message, now)
        wanted = [action for action in left if isinstance(action, SampleTokens)]
        if not wanted:
            take(left)
            continue
        tokens = tuple(END if rng.random() < 0.05 else LETTER for _ in wanted[0].rows)
        following = scheduler.handle(TokensSampled(tokens), now)
        if ahead is not None and END not in tokens:
            assert ahead.rows == wanted[0].rows
            assert sends(following) == [foreseen(step, ahead, tokens)]
            confirmed += 1
        take(following)
    assert confirmed > 5
