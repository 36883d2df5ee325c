"""Messages that decode and prefill workers receive from the coordinator."""

from __future__ import annotations

from typing import Literal

from neuronpipe.protocol.codec import Message, message

DRAFTED = -1
"""The token of a `Step` that the draft layer is to predict."""


@message
class Step(Message):
    """To every participant: compute one token of each of these sequences, together with the other participants.
    `sequences`, `positions` and `tokens` have one item per sequence, in the same order; with drafted tokens all items
    are of one sequence, at consecutive positions. The logits of item i are written to row i of the exchange segment.
    `participants`, `first_blocks` and `end_blocks` have one item per
    participant. The participants may change from step to step. Their ranges cover every block of neurons once:
    participants with the same range share it by work stealing, and at most one range is shared. All participants share
    the stages other than the feed-forward's blocks. An accelerator alone computes every row of the matrices in
    `held_matrices`, and what follows from these rows up to the next barrier.

    step: number of the step; a step that is repeated after a failure keeps its number
    epoch: value of the epoch word for which this attempt is valid
    participants: the processes that compute the step, as "role.index", for example "decode.0"; their order numbers them
        from 0
    first_blocks: first block of neurons of each participant, in every layer
    end_blocks: the block after its last one
    sequences: KV slot of each sequence
    positions: position of each token in its sequence, from 0
    tokens: the input tokens, one for each sequence. Either none or all but the first are -1: the draft layer of the
        model predicts these before the step, and the participants write them to `drafted` of the exchange segment
    held_matrices: the matrices that the accelerator among the participants computes alone, out of "qkv",
        "attention_output" (both in every layer) and "output"
    states_from: if layers have a state, the slot of each sequence's state before its token, or -1 at position 0
    states_to: likewise the slot that the state after the token is written to
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
    states_from: tuple[int, ...] = ()
    states_to: tuple[int, ...] = ()

    @property
    def is_drafted(self) -> bool:
        """True if the draft layer predicts all tokens but the first."""
        return self.tokens[-1] == DRAFTED

    def __post_init__(self) -> None:
        if {len(self.states_from), len(self.states_to)} not in ({0}, {len(self.tokens)}):
            raise ValueError("states_from and states_to: expected the same length as tokens, or none")
        if not 0 < len(self.sequences) == len(self.positions) == len(self.tokens):
            raise ValueError("sequences, positions and tokens: expected the same length, at least 1")
        if self.tokens[0] == DRAFTED or {DRAFTED} < {*self.tokens[1:]}:
            raise ValueError("tokens: expected none that are drafted, or all but the first")
        if not 0 < len(self.participants) == len(self.first_blocks) == len(self.end_blocks):
            raise ValueError("participants, first_blocks and end_blocks: expected the same length, at least 1")
        if self.held_matrices and not any(name.startswith("accelerator.") for name in self.participants):
            raise ValueError("held_matrices: no accelerator is among the participants to compute them")


@message
class Prefill(Message):
    """To a prefill worker: compute these tokens of one sequence in all layers and write their keys and values to the KV
    segment. The logits go to the rows of the exchange segment from row 0 on, in the order of the tokens.

    step: number of the step, from the same counter as the steps of `Step`
    epoch: value of the epoch word for which this attempt is valid
    sequence: KV slot
    position: position of the first token
    tokens: the input tokens; at most as many as the plan's prefill chunk
    logits: the tokens whose logits are computed: none, the last one, or all
    copy_from: another KV slot that holds the same tokens before `position`; the worker first copies their keys and
        values from there
    targets: tokens to score, with `logits` "none": the first target follows the first of `tokens`, and so on. The
        worker computes logits and reads them a few rows at a time
    likely: how many of the most likely tokens to return for each target
    state_from: if layers have a state, the slot of the sequence's state before the first token, or -1 at position 0
    state_to: likewise the slot that the state after the last token is written to
    snapshot_tokens: numbers of the chunk's first tokens after which the state is also written, ascending
    snapshot_slots: the slots that these states are written to
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
    state_from: int = -1
    state_to: int | None = None
    snapshot_tokens: tuple[int, ...] = ()
    snapshot_slots: tuple[int, ...] = ()

    @property
    def state_runs(self) -> list[tuple[int, int, int]]:
        """The runs of tokens between two states: (number of tokens, slot of the state before, slot of the one after).
        Empty if no layer has a state."""
        if self.state_to is None:
            return []
        ends = (0, *self.snapshot_tokens, len(self.tokens))
        slots = (self.state_from, *self.snapshot_slots, self.state_to)
        return [(ends[n + 1] - ends[n], slots[n], slots[n + 1]) for n in range(len(slots) - 1)]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens: expected at least one")
        ends, slots = self.snapshot_tokens, (self.state_from, *self.snapshot_slots, self.state_to)
        if len(ends) != len(self.snapshot_slots) or list(ends) != sorted({*ends} & {*range(1, len(self.tokens))}):
            raise ValueError("snapshot_tokens: expected ascending numbers of tokens, and a slot for each")
        if ends and (self.state_to is None or len({*slots}) != len(slots) or min(self.snapshot_slots) < 0):
            raise ValueError("snapshot_slots: expected slots that differ from each other and from those of the step")
        if len(self.targets) > len(self.tokens) or (self.targets and self.logits != "none"):
            raise ValueError('targets: expected no more than tokens, and logits "none"')
        if self.likely < 0:
            raise ValueError("likely: expected 0 or more")
        if self.copy_from == self.sequence:
            raise ValueError("copy_from: expected another slot than that of the sequence")


@message
class Release(Message):
    """To the prefill worker, while no prompt is under way: return the memory of its stage to the system, and the memory
    of the keys and values behind the given number of tokens in each KV slot; then answer `Released`. Decode steps
    within these tokens go on meanwhile.

    keep_tokens: how many tokens of each KV slot keep their memory, in the order of the slots
    """

    keep_tokens: tuple[int, ...]
