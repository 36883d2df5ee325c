"""The coordinator's decisions, driven by hand: no sockets, no clock, no model."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Accepted, Finished, Refused, Scored, ScoreFinished, Token
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import Cancel, Generate, Next, Score
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.sampling import as_logprobs
from neuronpipe.services.coordinator.scheduling.admission import MIN_QUEUED, QUEUED_PER_SEQUENCE, Limits
from neuronpipe.services.coordinator.scheduling.events import (
    Abandon,
    Action,
    AnswersKnown,
    Dismiss,
    Ending,
    EpochChanged,
    Leaving,
    Logprobs,
    ProcessKey,
    ProcessReady,
    RequestReceived,
    SampleTokens,
    ScoreTokens,
    SendStep,
    StepFailed,
    StepLeft,
    Tell,
    ThrottleChanged,
    Tick,
    TokensSampled,
    TokensScored,
)
from neuronpipe.services.coordinator.scheduling.kv_reservation import Reservation
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler
from neuronpipe.services.coordinator.scheduling.steps import BESIDE_DECODE_TOKENS
from neuronpipe.services.coordinator.text.constrained_answers import Constraints, Failure
from neuronpipe.services.coordinator.text.grammar import Grammars
from neuronpipe.services.runtime.quarantine import Quarantine

from tests.direct_constraints import DirectConstraints
from tests.unit.test_layers import ROOT, imports

PROCESSES = [("decode", 0), ("decode", 1), ("prefill", 0), ("loader", 0), ("cache", 0)]
NUMERICS = {"decode": "cpu:avx2", "prefill": "cpu:avx2"}
PREFILL_NUMERICS = NUMERICS["prefill"]
END = 0


class Letters:
    """A tokenizer whose tokens are code points."""

    longest_token_bytes = 4

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return "".join(map(chr, tokens))


LETTERS = Letters()
NO_GRAMMARS = DirectConstraints(Grammars(LETTERS, 200, [END]))


def make_scheduler(
    tokenizer: Letters = LETTERS,
    accelerator: str = "",
    constraints: Constraints = NO_GRAMMARS,
    quarantine: Quarantine | None = None,
    reservation: Reservation | None = None,
    **changes: Any,
) -> Scheduler:
    """accelerator: the numerics of one; none by default."""
    limits: dict[str, Any] = {
        "sequences": 2,
        "context_tokens": 16,
        "prefill_chunk_tokens": 4,
        "logit_rows": 3,
        "vocabulary": 200,
    } | changes
    processes = [*PROCESSES, ("accelerator", 0)] if accelerator else PROCESSES
    scheduler = Scheduler(
        Limits(mode="exact", end_tokens=frozenset({END}), plan_id="p", **limits),
        processes,
        tokenizer,
        constraints,
        reservation,
        quarantine=quarantine,
    )
    for process in processes:
        scheduler.handle(ProcessReady(process, (NUMERICS | {"accelerator": accelerator}).get(process[0], "")), 0.0)
    return scheduler


def receive(scheduler: Scheduler, message: Message, now: float) -> list[Action]:
    """A client asks for something."""
    return scheduler.handle(RequestReceived(b"c", message), now)


class SlowAnswer:
    """What an answer must follow, where it takes until the test says so to know what may come."""

    allowed = b"\xff" * 25
    complete = False
    failure: Failure | None = None

    def __init__(self) -> None:
        self.pending, self.tokens, self.closed = True, list[int](), False

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.pending = True

    def close(self) -> None:
        self.closed = True


class SlowConstraints:
    """Starts such answers, and keeps them."""

    def __init__(self) -> None:
        self.answers: list[SlowAnswer] = []
        self.has_memory = False

    @property
    def needs_memory(self) -> bool:
        return any(not answer.closed for answer in self.answers)

    def set_memory(self, is_reserved: bool) -> None:
        self.has_memory = is_reserved

    def start(self, ask: Generate) -> SlowAnswer:
        self.answers.append(SlowAnswer())
        return self.answers[-1]

    def marks(self, ask: Generate) -> dict[int, str]:
        return {}


def sent(actions: list[Action]) -> list[Step | Prefill]:
    return [action.message for action in actions if isinstance(action, SendStep)]


def told(actions: list[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Tell)]


def participants_of(step: Step | Prefill) -> list[ProcessKey]:
    assert isinstance(step, Step)
    return [(role, int(index)) for role, _, index in (name.partition(".") for name in step.participants)]


def finish(scheduler: Scheduler, message: Step | Prefill, now: float = 1.0) -> list[Action]:
    """All participants of a step report that they are done."""
    actions: list[Action] = []
    participants = [("prefill", 0)] if isinstance(message, Prefill) else participants_of(message)
    ratings = tuple(Rating(logprob=-0.5) for _ in message.targets) if isinstance(message, Prefill) else ()
    for process in participants:
        actions += scheduler.handle(StepLeft(process, message.step, message.epoch, True, {}, ratings), now)
    return actions


def scores(action: ScoreTokens) -> tuple[Logprobs, ...]:
    """What the service makes of it: the worker's ratings, or its own."""
    return as_logprobs(action.ratings) or tuple(Logprobs(-0.5, ()) for _ in action.targets)


def generate(scheduler: Scheduler, prompt: str, tokens: Sequence[int], **ask: int) -> list[Action]:
    """Run one request to its end; `tokens` are what is sampled, one after the other. Returns all actions."""
    samples = list(tokens)
    everything = receive(scheduler, Generate(request="r", prompt=prompt, **ask), 0.0)  # type: ignore[arg-type]
    pending = list(everything)
    while pending:
        action = pending.pop(0)
        answer: list[Action] = []
        if isinstance(action, SendStep):
            answer = finish(scheduler, action.message)
        elif isinstance(action, SampleTokens):
            answer = scheduler.handle(TokensSampled(tuple(samples.pop(0) for _ in action.rows)), 2.0)
        pending += answer
        everything += answer
    return everything


def test_a_prompt_is_prefilled_in_chunks_and_only_the_last_chunk_asks_for_logits() -> None:
    actions = generate(make_scheduler(), "abcdefghi", [ord("x")], max_tokens=1)
    chunks = [message for message in sent(actions) if isinstance(message, Prefill)]
    assert [len(chunk.tokens) for chunk in chunks] == [4, 4, 1]
    assert [chunk.position for chunk in chunks] == [0, 4, 8]
    assert [chunk.logits for chunk in chunks] == ["none", "none", "last"]


