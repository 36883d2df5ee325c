"""What decode and prefill workers receive from the coordinator."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message


@message
class Share(Message):
    """One participant of a `Step`, and which neurons are its own.

    role: the participant's role
    index: number among the processes of this role
    first_block: first block of neurons that it computes, in every layer
    end_block: the block after its last one
    """

    role: str
    index: int
    first_block: int
    end_block: int

    @property
    def blocks(self) -> tuple[int, int]:
        """The range [first, end)."""
        return self.first_block, self.end_block


@message
class Step(Message):
    """To every participant: compute one token of each of these sequences, together. `sequences`, `positions` and
    `tokens` have one item per sequence, in the same order; the logits of item i go to row i of the exchange segment.

    Participants may change from step to step. Together they have every block once: those with the same blocks take them
    by turns, and at most one range of blocks is shared. Stages other than the feed-forward's blocks belong to all.

    step: number of the step; a step that is repeated after a failure keeps its number
    epoch: value of the epoch word for which this attempt is valid
    participants: who computes the step; their order numbers them from 0
    sequences: KV slot of each sequence
    positions: position of each token in its sequence, from 0
    tokens: the input tokens, one of each sequence
    """

    step: int
    epoch: int
    participants: tuple[Share, ...]
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.sequences) == len(self.positions) == len(self.tokens):
            raise ValueError("sequences, positions and tokens: expected the same length, at least 1")
        if not self.participants:
            raise ValueError("participants: expected at least one")


@message
class Prefill(Message):
    """To a prefill worker: run these tokens of one sequence through all layers and write their keys and values to
    the KV segment. Logits go to the rows of the exchange segment from row 0 on, in the order of the tokens.

    step: number of the step, from the same counter as that of `Step`
    epoch: value of the epoch word for which this attempt is valid
    sequence: KV slot
    position: position of the first token
    tokens: at most the plan's prefill chunk
    logits: for which tokens logits are computed
    copy_from: another KV slot with the same tokens before `position`: their keys and values are copied from there first
    """

    step: int
    epoch: int
    sequence: int
    position: int
    tokens: tuple[int, ...]
    logits: Literal["none", "last", "all"]
    copy_from: int | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens: expected at least one")
        if self.copy_from == self.sequence:
            raise ValueError("copy_from: expected another slot than that of the sequence")
