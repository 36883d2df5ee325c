"""Which requests a run takes on: their numbers checked, their text turned into tokens."""

from __future__ import annotations

import dataclasses
from typing import Literal

from neuronpipe.protocol.messages.client import RefusalCode, Refused
from neuronpipe.protocol.messages.request import Generate, Score
from neuronpipe.services.coordinator.detokenizer import Tokenizer
from neuronpipe.services.coordinator.grammar import GrammarError, Grammars

Problem = tuple[RefusalCode, str]

WAITING_PER_SEQUENCE, MIN_WAITING = 4, 64
MAX_LOGPROBS = 20
MAX_BIAS = MAX_PENALTY = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the plan and the package fix."""

    mode: Literal["exact", "predicted"]
    sequences: int
    context_tokens: int
    prefill_chunk_tokens: int
    logit_rows: int
    vocabulary: int
    end_tokens: frozenset[int]
    plan_id: str


class Admission:
    """Checks requests. Nothing a client sends may end the coordinator, or make it hold memory without limit."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._grammars = grammars

    def check(self, ask: Generate | Score, waiting: int) -> list[int] | Refused:
        """The request's tokens, or its refusal. waiting: how many requests wait already."""
        problem = self._problem_with(ask, waiting)
        tokens: list[int] = []
        if problem is None:
            tokens, problem = self._tokens_of(ask)
        return tokens if problem is None else Refused(request=ask.request, code=problem[0], message=problem[1])

    def _problem_with(self, ask: Generate | Score, waiting: int) -> Problem | None:
        """What is wrong with a request, before its text is looked at."""
        if waiting >= WAITING_PER_SEQUENCE * self._limits.sequences + MIN_WAITING:
            return "busy", f"{waiting} requests are waiting already; try again later"
        return self._problem_with_options(ask) if isinstance(ask, Generate) else None

    def _problem_with_options(self, ask: Generate) -> Problem | None:
        """What is wrong with how the text is to be drawn."""
        for name, good in (
            ("max_tokens", ask.max_tokens >= 1),
            ("temperature", 0 <= ask.temperature <= 100),
            ("top_k", 0 <= ask.top_k < 2**31),
            ("top_p", 0 < ask.top_p <= 1),
            ("min_p", 0 <= ask.min_p <= 1),
            ("repetition_penalty", 1 / MAX_PENALTY <= ask.repetition_penalty <= MAX_PENALTY),
            ("frequency_penalty", abs(ask.frequency_penalty) <= MAX_PENALTY),
            ("presence_penalty", abs(ask.presence_penalty) <= MAX_PENALTY),
            ("logprobs", ask.logprobs is None or 0 <= ask.logprobs <= MAX_LOGPROBS),
        ):
            if not good:
                return "bad_request", f"{name} is out of range: {getattr(ask, name)}"
        biased = {entry.token for entry in ask.logit_bias}
        if len(biased) != len(ask.logit_bias):
            return "bad_request", "logit_bias names a token twice"
        for entry in ask.logit_bias:
            if not 0 <= entry.token < self._limits.vocabulary:
                return (
                    "bad_request",
                    f"logit_bias: token {entry.token} is outside the vocabulary of {self._limits.vocabulary}",
                )
            if not abs(entry.bias) <= MAX_BIAS:
                return "bad_request", f"logit_bias: {entry.bias} for token {entry.token} is not within {MAX_BIAS:g}"
        if ask.grammar is not None:
            try:
                self._grammars.start(ask.grammar)
            except GrammarError as error:
                return "bad_request", f"grammar: {error}"
        return None

    def _tokens_of(self, ask: Generate | Score) -> tuple[list[int], Problem | None]:
        """The request's tokens, or why there are none. A text that is too long for sure is not even encoded: that
        takes 180 bytes of memory for each of the text's."""
        limit = self._limits.context_tokens
        most = f"this model's maximum context length is {limit} tokens"  # clients of OpenAI's API look for these words
        text = ask.prompt if isinstance(ask, Generate) else ask.text
        tokens = ask.tokens
        if tokens is None:
            text_bytes = len((text or "").encode(errors="replace"))
            if text_bytes > limit * self._tokenizer.longest_token_bytes:
                problem = f"{most}; the prompt has {text_bytes} bytes, more than these can be: shorten it"
                return [], ("too_long", problem)
            try:
                tokens = tuple(self._tokenizer.encode(text or "", frame=not isinstance(ask, Generate) or ask.frame))
            except Exception as error:  # the library's own kinds; whatever it is, it is about this text
                return [], ("bad_request", f"the tokenizer refuses the prompt: {error}")
        if not tokens:
            return [], ("bad_request", "the prompt is empty; give at least one token")
        if len(tokens) > limit:
            return [], ("too_long", f"{most}; the prompt has {len(tokens)}, shorten it")
        if max(tokens) >= self._limits.vocabulary or min(tokens) < 0:
            return [], ("bad_request", f"a token id is outside the vocabulary of {self._limits.vocabulary}")
        return list(tokens), None
