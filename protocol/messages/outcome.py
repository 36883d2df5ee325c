"""What the coordinator receives from workers: the outcome of a `Step` or a `Prefill`. Each is answered by exactly one
of the first four, which gives the credit back. And the answers about memory."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.lifecycle import FailureCode


@message
class StepDone(Message):
    """This worker's share of the step is done. When all participants have sent this the logits are complete.

    step: as in `Step`
    epoch: as in `Step`
    index: which decode worker
    counters: figures of this step: clusters looked up and missed, times waited, ...
    """

    step: int
    epoch: int
    index: int
    counters: dict[str, float]


@message
class Rating(Message):
    """What the model makes of one token that is given, in `Prefilled`.

    logprob: natural logarithm of its probability
    likely: ids of the most likely tokens in its place, most likely first; among equals the lower id first
    logprobs: the natural logarithms of their probabilities
    """

    logprob: float
    likely: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@message
class Prefilled(Message):
    """The keys and values of all tokens are written, and the requested logits too.

    step: as in `Prefill`
    epoch: as in `Prefill`
    index: which prefill worker
    counters: figures of this step, as in `StepDone`
    ratings: of the targets of the `Prefill`, in their order
    """

    step: int
    epoch: int
    index: int
    counters: dict[str, float]
    ratings: tuple[Rating, ...] = ()


@message
class StepAbandoned(Message):
    """The worker left the step: the epoch word changed, or the loader did not take its demand. What it wrote does not
    count. If the epoch is still the present one the coordinator advances it, so that the others leave too.

    step: as in the request
    epoch: as in the request
    index: which worker of its role
    """

    step: int
    epoch: int
    index: int


@message
class StepFailed(Message):
    """The worker cannot compute this step, and another attempt may fail too.

    step: as in the request
    epoch: as in the request
    index: which worker of its role
    code: kind of failure, as in `Failed`
    message: one line for a person
    """

    step: int
    epoch: int
    index: int
    code: FailureCode
    message: str


@message
class Reserved(Message):
    """From the cache: what was to be reserved is free.

    number: as in `Reserve`
    """

    number: int


@message
class Released(Message):
    """From the prefill worker: the memory is given back."""