def test_each_sampled_token_is_the_input_of_the_next_step_at_the_next_position() -> None:
    steps = [
        message for message in sent(generate(make_scheduler(), "ab", b"xyz", max_tokens=3)) if isinstance(message, Step)
    ]
    assert [(step.positions, step.tokens) for step in steps] == [((2,), (ord("x"),)), ((3,), (ord("y"),))]


def test_the_text_ends_at_max_tokens_at_an_end_token_and_at_the_context() -> None:
    def reason(prompt: str, tokens: Sequence[int], most: int) -> tuple[str, str]:
        (finished,) = [
            m for m in told(generate(make_scheduler(), prompt, tokens, max_tokens=most)) if isinstance(m, Finished)
        ]
        return finished.reason, finished.text

    assert reason("ab", b"xyz", 3) == ("length", "xyz")
    assert reason("ab", [ord("x"), END], 9) == ("end", "x")
    assert reason("a" * 14, b"xy", 9) == ("context", "xy")  # prompt and answer together are never longer
    assert reason("a" * 14, b"xy", 2) == ("length", "xy")
    assert reason("a" * 15, b"x", 9) == ("context", "x")
    assert reason("a" * 16, b"x", 9) == ("context", "x")


@pytest.mark.parametrize(("prompt", "code"), [("", "bad_request"), ("a" * 17, "too_long"), ("\u0fff", "bad_request")])
def test_a_prompt_that_cannot_be_served_is_refused_and_nothing_is_sent(prompt: str, code: str) -> None:
    actions = receive(make_scheduler(), Generate(request="r", prompt=prompt), 0.0)
    (refused,) = told(actions)
    assert isinstance(refused, Refused)
    assert refused.code == code
    assert not sent(actions)


def test_a_lost_participant_voids_the_step_and_the_same_step_is_sent_to_who_is_left() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=2), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 1.0))
    assert not sent(scheduler.handle(EpochChanged(1, (("decode", 1),)), 1.1))
    (again,) = sent(scheduler.handle(StepLeft(("decode", 0), step.step, 0, False), 1.2))
    assert participants_of(again) == [("decode", 0)]
    shares = {"participants": ("decode.0",), "first_blocks": (0,), "end_blocks": (1,)}
    assert again == dataclasses.replace(step, epoch=1, **shares)  # type: ignore[arg-type]
    assert scheduler.handle(ProcessReady(("decode", 1), "cpu:avx2"), 1.3) == []
    assert not scheduler.handle(StepLeft(("decode", 1), step.step, 1, True), 1.4), "it is not in that step"
    scheduler.handle(StepLeft(("decode", 0), step.step, 1, True), 1.5)
    scheduler.handle(TokensSampled((END,)), 1.6)


def test_a_process_that_is_back_takes_part_in_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.handle(EpochChanged(1, (("decode", 0),)), 0.1)
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.2))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.3))
    assert participants_of(step) == [("decode", 1)]
    scheduler.handle(ProcessReady(("decode", 0), "cpu:avx2"), 0.4)
    finish(scheduler, step)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.5))
    assert participants_of(step) == [("decode", 0), ("decode", 1)]


def test_without_a_decode_worker_or_a_cache_nothing_is_computed_and_without_prefill_texts_go_on() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.1))
    scheduler.handle(EpochChanged(1, (("decode", 0), ("decode", 1), ("cache", 0), ("prefill", 0))), 0.2)
    assert not sent(scheduler.handle(ProcessReady(("decode", 0), "cpu:avx2"), 0.3))
    (again,) = sent(scheduler.handle(ProcessReady(("cache", 0)), 0.4))
    assert (again.step, participants_of(again)) == (step.step, [("decode", 0)])
    assert not sent(receive(scheduler, Generate(request="s", prompt="cd"), 0.5))
    finish(scheduler, again)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.6))
    assert isinstance(step, Step)
    scheduler.handle(ProcessReady(("prefill", 0), "cpu:avx2"), 0.7)
    finish(scheduler, step)
    (prefill,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.8))
    assert isinstance(prefill, Prefill)


def test_workers_of_two_numerics_share_no_step() -> None:
    scheduler = make_scheduler()
    scheduler.handle(EpochChanged(1, (("decode", 1),)), 0.1)
    scheduler.handle(ProcessReady(("decode", 1), "cpu:scalar"), 0.2)
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.3))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.4))
    assert participants_of(step) == [("decode", 0)]


def test_every_participant_of_a_step_has_all_blocks_to_share() -> None:
    scheduler = make_scheduler(blocks=7)
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.1))
    assert isinstance(step, Step)
    assert (step.first_blocks, step.end_blocks) == ((0, 0), (7, 7))


def test_an_accelerator_has_the_first_blocks_by_how_many_texts_there_are_and_while_it_is_there() -> None:
    scheduler = make_scheduler(
        blocks=7, offloaded_blocks=(5, 3), offloaded_matrices=("output",), accelerator="cpu:avx2"
    )
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.1))
    assert isinstance(step, Step)
    assert participants_of(step) == [("decode", 0), ("decode", 1), ("accelerator", 0)]
    assert (step.first_blocks, step.end_blocks, step.held_matrices) == ((5, 5, 0), (7, 7, 5), ("output",))
    scheduler.handle(EpochChanged(1, (("accelerator", 0),)), 0.2)
    for process in (("decode", 0), ("decode", 1)):
        actions = scheduler.handle(StepLeft(process, step.step, 0, False), 0.3)
    (again,) = sent(actions)
    assert isinstance(again, Step)
    assert (again.first_blocks, again.end_blocks, again.tokens) == ((0, 0), (7, 7), step.tokens)
    assert again.held_matrices == ()
    scheduler.handle(ProcessReady(("accelerator", 0), "cpu:avx2"), 0.4)
    finish(scheduler, again)
    receive(scheduler, Generate(request="s", prompt="cd", max_tokens=9), 0.5)
    (prefill,) = sent(scheduler.handle(TokensSampled((ord("y"),)), 0.6))
    finish(scheduler, prefill)
    (both,) = sent(scheduler.handle(TokensSampled((ord("z"),)), 0.7))
    assert isinstance(both, Step)
    assert (both.end_blocks, len(both.tokens)) == ((7, 7, 3), 2)


