"""The coordinator's end of the decode workers' lanes: steps that are given and answered without messages.

What comes after a step of texts that go on is known while it is computed, but for the tokens: `arm` tells a native
thread (native/steps/relay.c), which samples them when everybody has answered, and passes the next step on at once. The
coordinator hears of it by `take`, while that one is computed: it decides as it always does, and finds its decision
carried out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.coordinator.sampling import Sampler
from neuronpipe.services.coordinator.scheduling.events import Ahead, ProcessKey, SendStep
from neuronpipe.services.runtime.run_memory import Lanes, RunMemory
from neuronpipe.services.steps.step_counters import summed_counters
from neuronpipe.services.steps.step_shares import work_of


@frozen(slots=True)
class Answer:
    """A participant's, of a step that is done; as in `StepDone`. counters: in sum over those that answered together, in
    the last one's."""

    process: ProcessKey
    step: int
    epoch: int
    counters: dict[str, float]


@frozen(slots=True)
class Done:
    """A step that everybody has answered. tokens: those sampled of it already; None: nobody was told how. Times in
    nanoseconds: when the last had answered, when tokens were sampled, when the next step was passed on, if it was."""

    tokens: tuple[int, ...] | None
    done_ns: int
    sampled_ns: int
    passed_ns: int


class Relay:
    """See the module. One thread uses it.

    wake: a descriptor that can be read when a step is done
    done: how the last step ended, if it came by lanes, until the next is sent
    """

    def __init__(self, memory: RunMemory, model: ModelSpec, sampler: Sampler) -> None:
        self._lanes = Lanes(memory)
        self._sampler = sampler
        self.wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        claims = ffi.from_buffer("uint32_t[]", memory.view("exchange", "claims"))
        self._config = ffi.new(
            "np_pipeline_config *",
            {
                "channels": self._lanes.native[0],
                "epoch": ffi.from_buffer("uint32_t[]", memory.view("exchange", "epoch")),
                "barrier": ffi.cast("np_barrier *", ffi.from_buffer(memory.view("exchange", "barriers"))),
                "claims": claims,
                "claim_count": len(claims),
                "logits": sampler.logits,
                "vocabulary": model.vocabulary,
                "scratch": sampler.scratch,
                "wake": self._wake_end,
            },
        )
        for lane in range(self._lanes.count):  # of workers that listen to a coordinator that is gone
            lib.np_channel_clear(self._lanes.native, lane)
        self._native = lib.np_pipeline_create(self._config) if self._lanes.count <= Lanes.MAX_COUNT else ffi.NULL
        self._taken = ffi.new("np_pipeline_result *")
        self._given: SendStep | None = None  # the step under way here
        self._owed: dict[ProcessKey, int] = {}  # who has not answered it, with their lanes
        self._ahead: Ahead | None = None  # what the thread was told
        self._keep: list[Any] = []
        self._passed: SendStep | None = None  # given by the thread, and not yet by the scheduler
        self.done: Done | None = None

    def close(self) -> None:
        """End the thread."""
        lib.np_pipeline_destroy(self._native)
        self._native = ffi.NULL

    # ---- giving ----------------------------------------------------------------------------------------------
    def give(self, action: SendStep) -> bool:
        """Give a step to its participants, where all of them listen. False: nothing was given, and nobody listens."""
        message = action.message
        if self._native == ffi.NULL or not isinstance(message, Step):
            return False
        if not all(role == "decode" and index < self._lanes.count for role, index in action.processes):
            return False
        lanes = {process: process[1] for process in action.processes}
        steps, keep = _native_steps(message, action.processes)
        mask = sum(1 << lane for lane in lanes.values())
        if lib.np_pipeline_send(self._native, mask, steps) != 1:
            return False
        del keep  # it was copied
        self._given, self._owed = action, lanes
        return True

    def arm(self, ahead: Ahead | None) -> None:
        """What to do when the step under way is done; None: nothing but to tell of it."""
        if ahead is None or self._given is None or self._ahead is not None:
            return
        how, uniforms, self._keep = self._sampler.prepare(ahead.rows)
        positions, ends = ffi.new("int32_t[]", ahead.positions), ffi.new("int32_t[]", ahead.ends)
        following = ffi.new(
            "np_pipeline_next *",
            {
                "number": ahead.number,
                "count": len(ahead.rows),
                "how": how,
                "uniforms": uniforms,
                "positions": positions,
                "ends": ends,
                "end_count": len(ahead.ends),
            },
        )
        self._keep += [how, uniforms, positions, ends]
        self._ahead = ahead
        lib.np_pipeline_arm(self._native, following)

    def passed(self, action: SendStep) -> Done | None:
        """When a step is to be sent: how the one before ended, if this one was passed on already. Then it is the one
        under way; else it has to be sent."""
        done, passed = self.done, self._passed
        self.done = self._passed = None
        if passed is None:
            return None
        if passed != action:
            self._passed = passed
            return None
        self._given = action
        self._owed = {process: process[1] for process in action.processes}
        return done

    def take_unwanted(self) -> bool:
        """Whether a step was passed on that was not decided on. Asked once: nothing is known of that step then."""
        unwanted, self._passed = self._passed is not None, None
        return unwanted

    # ---- answers ---------------------------------------------------------------------------------------------
    @property
    def waits(self) -> bool:
        """Whether answers are to come."""
        return bool(self._owed)

    @property
    def armed(self) -> bool:
        """Whether the thread was told what to do."""
        return self._ahead is not None

    def take(self) -> list[Answer]:
        """Who has answered since; and disarm. After the last answer `done` says how the step ended."""
        if self._given is None:
            return []
        taken, step = self._taken, self._given.message
        lib.np_pipeline_collect(self._native, taken)
        ahead, self._ahead, self._keep = self._ahead, None, []
        lanes = int(taken.channels)
        there = {process: lane for process, lane in self._owed.items() if lanes >> lane & 1}
        answers = []
        if there:
            self._owed = {process: lane for process, lane in self._owed.items() if process not in there}
            counters = [dict[str, float]()] * (len(there) - 1) + [
                summed_counters([taken.counters + n for n in there.values()])
            ]
            answers = [Answer(one, step.step, step.epoch, sums) for one, sums in zip(there, counters, strict=True)]
        if taken.all_answered:
            self._end(taken, ahead)
        return answers

    def _end(self, taken: Any, ahead: Ahead | None) -> None:
        assert self._given is not None
        message, processes = self._given.message, self._given.processes
        tokens = tuple(taken.tokens[0 : len(message.tokens)]) if taken.sampled else None
        self.done = Done(tokens, int(taken.done_ns), int(taken.sampled_ns), int(taken.next_sent_ns))
        if taken.next_sent:
            assert ahead is not None
            assert tokens is not None
            assert isinstance(message, Step)
            following = dataclasses.replace(message, step=ahead.number, positions=ahead.positions, tokens=tokens)
            self._passed = SendStep(processes, following)
        self._given, self._owed = None, {}

    def clear_wake(self) -> None:
        """The descriptor was seen to be readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 64)

    # ---- processes -------------------------------------------------------------------------------------------
    def lost(self, process: ProcessKey) -> None:
        """It is gone, or a new one: nothing is expected of it."""
        self._owed.pop(process, None)
        if process[0] == "decode" and process[1] < self._lanes.count:
            lib.np_channel_clear(self._lanes.native, process[1])

    def answered(self, process: ProcessKey) -> None:
        """By a message."""
        self._owed.pop(process, None)

    def release(self, peer: str) -> None:
        """A message follows: who listens looks for it now."""
        role, _, index = peer.partition("-")
        if role == "decode" and int(index) < self._lanes.count:
            lib.np_channel_release(self._lanes.native, int(index))


def _native_steps(message: Step, processes: Sequence[ProcessKey]) -> tuple[Any, list[Any]]:
    """np_step[], in the order of lanes, and what it points to."""
    keep = [ffi.new("int32_t[]", list(numbers)) for numbers in (message.sequences, message.positions, message.tokens)]
    works = [work_of(message, f"{role}.{index}") for role, index in sorted(processes)]
    steps = [
        {
            "number": work.number,
            "epoch": work.epoch,
            "participants": work.share.participants,
            "participant": work.share.participant,
            "first_block": work.share.first_block,
            "end_block": work.share.end_block,
            "sharers": work.share.sharers,
            "sharer": work.share.sharer,
            "count": len(work.tokens),
            "sequences": keep[0],
            "positions": keep[1],
            "tokens": keep[2],
            "logits_count": work.logits_count,
        }
        for work in works
    ]
    return ffi.new("np_step[]", steps), keep
