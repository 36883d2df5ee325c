"""The share of a `Step` that one participant computes."""

from __future__ import annotations

from functools import lru_cache

from neuronpipe.plans.plan.document import ACCELERATOR
from neuronpipe.protocol.messages.worker import Step
from neuronpipe.services.steps.backend import Share, StepWork


def work_of(step: Step, name: str) -> StepWork:
    """Return the work of the participant of this name in a step. Raises ValueError if it does not take part."""
    return StepWork(
        number=step.step,
        epoch=step.epoch,
        sequences=step.sequences,
        positions=step.positions,
        tokens=step.tokens,
        logits_first=0,
        logits_count=len(step.tokens),
        states_from=step.states_from,
        states_to=step.states_to,
        share=_share_of(step.participants, step.first_blocks, step.end_blocks, step.held_matrices, name),
    )


@lru_cache(maxsize=8)  # consecutive steps mostly have the same participants
def _share_of(
    participants: tuple[str, ...], first: tuple[int, ...], end: tuple[int, ...], matrices: tuple[str, ...], name: str
) -> Share:
    index = participants.index(name)
    ranges = list(zip(first, end, strict=True))
    sharers = [number for number, blocks in enumerate(ranges) if blocks == ranges[index]]
    offloaded_ends = [end for name, (_, end) in zip(participants, ranges, strict=True) if _is_accelerator(name)]
    return Share(
        first_block=first[index],
        end_block=end[index],
        participants=len(participants),
        participant=index,
        sharers=len(sharers),
        sharer=sharers.index(index),
        offloaded_blocks=max(offloaded_ends, default=0),
        offloaded_matrices=matrices,
    )


def _is_accelerator(participant: str) -> bool:
    return participant.startswith(f"{ACCELERATOR}.")
