"""What a step's logits make of the works in it: tokens, likelihoods, ends."""

from __future__ import annotations

from neuronpipe.protocol.messages.client import FinishReason, Scored, Token
from neuronpipe.protocol.messages.worker import Prefill
from neuronpipe.services.coordinator import drawing
from neuronpipe.services.coordinator.admission import Limits
from neuronpipe.services.coordinator.events import Likelihoods, Measured, Sample, Sampled, Tell
from neuronpipe.services.coordinator.outstanding import Outstanding
from neuronpipe.services.coordinator.requests import Requests
from neuronpipe.services.coordinator.sequences import Generation, Scoring, Work
from neuronpipe.services.coordinator.text import Tokenizer


class Results:
    """Takes works on by what a step gave them, and tells their clients."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer, requests: Requests) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._requests = requests

    def read_logits(self, step: Outstanding) -> Sample | Likelihoods:
        """Every participant is done: the works have more keys and values now. Asks for what the logits say."""
        step.reading = True
        message = step.action.message
        count = len(message.tokens) if isinstance(message, Prefill) else 1
        for work in step.works:
            if isinstance(message, Prefill) and isinstance(work, Generation):
                self._requests.reuse(work, message.position - work.computed_tokens)
            work.computed_tokens += count
        first = step.works[0]
        if isinstance(first, Scoring):
            targets = first.tokens[first.computed_tokens - count + 1 : first.computed_tokens + 1]
            return Likelihoods(tuple(targets))
        drawn = [] if isinstance(message, Prefill) and message.logits == "none" else step.works
        return Sample(tuple(drawing.draw_of(row, work, self._limits.end_tokens) for row, work in enumerate(drawn)))

    def sampled(self, works: list[Work], event: Sampled, now: float) -> list[Tell]:
        """A token for each work; for none after a chunk of a prompt that is not its last."""
        told: list[Tell] = []
        for number, (work, token) in enumerate(zip(works, event.tokens, strict=False)):
            assert isinstance(work, Generation)
            try:
                complete = drawing.follow(work, token, self._limits.end_tokens)
            except drawing.Undrawable as trouble:
                told.append(self._requests.refuse(work, trouble.code, str(trouble)))
                continue
            said, reason = self._token(work, token, complete, now)
            if number in event.ratings:
                said = drawing.rated(said, event.ratings[number], self._tokenizer.piece)
            told.append(Tell(work.client, said))
            if reason is not None:
                told.append(self._requests.end_text(work, reason))
        return told

    def _token(self, work: Generation, token: int, complete: bool, now: float) -> tuple[Token, FinishReason | None]:
        """Add a token to a text; returns what its client is told, and why the text ends with it."""
        work.token_times.append(now)
        work.tokens.append(token)
        ended = token in self._limits.end_tokens
        text = "" if ended else work.stream.push(token)
        reason: FinishReason | None = None
        if ended:
            reason = "end"
        elif work.stream.stopped:
            reason = "stop"
        elif complete:
            reason = "end"
        elif len(work.tokens) >= work.most_tokens:
            reason = "length" if work.generated_tokens >= work.ask.max_tokens else "context"
        if reason is not None:
            text += work.stream.finish()
        ms = 1000 * (now - (work.token_times[-2] if len(work.token_times) > 1 else work.arrived_at))
        said = Token(request=work.request, index=work.generated_tokens - 1, token=token, text=text, ms=round(ms, 3))
        return said, reason

    def measured(self, work: Work, event: Measured, now: float) -> list[Tell]:
        """Likelihoods of the tokens of one score's step."""
        assert isinstance(work, Scoring)
        work.total_nll += sum(event.nll)
        last = work.computed_tokens >= len(work.tokens)
        rows = len(event.nll) + last  # the text's last token has logits and no target
        work.waiting, work.waiting_since = work.ask.logits, now
        scored = Scored(request=work.request, position=work.computed_tokens - rows, row=0, rows=rows, nll=event.nll)
        told = [Tell(work.client, scored)]
        if last and not work.waiting:
            told.append(self._requests.end_score(work, now))
        return told