def test_an_accelerator_of_other_numerics_is_left_out() -> None:
    scheduler = make_scheduler(blocks=7, offloaded_blocks=(5,), accelerator="cpu:scalar")
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.1))
    assert participants_of(step) == [("decode", 0), ("decode", 1)]


def test_an_accelerator_in_numerics_of_its_own_names_the_steps_that_it_takes_part_in() -> None:
    """Without it a step is computed in those of the decode workers, and what is kept says by whom it was computed."""
    both = "npu-held+cpu:avx2"
    scheduler = make_scheduler(blocks=7, offloaded_blocks=(5,), accelerator=both)
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.1))
    assert participants_of(step) == [("decode", 0), ("decode", 1), ("accelerator", 0)]
    (text,) = scheduler.requests.active
    finish(scheduler, step)
    assert text.provenance.runs == [(2, "cpu:avx2"), (3, both)]
    (step,) = sent(scheduler.handle(TokensSampled((ord("y"),)), 0.2))
    assert isinstance(step, Step)
    scheduler.handle(EpochChanged(1, (("accelerator", 0),)), 0.3)
    for process in (("decode", 0), ("decode", 1)):
        actions = scheduler.handle(StepLeft(process, step.step, 0, False), 0.4)
    (again,) = sent(actions)
    assert isinstance(again, Step)
    assert (again.first_blocks, again.end_blocks) == ((0, 0), (7, 7))
    assert (again.tokens, again.positions) == (step.tokens, step.positions)
    scheduler.handle(ProcessReady(("accelerator", 0), both), 0.5)
    finish(scheduler, again)
    assert text.provenance.runs == [(2, "cpu:avx2"), (3, both), (4, "cpu:avx2")]
    (back,) = sent(scheduler.handle(TokensSampled((ord("z"),)), 0.6))
    assert ("accelerator", 0) in participants_of(back)


def test_an_answer_under_an_old_epoch_does_not_count() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab"), 0.0))
    scheduler.handle(EpochChanged(1, (("loader", 0),)), 0.1)
    scheduler.handle(StepLeft(("prefill", 0), prefill.step, 0, False), 0.2)
    (again,) = sent(scheduler.handle(ProcessReady(("loader", 0)), 0.3))
    assert not scheduler.handle(StepLeft(("prefill", 0), prefill.step, 0, True), 0.4)
    assert any(
        isinstance(action, SampleTokens)
        for action in scheduler.handle(StepLeft(("prefill", 0), again.step, 1, True), 0.5)
    )


def test_an_answer_that_comes_twice_counts_once() -> None:
    scheduler = make_scheduler(blocks=7, offloaded_blocks=(5,), accelerator="cpu:avx2")
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=2), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((ord("x"),)), 0.1))
    holder, first, second = ("accelerator", 0), ("decode", 0), ("decode", 1)
    for process in (holder, holder, first, holder):
        assert not scheduler.handle(StepLeft(process, step.step, step.epoch, True, {"held_rows": 3.0}), 0.2)
    assert not scheduler.handle(StepFailed(holder, step.step, step.epoch, "it changed its mind"), 0.2)
    assert not scheduler.handle(StepLeft(holder, step.step, step.epoch, False), 0.2)
    (wanted,) = scheduler.handle(StepLeft(second, step.step, step.epoch, True, {"held_rows": 0.0}), 0.3)
    assert isinstance(wanted, SampleTokens)
    actions = scheduler.handle(TokensSampled((ord("y"),)), 0.4)
    (finished,) = [message for message in told(actions) if isinstance(message, Finished)]
    assert (finished.decode["answers"], finished.decode["held_rows"]) == (3, 6)


def test_no_step_is_sent_before_every_process_was_ready() -> None:
    scheduler = Scheduler(
        Limits(
            mode="exact",
            sequences=1,
            context_tokens=16,
            prefill_chunk_tokens=4,
            logit_rows=1,
            vocabulary=200,
            end_tokens=frozenset(),
            plan_id="p",
        ),
        PROCESSES,
        LETTERS,
        NO_GRAMMARS,
    )
    assert not sent(receive(scheduler, Generate(request="r", prompt="ab"), 0.0))
    for process in PROCESSES[:-1]:
        assert not sent(scheduler.handle(ProcessReady(process), 0.0))
    assert not scheduler.workers.all_ready()
    assert sent(scheduler.handle(ProcessReady(PROCESSES[-1]), 0.0))
    assert scheduler.workers.all_ready()


def test_workers_get_the_next_step_before_clients_are_told_of_the_last_one() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    finish(scheduler, prefill)
    assert [type(action) for action in scheduler.handle(TokensSampled((120,)), 1.0)] == [SendStep, Tell]


def test_a_failed_step_is_left_before_its_clients_are_told() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab"), 0.0))
    actions = scheduler.handle(StepFailed(("prefill", 0), prefill.step, 0, "damaged bundle"), 0.1)
    assert [type(action) for action in actions] == [Abandon, Tell]


def test_two_texts_share_a_step_and_a_third_waits_for_a_slot() -> None:
    scheduler = make_scheduler()
    pending = [a for name in "123" for a in receive(scheduler, Generate(request=name, prompt="ab", max_tokens=4), 0.0)]
    widest = 0
    finished = []
    while pending:
        action = pending.pop(0)
        if isinstance(action, SendStep):
            widest = max(widest, len(action.message.tokens) if isinstance(action.message, Step) else 0)
            pending += finish(scheduler, action.message)
        elif isinstance(action, SampleTokens):
            pending += scheduler.handle(TokensSampled(tuple(120 for _ in action.rows)), 1.0)
        elif isinstance(action, Tell) and isinstance(action.message, Finished):
            finished.append(action.message.request)
    assert widest == 2
    assert sorted(finished) == ["1", "2", "3"]


