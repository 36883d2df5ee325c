"""`python -m neuronpipe.plans.simulate`: the table of plans/simulate/README.md, misses of activated neurons in percent.

Four layers of Bamboo's curves (1, 10, 16, 28), 10 % active, one pool; the workload is that of synthetic packages
(plans/synth). 200 tokens go by, then 500 are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.plans.simulate.policies import Clock, Ids, Lru, Policy, Queues, Static
from neuronpipe.plans.synth.firing import active_shares
from neuronpipe.plans.synth.trajectory import PRESETS, Preset, trajectory

LAYERS, OF_LAYERS, NEURONS, ACTIVE = (1, 10, 16, 28), 32, 2048, 0.1
SKIPPED_TOKENS, COUNTED_TOKENS = 200, 500
SHARES = (0.25, 0.5, 0.75)
POLICIES: dict[str, Callable[[Ids, int], Policy]] = {
    "static": lambda order, slots: Static(order, slots, 1.0),
    "LRU": Lru,
    "CLOCK, one bit": Clock,
    "one bit, 10 % pinned": lambda order, slots: Clock(order, slots, 0.1),
    "one bit, 25 % pinned": lambda order, slots: Clock(order, slots, 0.25),
    "one bit, 50 % pinned": lambda order, slots: Clock(order, slots, 0.5),
    "CLOCK, two bits": lambda order, slots: Clock(order, slots, most=3),
    "two bits, 25 % pinned": lambda order, slots: Clock(order, slots, 0.25, most=3),
    "after S3-FIFO": Queues,
}


def workload(preset: Preset, seed: int) -> tuple[Ids, list[list[Ids]]]:
    """All neurons by frequency, and for each token the active ones of each layer."""
    shares = np.concatenate([active_shares(layer, OF_LAYERS, NEURONS, ACTIVE) for layer in LAYERS])
    random = np.random.default_rng(seed)
    states = trajectory(preset, SKIPPED_TOKENS + COUNTED_TOKENS, len(shares), random)
    active = states > -quantile(shares)
    layers = [range(n * NEURONS, (n + 1) * NEURONS) for n in range(len(LAYERS))]
    steps = [[np.flatnonzero(token[own.start : own.stop]) + own.start for own in layers] for token in active]
    return np.argsort(-shares, kind="stable"), steps


def miss_rate(policy: Policy, steps: list[list[Ids]]) -> float:
    """Share of the looked up clusters that were absent."""
    missed = looked = 0
    for token, layers in enumerate(steps):
        for wanted in layers:
            misses = policy.step(wanted)
            if token >= SKIPPED_TOKENS:
                missed, looked = missed + misses, looked + len(wanted)
    return missed / looked


def table(seed: int = 1) -> Iterator[str]:
    """Markdown lines; a cell has the misses at a quarter, a half and three quarters of the neurons resident."""
    yield "| policy | " + " | ".join(PRESETS) + " |"
    yield "|---" * (1 + len(PRESETS)) + "|"
    made = [workload(preset, seed) for preset in PRESETS.values()]
    for name, make in POLICIES.items():
        cells = []
        for order, steps in made:
            rates = (miss_rate(make(order, int(share * len(order))), steps) for share in SHARES)
            cells.append(" / ".join(f"{100 * rate:.1f}" for rate in rates))
        yield f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
