"""One repetition of a test: its requests, one or several at once, and the times of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from neuronpipe.launch.bench.cases import Case
from neuronpipe.launch.client import Client
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.client import Finished, Refused, Status, Token
from neuronpipe.protocol.messages.request import AskStatus, Generate


@dataclass
class SequenceTimes:
    """The times of the answer to one request.

    first_ms: time to the first token
    gaps_ms: times between tokens
    counted_ms: those of gaps_ms during which all sequences of the repetition were decoded
    counts: whether all sequences have their first token, so that the next gap may count
    finished: the last message; None while the request is under way
    """

    tokens: int = 0
    first_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    counted_ms: list[float] = field(default_factory=list)
    counts: bool = False
    finished: Finished | None = None


@frozen
class Repetition:
    """The sequences of requests that were sent at once."""

    sequences: tuple[SequenceTimes, ...]

    @property
    def first_ms(self) -> float:
        """Time to the first token of the first sequence."""
        return self.sequences[0].first_ms

    @property
    def gaps_ms(self) -> list[float]:
        return [gap for sequence in self.sequences for gap in sequence.counted_ms]

    @property
    def decoded_tokens(self) -> int:
        """Tokens of all sequences without the first of each, which comes with its prompt."""
        return sum(len(sequence.gaps_ms) for sequence in self.sequences)

    @property
    def finished(self) -> list[Finished]:
        return [sequence.finished for sequence in self.sequences if sequence.finished is not None]

    def time_ms(self, case: Case) -> float:
        """Return the time that the test counts. Sequences share steps, so the decode time is their mean."""
        decode_ms = sum(sum(sequence.gaps_ms) for sequence in self.sequences) / len(self.sequences)
        return (self.first_ms if case.prefill_tokens else 0.0) + decode_ms

    def tokens_per_s(self, case: Case) -> float:
        """Return the tokens that the test counts, of all sequences, per second."""
        if case.prefill_tokens:
            return 1000 * (case.prefill_tokens + self.decoded_tokens) / self.time_ms(case)
        return sum(1000 * len(sequence.counted_ms) / sum(sequence.counted_ms) for sequence in self.sequences)


def run_repetition(client: Client, case: Case, requests: Sequence[Generate]) -> Repetition:
    """Send the requests at once, and time their tokens. Raises UserError if one ends with nothing to measure."""
    sequences = {request.request: SequenceTimes() for request in requests}
    for message in client.request(requests[0]) if len(requests) == 1 else _answers(client, requests):
        record(sequences, message)
    for sequence in sequences.values():
        if case.decode_tokens and not sequence.counted_ms:
            raise UserError(
                f"{case.name}: the model ended an answer after {sequence.tokens} token(s), too soon to measure"
            )
    return Repetition(tuple(sequences.values()))


def record(sequences: dict[str, SequenceTimes], message: Message) -> None:
    """Record one message. Tokens that come again after a restart of the coordinator are ignored."""
    sequence = sequences.get(getattr(message, "request", ""))
    if sequence is None:
        return
    if isinstance(message, Finished):
        sequence.finished = message
    elif isinstance(message, Token) and message.index == sequence.tokens:
        sequence.tokens += 1
        if message.index == 0:
            sequence.first_ms = message.ms
        else:
            sequence.gaps_ms.append(message.ms)
            if sequence.counts and not any(any_sequence.finished for any_sequence in sequences.values()):
                sequence.counted_ms.append(message.ms)
        sequence.counts = all(any_sequence.tokens for any_sequence in sequences.values())


def _answers(client: Client, requests: Sequence[Generate]) -> Iterator[Message]:
    """Send the requests and yield their answers. Raises UserError if the coordinator is restarted meanwhile."""
    open_requests = {request.request for request in requests}
    for request in requests:
        client.send(request)
    for message in client.replies():
        if message is None:
            client.send(AskStatus())
        elif isinstance(message, Status):
            if any(process.role == "coordinator" and process.restarts for process in message.processes):
                raise UserError("the coordinator was restarted and has lost these requests; measure again")
        elif isinstance(message, Refused) and message.request in open_requests:
            raise UserError(message.message)
        else:
            yield message
            if isinstance(message, Finished):
                open_requests.discard(message.request)
            if not open_requests:
                return
