"""Admission: checks of requests, and the tokenization of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.client import Mode, RefusalCode, Refused, Tokenized
from neuronpipe.protocol.messages.request import MAX_BIAS, RANGES, Bias, Generate, Score, Tokenize
from neuronpipe.services.coordinator.text.function_calls import CallsError, require_short_calls
from neuronpipe.services.coordinator.text.grammar import GrammarError, require_short
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer
from neuronpipe.services.runtime.job import Job

QUEUED_PER_SEQUENCE, MIN_QUEUED = 4, 64


@frozen(kw_only=True)
class Limits:
    """The limits that the plan and the package set."""

    mode: Mode
    sequences: int
    context_tokens: int
    prefill_chunk_tokens: int
    logit_rows: int
    vocabulary: int
    end_tokens: frozenset[int]
    plan_id: str
    blocks: int = 1  # of a layer
    offloaded_blocks: tuple[int, ...] = ()  # of a layer, by number of sequences: see `held_blocks` of `Compute`
    offloaded_matrices: tuple[str, ...] = ()
    state_slots: int = 0
    draft_tokens: int = 0
    draft_layers: int = 0
    model_context_tokens: int = 0  # what a run of this model may have at most; 0: no more than this one has

    @classmethod
    def of(cls, job: Job) -> Limits:
        manifest, compute = job.package.manifest, job.plan.compute
        return cls(
            mode=compute.mode,
            sequences=compute.sequences,
            context_tokens=compute.context_tokens,
            model_context_tokens=manifest.model.context_tokens,
            prefill_chunk_tokens=compute.prefill_chunk_tokens,
            logit_rows=compute.logit_rows,
            state_slots=compute.state_slots,
            draft_tokens=compute.draft_tokens,
            draft_layers=manifest.model.draft_layers,
            vocabulary=manifest.model.vocabulary,
            end_tokens=frozenset(manifest.end_tokens),
            plan_id=job.plan.id,
            blocks=manifest.layout.blocks,
            offloaded_blocks=compute.held_blocks,
            offloaded_matrices=compute.held_matrices,
        )

    def shares(self, are_accelerators: Sequence[bool], sequences: int) -> dict[str, tuple[int, ...] | tuple[str, ...]]:
        """Return the fields of `Step` that assign blocks and matrices to participants.

        are_accelerators: for each participant True if it is an accelerator, which computes the first blocks and the
            offloaded matrices; the others share the remaining blocks by work stealing
        sequences: number of sequences in the step
        """
        has_accelerator, sizes = any(are_accelerators), self.offloaded_blocks
        offloaded = sizes[min(sequences, len(sizes)) - 1] if has_accelerator else 0
        return {
            "first_blocks": tuple(0 if is_accelerator else offloaded for is_accelerator in are_accelerators),
            "end_blocks": tuple(offloaded if is_accelerator else self.blocks for is_accelerator in are_accelerators),
            "held_matrices": self.offloaded_matrices if has_accelerator else (),
        }


class _Refusal(Exception):
    """A reason to refuse a request."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code: RefusalCode = code


