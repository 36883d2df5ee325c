"""Messages that clients receive from the coordinator."""

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
ProfileState = Literal["", "waiting", "measuring", "measured", "failed"]
FinishReason = Literal["length", "stop", "end", "cancelled", "context"]


@message
class Accepted(Message):
    """The request is queued.

    request: as in the request
    prompt_tokens: length of its prompt in tokens
    """

    request: str
    prompt_tokens: int


@message
class Refused(Message):
    """The request is not served, or no longer served.

    request: as in the request
    code: "bad_request": it will never be served; "too_long": it exceeds the context; "busy", "starting", "draining":
        try again later; "cancelled": the client ended it; "failed": an error inside the run; "ended_a_process": the
        same request was under way when processes died, at the same place, and is not run again
    message: one line for a person
    retry_after_s: with "busy": estimated time until there is room, in seconds; 0: unknown
    """

    request: str
    code: RefusalCode
    message: str
    retry_after_s: int = 0


@message
class Likely(Message):
    """One of the most likely tokens, in `Token` and `Rated`.

    token: id of the token
    piece: bytes of the token, which need not be whole characters
    logprob: natural logarithm of its probability
    """

    token: int
    piece: bytes
    logprob: float


@message
class Token(Message):
    """One more token of the completion.

    request: as in `Generate`
    index: number of the token in the completion, from 0
    token: its id
    text: what the token adds to the text; empty while a character is incomplete, or while it may belong to a stop
        string
    ms: time since the token before; since `Generate` for the first
    logprob: natural logarithm of its probability in the model's distribution, before temperature and penalties. This
        field and the next two are set only if `Generate.logprobs` is set
    piece: its own bytes, as in `Likely`; for an end token, the bytes of its name
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
    """The completion is complete.

    request: as in `Generate`
    reason: "length": `max_tokens` was reached; "stop": a stop string was generated; "end": an end token was sampled, or
        nothing can follow by the grammar; "cancelled": the client ended it; "context": the context is full
    text: the whole completion
    tokens: number of generated tokens
    prompt_tokens: length of the prompt in tokens
    ttft_ms: time from `Generate` to the first token
    tokens_per_s: generated tokens after the first, over the time since the first; 0 if there is only one
    tbt_ms: time between tokens, as "p50", "p90" and "p99"
    memory: bytes by what they are used for; "peak" and "limit" are those of the whole run
    flash: figures of this request: bytes and reads of the loader during it, share of clusters missed, and others
    prefill: sums over its prefill steps: "steps", "tokens", "ms" from sending to the last answer, "read_bytes" and
        "reads" of the loader during them, "answers" of participants, and the counters of these
    decode: the same for its decode steps; a step of several sequences counts in full for each
    plan: id of the plan
    mode: "exact", "predicted" or "thresholded"
    cached_tokens: how many tokens of the prompt were not computed, because another sequence or the
        prompt cache has them
    stop: the stop string that was generated, with reason "stop"
    drafted_tokens: how many drafted tokens its steps have computed
    accepted_tokens: how many of them are tokens of the completion
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
    stop: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@message
class Rated(Message):
    """One token of a scored text, in `Scored`.

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
    nll: negative natural logarithm of the probability of each token that follows a token of the piece; at the end of
        the text this has one item less than `rows`
    rated: with `Score.logprobs`, the same tokens in the same order; the first piece has the first token of the text
        before them
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
    tokens: number of tokens that were scored, which is all but the first
    nll_mean: mean negative logarithm of their probabilities; the perplexity is its exponential
    seconds: time since `Score`
    """

    request: str
    tokens: int
    nll_mean: float
    seconds: float


@message
class Tokenized(Message):
    """A text and its tokens.

    request: as in `Tokenize`
    tokens: ids of the tokens
    pieces: the bytes of each token, as in `Token`
    text: the text that the tokens stand for. It lacks what the tokenizer dropped from a given text, and special tokens
        unless `Tokenize.special` is set
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
    pid: process id; 0 while there is none
    state: the state in the coordinator's view
    core: the processor to which it is pinned
    step: as in `Beat`
    outstanding: how many pieces of work it has not answered
    restarts: how often it was lost and restarted; a replacement by `swap` does not count
    numerics: as in `Hello`
    backend: the backend that computes in it by the plan, as NAME or NAME:OPTIONS; empty: the native engine, or it
        computes nothing
    work: its part of the present decode steps, in words, if processes compute different parts
    note: what the run has been waiting for too long from this process, in words; empty: nothing
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
    """Progress of warm-up, in `Status` and `Snapshot`: what became of the clusters that the cache asked the loader to
    load since one of the two was last started.

    loaded_bytes: bytes loaded so far, by requests or by warm-up
    total_bytes: bytes of all these clusters
    bytes_per_s: mean speed since it began; 0 if unknown
    left_s: how long the rest takes at that speed; nil if unknown
    """

    loaded_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    left_s: float | None = None

    @classmethod
    def on_board(cls, flash: Sequence[int]) -> WarmUp | None:
        """Return the progress that the loader writes to the board's `flash` line; None before the cache asked for a
        warm-up."""
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
        """True if all clusters of the warm-up are loaded."""
        return self.loaded_bytes >= self.total_bytes


@message
class Status(Message):
    """The run in the coordinator's view.

    run: id of the run
    ready: true if requests are served
    plan: id of the plan
    mode: "exact", "predicted" or "thresholded"
    processes: one item for each process of the plan, in the order of the board's lines and the trace's rings
    memory_bytes: memory of processes and segments together
    memory_peak_bytes: maximum of `memory_bytes` so far
    memory_limit_bytes: the plan's limit
    sequences_active: sequences that have a KV slot
    max_sequences: number of KV slots
    sequences_waiting: requests that wait for a KV slot
    steps: number of steps done
    tokens: number of tokens generated
    uptime_s: time since the coordinator started
    flash_bytes: bytes read since the loader started
    throttle_share: share of the time that the run pauses, set by `Throttle`
    cached_tokens: prompt tokens that were not computed, as in `Finished`
    warm_up: nil until the cache has asked for a warm-up, and with a loader that does not report it
    miss_rate: share of the cluster parts needed by the last decode steps that was not in memory; 0 before there were
        enough steps
    planned_miss_rate: the miss rate that the plan expects
    pins: "held": what the plan pins stays pinned; "tried": pins are released as a trial, because more was missed than
        the plan expects; "let_go": they are released for good
    device_profile: the profile that the run measures by itself: "waiting" for idle minutes, "measuring", "measured",
        or "failed"; "" if the run measures none
    deviations: terms of the plan that the last tokens differed from by more than a quarter, such as `misses: planned
        8%, measured 21%`; empty before 100 tokens of one sequence, and if none did
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
    device_profile: ProfileState = ""
    deviations: str = ""

    def notes(self) -> str:
        """Return what keeps the run waiting, for a person, such as `cache.0 has not sent Hello for 6 s`; empty while
        all is well."""
        return "; ".join(f"{process.role}.{process.index} {process.note}" for process in self.processes if process.note)
