"""What clients receive from the coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.layouts.run import BOARD_FLASH
from neuronpipe.protocol.messages.lifecycle import State

RefusalCode = Literal[
    "bad_request", "too_long", "busy", "starting", "draining", "cancelled", "failed", "ended_a_process"
]
Mode = Literal["exact", "predicted", "thresholded"]
Pins = Literal["held", "tried", "let_go"]
FinishReason = Literal["length", "stop", "end", "cancelled", "context"]


@message
class Accepted(Message):
    """The request is queued.

    request: as in the request
    prompt_tokens: length of its text in tokens
    """

    request: str
    prompt_tokens: int


@message
class Refused(Message):
    """The request is not served, or no longer.

    request: as in the request
    code: "bad_request": it will never be served; "too_long": it exceeds the context; "busy", "starting", "draining":
        try again later; "cancelled": the client ended it; "failed": an error inside the run; "ended_a_process": the
        same request was under way when processes died, at the same place, and is not run again
    message: one line for a person
    retry_after_s: with "busy": estimated time until there is room; 0: unknown
    """

    request: str
    code: RefusalCode
    message: str
    retry_after_s: int = 0


@message
class Likely(Message):
    """One of the most likely tokens, in `Token`.

    token: its id
    piece: its own bytes, which need not be whole characters
    logprob: natural logarithm of its probability
    """

    token: int
    piece: bytes
    logprob: float


@message
class Token(Message):
    """One more token.

    request: as in `Generate`
    index: number of the token in the answer, from 0
    token: its id
    text: what it adds to the text; empty while a character is incomplete, or while it may belong to a stop text
    ms: time since the token before, or since `Generate` for the first
    logprob: natural logarithm of its probability by the model, before temperature and penalties. This field and the
        next two are set only if `Generate.logprobs` is
    piece: its own bytes, as in `Likely`; those of an end token are its name
    top: the most likely tokens, most likely first; among equals the lower id first
    """

    request: str
    index: int
    token: int
    text: str
    ms: float
    logprob: float | None = None
    piece: bytes = b""
    top: tuple[Likely, ...] = ()


@message
class Finished(Message):
    """The answer is complete.

    request: as in `Generate`
    reason: max_tokens reached, a stop text, an end token, cancelled by the client, or the context is full
    text: the whole answer
    tokens: number of generated tokens
    prompt_tokens: length of the prompt in tokens
    ttft_ms: from `Generate` to the first token
    tokens_per_s: generated tokens after the first, over the time since the first; 0 when there is only one
    tbt_ms: time between tokens: p50, p90, p99
    memory: bytes by what they are used for; "peak" and "limit" are of the whole run
    flash: figures of this request: bytes and reads of the loader during it, share of clusters missed, ...
    prefill: sums over its prefill steps: steps, tokens, ms from sending to the last answer, read_bytes and reads of the
        loader during them, answers of participants, and the counters of these
    decode: the same of its decode steps; a step of several sequences counts in full for each
    plan: id of the plan
    mode: "exact", "predicted" or "thresholded"
    cached_tokens: how many of the prompt's tokens were not computed, because another text has the same prefix
    """

    request: str
    reason: FinishReason
    text: str
    tokens: int
    prompt_tokens: int
    ttft_ms: float
    tokens_per_s: float
    tbt_ms: dict[str, float]
    memory: dict[str, int]
    flash: dict[str, float]
    prefill: dict[str, float]
    decode: dict[str, float]
    plan: str
    mode: Mode
    cached_tokens: int = 0


@message
class Rated(Message):
    """One token of a text that is scored, in `Scored`.

    token: its id
    piece: its own bytes, as in `Token`
    logprob: natural logarithm of its probability after the tokens before it; nil for the first token of the text
    top: the most likely tokens in its place, most likely first; among equals the lower id first
    """

    token: int
    piece: bytes
    logprob: float | None = None
    top: tuple[Likely, ...] = ()


@message
class Scored(Message):
    """One piece of the text is scored.

    request: as in `Score`
    position: position of its first token in the text
    row: row of the exchange segment with the logits after the first token, valid until `Next`
    rows: length of the piece in tokens
    nll: negative natural logarithm of the probability of each token that follows; one less than rows at the end of
        the text
    rated: with `Score.logprobs`, the same tokens in the same order; before them, in the first piece, the text's first
        token
    """

    request: str
    position: int
    row: int
    rows: int
    nll: tuple[float, ...]
    rated: tuple[Rated, ...] = ()


@message
class ScoreFinished(Message):
    """The whole text is scored.

    request: as in `Score`
    tokens: number of tokens that were scored: all but the first
    nll_mean: mean over these; the perplexity is its exponential
    seconds: from `Score` to here
    """

    request: str
    tokens: int
    nll_mean: float
    seconds: float


@message
class Tokenized(Message):
    """A text and its tokens.

    request: as in `Tokenize`
    tokens: their ids
    pieces: the bytes of each, as in `Token`
    text: what the tokens stand for; what the tokenizer left out of a given text is not in it, nor are
        special ones, unless `Tokenize.special` asked for them
    """

    request: str
    tokens: tuple[int, ...]
    pieces: tuple[bytes, ...]
    text: str


@message
class ProcessStatus(Message):
    """One process, in `Status`.

    role: as in `Hello`
    index: as in `Hello`
    pid: process id; 0 when there is none at the moment
    state: as the coordinator sees it
    core: the processor it is pinned to
    step: as in `Beat`
    outstanding: how many requests it has not answered
    restarts: how often it was lost and restarted; replacing it by `swap` does not count
    numerics: as in `Hello`
    backend: who computes in it by the plan, as NAME or NAME:OPTIONS; empty: the native engine, or it computes nothing
    work: what of decode steps it computes now, in words, where processes compute different things
    note: what the run waits for in vain that this process has not done, in words; empty: nothing
    """

    role: str
    index: int
    pid: int
    state: State
    core: int | None = None
    step: int = 0
    outstanding: int = 0
    restarts: int = 0
    numerics: str = ""
    backend: str = ""
    work: str = ""
    note: str = ""


@message
class WarmUp(Message):
    """Progress of warm-up, in `Status` and `Snapshot`: of what the cache asked the loader to load when one of the two
    started last.

    loaded_bytes: loaded so far, also by requests
    total_bytes: all of it
    bytes_per_s: how fast, on average since it began; 0 where it is not known
    left_s: how long the rest takes at that speed; nil where it is not known
    """

    loaded_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    left_s: float | None = None

    @classmethod
    def on_board(cls, flash: Sequence[int]) -> WarmUp | None:
        """As the loader says in the board's `flash`; None before it was asked."""
        total, left, took_ns = (
            int(flash[BOARD_FLASH.index(name)]) for name in ("warm_up_bytes", "warm_up_left_bytes", "warm_up_ns")
        )
        if not total:
            return None
        loaded = max(0, total - left)
        speed = 1e9 * loaded / took_ns if took_ns else 0.0
        left_s = round(left / speed, 3) if speed else None
        return cls(loaded_bytes=loaded, total_bytes=total, bytes_per_s=round(speed), left_s=left_s)

    @property
    def done(self) -> bool:
        """Whether all of it is there."""
        return self.loaded_bytes >= self.total_bytes


