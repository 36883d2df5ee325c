"""The step pipeline: steps sent to decode workers and answered through shared memory, without messages.

If all sequences of a step continue, the next step is known, apart from its tokens, while the step is computed. `arm`
passes it to a native thread (native/steps/step_pipeline.c), which samples the tokens when every participant has
answered and sends the next step at once. Meanwhile the coordinator processes the results from `collect`. The
scheduler's decision must equal the step that the native thread has sent; otherwise that step is abandoned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
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

log = logging.getLogger(__name__)


@frozen(slots=True)
class StepAnswer:
    """A participant's answer to a finished step, as in `StepDone`.

    counters: the sum over all answers of one call of `collect`, in the last of them; the others have none
    """

    process: ProcessKey
    step: int
    epoch: int
    counters: dict[str, float]


@frozen(slots=True)
class FinishedStep:
    """A step that all participants have answered.

    tokens: those that the native thread has sampled, one for each sequence; None: it has sampled none
    done_ns, sampled_ns, passed_ns: times, in nanoseconds, at which the last participant had answered, the tokens were
    sampled, and the next step was sent
    """

    tokens: tuple[int, ...] | None
    done_ns: int
    sampled_ns: int
    passed_ns: int


class StepPipeline:
    """The coordinator's end of the step channels. One thread uses it.

    wake: a descriptor that is readable when a step is finished
    done: the last step, if it was sent through the channels; None once the next step is sent
    """

    def __init__(self, memory: RunMemory, model: ModelSpec, sampler: Sampler) -> None:
        self._lanes = Lanes(memory)
        self._sampler, self._drafted = sampler, memory.view("exchange", "drafted")
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
        for lane in range(self._lanes.count):  # workers may still listen for a dead coordinator
            lib.np_channel_clear(self._lanes.native, lane)
        self._native = lib.np_pipeline_create(self._config) if self._lanes.count <= Lanes.MAX_COUNT else ffi.NULL
        self._native_outcome = ffi.new("np_pipeline_result *")
        self._outstanding: SendStep | None = None  # the outstanding step, if it was sent this way
        self._owed: dict[ProcessKey, int] = {}  # participants that have not answered, with their channels
        self._armed_step: Ahead | None = None  # what the native thread will send next
        self._native_arrays: list[Any] = []
        self._unprocessed: SendStep | None = None  # sent by the native thread, not decided by the scheduler yet
        self.done: FinishedStep | None = None

    def close(self) -> None:
        lib.np_pipeline_destroy(self._native)
        self._native = ffi.NULL

    # ---- steps -----------------------------------------------------------------------------------------------
    def send(self, action: SendStep) -> bool:
        """Send a step if all its participants listen to their channels. Returns False if nothing was sent; then the
        participants wait for messages instead."""
        message = action.message
        if self._native == ffi.NULL or not isinstance(message, Step):
            return False
        if not all(role == "decode" and index < self._lanes.count for role, index in action.processes):
            return False
        lanes = {process: process[1] for process in action.processes}
        steps, arrays = _native_steps(message, action.processes)
        mask = sum(1 << lane for lane in lanes.values())
        if lib.np_pipeline_send(self._native, mask, steps) != 1:
            return False
        del arrays  # the native code has copied them
        self._outstanding, self._owed = action, lanes
        return True

    def arm(self, ahead: Ahead | None) -> None:
        """Pass the step after the outstanding one to the native thread.

        Nothing happens if `ahead` is None, the outstanding step was not sent through the channels, or a step is armed.
        """
        if ahead is None or self._outstanding is None or self._armed_step is not None:
            return
        how, uniforms, self._native_arrays = self._sampler.prepare(ahead.rows)
        positions, ends = ffi.new("int32_t[]", ahead.positions), ffi.new("int32_t[]", ahead.ends)
        states = [ffi.new("int32_t[]", slots) if slots else ffi.NULL for slots in (ahead.states_from, ahead.states_to)]
        following = ffi.new(
            "np_pipeline_next *",
            {
                "number": ahead.number,
                "count": len(ahead.rows),
                "how": how,
                "uniforms": uniforms,
                "positions": positions,
                "states_from": states[0],
                "states_to": states[1],
                "ends": ends,
                "end_count": len(ahead.ends),
            },
        )
        self._native_arrays += [how, uniforms, positions, ends, *states]
        self._armed_step = ahead
        lib.np_pipeline_arm(self._native, following)

    def sent_already(self, action: SendStep) -> FinishedStep | None:
        """Return the previous step if the native thread has sent this one already; else None. If it has sent one, that
        is the outstanding step now."""
        done, passed = self.done, self._unprocessed
        self.done = None
        if passed is None:
            return None
        self._outstanding = passed
        self._owed = {process: process[1] for process in passed.processes}
        if passed != action:
            return None
        self._unprocessed = None
        return done

    def take_unexpected(self) -> bool:
        """Return True, once, if the native thread has sent a step that the scheduler did not decide on."""
        is_unexpected, self._unprocessed = self._unprocessed is not None, None
        if is_unexpected:
            log.error("a step was sent ahead that was not decided on")
        return is_unexpected

    @property
    def drafted(self) -> tuple[int, ...]:
        """The tokens that the draft layer has predicted for the last step, and older ones behind them."""
        return tuple(self._drafted)

    # ---- answers ---------------------------------------------------------------------------------------------
    @property
    def is_waiting(self) -> bool:
        """True if answers are outstanding."""
        return bool(self._owed)

    @property
    def is_armed(self) -> bool:
        """True if the native thread has the next step."""
        return self._armed_step is not None

    def collect(self) -> list[StepAnswer]:
        """Return the new answers, and disarm the native thread. With the last answer of a step, `done` is set."""
        if self._outstanding is None:
            return []
        outcome, step = self._native_outcome, self._outstanding.message
        lib.np_pipeline_collect(self._native, outcome)
        ahead, self._armed_step, self._native_arrays = self._armed_step, None, []
        lanes = int(outcome.channels)
        answered = {process: lane for process, lane in self._owed.items() if lanes >> lane & 1}
        answers = []
        if answered:
            self._owed = {process: lane for process, lane in self._owed.items() if process not in answered}
            counters = [dict[str, float]()] * (len(answered) - 1) + [
                summed_counters([outcome.counters + n for n in answered.values()])
            ]
            answers = [
                StepAnswer(process, step.step, step.epoch, sums)
                for process, sums in zip(answered, counters, strict=True)
            ]
        if outcome.all_answered:
            self._end(outcome, ahead)
        return answers

    def _end(self, outcome: Any, ahead: Ahead | None) -> None:
        assert self._outstanding is not None
        message, processes = self._outstanding.message, self._outstanding.processes
        tokens = tuple(outcome.tokens[0 : len(message.tokens)]) if outcome.sampled else None
        self.done = FinishedStep(tokens, int(outcome.done_ns), int(outcome.sampled_ns), int(outcome.next_sent_ns))
        if outcome.next_sent:
            assert ahead is not None
            assert tokens is not None
            assert isinstance(message, Step)
            following = dataclasses.replace(
                message,
                step=ahead.number,
                positions=ahead.positions,
                tokens=tokens,
                states_from=ahead.states_from,
                states_to=ahead.states_to,
            )
            self._unprocessed = SendStep(processes, following)
        self._outstanding, self._owed = None, {}

    def clear_wake(self) -> None:
        """Empty the descriptor `wake` after it was readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 64)

    # ---- processes -------------------------------------------------------------------------------------------
    def lost(self, process: ProcessKey) -> None:
        """Clear the channel of a process that has ended, and await no answer of it."""
        self._owed.pop(process, None)
        if process[0] == "decode" and process[1] < self._lanes.count:
            lib.np_channel_clear(self._lanes.native, process[1])

    def answered_by_message(self, process: ProcessKey) -> None:
        """Await no answer through the channel of a participant that has answered by a message."""
        self._owed.pop(process, None)

    def release(self, peer: str) -> None:
        """End a decode worker's wait at its channel, so that it reads the message that is about to be sent."""
        role, _, index = peer.partition("-")
        if role == "decode" and int(index) < self._lanes.count:
            lib.np_channel_release(self._lanes.native, int(index))


def _native_steps(message: Step, processes: Sequence[ProcessKey]) -> tuple[Any, list[Any]]:
    """Return np_step[] in the order of channels, and the arrays that it points to."""
    states = (message.states_from, message.states_to)
    arrays = [
        ffi.new("int32_t[]", list(numbers)) if numbers else ffi.NULL
        for numbers in (message.sequences, message.positions, message.tokens, *states)
    ]
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
            "sequences": arrays[0],
            "positions": arrays[1],
            "tokens": arrays[2],
            "states_from": arrays[3],
            "states_to": arrays[4],
            "logits_count": work.logits_count,
        }
        for work in works
    ]
    return ffi.new("np_step[]", steps), arrays
