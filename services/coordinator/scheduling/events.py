"""The events that the service hands to the scheduler, and the actions that the scheduler asks for."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.messages.worker import Prefill, Step

ProcessKey = tuple[str, int]
"""(role, index)"""


# ---- events --------------------------------------------------------------------------------------------------
@frozen
class RequestReceived:
    """A client asks for something, or says more about what it asked for."""

    client: bytes
    message: Message


@frozen
class ProcessReady:
    """A service finished its start, or its restart. numerics: as in `Hello`."""

    process: ProcessKey
    numerics: str = ""


@frozen
class EpochChanged:
    """Everybody leaves the step; `lost` are the processes that ended. killed: whether SIGKILL ended them all."""

    epoch: int
    lost: tuple[ProcessKey, ...]
    killed: bool = True


@frozen
class StepLeft:
    """A participant is through with a step: done, or abandoned because of the epoch. ratings: as in `Prefilled`."""

    process: ProcessKey
    step: int
    epoch: int
    done: bool
    counters: dict[str, float] = dataclasses.field(default_factory=dict)
    ratings: tuple[Rating, ...] = ()


@frozen
class StepFailed:
    """A participant cannot compute the step: damaged bytes on flash, say. The requests in it fail, the run goes on."""

    process: ProcessKey
    step: int
    epoch: int
    message: str


@frozen
class Logprobs:
    """Logarithms of probabilities: of the token that was sampled, and of the most likely ones with their ids."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@frozen
class TokensSampled:
    """The service's answer to SampleTokens.

    tokens: one for each row, in the same order; NOT_A_NUMBER or ALL_BANNED where there is none
    cost: what the service measured of the step
    logprobs: of the rows that ask for them, by the row's place in SampleTokens
    """

    NOT_A_NUMBER: ClassVar[int] = -1  # a logit is no number
    ALL_BANNED: ClassVar[int] = -2  # no token is allowed

    tokens: tuple[int, ...]
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, Logprobs] = dataclasses.field(default_factory=dict)


@frozen
class TokensScored:
    """The service's answer to ScoreTokens: how likely each target is, and which tokens are likeliest."""

    ratings: tuple[Logprobs, ...]


@frozen
class ThrottleChanged:
    """Pause for this share of the time, until then."""

    share: float
    until: float


@frozen
class Leaving:
    """These processes have successors that wait for them to go; it replaces what was said before."""

    processes: frozenset[ProcessKey]


@frozen
class Ending:
    """The run comes to its end: nothing is taken on any more, and nothing is finished."""


@frozen
class MemoryReserved:
    """The cache has freed what `ReserveMemory` with this number asked for."""

    number: int


@frozen
class AnswersKnown:
    """Of answers that follow something it is known now what may come next, or it takes longer than steps can wait."""


@frozen
class MemoryReleased:
    """The prefill worker has given its memory back."""


@frozen
class Tick:
    """Time has passed and nothing else happened."""


Event = (
    RequestReceived
    | ProcessReady
    | EpochChanged
    | Leaving
    | StepLeft
    | StepFailed
    | TokensSampled
    | TokensScored
    | AnswersKnown
    | ThrottleChanged
    | MemoryReserved
    | MemoryReleased
    | Ending
    | Tick
)


# ---- actions -------------------------------------------------------------------------------------------------
@frozen
class SendStep:
    """Send the message to these processes, under the present epoch."""

    processes: tuple[ProcessKey, ...]
    message: Step | Prefill


@frozen
class Tell:
    """Send the message to a client."""

    client: bytes
    message: Message


@frozen
class SampleRow:
    """How to sample a token from one row of logits; the same `counter` gives the same token again.

    text: the tokens so far, when a penalty asks for them; the first `prompt_tokens` are the prompt
    biases: (token, what is added to its logit)
    allowed: one bit for each token id, the lowest bit of a byte first; None: all
    """

    row: int
    ask: Generate
    counter: int
    text: tuple[int, ...] = ()
    prompt_tokens: int = 0
    biases: tuple[tuple[int, float], ...] = ()
    allowed: bytes | None = None


@frozen
class SampleTokens:
    """Read the logit rows and answer with TokensSampled."""

    rows: tuple[SampleRow, ...]


@frozen
class ScoreTokens:
    """Answer with TokensScored.

    targets: logit row n rates target n; a row without a target is not read
    likely: how many of the most likely tokens to name for each target
    ratings: what a prefill worker has read already; then there are no logits
    """

    targets: tuple[int, ...]
    likely: int = 0
    ratings: tuple[Rating, ...] = ()


@frozen
class Abandon:
    """Advance the epoch: the other participants of a failed step must not wait for the one that gave up."""


@frozen
class Dismiss:
    """Drain the process: no step is under way, and none is sent before its successor is ready."""

    process: ProcessKey


@frozen
class ReserveMemory:
    """Tell the cache that so much of the memory that is lent to slots is needed. kv_tokens: of every KV slot, those
    that have memory."""

    number: int
    reserved_bytes: int
    kv_tokens: tuple[int, ...]


@frozen
class ReleaseMemory:
    """Tell the prefill worker to give memory back: as in `Release`."""

    keep_tokens: tuple[int, ...]


@frozen
class Ahead:
    """What follows the step under way, but for the tokens that it gives: no action, but what the next ones will be if
    nothing happens before that step is done.

    rows: how its tokens are to be sampled
    number, positions: of the step after it, which has the same texts and participants
    ends: with one of these tokens a text ends: then something else follows
    """

    rows: tuple[SampleRow, ...]
    number: int
    positions: tuple[int, ...]
    ends: tuple[int, ...]


Action = SendStep | Tell | SampleTokens | ScoreTokens | Abandon | Dismiss | ReserveMemory | ReleaseMemory