def test_a_failed_step_refuses_its_requests_calls_the_others_away_and_serves_the_next() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab"), 0.0))
    actions = scheduler.handle(StepFailed(("prefill", 0), prefill.step, 0, "damaged bundle"), 0.1)
    assert [m.message for m in told(actions) if isinstance(m, Refused)] == ["damaged bundle"]
    assert Abandon() in actions
    scheduler.handle(EpochChanged(1, ()), 0.2)
    assert sent(receive(scheduler, Generate(request="s", prompt="cd"), 0.3))


def test_a_cancelled_text_ends_after_the_step_in_flight() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 0.0))
    assert not told(receive(scheduler, Cancel(request="r"), 0.1))
    finish(scheduler, prefill)
    (token, finished) = told(scheduler.handle(TokensSampled((120,)), 0.2))
    assert isinstance(token, Token)
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"


@pytest.mark.parametrize("path", ["decode", "prefill"])
def test_every_token_but_the_first_is_scored(path: str) -> None:
    scheduler = make_scheduler()
    ask = Score(request="s", tokens=(1, 2, 3, 4, 5), path=path)  # type: ignore[arg-type]
    pending = receive(scheduler, ask, 0.0)
    targets: list[int] = []
    scored: list[Scored] = []
    finished: list[ScoreFinished] = []
    while pending:
        action = pending.pop(0)
        if isinstance(action, SendStep):
            pending += finish(scheduler, action.message)
        elif isinstance(action, ScoreTokens):
            targets += action.targets
            pending += scheduler.handle(TokensScored(scores(action)), 1.0)
        elif isinstance(action, Tell):
            scored += [action.message] if isinstance(action.message, Scored) else []
            finished += [action.message] if isinstance(action.message, ScoreFinished) else []
            assert isinstance(action.message, Accepted | Scored | ScoreFinished)
    assert targets == [2, 3, 4, 5]
    assert sum(message.rows for message in scored) == 5
    assert [message.position for message in scored] == ([0, 1, 2, 3, 4] if path == "decode" else [0, 4])
    assert (finished[0].tokens, finished[0].nll_mean) == (4, 0.5)


def test_no_step_overwrites_logits_that_a_client_is_reading() -> None:
    scheduler = make_scheduler()
    (step,) = sent(receive(scheduler, Score(request="s", tokens=(1, 2), path="decode", logits=True), 0.0))
    finish(scheduler, step)
    assert not sent(scheduler.handle(TokensScored((Logprobs(-0.5, ()),)), 0.1))
    assert sent(receive(scheduler, Next(request="s"), 0.2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", float("nan")), ("temperature", -1.0), ("top_k", -1), ("top_k", 2**40), ("top_p", float("nan"))],
)
def test_a_sampling_number_out_of_range_is_refused_and_does_not_end_the_run(name: str, value: float) -> None:
    scheduler = make_scheduler()
    (refused,) = told(receive(scheduler, Generate(request="r", prompt="ab", **{name: value}), 0.0))  # type: ignore[arg-type]
    assert isinstance(refused, Refused)
    assert refused.code == "bad_request"
    assert sent(receive(scheduler, Generate(request="s", prompt="ab"), 0.0))


def test_an_empty_prompt_is_the_begin_token_of_tokenizers_that_add_one() -> None:
    class Framed(Letters):
        def encode(self, text: str, *, frame: bool = True) -> list[int]:
            return [1] * frame + super().encode(text)

    asks = (Generate(request="r", prompt=""), Score(request="r", text=""))
    for ask in asks:
        answer = told(receive(make_scheduler(Framed()), ask, 0.0))
        assert answer[0] == Accepted(request="r", prompt_tokens=1)
        for tokenizer, refused in ((Letters(), ask), (Framed(), dataclasses.replace(ask, frame=False))):
            (answer,) = told(receive(make_scheduler(tokenizer), refused, 0.0))
            assert isinstance(answer, Refused)
            assert (answer.code, answer.message) == ("bad_request", "the prompt is empty; give at least one token")


def test_a_text_too_long_for_sure_is_refused_before_it_is_encoded() -> None:
    class Fails(Letters):
        def encode(self, text: str) -> list[int]:
            raise AssertionError("encoded")

    scheduler = make_scheduler(Fails())
    (refused,) = told(receive(scheduler, Generate(request="r", prompt="a" * 65), 0.0))
    assert isinstance(refused, Refused)
    assert refused.code == "too_long"


def test_a_score_through_decode_never_shares_a_step_with_texts_or_other_scores() -> None:
    scheduler = make_scheduler(sequences=3)
    pending = receive(scheduler, Generate(request="g", prompt="ab", max_tokens=4), 0.0)
    for name in "12":
        pending += receive(scheduler, Score(request=name, tokens=(1, 2, 3), path="decode"), 0.0)
    finished = set()
    while pending:
        action = pending.pop(0)
        if isinstance(action, SendStep):
            pending += finish(scheduler, action.message)
        elif isinstance(action, SampleTokens):
            pending += scheduler.handle(TokensSampled(tuple(120 for _ in action.rows)), 1.0)
        elif isinstance(action, ScoreTokens):
            pending += scheduler.handle(TokensScored(scores(action)), 1.0)
        elif isinstance(action, Tell) and isinstance(action.message, Finished | ScoreFinished):
            finished.add(action.message.request)
    assert finished == {"g", "1", "2"}


def test_a_client_that_never_gives_logits_back_is_given_up_after_a_while() -> None:
    scheduler = make_scheduler()
    (step,) = sent(
        scheduler.handle(RequestReceived(b"gone", Score(request="s", tokens=(1, 2), path="decode", logits=True)), 0.0)
    )
    finish(scheduler, step)
    scheduler.handle(TokensScored((Logprobs(-0.5, ()),)), 1.0)
    assert not sent(receive(scheduler, Generate(request="r", prompt="ab"), 2.0))
    assert sent(scheduler.handle(Tick(), 20.0))


def test_a_request_cancelled_while_it_waits_is_answered() -> None:
    scheduler = make_scheduler(sequences=1)
    receive(scheduler, Generate(request="1", prompt="ab"), 0.0)
    receive(scheduler, Generate(request="2", prompt="ab"), 0.0)
    (refused,) = told(receive(scheduler, Cancel(request="2"), 0.0))
    assert isinstance(refused, Refused)
    assert (refused.request, refused.code) == ("2", "cancelled")


def test_a_participant_that_gives_up_by_itself_calls_the_others_away() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab"), 0.0))
    assert Abandon() in scheduler.handle(StepLeft(("prefill", 0), prefill.step, 0, False), 0.1)


def test_a_second_ready_does_not_take_a_computing_participant_out_of_the_step() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=3), 0.0))
    finish(scheduler, prefill)
    (step,) = sent(scheduler.handle(TokensSampled((120,)), 0.1))
    scheduler.handle(ProcessReady(("decode", 1)), 0.2)
    assert not scheduler.handle(StepLeft(("decode", 0), step.step, 0, True), 0.3), "decode.1 is still computing"