@message
class Status(Message):
    """The run as the coordinator sees it.

    run: id of the run
    ready: whether requests are served
    plan: id of the plan
    mode: "exact", "predicted" or "thresholded"
    processes: one for each process of the plan, in the order of the board's lines and the trace's rings
    memory_bytes: processes and segments together
    memory_peak_bytes: the most it was
    memory_limit_bytes: what the plan allows
    sequences_active: sequences that hold a KV slot
    max_sequences: KV slots there are
    sequences_waiting: requests that wait for one
    steps: steps done
    tokens: tokens generated
    uptime_s: since the coordinator started
    flash_bytes: read since the loader started
    throttle_share: share of the time that the run pauses, by `Throttle`
    cached_tokens: prompt tokens that were not computed, as in `Finished`
    warm_up: absent until the cache has asked for something, and with a loader that does not report it
    miss_rate: of what the last decode steps wanted, the share that was not in memory; 0 before there were enough
    planned_miss_rate: what the plan expects of it
    pins: "held" while what the plan pins stays; "tried" and "let_go" where more was missed than it expects
    """

    run: str
    ready: bool
    plan: str
    mode: Mode
    processes: tuple[ProcessStatus, ...]
    memory_bytes: int
    memory_peak_bytes: int
    memory_limit_bytes: int
    sequences_active: int
    max_sequences: int
    sequences_waiting: int
    steps: int
    tokens: int
    uptime_s: float
    flash_bytes: int = 0
    throttle_share: float = 0.0
    cached_tokens: int = 0
    warm_up: WarmUp | None = None
    miss_rate: float = 0.0
    planned_miss_rate: float = 0.0
    pins: Pins = "held"

    def notes(self) -> str:
        """What keeps the run waiting, for a person: `cache.0 has not sent Hello for 6 s`; empty while all is well."""
        return "; ".join(f"{one.role}.{one.index} {one.note}" for one in self.processes if one.note)
