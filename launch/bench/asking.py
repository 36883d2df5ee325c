"""The requests of one repetition, and what their answers say: one text, or several at once."""

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
class Text:
    """The answer to one request. Times in ms; gaps: between tokens; of them counted: those that began and ended while
    all texts of the repetition were under way."""

    tokens: int = 0
    first_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    counted_ms: list[float] = field(default_factory=list)
    counts: bool = False  # its next gap
    finished: Finished | None = None


@frozen
class Repetition:
    """Texts that were asked for at once; mostly one."""

    texts: tuple[Text, ...]

    @property
    def first_ms(self) -> float:
        """Until the first token of the first one."""
        return self.texts[0].first_ms

    @property
    def gaps_ms(self) -> list[float]:
        """Between tokens, those that count."""
        return [gap for text in self.texts for gap in text.counted_ms]

    @property
    def decoded_tokens(self) -> int:
        """Of all texts, without the first of each, which comes with its prompt."""
        return sum(len(text.gaps_ms) for text in self.texts)

    @property
    def finished(self) -> list[Finished]:
        """The last message of each text."""
        return [text.finished for text in self.texts if text.finished is not None]

    def time_ms(self, case: Case) -> float:
        """What the test counts of the run's time. Texts share the steps, so that it is their mean."""
        decode_ms = sum(sum(text.gaps_ms) for text in self.texts) / len(self.texts)
        return (self.first_ms if case.prefill_tokens else 0.0) + decode_ms

    def tokens_per_s(self, case: Case) -> float:
        """Tokens that the test counts over the time it counts; of several texts, all their tokens."""
        if case.prefill_tokens:
            return 1000 * (case.prefill_tokens + self.decoded_tokens) / self.time_ms(case)
        return sum(1000 * len(text.counted_ms) / sum(text.counted_ms) for text in self.texts)


def generate(client: Client, case: Case, asks: Sequence[Generate]) -> Repetition:
    """Ask for these texts at once. Raises UserError when one ends with nothing to measure."""
    texts = {ask.request: Text() for ask in asks}
    for message in client.request(asks[0]) if len(asks) == 1 else _answers(client, asks):
        take(texts, message)
    for text in texts.values():
        if case.decode_tokens and not text.counted_ms:
            raise UserError(f"{case.name}: the model ended a text after {text.tokens} token(s), too soon to measure")
    return Repetition(tuple(texts.values()))


def take(texts: dict[str, Text], message: Message) -> None:
    """Add one message to the answer that it belongs to. Tokens that come once more, because the coordinator was
    restarted, are left out."""
    text = texts.get(getattr(message, "request", ""))
    if text is None:
        return
    if isinstance(message, Finished):
        text.finished = message
    elif isinstance(message, Token) and message.index == text.tokens:
        text.tokens += 1
        if message.index == 0:
            text.first_ms = message.ms
        else:
            text.gaps_ms.append(message.ms)
            if text.counts and not any(other.finished for other in texts.values()):
                text.counted_ms.append(message.ms)
        text.counts = all(other.tokens for other in texts.values())


def _answers(client: Client, asks: Sequence[Generate]) -> Iterator[Message]:
    """The messages of all of them, up to the last. A coordinator that is restarted meanwhile has forgotten them:
    UserError."""
    open_requests = {ask.request for ask in asks}
    for ask in asks:
        client.send(ask)
    for message in client.replies():
        if message is None:
            client.send(AskStatus())
        elif isinstance(message, Status):
            if any(process.role == "coordinator" and process.restarts for process in message.processes):
                raise UserError("the coordinator was restarted and has forgotten these texts; measure again")
        elif isinstance(message, Refused) and message.request in open_requests:
            raise UserError(message.message)
        else:
            yield message
            if isinstance(message, Finished):
                open_requests.discard(message.request)
            if not open_requests:
                return