def test_output_that_is_no_number_refuses_the_request_and_serves_the_next() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab"), 0.0))
    finish(scheduler, prefill)
    (refused,) = told(scheduler.handle(TokensSampled((-3,)), 0.1))
    assert isinstance(refused, Refused)
    assert sent(receive(scheduler, Generate(request="s", prompt="ab"), 0.2))


def test_a_throttled_run_sends_the_next_step_after_its_pause_and_cancels_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.handle(ThrottleChanged(0.75, until=100.0), 0.0)
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="ab", max_tokens=9), 10.0))
    finish(scheduler, prefill, 11.0)
    assert sent(scheduler.handle(TokensSampled((ord("x"),)), 11.0)) == []
    assert sent(scheduler.handle(Tick(), 13.9)) == []
    (step,) = sent(scheduler.handle(Tick(), 14.0))  # one second of work, three of pause
    finish(scheduler, step, 15.0)
    scheduler.handle(TokensSampled((ord("y"),)), 15.0)
    (finished,) = told(receive(scheduler, Cancel(request="r"), 15.5))
    assert isinstance(finished, Finished)
    assert finished.reason == "cancelled"


class Driven:
    """A scheduler whose steps are done at once; every sampled token is an x."""

    def __init__(self, **limits: int) -> None:
        self.scheduler = make_scheduler(**limits)
        self.steps: list[Step | Prefill] = []
        self.told: list[Message] = []

    def ask(self, name: str, prompt: str, most: int = 2, **options: object) -> list[Action]:
        ask = Generate(request=name, prompt=prompt, max_tokens=most, **options)  # type: ignore[arg-type]
        return receive(self.scheduler, ask, 0.0)

    def run(
        self, actions: list[Action], until: Callable[[Step | Prefill], bool] = lambda message: False
    ) -> list[Action]:
        """Do what is wanted, until nothing is or a certain step is to be sent; returns what is left to do."""
        pending = list(actions)
        while pending:
            action = pending.pop(0)
            if isinstance(action, SendStep):
                if until(action.message):
                    return [action, *pending]
                self.steps.append(action.message)
                pending += finish(self.scheduler, action.message)
            elif isinstance(action, SampleTokens):
                pending += self.scheduler.handle(TokensSampled(tuple(120 for _ in action.rows)), 1.0)
            elif isinstance(action, ScoreTokens):
                pending += self.scheduler.handle(TokensScored(scores(action)), 1.0)
            elif isinstance(action, Tell):
                self.told.append(action.message)
        return []

    def finished(self) -> dict[str, Finished]:
        return {message.request: message for message in self.told if isinstance(message, Finished)}

    def prefills(self) -> list[Prefill]:
        return [step for step in self.steps if isinstance(step, Prefill)]


def test_a_text_that_goes_on_where_another_ended_computes_only_what_is_new() -> None:
    driven = Driven()
    driven.run(driven.ask("1", "abcdef"))
    driven.run(driven.ask("2", "abcdefxyz"))  # an x was sampled, and computed for the second one
    last = driven.prefills()[-1]
    assert (last.sequence, last.position, last.copy_from) == (driven.prefills()[0].sequence, 7, None)
    assert driven.finished()["2"].cached_tokens == 7
    assert driven.finished()["1"].cached_tokens == 0
    assert driven.scheduler.requests.cached_tokens == 7


def test_the_same_prompt_again_computes_its_last_token() -> None:
    driven = Driven()
    driven.run(driven.ask("1", "abcd"))
    driven.run(driven.ask("2", "abcd"))
    last = driven.prefills()[-1]
    assert (last.position, last.tokens, last.logits) == (3, (ord("d"),), "last")


def test_texts_that_come_together_share_what_the_first_of_them_computed() -> None:
    driven = Driven()
    actions = driven.ask("1", "abcdefgh") + driven.ask("2", "abcdefgi")
    driven.run(actions)
    shared = [prefill for prefill in driven.prefills() if prefill.copy_from is not None]
    assert [(prefill.position, prefill.tokens, prefill.logits) for prefill in shared] == [(7, (ord("i"),), "last")]
    assert shared[0].copy_from == driven.prefills()[0].sequence != shared[0].sequence
    assert driven.finished()["2"].cached_tokens == 7


def test_a_copy_is_made_again_with_the_voided_step_and_counts_once() -> None:
    driven = Driven()
    pending = driven.run(driven.ask("1", "abcdef", most=9), until=lambda message: message.step == 2)
    driven.ask("2", "abcdeg")
    pending = driven.run(pending, until=lambda message: isinstance(message, Prefill) and message.copy_from is not None)
    (prefill,) = sent(pending)
    driven.scheduler.handle(EpochChanged(1, (("prefill", 0),)), 0.2)
    again = driven.scheduler.handle(ProcessReady(("prefill", 0), "cpu:avx2"), 0.3)
    assert sent(again) == [dataclasses.replace(prefill, epoch=1)]
    driven.run(again)
    assert driven.finished()["2"].cached_tokens == 5


def test_a_copy_is_not_made_by_a_prefill_worker_that_would_have_computed_it_otherwise() -> None:
    driven = Driven()
    pending = driven.run(driven.ask("1", "abcdef", most=9), until=lambda message: message.step == 2)
    driven.ask("2", "abcdeg")
    driven.run(pending, until=lambda message: isinstance(message, Prefill) and message.copy_from is not None)
    driven.scheduler.handle(EpochChanged(1, (("prefill", 0),)), 0.2)
    again = driven.scheduler.handle(ProcessReady(("prefill", 0), "cpu:scalar"), 0.3)
    (prefill,) = sent(driven.run(again, until=lambda message: isinstance(message, Prefill)))
    assert isinstance(prefill, Prefill)
    assert (prefill.position, prefill.copy_from) == (0, None)


