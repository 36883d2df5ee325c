"""What the next step is: prompts and texts in turn, a score's step to itself. Sends nothing and waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.events import Seat, SendStep
from neuronpipe.services.coordinator.outstanding import Outstanding
from neuronpipe.services.coordinator.requests import Requests
from neuronpipe.services.coordinator.sequences import Generation, Scoring, Work

BESIDE_DECODE_TOKENS = 64  # of a prompt, at a time, while other texts wait for their next token
PREFILL: tuple[Seat, ...] = (("prefill", 0),)


class Schedule:
    """Whose turn it is among the works that have a slot."""

    def __init__(self, limits: Limits, decoders: tuple[Seat, ...], requests: Requests) -> None:
        self._limits = limits
        self._decoders = decoders
        self._requests = requests
        self._prefill_turn = True
        self._score_turn = False
        self.steps = 0

    def next_step(self, epoch: int) -> Outstanding | None:
        """The next step, under that epoch; None when there is nothing to do."""
        works = self._requests.works
        prefills = [work for work in works if _wants_prefill(work)]
        decodes = [work for work in works if not _wants_prefill(work)]
        if prefills and (self._prefill_turn or not decodes):
            self._prefill_turn = False
            return self._prefill(prefills[0], epoch, beside_decode=bool(decodes))
        self._prefill_turn = True
        scorings = [work for work in decodes if isinstance(work, Scoring)]
        texts = [work for work in decodes if not isinstance(work, Scoring)]
        self._score_turn = bool(scorings) and (self._score_turn or not texts)
        # Logits of a score are read row by row, so it has a step to itself.
        batch: list[Work] = [*scorings[:1]] if self._score_turn else texts
        self._score_turn = not self._score_turn
        return self._decode(batch[: self._limits.logit_rows], epoch) if batch else None

    def _prefill(self, work: Work, epoch: int, *, beside_decode: bool) -> Outstanding:
        first = work.computed_tokens
        copy_from: int | None = None
        chunk: Sequence[int]
        logits: Literal["none", "last", "all"]
        if isinstance(work, Scoring):
            chunk, logits = work.next_chunk(self._limits.logit_rows), "all"
        else:
            assert isinstance(work, Generation)
            match = self._requests.lender(work)
            if match is not None:
                copy_from, first = match
            most = self._limits.prefill_chunk_tokens
            most = min(most, BESIDE_DECODE_TOKENS) if beside_decode else most
            chunk = work.tokens[first : min(work.prompt_tokens, first + most)]
            logits = "last" if first + len(chunk) == work.prompt_tokens else "none"
        self.steps += 1
        message = Prefill(
            step=self.steps,
            epoch=epoch,
            sequence=work.slot,
            position=first,
            tokens=tuple(chunk),
            logits=logits,
            copy_from=copy_from,
        )
        return Outstanding(SendStep(PREFILL, message), [work])

    def _decode(self, works: list[Work], epoch: int) -> Outstanding:
        self.steps += 1
        message = Step(
            step=self.steps,
            epoch=epoch,
            sequences=tuple(work.slot for work in works),
            positions=tuple(work.computed_tokens for work in works),
            tokens=tuple(work.tokens[work.computed_tokens] for work in works),
        )
        return Outstanding(SendStep(self._decoders, message), works)


def _wants_prefill(work: Work) -> bool:
    if isinstance(work, Scoring):
        return work.ask.path == "prefill"
    assert isinstance(work, Generation)
    return work.prefilling
