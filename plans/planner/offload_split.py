"""The split of feed-forward blocks between an accelerator and the workers, for each number of sequences in a step.

Device and workers compute in parallel, so the best split is near the point where both take equally long. All numbers of
blocks are tried, since some are better than their neighbours: the device returns the sums of eight blocks as one
vector, those of seven as three. Offloaded blocks are not read from flash, so where flash is the bottleneck they save
reads as slots do. If the device shares this machine's memory, memory of blocks that it does not take becomes slots.

Matrices that save time are ranked by the time saved per byte. Plans with the first one, two, and so on are compared; if
there is no room for both, matrices replace blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from neuronpipe.plans.cost.accelerator_cost import AcceleratorCost
from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.token_time import Measurements, matrices_saved_ms, step_ms
from neuronpipe.plans.device.accelerator import MAX_SEQUENCES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Memory, Plan
from neuronpipe.plans.plan.offloaded_blocks import MATRICES, Accelerator, fits_buffer, offloaded_matrices_bytes
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

StepMs = Callable[[int, int], float | None]
"""Returns the expected time of a step, given the numbers of offloaded blocks and of sequences; None if unknown."""


Make = Callable[[tuple[int, ...] | None, tuple[str, ...] | None], Plan]
"""Returns a plan with these offloaded blocks and matrices; None leaves them to the planner. Raises UserError."""


@frozen
class BestSplit:
    """The search for the best split of the work between one accelerator and the workers."""

    manifest: Manifest
    rates: ActivationRates
    accelerator: Accelerator
    measured: Measurements
    make: Make

    def of(self, max_plan: Plan) -> Plan:
        """Return the fastest plan, or `max_plan` if the device was not measured.

        max_plan: the plan with as many blocks as fit; it has matrices only if the device was not measured
        """
        saved_ms = matrices_saved_ms(
            self.manifest, self.rates, max_plan.compute, max_plan.memory, max_plan.flash, self.measured
        )
        worth = [name for name, ms in saved_ms.items() if ms > 0 and fits_buffer(self.manifest, self.accelerator, name)]
        worth.sort(key=lambda name: saved_ms[name] / offloaded_matrices_bytes(self.manifest, (name,), 1), reverse=True)
        choices = [max_plan]
        for count in range(1, len(worth) + 1):
            with contextlib.suppress(UserError):  # no block fits besides these matrices
                choices.append(self.make(None, tuple(name for name in MATRICES if name in worth[:count])))
        return max(map(self.with_best_blocks, choices), key=lambda plan: plan.expected.tokens_per_s or 0.0)

    def with_best_blocks(self, plan: Plan) -> Plan:
        """Return this plan with the offloaded blocks that make steps shortest; unchanged if times are not known."""
        blocks = best_offloaded_blocks(self.manifest, self.rates, plan, self.measured)
        return plan if blocks in (None, plan.compute.held_blocks) else self.make(blocks, plan.compute.held_matrices)


def best_offloaded_blocks(
    manifest: Manifest, rates: ActivationRates, plan: Plan, measured: Measurements
) -> tuple[int, ...] | None:
    """Return the `Compute.held_blocks` with the shortest steps, with at most as many blocks as the plan has.

    None if the device was not measured.
    """
    compute, max_blocks = plan.compute, plan.compute.max_offloaded_blocks()
    if AcceleratorCost.of(manifest, compute, measured[2]) is None:
        return None

    def time_ms(blocks: int, batch: int) -> float | None:
        memory = plan.memory
        if compute.device_shares_memory:
            memory = with_fewer_offloaded_blocks(manifest, memory, max_blocks - blocks)
        tried_compute = dataclasses.replace(compute, held_blocks=(blocks,))
        return step_ms(manifest, rates, tried_compute, memory, plan.flash, measured, batch=batch)

    return best_blocks_by_batch(time_ms, max_blocks, compute.sequences)


def best_blocks_by_batch(step_ms: StepMs, max_blocks: int, sequences: int) -> tuple[int, ...] | None:
    """Return the `Compute.held_blocks` with the shortest steps of one sequence, two, and so on up to MAX_SEQUENCES.

    At least one number is not 0; equal numbers at the end are given once. None if no time is known.

    max_blocks: maximum of offloaded blocks of a feed-forward
    """
    if step_ms(0, 1) is None:
        return None

    def best(batch: int, min_blocks: int) -> int:
        return min(range(min_blocks, max_blocks + 1), key=lambda blocks: step_ms(blocks, batch) or 0.0)

    blocks_by_batch = [best(batch, 0) for batch in range(1, min(sequences, MAX_SEQUENCES) + 1)]
    if not any(blocks_by_batch):
        blocks_by_batch[0] = best(1, 1)
    while len(blocks_by_batch) > 1 and blocks_by_batch[-1] == blocks_by_batch[-2]:
        blocks_by_batch.pop()
    return tuple(blocks_by_batch)


def with_fewer_offloaded_blocks(manifest: Manifest, memory: Memory, fewer_blocks: int) -> Memory:
    """Return the memory of a plan whose accelerator shares this machine's memory, with fewer offloaded blocks.

    The memory of `fewer_blocks` blocks of every feed-forward becomes slots.
    """
    added_slots = manifest.model.ffns * fewer_blocks * manifest.layout.block_clusters
    clusters = manifest.clusters
    return dataclasses.replace(
        memory,
        trigger_slots=min(clusters, memory.trigger_slots + added_slots),
        value_slots=min(clusters, memory.value_slots + added_slots),
    )