def test_what_decode_computed_in_other_numerics_is_not_a_beginning_for_others() -> None:
    """A run of its own would prefill the whole prompt."""
    driven = Driven()
    driven.scheduler.handle(EpochChanged(1, (("prefill", 0),)), 0.0)
    driven.scheduler.handle(ProcessReady(("prefill", 0), "cpu:scalar"), 0.0)
    driven.run(driven.ask("1", "abcdef", most=4))
    driven.run(driven.ask("2", "abcdefxxxx"))  # three x were computed by decode, one was only sampled
    assert driven.finished()["2"].cached_tokens == 6
    driven.run(driven.ask("3", "abcdefxxxx"))  # the second one's prompt was prefilled, except what it shared
    assert driven.finished()["3"].cached_tokens == 9


def test_nothing_that_an_unfinished_step_writes_is_shared() -> None:
    """The first text's chunk is under way, or abandoned: the second one may not count on its keys."""
    driven = Driven(prefill_chunk_tokens=8)
    (chunk,) = sent(driven.ask("1", "abcdef"))
    driven.ask("2", "abcdef")
    receive(driven.scheduler, Cancel(request="1"), 0.1)
    driven.scheduler.handle(StepFailed(("prefill", 0), chunk.step, 0, "damaged"), 0.2)
    (next_chunk,) = sent(driven.scheduler.handle(EpochChanged(1, ()), 0.3))
    assert isinstance(next_chunk, Prefill)
    assert (next_chunk.position, next_chunk.copy_from) == (0, None)


def test_a_request_that_does_not_share_computes_its_whole_prompt() -> None:
    driven = Driven()
    driven.run(driven.ask("1", "abcdef"))
    driven.run(driven.ask("2", "abcdef", share_prefix=False))
    assert [prefill.position for prefill in driven.prefills()] == [0, 4, 0, 4]
    assert driven.finished()["2"].cached_tokens == 0


def test_a_scored_text_computes_every_token_and_leaves_its_keys_to_others() -> None:
    driven = Driven()
    driven.run(driven.ask("1", "abcdef"))
    driven.run(receive(driven.scheduler, Score(request="s", text="abcdef"), 0.0))
    assert [prefill.position for prefill in driven.prefills()] == [0, 4, 0, 4]
    driven.run(driven.ask("2", "abcdef"))
    assert driven.finished()["2"].cached_tokens == 5


def test_a_long_prompt_lets_the_others_have_a_token_after_every_chunk() -> None:
    driven = Driven(context_tokens=400, prefill_chunk_tokens=300)
    pending = driven.run(driven.ask("1", "ab", most=50), until=lambda message: message.step == 4)
    driven.ask("2", "c" * 300)
    driven.run(pending)
    kinds = ["prefill" if isinstance(step, Prefill) else "decode" for step in driven.steps[3:]]
    assert kinds[:8] in (["prefill", "decode"] * 4, ["decode", "prefill"] * 4)
    assert all(len(prefill.tokens) <= BESIDE_DECODE_TOKENS for prefill in driven.prefills())


def test_a_cancelled_text_takes_part_in_no_further_step_and_its_slot_goes_to_the_next() -> None:
    driven = Driven(sequences=1)
    pending = driven.run(driven.ask("1", "ab", most=9), until=lambda message: message.step == 3)
    driven.ask("2", "cd")
    receive(driven.scheduler, Cancel(request="1"), 0.5)  # the third step is on its way
    driven.run(pending)
    assert driven.finished()["1"].reason == "cancelled"
    assert driven.finished()["1"].tokens == 3
    assert [type(step) for step in driven.steps] == [Prefill, Step, Step, Prefill, Step]
    assert driven.finished()["2"].tokens == 2


def test_requests_beyond_the_bound_of_those_that_wait_are_refused_at_once() -> None:
    driven = Driven(sequences=1)
    answers = [told(driven.ask(str(number), "ab")) for number in range(1 + MIN_QUEUED + QUEUED_PER_SEQUENCE + 1)]
    assert all(isinstance(answer[-1], Accepted) for answer in answers[:-1])
    (refused,) = answers[-1]
    assert isinstance(refused, Refused)
    assert refused.code == "busy"
    assert refused.retry_after_s == 1  # no text has a pace yet


def test_when_the_run_ends_all_are_told_and_nothing_is_taken_on_any_more() -> None:
    driven = Driven(sequences=1)
    (prefill,) = sent(driven.ask("1", "ab"))
    driven.ask("2", "cd")
    actions = driven.scheduler.handle(Ending(), 0.5)
    assert [(message.request, message.code) for message in told(actions)] == [("1", "draining"), ("2", "draining")]
    assert sent(actions) == []
    (refused,) = told(driven.ask("3", "ef"))
    assert isinstance(refused, Refused)
    assert refused.code == "draining"
    assert finish(driven.scheduler, prefill) == []  # what comes of the step is nobody's any more


def test_the_workers_that_stay_go_on_as_soon_as_one_that_is_replaced_has_gone() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="abc", max_tokens=9), 0.0))
    scheduler.handle(Leaving(frozenset({("decode", 0)})), 0.5)
    finish(scheduler, prefill)
    assert Dismiss(("decode", 0)) in scheduler.handle(TokensSampled((65,)), 1.0)
    assert scheduler.handle(Tick(), 1.1) == [], "its end would void a step"
    (step,) = sent(scheduler.handle(EpochChanged(1, (("decode", 0),)), 1.2))
    assert (participants_of(step), step.epoch) == ([("decode", 1)], 1)


