"""Results that several plans of one package have in common, so that a search computes them once.

A search asks for many chunks and numbers of reads at once, and memory often allows fewer than it asks for. Then several
options lead to the same slots, and to the same expectation.
"""

from __future__ import annotations

from typing import Any

from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.token_time import Measurements, expected
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Compute, Expected, Flash, Memory
from neuronpipe.plans.plan.memory_budget import Budgets
from neuronpipe.plans.planner.slot_regions import Regions, allocate_slots


class SharedResults:
    """The memory budgets, slots and expectations of one package's plans.

    budgets: the memory budgets, by shape and chunk
    """

    def __init__(self, manifest: Manifest) -> None:
        self.budgets = Budgets(manifest)
        self._manifest = manifest
        self._regions: dict[Any, Regions | None] = {}
        self._expected: dict[Any, tuple[Measurements, Expected]] = {}

    def regions(self, rates: ActivationRates, **arguments: Any) -> Regions | None:
        """Return the result of `allocate_slots` for these arguments."""
        key = rates, *arguments.values()
        if key not in self._regions:
            self._regions[key] = allocate_slots(self._manifest, rates, **arguments)
        return self._regions[key]

    def expected(
        self, rates: ActivationRates, compute: Compute, memory: Memory, flash: Flash, measured: Measurements
    ) -> Expected:
        """Return the expectation of the cost model for these sections of a plan."""
        key = rates, compute, memory, flash, *map(id, measured)
        if key not in self._expected:  # the measurements are stored too, so that their ids stay theirs
            self._expected[key] = measured, expected(self._manifest, rates, compute, memory, flash, *measured)
        return self._expected[key][1]
