"""What decode and prefill workers receive from the coordinator."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message


@message
class Step(Message):
    """To every participant: compute one token of each of these sequences, together. `sequences`, `positions` and
    `tokens` have one item per sequence, in the same order; the logits of item i go to row i of the exchange segment.

    `participants`, `first_blocks` and `end_blocks` have one item per participant. Participants may change from step to
    step. Together they have every block of neurons once: those with the same blocks take them by turns, and at most one
    range of blocks is shared. Stages other than the feed-forward's blocks belong to all; but of the matrices that are
    held every row, and what follows from it up to the next meeting, is the accelerator's. An accelerator takes part in
    no step with a participant of a minor version below 1.

    step: number of the step; a step that is repeated after a failure keeps its number
    epoch: value of the epoch word for which this attempt is valid
    participants: who computes the step, by role and index: "decode.0"; their order numbers them from 0
    first_blocks: first block of neurons that each computes, in every layer
    end_blocks: the block after its last one
    sequences: KV slot of each sequence
    positions: position of each token in its sequence, from 0
    tokens: the input tokens, one of each sequence
    held_matrices: of "qkv", "attention_output" (both of every layer) and "output", those that the accelerator among the
        participants computes alone
    """

    step: int
    epoch: int
    participants: tuple[str, ...]
    first_blocks: tuple[int, ...]
    end_blocks: tuple[int, ...]
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    held_matrices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.sequences) == len(self.positions) == len(self.tokens):
            raise ValueError("sequences, positions and tokens: expected the same length, at least 1")
        if not 0 < len(self.participants) == len(self.first_blocks) == len(self.end_blocks):
            raise ValueError("participants, first_blocks and end_blocks: expected the same length, at least 1")
        if self.held_matrices and not any(one.startswith("accelerator.") for one in self.participants):
            raise ValueError("held_matrices: no accelerator is among the participants to compute them")


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
    targets: tokens to rate, with `logits` "none": the first follows the first of `tokens`, and so on. Logits are made
        and read a few rows at a time. Sent to no worker of a minor version below 3
    likely: how many of the most likely tokens to name for each target
    """

    step: int
    epoch: int
    sequence: int
    position: int
    tokens: tuple[int, ...]
    logits: Literal["none", "last", "all"]
    copy_from: int | None = None
    targets: tuple[int, ...] = ()
    likely: int = 0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens: expected at least one")
        if len(self.targets) > len(self.tokens) or (self.targets and self.logits != "none"):
            raise ValueError('targets: expected no more than tokens, and logits "none"')
        if self.likely < 0:
            raise ValueError("likely: expected 0 or more")
        if self.copy_from == self.sequence:
            raise ValueError("copy_from: expected another slot than that of the sequence")


@message
class Release(Message):
    """To the prefill worker, with no prompt under way: give the memory of its stage back to the system, and that of
    keys and values behind so many tokens of each KV slot; then answer `Released`. Decode steps go on meanwhile, within
    these tokens.

    keep_tokens: of each KV slot, in order
    """

    keep_tokens: tuple[int, ...]
