"""What of a `Step` is whose: the step as one participant gets it."""

from __future__ import annotations

from functools import lru_cache

from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.steps.backend import Share, StepWork


def work_of(step: Step, name: str) -> StepWork:
    """A step as the participant of this name gets it. Raises ValueError when it is not among them."""
    return StepWork(
        number=step.step,
        epoch=step.epoch,
        sequences=step.sequences,
        positions=step.positions,
        tokens=step.tokens,
        logits_first=0,
        logits_count=len(step.tokens),
        share=_share_of(step.participants, step.first_blocks, step.end_blocks, step.held_matrices, name),
    )


@lru_cache(maxsize=8)  # of the participants of one step, who are mostly those of the last
def _share_of(
    participants: tuple[str, ...], first: tuple[int, ...], end: tuple[int, ...], matrices: tuple[str, ...], name: str
) -> Share:
    own = participants.index(name)
    ranges = list(zip(first, end, strict=True))
    sharers = [number for number, blocks in enumerate(ranges) if blocks == ranges[own]]
    return Share(
        first_block=first[own],
        end_block=end[own],
        participants=len(participants),
        participant=own,
        sharers=len(sharers),
        sharer=sharers.index(own),
        held_blocks=max((end for one, (_, end) in zip(participants, ranges, strict=True) if _holds(one)), default=0),
        held_matrices=matrices,
    )


def _holds(participant: str) -> bool:
    """Whether it holds the weights of its blocks."""
    return participant.startswith(f"{ACCELERATOR}.")