class Admission:
    """Checks of requests.

    No request may end the coordinator or make it hold memory without limit.
    """

    def __init__(self, limits: Limits, tokenizer: Tokenizer) -> None:
        self._limits = limits
        self._tokenizer = tokenizer

    def check(self, ask: Generate | Score, queued: int) -> list[int] | Refused:
        """Return the tokens of a request, or its refusal.

        queued: the number of requests that wait already
        """
        try:
            if queued >= QUEUED_PER_SEQUENCE * self._limits.sequences + MIN_QUEUED:
                raise _Refusal("busy", f"{queued} requests are waiting already; try again later")
            if isinstance(ask, Generate):
                self._check_options(ask)
            elif ask.logprobs is not None and ask.logprobs not in RANGES["logprobs"]:
                raise _Refusal("bad_request", f"logprobs is out of range: {ask.logprobs}")
            return self._tokens_of(ask)
        except _Refusal as refusal:
            return Refused(request=ask.request, code=refusal.code, message=str(refusal))

    def tokenized(self, ask: Tokenize) -> Tokenized | Refused:
        """Return the tokens and the text of a text or of tokens; a refusal if they exceed the context."""
        try:
            tokens = self._tokens_of(ask, min_tokens=0)
            pieces = tuple(map(self._tokenizer.piece, tokens))
            text = self._tokenizer.decode(tokens, special=ask.special) if tokens else ""
        except _Refusal as refusal:
            return Refused(request=ask.request, code=refusal.code, message=str(refusal))
        return Tokenized(request=ask.request, tokens=tuple(tokens), pieces=pieces, text=text)

    def _check_options(self, ask: Generate) -> None:
        """Raise _Refusal if an option is out of range, or a grammar or the calls are too long."""
        for name, allowed in RANGES.items():
            value = getattr(ask, name)
            if value is not None and value not in allowed:
                raise _Refusal("bad_request", f"{name} is out of range: {value}; it must be {allowed}")
        self._check_biases(ask.logit_bias)
        try:
            if ask.calls is not None:
                require_short_calls(ask.calls)
            if ask.grammar is not None:
                require_short(ask.grammar)
        except (GrammarError, CallsError) as error:
            raise _Refusal("bad_request", f"grammar: {error}") from None

    def _check_biases(self, biases: tuple[Bias, ...]) -> None:
        if len({entry.token for entry in biases}) != len(biases):
            raise _Refusal("bad_request", "logit_bias names a token twice")
        for token, bias in ((entry.token, entry.bias) for entry in biases):
            if not 0 <= token < self._limits.vocabulary:
                outside = f"token {token} is outside the vocabulary of {self._limits.vocabulary}"
                raise _Refusal("bad_request", f"logit_bias: {outside}")
            if not abs(bias) <= MAX_BIAS:
                raise _Refusal("bad_request", f"logit_bias: {bias} for token {token} is not within {MAX_BIAS:g}")

    def _tokens_of(self, ask: Generate | Score | Tokenize, min_tokens: int = 1) -> list[int]:
        limit = self._limits.context_tokens
        # Clients of OpenAI's API look for these words.
        limit_text = f"this model's maximum context length is {limit} tokens"
        tokens = self._encode(ask, limit_text) if ask.tokens is None else list(ask.tokens)
        if len(tokens) < min_tokens:
            raise _Refusal("bad_request", "the prompt is empty; give at least one token")
        if len(tokens) > limit:
            raise _Refusal("too_long", f"{limit_text}; the prompt has {len(tokens)}, {self._how_to_fit}")
        if max(tokens, default=0) >= self._limits.vocabulary or min(tokens, default=0) < 0:
            raise _Refusal("bad_request", f"a token id is outside the vocabulary of {self._limits.vocabulary}")
        return tokens

    @property
    def _how_to_fit(self) -> str:
        """The advice to whoever sends a prompt that is too long."""
        if self._limits.context_tokens >= self._limits.model_context_tokens:
            return "shorten it"
        return f"shorten it, or start the run with --context, up to {self._limits.model_context_tokens}"

    def _encode(self, ask: Generate | Score | Tokenize, limit_text: str) -> list[int]:
        """Return the tokens of a text. Raises _Refusal.

        A text that certainly exceeds the limit is refused without encoding, which takes about a microsecond for each
        character, while others wait.
        """
        text, frame = (ask.prompt if isinstance(ask, Generate) else ask.text), ask.frame
        text_bytes = len((text or "").encode(errors="replace"))
        if text_bytes > self._limits.context_tokens * self._tokenizer.longest_token_bytes:
            problem = (
                f"{limit_text}; the prompt has {text_bytes} bytes, more than that many tokens can have; "
                f"{self._how_to_fit}"
            )
            raise _Refusal("too_long", problem)
        try:
            return self._tokenizer.encode(text or "", frame=frame)
        except Exception as error:  # the library raises its own classes; any of them is about this prompt
            raise _Refusal("bad_request", f"the tokenizer refuses the prompt: {error}") from None
