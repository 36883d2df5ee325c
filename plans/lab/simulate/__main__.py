"""`python -m neuronpipe.plans.lab.simulate`: misses of cache policies, in percent, as Markdown tables.

Without arguments, the workload is generated as in synthetic packages (plans/lab/synth): four layers with Bamboo's
curves, 10 % of the neurons active, one pool; 200 tokens warm it, the next 500 count. `record PACKAGE FILE` records the
activations of a package. `FILES...` prints the table of such recordings; their first quarter is warm-up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from neuronpipe.plans.activity.replacement_policies import Clock, Ids, Lfu, Lru, Optimal, Policy, Queues, Static
from neuronpipe.plans.lab.simulate.recording import Recording, record
from neuronpipe.plans.lab.synth.activation_rates import active_shares
from neuronpipe.plans.lab.synth.trajectory import PRESETS, Preset, trajectory
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.protocol.errors import UserError

LAYERS, OF_LAYERS, NEURONS, ACTIVE = (1, 10, 16, 28), 32, 2048, 0.1
SKIPPED_TOKENS, COUNTED_TOKENS = 200, 500
SHARES = (0.25, 0.5, 0.75)
RECORDED_SHARES = (0.15, 0.3, 0.55)
SKIPPED_SHARE = 0.25
Steps = list[list[Ids]]
"""For each token, the neurons or clusters that each layer accesses."""

POLICIES: dict[str, Callable[[Ids, int, Steps], Policy]] = {
    "static": lambda order, slots, steps: Static(order, slots, 1.0),
    "LRU": lambda order, slots, steps: Lru(order, slots),
    "LFU, half-life 16 tokens": lambda order, slots, steps: Lfu(order, slots, 16 * len(steps[0])),
    "LFU, half-life 128 tokens": lambda order, slots, steps: Lfu(order, slots, 128 * len(steps[0])),
    "after S3-FIFO": lambda order, slots, steps: Queues(order, slots),
    "CLOCK": lambda order, slots, steps: Clock(order, slots),
    "CLOCK, 25 % pinned": lambda order, slots, steps: Clock(order, slots, 0.25),
    "CLOCK, two bits set by looks": lambda order, slots, steps: Clock(order, slots, max_uses=3, at_look=True),
    "CLOCK, 7 uses counted by the hand": lambda order, slots, steps: Clock(order, slots, max_uses=7),
    "the same, 25 % pinned": lambda order, slots, steps: Clock(order, slots, 0.25, max_uses=7),
    "optimal": lambda order, slots, steps: Optimal(order, slots, [ids for token in steps for ids in token]),
}


def workload(preset: Preset, seed: int) -> tuple[Ids, Steps]:
    """Return all neurons, most frequent first, and the active neurons of each token and layer."""
    shares = np.concatenate([active_shares(layer, OF_LAYERS, NEURONS, ACTIVE) for layer in LAYERS])
    random = np.random.default_rng(seed)
    states = trajectory(preset, SKIPPED_TOKENS + COUNTED_TOKENS, len(shares), random)
    active = states > -quantile(shares)
    layers = [range(n * NEURONS, (n + 1) * NEURONS) for n in range(len(LAYERS))]
    steps = [[np.flatnonzero(token[span.start : span.stop]) + span.start for span in layers] for token in active]
    return np.argsort(-shares, kind="stable"), steps


def miss_rate(policy: Policy, steps: Steps, skipped_tokens: int = SKIPPED_TOKENS) -> float:
    """Return the share of accesses that miss, without the first `skipped_tokens`."""
    missed = looked = 0
    for token, layers in enumerate(steps):
        for ids in layers:
            misses = policy.step(ids)
            if token >= skipped_tokens:
                missed, looked = missed + misses, looked + len(ids)
    return missed / looked


def table(
    workloads: dict[str, tuple[Ids, Steps]], resident: Sequence[float], skipped_tokens: Callable[[Steps], int]
) -> Iterator[str]:
    """Yield the lines of a Markdown table: a column for each workload, a row for each policy.

    resident: resident shares; a cell has a miss rate for each
    skipped_tokens: returns the number of warm-up tokens
    """
    yield "| policy | " + " | ".join(workloads) + " |"
    yield "|---" * (1 + len(workloads)) + "|"
    for name, make in POLICIES.items():
        cells = []
        for order, steps in workloads.values():
            slots = (int(share * len(order)) for share in resident)
            rates = (miss_rate(make(order, count, steps), steps, skipped_tokens(steps)) for count in slots)
            cells.append(" / ".join(f"{100 * rate:.1f}" for rate in rates))
        yield f"| {name} | " + " | ".join(cells) + " |"


def recorded(files: Iterable[Path]) -> Iterator[str]:
    workloads: dict[str, tuple[Ids, Steps]] = {}
    for file in files:
        recording = Recording.load(file)
        workloads[recording.package] = recording.by_cluster()
        if recording.chosen.shape[2] > 1:
            workloads[f"{recording.package}, whole experts"] = recording.by_expert()
    yield from table(workloads, RECORDED_SHARES, lambda steps: int(SKIPPED_SHARE * len(steps)))


def main(words: Sequence[str]) -> int:
    if words[:1] == ["record"]:
        parser = argparse.ArgumentParser(prog="python -m neuronpipe.plans.lab.simulate record")
        parser.add_argument("package", type=Path, help="a synthetic package")
        parser.add_argument("file", type=Path, help="the recording, .npz")
        parser.add_argument("--mode", choices=("exact", "predicted"), default="exact")
        parser.add_argument("--preset", default="default", help="of a synthetic package: which text")
        parser.add_argument("--tokens", type=int, default=400)
        arguments = parser.parse_args(words[1:])
        package = Package.open(arguments.package)
        work = package.manifest.workload
        if work is None or arguments.preset not in work.presets:
            raise UserError(
                f"{arguments.package}: has no preset {arguments.preset}: recordings are made of synthetic packages"
            )
        first, max_tokens = work.presets[arguments.preset]
        tokens = range(first, first + min(max_tokens, arguments.tokens))
        record(package, arguments.mode, tokens, arguments.preset).save(arguments.file)
        return 0
    if words:
        lines = recorded(map(Path, words))
    else:
        generated = {name: workload(preset, 1) for name, preset in PRESETS.items()}
        lines = table(generated, SHARES, lambda steps: SKIPPED_TOKENS)
    for line in lines:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as wrong:
        sys.exit(f"simulate: {wrong}")
