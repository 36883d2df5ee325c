"""Events, which the service passes to the scheduler, and actions, which the scheduler returns."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages import outcome
from neuronpipe.protocol.messages.loader import Hasten, Restore, Save
from neuronpipe.protocol.messages.outcome import Rating
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.messages.worker import Prefill, Step

ProcessKey = tuple[str, int]
"""(role, index)"""


# ---- events --------------------------------------------------------------------------------------------------
@frozen
class RequestReceived:
    """A message of a client: a new request, or one that concerns an earlier request."""

    client: bytes
    message: Message


@frozen
class ProcessReady:
    """A service has finished its start or restart.

    numerics, prompt_cache, drafts: the fields of its `Hello`
    """

    process: ProcessKey
    numerics: str = ""
    prompt_cache: bool = False
    drafts: bool = False


@frozen
class EpochChanged:
    """The epoch has changed: all participants leave the step.

    lost: the processes that ended
    killed: True if SIGKILL ended all of them
    """

    epoch: int
    lost: tuple[ProcessKey, ...]
    killed: bool = True


@frozen
class StepLeft:
    """A participant has left a step.

    done: False if it abandoned the step
    ratings: the field of `Prefilled`
    drafted: the tokens that the draft layer predicts in the step, if it does; more may follow
    """

    process: ProcessKey
    step: int
    epoch: int
    done: bool
    counters: dict[str, float] = dataclasses.field(default_factory=dict)
    ratings: tuple[Rating, ...] = ()
    drafted: tuple[int, ...] = ()


@frozen
class StepFailed:
    """A participant cannot compute the step, for example because a bundle is damaged. The requests of its sequences are
    refused, unless the draft layer predicts tokens in it: then the step is sent again without them. The run
    continues."""

    process: ProcessKey
    step: int
    epoch: int
    message: str


@frozen
class Logprobs:
    """The log-probability of a token, and pairs of id and log-probability of the most likely tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@frozen
class TokensSampled:
    """The result of `SampleTokens`.

    tokens: one for each row, in the same order; NOT_A_NUMBER or ALL_BANNED if there is no token
    cost: figures of the step, measured by the service
    logprobs: log-probabilities of the rows that request them, by the row's place in `SampleTokens`
    """

    NOT_A_NUMBER: ClassVar[int] = -1  # a logit is no number
    ALL_BANNED: ClassVar[int] = -2  # no token is allowed

    tokens: tuple[int, ...]
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, Logprobs] = dataclasses.field(default_factory=dict)


@frozen
class TokensScored:
    """The result of `ScoreTokens`: the log-probability of each target, and the most likely tokens."""

    ratings: tuple[Logprobs, ...]


@frozen
class ThrottleChanged:
    """A client asks for pauses.

    share: share of the time to spend in pauses, 0 to 1
    until: time at which the pauses end
    """

    share: float
    until: float


@frozen
class Leaving:
    """The processes that are to end, usually because others replace them. The set replaces the previous one."""

    processes: frozenset[ProcessKey]


@frozen
class Ending:
    """The run ends: requests are refused from now on, and those under way are not completed."""


@frozen
class MemoryReserved:
    """The cache has evicted what the `ReserveMemory` with this number requested."""

    number: int


@frozen
class AnswersKnown:
    """The grammar process has answered for some sequences or requests, or the wait for its answers has ended."""


@frozen
class MemoryReleased:
    """The prefill worker has released its memory."""


@frozen
class PrefixSaved:
    """The loader does not read the KV slot of the `Save` with this number any more."""

    number: int


@frozen
class PrefixRestored:
    """The loader does not write the KV slot of the `Restore` with this number any more.

    tokens: number of tokens from position 0 on that the slot stores now; 0 if nothing was restored
    """

    number: int
    tokens: int


@frozen
class Tick:
    """Time has passed without another event."""


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
    | PrefixSaved
    | PrefixRestored
    | Ending
    | Tick
)


def event_of(answer: outcome.Reserved | outcome.Released | outcome.Saved | outcome.Restored) -> Event:
    """Return the event of a service's answer about memory or the prompt cache."""
    match answer:
        case outcome.Reserved(number=number):
            return MemoryReserved(number)
        case outcome.Released():
            return MemoryReleased()
        case outcome.Saved(number=number):
            return PrefixSaved(number)
        case outcome.Restored(number=number, tokens=tokens):
            return PrefixRestored(number, tokens)


# ---- actions -------------------------------------------------------------------------------------------------
@frozen
class SendStep:
    """Send the step to these processes under the current epoch."""

    processes: tuple[ProcessKey, ...]
    message: Step | Prefill


@frozen
class Tell:
    """Send the message to a client."""

    client: bytes
    message: Message


@frozen
class SampleRow:
    """The options to sample a token from one row of logits. The same options and `counter` always yield the same
    token.

    text: prompt and completion, if a penalty needs them; the first `prompt_tokens` are the prompt
    biases: pairs of a token and the value to add to its logit
    allowed: one bit for each token id, the lowest bit of a byte first; None: every token is allowed
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
    """Sample a token from each of these rows of logits; answered by `TokensSampled`."""

    rows: tuple[SampleRow, ...]


@frozen
class ScoreTokens:
    """Rate given tokens; answered by `TokensScored`.

    targets: logit row n rates target n; a row without a target is not read
    likely: how many of the most likely tokens to name for each target
    ratings: the prefill worker's ratings, if it has rated the targets; then there are no logits
    """

    targets: tuple[int, ...]
    likely: int = 0
    ratings: tuple[Rating, ...] = ()


@frozen
class Abandon:
    """Advance the epoch, so that the other participants of a failed step do not wait at the barrier."""


@frozen
class Dismiss:
    """Drain the process. No step is outstanding, and none is sent until the process has ended."""

    process: ProcessKey


@frozen
class ReserveMemory:
    """Reserve memory for keys, values and prefill, which the cache then does not use for weight slots.

    number: number of the `Reserve` message, which the answer repeats
    reserved_bytes: all reserved memory; it replaces the previous reservation, which may have been larger
    kv_tokens: number of tokens that have memory, for each KV slot
    """

    number: int
    reserved_bytes: int
    kv_tokens: tuple[int, ...]


@frozen
class ReleaseMemory:
    """Send `Release` to the prefill worker: it releases its memory and that of keys and values beyond `keep_tokens`
    in each KV slot."""

    keep_tokens: tuple[int, ...]


@frozen
class UsePromptCache:
    """Send the message to the loader: save a KV slot to the prompt cache, sooner end that, or restore a slot."""

    message: Save | Hasten | Restore


@frozen
class Ahead:
    """The step after the outstanding one, except for its tokens. It is valid until the next event. It is not an action.

    rows: options to sample the outstanding step's tokens
    number, positions: number and positions of the next step, which has the same sequences and participants
    states_from, states_to: its fields of these names
    ends: end tokens; if one is sampled, this step must not be sent
    """

    rows: tuple[SampleRow, ...]
    number: int
    positions: tuple[int, ...]
    ends: tuple[int, ...]
    states_from: tuple[int, ...] = ()
    states_to: tuple[int, ...] = ()


Action = (
    SendStep | Tell | SampleTokens | ScoreTokens | Abandon | Dismiss | ReserveMemory | ReleaseMemory | UsePromptCache
)
