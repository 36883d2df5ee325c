"""What happens to the coordinator's core, and what it wants done: the two alphabets between core and shell."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.messages.worker import Prefill, Step

Seat = tuple[str, int]
"""(role, index)"""


# ---- events --------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Asked:
    """A client sent a request."""

    client: bytes
    message: Message


@dataclasses.dataclass(frozen=True)
class SeatReady:
    """A service finished its start, or its restart."""

    seat: Seat


@dataclasses.dataclass(frozen=True)
class EpochChanged:
    """Everybody leaves the step; `lost` are the seats whose process is gone."""

    epoch: int
    lost: tuple[Seat, ...]


@dataclasses.dataclass(frozen=True)
class Left:
    """A participant is through with a step: done, or abandoned because of the epoch."""

    seat: Seat
    step: int
    epoch: int
    done: bool
    counters: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Broken:
    """A participant cannot compute the step: damaged bytes on flash, say. The requests in it fail, the run goes on."""

    seat: Seat
    step: int
    epoch: int
    message: str


@dataclasses.dataclass(frozen=True)
class Rating:
    """Logarithms of probabilities: of the token that was drawn, and of the most likely ones with their ids."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The shell's answer to Sample, in the same order.

    tokens: BROKEN or BANNED where there is none
    cost: what the shell measured of the step
    ratings: of the draws that ask for one, by their number
    """

    BROKEN: ClassVar[int] = -1  # a logit is no number
    BANNED: ClassVar[int] = -2  # nothing may be drawn

    tokens: tuple[int, ...]
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    ratings: dict[int, Rating] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The shell's answer to Likelihoods: nats per target."""

    nll: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Eased:
    """Rest this share of the time, until then."""

    share: float
    until: float


@dataclasses.dataclass(frozen=True)
class Leaving:
    """These seats' processes have successors that wait for them to go; it replaces what was said before."""

    seats: frozenset[Seat]


@dataclasses.dataclass(frozen=True)
class Ending:
    """The run comes to its end: nothing is taken on any more, and nothing is finished."""


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed and nothing else happened."""


Event = Asked | SeatReady | EpochChanged | Leaving | Left | Broken | Sampled | Measured | Eased | Ending | Tick


# ---- actions -------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class SendStep:
    """Send the message to these seats, under the present epoch."""

    seats: tuple[Seat, ...]
    message: Step | Prefill


@dataclasses.dataclass(frozen=True)
class Tell:
    """Send the message to a client."""

    client: bytes
    message: Message


@dataclasses.dataclass(frozen=True)
class Draw:
    """Sampling of one logit row, as the request says; `counter` makes a repeated draw the same.

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


@dataclasses.dataclass(frozen=True)
class Sample:
    """Read the logit rows and answer with Sampled."""

    draws: tuple[Draw, ...]


@dataclasses.dataclass(frozen=True)
class Likelihoods:
    """Read logit rows 0.. and answer with Measured: one nll per target (a row without a target is not measured)."""

    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Abandon:
    """Advance the epoch: the other participants of a broken step must not wait for the one that gave up."""


@dataclasses.dataclass(frozen=True)
class Dismiss:
    """Drain the seat's process: no step is under way, and none is sent before the seat is ready again."""

    seat: Seat


Action = SendStep | Tell | Sample | Likelihoods | Abandon | Dismiss
