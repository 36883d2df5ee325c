"""One test on a live run: a warm-up, repetitions, and one row of figures."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from neuronpipe.launch.bench.cases import Case, Prompts
from neuronpipe.launch.bench.energy import EnergyMeter
from neuronpipe.launch.bench.planned import errors, planned, planned_ranges
from neuronpipe.launch.bench.repetition import Repetition, run_repetition
from neuronpipe.launch.bench.traffic import traffic
from neuronpipe.launch.client import Client
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan, reads_whole
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.request import Generate

POLL_S = 0.02
QUIET_S = 0.3
MAX_WARM_UP_S = 60.0
FIRST_TOKENS = 8  # of the warm-up, whose speed is reported because the cache has seen nothing of its sequence


def model_name(package: Path) -> str:
    """Return the name of a package's folder, also if the path is `.` or ends in `..`."""
    return "demo" if package == DEMO else Path(os.path.abspath(package)).name


def wait_until_warm(client: Client) -> None:
    """Wait until the run is ready, and then until flash was idle for QUIET_S, for at most MAX_WARM_UP_S."""
    while not (status := client.status()).ready:
        time.sleep(POLL_S)
    quiet_since, last, began = time.monotonic(), -1, time.monotonic()
    while time.monotonic() - quiet_since < QUIET_S and time.monotonic() - began < MAX_WARM_UP_S:
        time.sleep(POLL_S)
        status = client.status()
        if status.flash_bytes != last:
            quiet_since, last = time.monotonic(), status.flash_bytes


@dataclass
class Cost:
    """Sums of the counters of all steps that a test counts."""

    figures: dict[str, float] = field(default_factory=dict)

    def add(self, figures: dict[str, float], batch: int) -> None:
        """Add the counters of one sequence. Each sequence of a batch counts its steps in full, so they are divided."""
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value / batch

    def __getitem__(self, name: str) -> float:
        return self.figures.get(name, 0.0)

    def of_one_participant_ms(self, name: str) -> float:
        """Return a time that each participant counted for itself: the mean over participants, summed over steps."""
        return self[name] * self["steps"] / self["answers"] if self["answers"] else 0.0


@frozen
class Bench:
    """The run and the settings that all tests of one command share.

    measured: the tests that were measured so far
    """

    package: Package
    plan: Plan
    device: Device
    prompts: Prompts
    client: Client
    batch: int = 1
    measured: list[Case] = field(default_factory=list)

    @cached_property
    def _frequencies(self) -> AccessFrequencies | None:
        return AccessFrequencies.of(self.package.manifest, self.package.read_activity)

    def measure(self, case: Case, repetitions: int, progress: Callable[[], None]) -> dict[str, Any]:
        """Measure one test and return its row. Raises UserError if an answer ends with nothing to measure."""
        warm_up = self.repeat(case, 0)
        progress()
        energy = EnergyMeter()
        repetitions_done = []
        for number in range(1, repetitions + 1):
            repetitions_done.append(self.repeat(case, number))
            progress()
        row = self.row(case, warm_up, repetitions_done, energy.joules())
        self.measured.append(case)
        return row

    def repeat(self, case: Case, number: int) -> Repetition:
        """Run one repetition, with its own prompts. Raises UserError if an answer ends with nothing to measure."""
        requests = []
        for sequence in range(number * self.batch, (number + 1) * self.batch):
            prompt = self.prompts.take(sequence, case.prompt_tokens, case.prompt_tokens + case.decode_tokens)
            requests.append(
                Generate(
                    request=f"{case.name}-{sequence}",
                    tokens=prompt,
                    max_tokens=case.max_tokens,
                    temperature=0.0,
                    share_prefix=False,
                    draft=False,  # random weights repeat themselves as no real text does
                )
            )
        return run_repetition(self.client, case, requests)

    def row(
        self, case: Case, warm_up: Repetition, repetitions: list[Repetition], joules: float | None
    ) -> dict[str, Any]:
        """Return the row of a test.

        joules: energy of all repetitions, if it was measured
        """
        plan = self.plan
        cost = Cost()
        for finished in (finished for repetition in repetitions for finished in repetition.finished):
            if case.decode_tokens:
                cost.add(finished.decode, self.batch)
            if case.prefill_tokens:
                cost.add(finished.prefill, self.batch)
        windows = self.package.manifest.model.windows_tokens
        sequences = [sequence for repetition in repetitions for sequence in repetition.sequences]
        positions = sum(_positions(case, len(sequence.gaps_ms), windows) for sequence in sequences)
        moved = traffic(self.package, plan, cost.figures, positions)
        time_ms = sum(repetition.time_ms(case) for repetition in repetitions)
        tokens = sum(case.prefill_tokens + repetition.decoded_tokens for repetition in repetitions)
        rates = [repetition.tokens_per_s(case) for repetition in repetitions]
        gaps = sorted(gap for repetition in repetitions for gap in repetition.gaps_ms)
        first = warm_up.sequences[0].gaps_ms[:FIRST_TOKENS]
        dram_s, flash_s = moved.dram_limit_s(self.device), moved.flash_limit_s(self.device, plan.flash.depth)
        exposed_ms, native_ms = cost.of_one_participant_ms("flash_ms"), cost.of_one_participant_ms("step_ms")
        barrier_ms = cost.of_one_participant_ms("barrier_ms")
        row = {
            "test": case.name,
            "mode": plan.compute.mode,
            "batch": self.batch,
            "ffn_resident": _resident_share(self.package.manifest, plan),
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_least": min(rates),
            "tokens_per_s_most": max(rates),
            "prefill_tokens_per_s": _median_of_prefill(case, repetitions),
            "tbt_ms": {f"p{share}": _quantile(gaps, share) for share in (50, 90, 99)},
            "tbt_most_ms": max(gaps, default=None),
            "dram_bytes_per_token": moved.dram_bytes / tokens,
            "dram_limit_fraction": None if dram_s is None else 1000 * dram_s / time_ms,
            "flash_bytes_per_token": moved.flash_bytes / tokens,
            "flash_reads_per_token": moved.flash_reads / tokens,
            "flash_limit_fraction": None if flash_s is None else 1000 * flash_s / time_ms,
            "miss_rate": miss_rate(cost.figures, whole=reads_whole(plan.compute, plan.flash) or not case.decode_tokens),
            "late_rate": _share(
                cost["trigger_missed"] + cost["value_missed"], cost["trigger_clusters"] + cost["value_clusters"]
            ),
            "late_rate_of_activated": _share(cost["value_missed"], cost["value_clusters"]),
            "guessed_right_share": _share(cost["guessed_right"], cost["guessed"]) if cost["guessed"] else None,
            "experts_guessed_per_token": cost["guessed"] / tokens,
            "hints_per_token": cost["hinted"] / tokens if cost["hinted"] else None,
            "hints_right": _share(cost["hinted_fired"], cost["hinted"]) if cost["hinted"] else None,
            "active_share": _share(cost["active"], cost["tokens"] * _neurons(self.package)),
            "exposed_io_share": min(1.0, exposed_ms / time_ms),
            "coordination_share": min(1.0, max(0.0, 1 - (native_ms - barrier_ms) / time_ms)),
            "barrier_share": min(1.0, barrier_ms / time_ms),
            "message_share": min(1.0, max(0.0, 1 - native_ms / time_ms)),
            "peak_memory_bytes": max(
                finished.memory["peak_bytes"] for repetition in repetitions for finished in repetition.finished
            ),
            "limit_memory_bytes": plan.memory.limit_bytes,
            "first_token_ms": warm_up.first_ms,
            "first_tokens_per_s": 1000 * len(first) / sum(first) if first else None,
            "joules_per_token": None if joules is None else joules / tokens,
            "repetitions": len(repetitions),
            "tokens": tokens,
            "model": model_name(self.package.path),
            "model_bytes": sum(file.bytes for file in self.package.manifest.files.values()),
            "quantization": self.package.manifest.precision,
            "workers": len(plan.compute.decode_workers()),
            "workload": self.prompts.preset,
            "plan": plan.id,
        }
        manifest, device, batch = self.package.manifest, self.device, self.batch
        figures = planned(manifest, plan, device, case, batch, self.measured, self._frequencies)
        ranges = planned_ranges(manifest, plan, device, case, batch, self._frequencies)
        planned_range = {name: asdict(speed_range) for name, speed_range in ranges.items()}
        return row | {"planned": figures, "planned_range": planned_range, "error": errors(row, figures)}


