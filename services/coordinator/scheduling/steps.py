"""Steps: the one that is outstanding, and what the next one is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import ProcessKey, SendStep, StepFailed, StepLeft
from neuronpipe.services.coordinator.scheduling.prefix_reuse import Match
from neuronpipe.services.coordinator.scheduling.processes import PREFILL, Participants, Workers
from neuronpipe.services.coordinator.scheduling.sequences import Cost, Generation, Scoring, Sequence, add_cost
from neuronpipe.services.runtime.quarantine import CERTAIN, CRASH_WEIGHT, STEP_KILL_WEIGHT

ISOLATED_WEIGHT = CERTAIN - CRASH_WEIGHT  # the next crash has one suspect
BESIDE_DECODE_TOKENS = 64  # of a prompt, at a time, while other texts wait for their next token


class OutstandingStep:
    """A step from when it is sent until its logits were read. Tokens and positions stay, however often it is sent.

    sequences: in the order of the logit rows; none where all were refused
    numerics: of its participants
    """

    def __init__(self, action: SendStep, sequences: list[Sequence], numerics: str) -> None:
        self.action = action
        self.numerics = numerics
        self.sequences = sequences
        self._reading = False  # every participant is done, and the service looks at the logits
        self._void = False
        self._busy: set[ProcessKey] = set(action.processes)
        self._cost: Cost = {}  # this time it was sent
        isolated = any(sequence.isolated for sequence in sequences)
        self.death_weight = ISOLATED_WEIGHT if isolated else 0  # of processes that died while they computed it

    @property
    def abandoned(self) -> bool:
        """Whether it does not count, and every participant has left it: it may be sent again."""
        return self._void and not self._busy and not self._reading

    @property
    def computed(self) -> bool:
        """Whether it counts, and every participant is done."""
        return not self._void and not self._busy

    @property
    def undisturbed(self) -> bool:
        """Whether it is a decode step that counts so far."""
        return isinstance(self.action.message, Step) and not self._void and not self._reading

    def again(self, epoch: int, builder: StepBuilder, participants: Participants) -> OutstandingStep:
        """The same step under the present epoch, computed by these."""
        message = dataclasses.replace(self.action.message, epoch=epoch)
        if isinstance(message, Step):
            message = dataclasses.replace(message, **builder.shares(participants, texts=len(message.tokens)))
        again = OutstandingStep(SendStep(participants, message), self.sequences, self.numerics)
        again.death_weight = self.death_weight
        return again

    def put_off(self) -> None:
        """It is not sent yet."""
        self._busy, self._void = set(), True

    def is_meant(self, event: StepLeft | StepFailed) -> bool:
        """Whether a participant that has not left yet speaks of this step, as it was last sent."""
        attempt = self.action.message.step, self.action.message.epoch
        return (event.step, event.epoch) == attempt and event.process in self._busy

    def epoch_changed(self, lost: Iterable[ProcessKey], killed: bool = True) -> None:
        """Everybody leaves. Where all were done before that, it counts nevertheless. killed: by SIGKILL."""
        if lost and self._busy and not self._void:
            self.death_weight += STEP_KILL_WEIGHT if killed else CRASH_WEIGHT
        self._busy -= set(lost)
        self._void = not self._reading

    def left(self, event: StepLeft) -> None:
        """A participant is through with it."""
        self._busy.discard(event.process)
        self._void |= not event.done
        add_cost(self._cost, {**event.counters, "answers": 1.0})

    def failed(self, process: ProcessKey) -> None:
        """A participant cannot compute it; its clients have been told."""
        self.sequences = []
        self._busy.discard(process)

    def read(self) -> None:
        """Every participant is done: the sequences have more keys and values now, and the logits are to be read."""
        self._reading = True
        message = self.action.message
        if isinstance(message, Prefill):
            self.sequences[0].advance(message.position, len(message.tokens), self.numerics)
        else:
            for sequence, position in zip(self.sequences, message.positions, strict=True):
                sequence.advance(position, 1, self.numerics)

    def account(self, measured: Cost) -> None:
        """Add what it took to the account of every text in it. measured: by the service."""
        message = self.action.message
        add_cost(self._cost, {**measured, "steps": 1.0, "tokens": float(len(message.tokens))})
        for sequence in self.sequences:
            if isinstance(sequence, Generation):
                add_cost(sequence.prefill_cost if isinstance(message, Prefill) else sequence.decode_cost, self._cost)


class StepBuilder:
    """What the next step is: prompts and texts in turn, a score's step to itself.

    workers: who can take part
    prefix_source: the slot from which the next chunk of a prompt may copy keys and values of these numerics
    """

    def __init__(
        self, limits: Limits, workers: Workers, prefix_source: Callable[[Generation, str], Match | None]
    ) -> None:
        self._limits = limits
        self._workers = workers
        self._prefix_source = prefix_source
        self._prefill_turn = True
        self._score_turn = False
        self.steps = 0

    def next_step(self, sequences: list[Sequence], epoch: int) -> OutstandingStep | None:
        """The next step for these sequences, under that epoch; None when there is nothing that can be done."""
        decoders, numerics = self._workers.decoders(), self._workers.prefill_numerics
        prefills = [one for one in sequences if one.prefilling]
        decodes = [one for one in sequences if not one.prefilling and not one.awaiting] if decoders else []
        if numerics is not None and prefills and (self._prefill_turn or not decodes):
            self._prefill_turn = False
            return self._prefill(prefills[0], epoch, numerics, beside_decode=bool(decodes))
        self._prefill_turn = True
        batch = self._decode_batch(decodes)
        return self._decode(batch, epoch, decoders) if batch else None

    def shares(self, participants: Participants, *, texts: int) -> dict[str, Any]:
        """The fields of `Step` that say what is whose, with so many texts."""
        holds = [role == ACCELERATOR for role, _ in participants]
        names = tuple(f"{role}.{index}" for role, index in participants)
        return {"participants": names, **self._limits.shares(holds, texts)}

    def _decode_batch(self, decodes: list[Sequence]) -> list[Sequence]:
        """All texts, or one score: logits of a score are read row by row, so it has a step to itself; or one text that
        is isolated."""
        if isolated := [one for one in decodes if one.isolated]:
            return isolated[:1]
        scores = [one for one in decodes if isinstance(one, Scoring)]
        texts = [one for one in decodes if not isinstance(one, Scoring)]
        score_turn = bool(scores) and (self._score_turn or not texts)
        self._score_turn = not score_turn
        return [*scores[:1]] if score_turn else texts[: self._limits.logit_rows]

    def _prefill(self, sequence: Sequence, epoch: int, numerics: str, *, beside_decode: bool) -> OutstandingStep:
        first, copy_from, targets = sequence.computed_tokens, None, tuple[int, ...]()
        limit_tokens = self._limits.prefill_chunk_tokens
        max_tokens = min(limit_tokens, BESIDE_DECODE_TOKENS) if beside_decode else limit_tokens
        logits: Literal["none", "last", "all"]
        if isinstance(sequence, Scoring):
            chunk, targets, logits = sequence.next_chunk(max_tokens, self._limits.logit_rows)
        else:
            assert isinstance(sequence, Generation)
            if (match := self._prefix_source(sequence, numerics)) is not None:
                copy_from, first = match
            chunk = sequence.tokens[first : min(sequence.prompt_tokens, first + max_tokens)]
            logits = "last" if first + len(chunk) == sequence.prompt_tokens else "none"
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
        )
        return OutstandingStep(SendStep((PREFILL,), message), [sequence], numerics)

    def _decode(self, batch: list[Sequence], epoch: int, participants: Participants) -> OutstandingStep:
        self.steps += 1
        message = Step(
            step=self.steps,
            epoch=epoch,
            **self.shares(participants, texts=len(batch)),
            sequences=tuple(one.slot for one in batch),
            positions=tuple(one.computed_tokens for one in batch),
            tokens=tuple(one.tokens[one.computed_tokens] for one in batch),
        )
        return OutstandingStep(SendStep(participants, message), batch, self._workers.numerics_of(participants))
