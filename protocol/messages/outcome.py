"""Messages that the coordinator receives from services: the outcome of a `Step` or a `Prefill`, and answers about
memory and the prompt cache. Exactly one of `StepDone`, `Prefilled`, `StepAbandoned` and `StepFailed` answers each piece
of work and returns its credit."""

from __future__ import annotations

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.messages.lifecycle import FailureCode


@message
class StepDone(Message):
    """This worker's share of the step is done. When all participants have sent this, the logits are complete.

    step: as in `Step`
    epoch: as in `Step`
    index: index of the worker in its role
    counters: figures of this step: clusters looked up and missed, times waited, and others
    """

    step: int
    epoch: int
    index: int
    counters: dict[str, float]


@message
class Rating(Message):
    """The score of one target token, in `Prefilled`.

    logprob: natural logarithm of its probability
    likely: ids of the most likely tokens in its place, most likely first; among equals the lower id first
    logprobs: natural logarithms of the probabilities of `likely`
    """

    logprob: float
    likely: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


@message
class Prefilled(Message):
    """The keys and values of all tokens are written, and so are the requested logits.

    step: as in `Prefill`
    epoch: as in `Prefill`
    index: index of the prefill worker
    counters: figures of this step, as in `StepDone`
    ratings: the scores of the targets of the `Prefill`, in their order
    """

    step: int
    epoch: int
    index: int
    counters: dict[str, float]
    ratings: tuple[Rating, ...] = ()


@message
class StepAbandoned(Message):
    """The worker left the step, because the epoch word changed or because the loader did not take its demand. What it
    wrote does not count. If the epoch is still the present one, the coordinator advances it, so that the other
    participants leave the step too.

    step: as in the request
    epoch: as in the request
    index: index of the worker in its role
    """

    step: int
    epoch: int
    index: int


@message
class StepFailed(Message):
    """The worker cannot compute this step, and another attempt may fail too.

    step: as in the request
    epoch: as in the request
    index: index of the worker in its role
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
    """From the cache: the memory of a `Reserve` is free.

    number: as in `Reserve`
    """

    number: int


@message
class Released(Message):
    """From the prefill worker: the memory of a `Release` is returned to the system."""


@message
class Saved(Message):
    """From the loader: it no longer reads the KV slot of a `Save`, which need not be saved.

    number: as in `Save`
    """

    number: int


@message
class Restored(Message):
    """From the loader: it no longer writes the KV slot of a `Restore`.

    number: as in `Restore`
    tokens: how many the slot has now; 0: nothing was restored
    """

    number: int
    tokens: int = 0