def test_a_process_is_dismissed_between_two_steps_and_nothing_is_sent_where_none_of_its_role_is_left() -> None:
    scheduler = make_scheduler()
    (prefill,) = sent(receive(scheduler, Generate(request="r", prompt="abc", max_tokens=3), 0.0))
    assert scheduler.handle(Leaving(frozenset({("decode", 0), ("decode", 1)})), 0.5) == []
    actions = finish(scheduler, prefill)
    assert [action for action in actions if isinstance(action, SampleTokens)]
    actions = scheduler.handle(TokensSampled((65,)), 1.0)
    assert [action.process for action in actions if isinstance(action, Dismiss)] == [("decode", 0), ("decode", 1)]
    assert sent(actions) == []
    assert sent(scheduler.handle(EpochChanged(1, (("decode", 0),)), 2.0)) == []
    assert sent(scheduler.handle(EpochChanged(2, (("decode", 1),)), 2.0)) == []
    (step,) = sent(scheduler.handle(ProcessReady(("decode", 1), "cpu:avx2"), 3.0))
    assert (step.epoch, participants_of(step)) == (2, [("decode", 1)])


def test_an_idle_process_is_dismissed_at_once_and_only_once() -> None:
    scheduler = make_scheduler()
    assert scheduler.handle(Leaving(frozenset({("cache", 0)})), 0.0) == [Dismiss(("cache", 0))]
    assert scheduler.handle(Tick(), 0.1) == []
    assert scheduler.handle(Leaving(frozenset()), 0.2) == []
    (prefill,) = sent(scheduler.handle(ProcessReady(("cache", 0)), 0.3)) or [None]
    assert prefill is None
    assert sent(receive(scheduler, Generate(request="r", prompt="abc", max_tokens=3), 0.4))


def test_neither_the_scheduler_nor_what_it_imports_here_has_a_socket_or_a_clock() -> None:
    room = ROOT / "services/coordinator/scheduling"
    found: set[str] = set()
    todo, seen = [room / "scheduler.py"], set[Path]()
    while todo:
        path = todo.pop()
        seen.add(path)
        for name in imports(path):
            found.add(name)
            module = room / f"{name.rpartition('.')[2]}.py"
            if (
                name.startswith("neuronpipe.services.coordinator.scheduling.")
                and module.exists()
                and module not in seen
            ):
                todo.append(module)
    assert {path.stem for path in seen} > {"scheduler", "requests", "step_results"}
    assert found.isdisjoint(
        {"time", "socket", "zmq", "neuronpipe.protocol.channel", "neuronpipe.services.runtime.trace"}
    )


def test_a_request_waits_for_its_grammar_while_others_go_on() -> None:
    constraints = SlowConstraints()
    scheduler = make_scheduler(constraints=constraints)
    slow, refused, unwanted = (Generate(request=name, prompt="ab", grammar="json") for name in ("s", "r", "u"))
    for ask in (slow, refused, unwanted, slow):  # the last is a client that is not sure
        assert receive(scheduler, ask, 0.0) == []
    assert len(constraints.answers) == 3
    assert sent(receive(scheduler, Generate(request="o", prompt="cd"), 0.0)), "another request is computed"
    (cancelled,) = told(receive(scheduler, Cancel(request="u"), 0.0))
    assert isinstance(cancelled, Refused)
    assert constraints.answers[2].closed
    for answer in constraints.answers:
        answer.pending = False
    constraints.answers[1].failure = Failure("bad_request", "grammar: no")
    accepted, failed = told(scheduler.handle(AnswersKnown(), 0.0))
    assert accepted == Accepted(request="s", prompt_tokens=2)
    assert failed == Refused(request="r", code="bad_request", message="grammar: no")
    assert scheduler.requests.compiling == []


class Constrained:
    """A scheduler with one constrained sequence "s" whose first token, x, is sampled and computed by a step."""

    def __init__(self, **ask: Any) -> None:
        self.constraints = SlowConstraints()
        self.scheduler = make_scheduler(constraints=self.constraints)
        options = {"prompt": "ab", "grammar": "json", "max_tokens": 9} | ask
        receive(self.scheduler, Generate(request="s", **options), 0.0)
        (self.answer,) = self.constraints.answers
        self.answer.pending = False
        (prefill,) = sent(self.scheduler.handle(AnswersKnown(), 0.0))
        finish(self.scheduler, prefill)
        self.actions = self.scheduler.handle(TokensSampled((ord("x"),)), 1.0)
        self.steps = sent(self.actions)

    def known(self, *, complete: bool = False, failure: Failure | None = None) -> list[Action]:
        """The answer to the last token arrives."""
        self.answer.pending, self.answer.complete, self.answer.failure = False, complete, failure
        return self.scheduler.handle(AnswersKnown(), 2.0)


def test_a_constrained_sequence_is_in_the_step_that_follows_its_token() -> None:
    run = Constrained()
    (step,) = run.steps
    assert isinstance(step, Step)
    assert (step.positions, step.tokens) == ((2,), (ord("x"),))
    assert told(run.actions) == [], "whether the text goes on is not known yet"
    (token,) = told(run.known())
    assert isinstance(token, Token)
    assert (token.token, run.answer.tokens) == (ord("x"), [ord("x")])
    (sample,) = finish(run.scheduler, step)
    assert isinstance(sample, SampleTokens)
    assert [(row.row, row.counter, row.allowed) for row in sample.rows] == [(0, 3, SlowAnswer.allowed)]
    (step,) = sent(run.scheduler.handle(TokensSampled((ord("y"),)), 3.0))
    assert isinstance(step, Step)
    assert (step.positions, step.tokens) == ((3,), (ord("y"),))


def test_a_step_waits_for_the_masks_of_its_sequences_before_its_logits_are_sampled() -> None:
    run = Constrained()
    (step,) = run.steps
    assert finish(run.scheduler, step) == []
    assert run.scheduler.awaited == [run.answer]
    sample, token = run.known()
    assert isinstance(sample, SampleTokens)
    assert isinstance(token, Tell)
    assert run.scheduler.awaited == []


def test_a_step_that_is_done_counts_though_a_process_dies_while_it_waits_for_masks() -> None:
    run = Constrained()
    (step,) = run.steps
    finish(run.scheduler, step)
    assert run.scheduler.handle(EpochChanged(1, (("decode", 0),)), 1.5) == []
    sample, _ = run.known()
    assert isinstance(sample, SampleTokens)


