"""What the coordinator knows of one piece of work: a text being generated, or a text being scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from neuronpipe.protocol.messages.request import Generate, Score
from neuronpipe.services.coordinator.grammar import Grammar
from neuronpipe.services.coordinator.text import TextStream

Cost = dict[str, float]
"""What steps took: figures by name, as in `Finished`."""


def add_cost(total: Cost, more: Cost) -> None:
    """Add `more` to `total`, name by name."""
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


@dataclasses.dataclass(kw_only=True)
class Work:
    """Work on one KV slot. `tokens` are all known tokens; the first `computed_tokens` have keys and values."""

    client: bytes
    request: str
    slot: int
    arrived_at: float
    tokens: list[int]
    computed_tokens: int = 0
    cancelled: bool = False


@dataclasses.dataclass(kw_only=True)
class Generation(Work):
    """A text being generated: the prompt, then a token per step."""

    ask: Generate
    grammar: Grammar | None  # how far the answer has come in what `ask` wants it to be
    stream: TextStream
    prompt_tokens: int
    most_tokens: int  # prompt included: what the context and the request allow
    cached_tokens: int = 0  # of the prompt: their keys and values were there already
    token_times: list[float] = dataclasses.field(default_factory=list)
    prefill_cost: Cost = dataclasses.field(default_factory=dict)  # of the steps it took part in
    decode_cost: Cost = dataclasses.field(default_factory=dict)

    @property
    def generated_tokens(self) -> int:
        """How many tokens were sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are left to compute (a decode step computes the last one it sampled)."""
        return self.computed_tokens < self.prompt_tokens


@dataclasses.dataclass(kw_only=True)
class Scoring(Work):
    """A text whose tokens' likelihoods are asked for; `waiting` while its client copies logits."""

    ask: Score
    total_nll: float = 0.0
    waiting: bool = False
    waiting_since: float = 0.0

    def next_chunk(self, rows: int) -> Sequence[int]:
        """The tokens of the next step: one through decode, at most `rows` through prefill."""
        size = 1 if self.ask.path == "decode" else rows
        return self.tokens[self.computed_tokens : self.computed_tokens + size]
