"""The outstanding step, and the choice of the next one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.protocol.messages.worker import DRAFTED, Prefill, Step
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.drafts import StepTimes
from neuronpipe.services.coordinator.scheduling.events import ProcessKey, SendStep, StepFailed, StepLeft
from neuronpipe.services.coordinator.scheduling.prefix_reuse import Match
from neuronpipe.services.coordinator.scheduling.processes import PREFILL, Participants, Workers
from neuronpipe.services.coordinator.scheduling.recurrent_states import NO_STATE, States
from neuronpipe.services.coordinator.scheduling.sequences import Cost, Generation, Scoring, Sequence, add_cost
from neuronpipe.services.runtime.quarantine import CERTAIN, CRASH_WEIGHT, STEP_KILL_WEIGHT

ISOLATED_WEIGHT = CERTAIN - CRASH_WEIGHT  # one more crash is enough: there is a single suspect
STATE_INTERVAL_TOKENS = 64  # a multiple of the chunks that the prompt cache stores
BESIDE_DECODE_TOKENS = 64  # per chunk of a prompt, while other sequences wait for their next token


class OutstandingStep:
    """A step from when it is sent until its logits have been read. Its tokens and positions stay the same however
    often it is sent.

    sequences: its sequences in the order of the logit rows; empty if all were refused
    drafted: the drafted tokens of its only sequence, which follow the newest one. Those that the draft layer predicts
        are known once all participants are done
    judged_tokens: how many of them were compared with the sampled token: none behind a wrong one, or the text's end
    accepted_tokens: how many of them were accepted
    rows: the sequence of each row of logits that is read
    numerics: numerics of its participants
    death_weight: evidence that the step ends processes; it is dropped when the weight reaches CERTAIN
    """

    def __init__(
        self,
        action: SendStep,
        sequences: list[Sequence],
        numerics: str,
        states: States,
        drafted: tuple[int, ...] = (),
    ) -> None:
        self.action = action
        self._states = states
        self.numerics = numerics
        self.sequences = sequences
        self.drafted, self.judged_tokens, self.accepted_tokens = drafted, 0, 0
        self.rows = dict(enumerate(sequences * (1 + len(drafted))))
        self._done = False  # every participant was done before the epoch changed
        self.undrafted_epoch = -1  # of the attempt whose drafted tokens were left out; -1: none
        self._read = False
        self._void = False
        self._busy: set[ProcessKey] = set(action.processes)
        self._cost: Cost = {}  # since it was last sent
        isolated = any(sequence.isolated for sequence in sequences)
        self.death_weight = ISOLATED_WEIGHT if isolated else 0

    @property
    def abandoned(self) -> bool:
        """True if the step does not count and every participant has left it: it may be sent again."""
        return self._void and not self._busy and not self._done

    @property
    def computed(self) -> bool:
        """True if the step counts and every participant is done."""
        return not self._void and not self._busy

    @property
    def undisturbed(self) -> bool:
        """True if it is a decode step that is under way and not void."""
        return isinstance(self.action.message, Step) and not self._void and not self._done

    @property
    def is_unread(self) -> bool:
        """True if every participant is done and the logits have not been read."""
        return self._done and not self._read

    def again(self, epoch: int, builder: StepBuilder, participants: Participants) -> OutstandingStep:
        """Return the same step for the current epoch and these participants."""
        message = dataclasses.replace(self.action.message, epoch=epoch)
        if isinstance(message, Step):
            message = dataclasses.replace(message, **builder.shares(participants, sequences=len(message.tokens)))
        action = SendStep(participants, message)
        drafted = self.action.message.tokens[1:] if self.drafted else ()
        repeated = OutstandingStep(action, self.sequences, self.numerics, self._states, drafted)
        repeated.death_weight, repeated.undrafted_epoch = self.death_weight, self.undrafted_epoch
        return repeated

    def put_off(self) -> None:
        """Mark the step as not sent yet."""
        self._busy, self._void = set(), True

    def is_meant(self, event: StepLeft | StepFailed) -> bool:
        """Return True if the event concerns the last attempt at this step, and a participant that has not left it."""
        attempt = self.action.message.step, self.action.message.epoch
        return (event.step, event.epoch) == attempt and event.process in self._busy

    def epoch_changed(self, lost: Iterable[ProcessKey], killed: bool = True) -> None:
        """Void the step, unless every participant was done.

        lost: processes that have ended
        killed: True if SIGKILL ended all of them
        """
        if lost and self._busy and not self._void:
            self.death_weight += STEP_KILL_WEIGHT if killed else CRASH_WEIGHT
        self._busy -= set(lost)
        self._void = not self._done

    def left(self, event: StepLeft) -> None:
        """Note that a participant has left the step. If it is not done, the step is void."""
        self._busy.discard(event.process)
        self._void |= not event.done
        self._done = self.computed
        if isinstance(self.action.message, Step) and self.action.message.is_drafted and event.done:
            self.drafted = event.drafted[: len(self.drafted)]
        add_cost(self._cost, {**event.counters, "answers": 1.0})

    def drop_drafts(self, event: StepFailed) -> bool:
        """Leave the tokens of the draft layer out if the attempt that has failed has any, so that the step can be sent
        again: no text needs them. Return True if it had."""
        message = self.action.message
        if isinstance(message, Step) and message.is_drafted:
            names = ("sequences", "positions", "tokens", "states_from", "states_to")
            shorter = dataclasses.replace(message, **{name: getattr(message, name)[:1] for name in names})
            self.action, self.drafted, self.undrafted_epoch = SendStep(self.action.processes, shorter), (), event.epoch
        if self.undrafted_epoch != event.epoch:
            return False
        self._busy.discard(event.process)
        self._void = True
        return True

    def failed(self, process: ProcessKey) -> None:
        """Note that a participant cannot compute the step, and remove the sequences, whose requests are refused."""
        self.sequences, self.rows = [], {}
        self._busy.discard(process)

    def read(self) -> None:
        """Advance the sequences by the tokens that the step has computed, and reduce `rows` to those to sample.

        A sequence whose grammar's answer is still pending cannot be sampled and does not advance: a later step computes
        the same position again, with the same result.
        """
        self._read = True
        message = self.action.message
        if isinstance(message, Prefill):
            to = NO_STATE if message.state_to is None else message.state_to
            self.sequences[0].advance(message.position, len(message.tokens), self.numerics, to)
            tokens = self.sequences[0].content().tokens
            self._states.written(to, tokens, self.numerics)
            for count, slot in zip(message.snapshot_tokens, message.snapshot_slots, strict=True):
                self._states.written(slot, tokens[: message.position + count], self.numerics)
            return
        if self.drafted:
            self._read_drafted(message)
            return
        for row, (sequence, position) in enumerate(zip(self.sequences, message.positions, strict=True)):
            if isinstance(sequence, Generation) and sequence.sampled is not None:
                sequence.missed_step = True
                del self.rows[row]
                continue
            sequence.advance(position, 1, self.numerics, self._state_after(row))
            if sequence.last_message is not None:
                del self.rows[row]

    def _read_drafted(self, message: Step) -> None:
        """Advance the sequence by its newest token; `accept` advances it by drafted ones."""
        (sequence,) = self.sequences
        assert isinstance(sequence, Generation)
        sequence.advance(message.positions[0], 1, self.numerics, self._state_after(0))
        sequence.drafted_tokens += len(self.drafted)
        if sequence.last_message is not None:
            self.rows = {}

    def accept(self, row: int) -> bool:
        """Return True if the token of this row counts: it follows the newest token, or drafted ones that are those of
        its sequence by now, which advances."""
        if not row or not self.drafted:
            return True
        (sequence,) = self.sequences
        assert isinstance(sequence, Generation)
        self.judged_tokens += 1
        if sequence.tokens[-1] != self.drafted[row - 1] or len(sequence.tokens) != sequence.computed_tokens + 1:
            return False
        sequence.advance(sequence.computed_tokens, 1, self.numerics, self._state_after(row))
        sequence.accepted_tokens += 1
        self.accepted_tokens += 1
        return True

    def _state_after(self, row: int) -> int:
        """Return the slot of the recurrent state after the token of this row of a decode step."""
        message = self.action.message
        assert isinstance(message, Step)
        return message.states_to[row] if message.states_to else NO_STATE

    def account(self, measured: Cost) -> None:
        """Add the cost of the step to that of every generated sequence in it.

        measured: figures that the service has measured, as `TokensSampled.cost`
        """
        message = self.action.message
        add_cost(self._cost, {**measured, "steps": 1.0, "tokens": float(len(message.tokens))})
        for sequence in self.sequences:
            if isinstance(sequence, Generation):
                add_cost(sequence.prefill_cost if isinstance(message, Prefill) else sequence.decode_cost, self._cost)


class StepBuilder:
    """The choice of the next step: prefill and decode in turn, scores in steps of their own.

    workers: the processes that can take part
    prefix_source: returns the KV slot from which the next chunk of a prompt may copy keys and values of the given
    numerics; None: nothing can be copied
    states: the slots of recurrent states
    step_times: measured times of decode steps for one sequence
    steps: number of steps so far
    can_use_layer: False once a step could be computed only without the draft layer: a cluster of it is damaged
    undrafted_step: the number of a step that has no drafted tokens, since it may be on its way; 0: none
    """

    def __init__(
        self,
        limits: Limits,
        workers: Workers,
        prefix_source: Callable[[Generation, str], Match | None],
        states: States,
    ) -> None:
        self._limits = limits
        self._workers = workers
        self._prefix_source, self._states = prefix_source, states
        self._prefill_turn = True
        self._score_turn = False
        self.step_times = StepTimes()
        self.can_use_layer = limits.draft_layers > 0
        self.steps = self.undrafted_step = 0

    def next_step(
        self, sequences: list[Sequence], epoch: int, read_states: Iterable[int] = ()
    ) -> OutstandingStep | None:
        """Return the next step for some of these sequences in this epoch; None if none can continue.

        read_states: state slots that active sequences go on from, and those that are being saved
        """
        decoders, numerics = self._workers.decoders(), self._workers.prefill_numerics
        prefills = [sequence for sequence in sequences if sequence.prefilling]
        decodes = (
            [sequence for sequence in sequences if not sequence.prefilling and not sequence.is_blocked]
            if decoders
            else []
        )
        if numerics is not None and prefills and (self._prefill_turn or not decodes):
            self._prefill_turn = False
            return self._prefill(prefills[0], epoch, numerics, [*read_states], beside_decode=bool(decodes))
        self._prefill_turn = True
        batch = self._decode_batch(decodes)
        return self._decode(batch, epoch, decoders, read_states) if batch else None

    def shares(self, participants: Participants, *, sequences: int) -> dict[str, Any]:
        """Return the fields of `Step` that divide the work between participants.

        sequences: number of sequences in the step
        """
        are_accelerators = [role == ACCELERATOR for role, _ in participants]
        names = tuple(f"{role}.{index}" for role, index in participants)
        return {"participants": names, **self._limits.shares(are_accelerators, sequences)}

    def _decode_batch(self, decodes: list[Sequence]) -> list[Sequence]:
        """Return the sequences of the next decode step: generated ones, as many as there are logit rows, or a single
        score, or a single isolated sequence. Empty if there are none."""
        if isolated := [sequence for sequence in decodes if sequence.isolated]:
            return isolated[:1]
        scores = [sequence for sequence in decodes if isinstance(sequence, Scoring)]
        generations = [sequence for sequence in decodes if not isinstance(sequence, Scoring)]
        score_turn = bool(scores) and (self._score_turn or not generations)
        self._score_turn = not score_turn
        return [*scores[:1]] if score_turn else generations[: self._limits.logit_rows]

    def _prefill(
        self, sequence: Sequence, epoch: int, numerics: str, read: list[int], *, beside_decode: bool
    ) -> OutstandingStep:
        """Return a step for a prompt's next chunk. read: as `read_states` of `next_step`"""
        first, copy_from, targets = sequence.computed_tokens, None, tuple[int, ...]()
        state, state_to, snapshots = sequence.state, None, dict[int, int]()
        limit_tokens = self._limits.prefill_chunk_tokens
        max_tokens = min(limit_tokens, BESIDE_DECODE_TOKENS) if beside_decode else limit_tokens
        logits: Literal["none", "last", "all"]
        if isinstance(sequence, Scoring):
            chunk, targets, logits = sequence.next_chunk(max_tokens, self._limits.logit_rows)
        else:
            assert isinstance(sequence, Generation)
            if (match := self._prefix_source(sequence, numerics)) is not None:
                copy_from, first, state = match
            chunk = sequence.tokens[first : self._chunk_end(first, max_tokens, sequence.prompt_tokens)]
            logits = "last" if first + len(chunk) == sequence.prompt_tokens else "none"
        if self._states.are_used:
            prompt_tokens = getattr(sequence, "prompt_tokens", math.inf)
            snapshots = self._snapshots(first, first + len(chunk), prompt_tokens, max_tokens, [*read, state])
            state_to = snapshots.pop(len(chunk), None)
            state_to = self._states.target(sequence.slot, state) if state_to is None else state_to
        self.steps += 1
        message = Prefill(
            step=self.steps,
            epoch=epoch,
            sequence=sequence.slot,
            position=first,
            tokens=tuple(chunk),
            logits=logits,
            copy_from=copy_from,
            targets=targets,
            likely=sequence.likely if targets else 0,
            state_from=state,
            state_to=state_to,
            snapshot_tokens=tuple(snapshots),
            snapshot_slots=tuple(snapshots.values()),
        )
        return OutstandingStep(SendStep((PREFILL,), message), [sequence], numerics, self._states)

    def _snapshots(
        self, first: int, end: int, prompt_tokens: float, max_tokens: int, read: list[int]
    ) -> dict[int, int]:
        """Return the snapshots that a prompt's chunk [first, end) writes: number of its tokens -> slot, ascending.

        The last chunk writes the state before the prompt's last token, from which the same prompt goes on, and the last
        one before it that the prompt cache can store; the chunk before the last writes the state after it.
        """
        if end < prompt_tokens:
            positions = [end] if end + max_tokens >= prompt_tokens else []
        else:
            positions = [end - 1, (end - 1) // STATE_INTERVAL_TOKENS * STATE_INTERVAL_TOKENS]
        snapshots: dict[int, int] = {}
        for position in dict.fromkeys(positions):
            slot = self._states.snapshot_target([*read, *snapshots.values()]) if position > first else None
            if slot is not None:
                snapshots[position - first] = slot
        return dict(sorted(snapshots.items()))

    def _chunk_end(self, first: int, max_tokens: int, prompt_tokens: int) -> int:
        """Return where a prompt's chunk ends. States between chunks are at positions where the prompt cache can store
        them."""
        end = min(prompt_tokens, first + max_tokens)
        aligned = end - end % STATE_INTERVAL_TOKENS
        return aligned if self._states.are_used and first < aligned and end < prompt_tokens else end

    def _decode(
        self, batch: list[Sequence], epoch: int, participants: Participants, read: Iterable[int]
    ) -> OutstandingStep:
        self.steps += 1
        drafted, first = self._drafted(batch), batch[0]
        states = self.states([(sequence.slot, sequence.state) for sequence in batch])
        if drafted and states:
            targets = self._states.draft_targets(first.slot, first.state, read)
            drafted = drafted[: len(targets) - 1]
            targets = targets[-1 - len(drafted) :]
            self._states.overwritten(targets)
            states = {"states_from": (first.state, *targets[:-1]), "states_to": (*targets,)}
        message = Step(
            step=self.steps,
            epoch=epoch,
            **self.shares(participants, sequences=len(batch) + len(drafted)),
            sequences=(*(sequence.slot for sequence in batch), *[first.slot] * len(drafted)),
            positions=(
                *(sequence.computed_tokens for sequence in batch),
                *range(first.computed_tokens + 1, first.computed_tokens + 1 + len(drafted)),
            ),
            tokens=(*(sequence.next_token for sequence in batch), *drafted),
            **states,
        )
        numerics = self._workers.numerics_of(participants)
        return OutstandingStep(SendStep(participants, message), batch, numerics, self._states, drafted)

    def _drafted(self, batch: list[Sequence]) -> tuple[int, ...]:
        """Return the drafted tokens of the next decode step; DRAFTED stands for each that the draft layer predicts."""
        (sequence, *others) = batch
        if others or not isinstance(sequence, Generation) or sequence.drafter is None or sequence.isolated:
            return ()
        if self.steps == self.undrafted_step:
            return ()
        drafted = sequence.drafter.draft(self._text_draft_tokens(sequence))
        return drafted or (DRAFTED,) * self._layer_draft_tokens(sequence)

    def may_draft(self, sequence: Sequence) -> bool:
        """Return True if the next step of a sequence that is alone may have drafted tokens."""
        return self._text_draft_tokens(sequence) > 0 or self._layer_draft_tokens(sequence) > 0

    def ended(self, step: OutstandingStep) -> None:
        """Note what a step tells about the draft layer, once its tokens have been processed."""
        message = step.action.message
        self.can_use_layer &= step.undrafted_epoch < 0
        if isinstance(message, Step) and message.is_drafted:
            self.step_times.acceptance.measured(step.accepted_tokens, step.judged_tokens)

    def _text_draft_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens to draft from a text; 0 if that does not pay."""
        if not isinstance(sequence, Generation) or sequence.drafter is None:
            return 0
        return self.step_times.best_draft_tokens(sequence.drafter.acceptance, self._max_drafted(sequence))

    def _layer_draft_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the draft layer is to predict; 0 if that does not pay."""
        if not isinstance(sequence, Generation) or sequence.drafter is None or not self.can_use_layer:
            return 0
        if not self._workers.can_draft:
            return 0
        acceptance, max_tokens = self.step_times.acceptance, self._max_drafted(sequence)
        max_tokens = min(max_tokens, 1) if acceptance.is_assumed else max_tokens
        return self.step_times.best_draft_tokens(acceptance.share, max_tokens, by_layer=True)

    def _max_drafted(self, sequence: Generation) -> int:
        return min(self._limits.draft_tokens, sequence.max_total_tokens - len(sequence.tokens) - 1)

    def states(self, sequences: list[tuple[int, int]]) -> dict[str, Any]:
        """Return `states_from` and `states_to` of a decode step without drafted tokens.

        sequences: (KV slot, state slot) of each
        """
        if not self._states.are_used:
            return {}
        targets = tuple(self._states.target(slot, state) for slot, state in sequences)
        return {"states_from": tuple(state for _, state in sequences), "states_to": targets}