def test_a_late_mask_discards_the_row_and_a_later_step_computes_the_same_position() -> None:
    run = Constrained()
    (step,) = run.steps
    finish(run.scheduler, step)
    (sample,) = run.scheduler.handle(AnswersKnown(), 1.5)
    assert sample == SampleTokens(())
    assert run.scheduler.handle(TokensSampled(()), 1.5) == [], "it is in no step until the mask is known"
    actions = run.known()
    (again,), (token,) = sent(actions), told(actions)
    assert isinstance(token, Token)
    assert isinstance(step, Step)
    assert isinstance(again, Step)
    assert (again.positions, again.tokens) == (step.positions, step.tokens)
    (sample,) = finish(run.scheduler, again)
    assert isinstance(sample, SampleTokens)
    assert [(row.row, row.counter) for row in sample.rows] == [(0, 3)]


def test_the_rows_of_other_sequences_keep_their_numbers_when_one_is_discarded() -> None:
    run = Constrained()
    (step,) = run.steps
    receive(run.scheduler, Generate(request="o", prompt="cd", max_tokens=9), 1.0)
    finish(run.scheduler, step)
    run.known()
    (prefill,) = sent(run.scheduler.handle(TokensSampled((ord("y"),)), 2.0))
    finish(run.scheduler, prefill)
    (step,) = sent(run.scheduler.handle(TokensSampled((ord("o"),)), 2.0))
    assert isinstance(step, Step)
    assert step.tokens == (ord("y"), ord("o"))
    finish(run.scheduler, step)
    (sample,) = run.scheduler.handle(AnswersKnown(), 2.0)
    assert isinstance(sample, SampleTokens)
    assert [row.row for row in sample.rows] == [1]
    actions = run.scheduler.handle(TokensSampled((ord("p"),)), 3.0)
    (step,), (token,) = sent(actions), told(actions)
    assert isinstance(step, Step)
    assert isinstance(token, Token)
    assert (token.request, token.token) == ("o", ord("p"))
    assert step.tokens == (ord("p"),), "the other one goes on alone"


@pytest.mark.parametrize(
    ("known", "last"),
    [
        ({"complete": True}, "end"),
        ({"failure": Failure("bad_request", "grammar: too large")}, "grammar: too large"),
    ],
)
def test_a_sequence_that_ends_within_a_step_has_its_slot_until_the_step_is_over(
    known: dict[str, Any], last: str
) -> None:
    run = Constrained()
    (step,) = run.steps
    messages = told(run.known(**known))
    assert not any(isinstance(message, Finished | Refused) for message in messages)
    assert len(run.scheduler.requests.active) == 1
    assert finish(run.scheduler, step) == [SampleTokens(())]
    (message,) = told(run.scheduler.handle(TokensSampled(()), 3.0))
    assert isinstance(message, Finished | Refused)
    assert (message.reason if isinstance(message, Finished) else message.message) == last
    assert run.scheduler.requests.active == []


def test_a_sequence_that_ended_within_a_step_is_told_so_though_that_step_is_never_completed() -> None:
    run = Constrained()
    run.known(complete=True)
    actions = run.scheduler.handle(EpochChanged(1, (("decode", 0), ("decode", 1)), killed=True), 2.5)
    assert told(actions) == []
    (message,) = told(run.scheduler.handle(ProcessReady(("decode", 0), "cpu:other"), 3.0))
    assert isinstance(message, Finished)
    assert message.reason == "end"


def test_a_stop_string_within_a_step_ends_the_sequence_with_that_step() -> None:
    run = Constrained(stop=("x",))
    (step,) = run.steps
    (token,) = told(run.known())
    assert isinstance(token, Token)
    finish(run.scheduler, step)
    (finished,) = told(run.scheduler.handle(TokensSampled(()), 3.0))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stop, finished.text, finished.tokens) == ("stop", "x", "", 1)


def test_a_constrained_sequence_that_is_cancelled_within_a_step_ends_with_it() -> None:
    run = Constrained()
    (step,) = run.steps
    assert receive(run.scheduler, Cancel(request="s"), 1.5) == []
    finish(run.scheduler, step)
    run.scheduler.handle(AnswersKnown(), 2.0)
    (finished,) = told(run.scheduler.handle(TokensSampled(()), 2.0))
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.tokens) == ("cancelled", 0)
    assert run.answer.closed


@pytest.mark.parametrize("seed", range(8))
def test_texts_are_the_same_however_late_their_masks_are(seed: int) -> None:
    chance = random.Random(seed)

    def texts(share_late: float) -> dict[str, list[int]]:
        """The tokens of each request; a row's token follows from the token and the position that the step computed."""
        constraints = SlowConstraints()
        scheduler = make_scheduler(constraints=constraints, sequences=3)
        tokens: dict[str, list[int]] = {}
        pending: list[Action] = []
        for name, grammar in (("a", "json"), ("b", None), ("c", "json")):
            pending += receive(
                scheduler, Generate(request=name, prompt="ab" + name, grammar=grammar, max_tokens=9), 0.0
            )
        step: Step | Prefill | None = None
        while pending or scheduler.requests.active or scheduler.requests.waiting:
            if not pending:
                for answer in constraints.answers:
                    answer.pending &= chance.random() < share_late
                pending = scheduler.handle(AnswersKnown(), 1.0)
                continue
            action = pending.pop(0)
            if isinstance(action, SendStep):
                step = action.message
                for answer in constraints.answers:  # some masks come while the step is computed
                    answer.pending &= chance.random() < 0.5
                pending += scheduler.handle(AnswersKnown(), 1.0)
                pending += finish(scheduler, step)
            elif isinstance(action, SampleTokens):
                assert step is not None
                inputs = step.tokens if isinstance(step, Step) else step.tokens[-1:]
                last = [len(step.tokens) - 1 + step.position] if isinstance(step, Prefill) else step.positions
                sampled = tuple(1 + (inputs[row.row] * 31 + last[row.row] * 17) % 100 for row in action.rows)
                pending += scheduler.handle(TokensSampled(sampled), 1.0)
            elif isinstance(action, Tell) and isinstance(action.message, Token):
                tokens.setdefault(action.message.request, []).append(action.message.token)
        return tokens

    in_time = texts(0.0)
    assert {name: len(tokens) for name, tokens in in_time.items()} == {"a": 9, "b": 9, "c": 9}
    assert texts(0.7) == in_time
