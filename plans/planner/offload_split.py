"""How many blocks of every feed-forward a device computes, by how many texts a step has: so many that the step is
expected to be shortest.

Which matrices it holds besides is found by what each saves for its bytes: those that save time are added one by one,
and so many of them are held, in place of blocks where there is not room for both, as make the fastest plan.

Device and workers compute beside each other, so that is about where they take alike; all numbers are tried, since some
are better than their neighbours (sums of eight blocks come back as one, of seven as three). What a device holds is not
read from flash: where that is what bounds, it is worth as much as memory for as many bytes. Where the device's memory
is this machine's, what it does not hold are slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from neuronpipe.plans.cost.accelerator_cost import DeviceCost
from neuronpipe.plans.cost.activation_rates import Rates
from neuronpipe.plans.cost.token_time import Measured, matrices_saved_ms, step_ms
from neuronpipe.plans.device.accelerator import MAX_SEQUENCES
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Memory, Plan
from neuronpipe.plans.plan.offloaded_blocks import MATRICES, Accelerator, fits_buffer, held_matrices_bytes
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

StepMs = Callable[[int, int], float | None]
"""The expected time of a step, by blocks that the device computes and by texts; None where it is not known."""


Make = Callable[[tuple[int, ...] | None, tuple[str, ...] | None], Plan]
"""A plan with these blocks and matrices held; None leaves them to the planner. Raises UserError."""


@frozen
class BestSplit:
    """What a device is best given: `make` is asked for plans with more or less of it."""

    manifest: Manifest
    rates: Rates
    accelerator: Accelerator
    measured: Measured
    make: Make

    def of(self, made: Plan) -> Plan:
        """The fastest. made: with as many blocks as fit, and with matrices only where the device was not measured: it
        is kept then."""
        saved_ms = matrices_saved_ms(self.manifest, self.rates, made.compute, made.memory, made.flash, self.measured)
        worth = [name for name, ms in saved_ms.items() if ms > 0 and fits_buffer(self.manifest, self.accelerator, name)]
        worth.sort(key=lambda name: saved_ms[name] / held_matrices_bytes(self.manifest, (name,), 1), reverse=True)
        choices = [made]
        for count in range(1, len(worth) + 1):
            with contextlib.suppress(UserError):  # no block fits beside them
                choices.append(self.make(None, tuple(name for name in MATRICES if name in worth[:count])))
        return max(map(self.with_best_blocks, choices), key=lambda one: one.expected.tokens_per_s or 0.0)

    def with_best_blocks(self, made: Plan) -> Plan:
        """The same with so many blocks that steps are shortest; as it is where that is not known."""
        held = best_held(self.manifest, self.rates, made, self.measured)
        return made if held in (None, made.compute.held_blocks) else self.make(held, made.compute.held_matrices)


def best_held(manifest: Manifest, rates: Rates, made: Plan, measured: Measured) -> tuple[int, ...] | None:
    """What the device of this plan is best given, up to what it has, as `Compute.held_blocks`; None where it was not
    measured."""
    compute, most = made.compute, made.compute.most_held_blocks()
    if DeviceCost.of(manifest, compute, measured[2]) is None:
        return None

    def time_ms(blocks: int, texts: int) -> float | None:
        memory = made.memory
        if compute.device_shares_memory:
            memory = without_some(manifest, memory, most - blocks)
        other = dataclasses.replace(compute, held_blocks=(blocks,))
        return step_ms(manifest, rates, other, memory, made.flash, measured, batch=texts)

    return best_by_texts(time_ms, most, compute.sequences)


def best_by_texts(step_ms: StepMs, most: int, sequences: int) -> tuple[int, ...] | None:
    """`Compute.held_blocks`: of one text, two, and so on; with more than MAX_TEXTS as with so many. At least one block
    of one of them; None where no time is known."""
    if step_ms(0, 1) is None:
        return None

    def best(texts: int, least: int) -> int:
        return min(range(least, most + 1), key=lambda blocks: step_ms(blocks, texts) or 0.0)

    found = [best(texts, 0) for texts in range(1, min(sequences, MAX_SEQUENCES) + 1)]
    if not any(found):
        found[0] = best(1, 1)
    while len(found) > 1 and found[-1] == found[-2]:
        found.pop()
    return tuple(found)


def without_some(manifest: Manifest, memory: Memory, left: int) -> Memory:
    """The memory of a plan where a device that shares it holds so many blocks of every feed-forward less: what these
    took are slots."""
    more = manifest.model.ffns * left * manifest.layout.block_clusters
    everything = manifest.clusters
    return dataclasses.replace(
        memory,
        trigger_slots=min(everything, memory.trigger_slots + more),
        value_slots=min(everything, memory.value_slots + more),
    )