def miss_rate(cost: Mapping[str, float], *, whole: bool) -> float:
    """Return the share of the needed cluster parts that were not in memory when they were first looked up.

    Trigger parts are looked up ahead: with a predictor those of the clusters that it names, otherwise all of a layer.
    Those that were not looked up ahead are assumed to miss as often.

    whole: a value part is read with its trigger part, so that trigger parts stand for both. Otherwise the value parts
        of clusters that fired count as well, which are looked up when they are computed.
    """

    def count(name: str) -> float:
        return cost.get(name, 0.0)

    triggers, values = count("trigger_clusters"), count("value_clusters")
    if count("foreseen"):
        share = count("foreseen_missed") / count("foreseen")
    else:
        share = _share(count("trigger_missed"), triggers)
    return share if whole else _share(share * triggers + count("value_missed"), triggers + values)


def _positions(case: Case, decoded: int, windows: Sequence[int]) -> float:
    """Return the number of positions whose keys and values are read, as a mean over layers with their windows.

    For each decoded token these are the positions before it. A prompt is computed in chunks, and reads about its length
    once.
    """
    last = case.prompt_tokens + decoded if case.decode_tokens else 0
    read = sum(min(n, window or n) for window in windows for n in range(case.prompt_tokens + 1, last + 1))
    return read / len(windows) + case.prefill_tokens


def _median_of_prefill(case: Case, repetitions: Sequence[Repetition]) -> float | None:
    """Return the speed of the prompt alone, in tokens/s until its first token; None if the test has no prompt."""
    if not case.prefill_tokens:
        return None
    return statistics.median(1000 * case.prefill_tokens / repetition.first_ms for repetition in repetitions)


def _quantile(ordered: list[float], share: int) -> float | None:
    return ordered[min(len(ordered) - 1, share * len(ordered) // 100)] if ordered else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _resident_share(manifest: Manifest, plan: Plan) -> float:
    """Return the share of all neurons' bytes that have slots."""
    memory, slots = plan.memory, manifest.slots(moved=plan.memory.are_scales_moved)
    resident = memory.trigger_slots * slots.trigger_bytes + memory.value_slots * slots.value_bytes
    return resident / (manifest.clusters * slots.both_bytes)


def _neurons(package: Package) -> int:
    model = package.manifest.model
    return model.ffns * model.neurons
